"""Count the tokens of a message, which both dialects do alike."""

from workers.api.call import Body, text_tokens
from workers.api.messages import messages_as_chat


def count_message_tokens(body: Body) -> int:
    """Return the count of /v1/messages/count_tokens. Raises ApiError if the body is invalid."""
    return len(text_tokens(messages_as_chat(body)))

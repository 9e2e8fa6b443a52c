"""Counting a message's tokens, which both dialects do alike."""

from workers.api.call import Body, text_tokens
from workers.api.messages import messages_as_chat


def count_message_tokens(body: Body) -> int:
    """What /v1/messages/count_tokens counts. Raises ApiError."""
    return len(text_tokens(messages_as_chat(body)))

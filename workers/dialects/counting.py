"""Counting a message's tokens, which both dialects answer alike."""

from workers.call import text_tokens
from workers.forms import messages_as_chat
from workers.http import HttpRequest, Response, json_response


def count_message_tokens(request: HttpRequest) -> Response:
    """POST /v1/messages/count_tokens. Raises ApiError."""
    return json_response({"input_tokens": len(text_tokens(messages_as_chat(request.json())))})

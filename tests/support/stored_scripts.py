"""Answers to calls of /v1/responses, for scripted engines.

`tests/engine/test_stored_responses.py` compares them with the answers of real engines.
"""

import json
from typing import Any

RESPONSES = "/v1/responses"


def response(
    name: str, status: str = "completed", text: str = "yes", used: tuple[int, int, int] | None = (8, 0, 2)
) -> Any:
    """A stored response. `used`: tokens of input, cached input and output; None before the response is finished."""
    content = [{"type": "output_text", "text": text, "annotations": []}]
    item = {"id": "msg", "type": "message", "role": "assistant", "status": "completed", "content": content}
    usage: dict[str, object] | None = None
    if used is not None:
        input_tokens, cached, output = used
        usage = {"input_tokens": input_tokens, "output_tokens": output, "total_tokens": input_tokens + output}
        usage |= {"input_tokens_details": {"cached_tokens": cached}, "output_tokens_details": {"reasoning_tokens": 0}}
    output_items = [] if used is None else [item]
    return {"id": name, "object": "response", "status": status, "error": None, "output": output_items, "usage": usage}


def encoded(name: str, status: str = "completed", used: tuple[int, int, int] | None = (8, 0, 2)) -> bytes:
    """A stored response as JSON."""
    return json.dumps(response(name, status, used=used)).encode()


def event(kind: str, **fields: object) -> bytes:
    """An event of a streamed response."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


def created(name: str) -> bytes:
    """The first event of a stream."""
    return event("response.created", response=response(name, "in_progress", used=None))


def delta(text: str) -> bytes:
    """One more token."""
    return event("response.output_text.delta", delta=text)


def completed(name: str, used: tuple[int, int, int] = (8, 0, 2)) -> bytes:
    """The last event."""
    return event("response.completed", response=response(name, used=used))


def not_found(name: str) -> dict[str, object]:
    """The body of both engines' 404 for an unknown id."""
    message = f"Response with id '{name}' not found."
    return {"error": {"message": message, "type": "invalid_request_error", "param": "response_id", "code": 404}}

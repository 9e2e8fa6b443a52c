"""Errors as OpenAI clients read them."""

from typing import Any

import orjson

from router.errors import RouterError, WorkerError


def error_body(error: RouterError) -> bytes:
    """The body of an error response."""
    return orjson.dumps({"error": _fields(error)})


def error_event(error: RouterError) -> bytes:
    """The end of a stream that began well, in the shape that vLLM gives it."""
    return _last_event(_fields(error))


def refusal_event(status: int, body: bytes) -> bytes:
    """An engine's error response as the end of a stream that has begun, in the same shape whatever its own is."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        fields = None
    error = fields.get("error", fields) if isinstance(fields, dict) else None
    if isinstance(error, dict) and "message" in error:
        return _last_event(error)
    said = error if isinstance(error, str) else f"The worker answered with status {status}."
    return error_event(WorkerError(said, code=str(status)))


def _fields(error: RouterError) -> dict[str, Any]:
    return {"message": error.message, "type": error.type, "param": error.param, "code": error.code}


def _last_event(error: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps({"error": error}) + b"\n\ndata: [DONE]\n\n"

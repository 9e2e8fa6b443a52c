"""Errors as the clients of each API read them, whether they are ours or a worker's."""

from collections.abc import Callable
from typing import Any, NamedTuple

import orjson

from router.errors import RouterError, WorkerError


def error_body(error: RouterError) -> bytes:
    """The body of an error response, as OpenAI's clients read it."""
    return orjson.dumps({"error": error_fields(error)})


def error_event(error: RouterError) -> bytes:
    """The end of a stream that began well, in the shape that vLLM gives it."""
    return _last_event(error_fields(error))


def refusal(status: int, body: bytes) -> bytes | None:
    """What to say instead of an error that is told in no shape that OpenAI's clients read; None where it may stay.

    Such are an object of another shape, and a failure told by no object, as by a proxy's page.
    """
    said = load(body)
    if status < 500 if said is None else "error" in said or "message" in said:
        return None
    return orjson.dumps({"error": worker_error_fields(status, body)})


def refusal_event(status: int, body: bytes) -> bytes:
    """An engine's error response as the end of a stream that has begun, in the same shape whatever its own is."""
    return _last_event(worker_error_fields(status, body))


def error_fields(error: RouterError) -> dict[str, Any]:
    """What there is to say of an error, under OpenAI's names."""
    return {"message": error.message, "type": error.type, "param": error.param, "code": error.code}


def worker_error_fields(status: int, body: bytes) -> dict[str, Any]:
    """What an engine's error response says, under OpenAI's names; it may lack any but the message."""
    fields = load(body) or {}
    error = fields.get("error", fields)
    if isinstance(error, dict) and "message" in error and _is_writable(error):
        return error
    said = error if isinstance(error, str) else fields.get("detail")
    if not isinstance(said, str):
        said = f"The worker answered with status {status}."
    return error_fields(WorkerError(said, code=str(status)))


def _is_writable(error: dict[str, Any]) -> bool:
    """Whether it is nested no deeper than JSON is written here, which is less deep than it is read."""
    try:
        orjson.dumps({"error": error})
    except orjson.JSONEncodeError:
        return False
    return True


def load(body: bytes) -> dict[str, Any] | None:
    """A JSON object; None for anything else."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return fields if isinstance(fields, dict) else None


def text_or_empty(value: object) -> str:
    """A text as it is; none for anything else, which may be nested too deeply to be written."""
    return value if isinstance(value, str) else ""


def _last_event(error: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps({"error": error}) + b"\n\ndata: [DONE]\n\n"


class ErrorShape(NamedTuple):
    """How one API tells errors."""

    body: Callable[[RouterError], bytes] = error_body
    """Of an error response."""
    event: Callable[[RouterError], bytes] = error_event
    """The end of a stream that has begun."""
    refusal: Callable[[int, bytes], bytes | None] = refusal
    """An engine's status and body, in this shape; None where its own will do."""
    refusal_event: Callable[[int, bytes], bytes] = refusal_event
    """The same as the end of a stream that has begun."""

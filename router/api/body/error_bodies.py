"""Error bodies and error events in the shape of each API, for errors of the router and of workers."""

from collections.abc import Callable
from http import HTTPStatus
from typing import Any, NamedTuple

import orjson

from router.api.body.json_object import load
from router.errors import ClientError, RouterError, UnknownPath, WorkerError


def error_body(error: RouterError) -> bytes:
    """Return the body of an error response in OpenAI's shape."""
    return orjson.dumps({"error": error_fields(error)})


def error_event(error: RouterError) -> bytes:
    """Return the last event of a stream that fails after its start, in vLLM's shape."""
    return _last_event(error_fields(error))


def refusal(status: int, body: bytes) -> bytes | None:
    """Convert an engine's error response to OpenAI's shape. Returns None if its clients can read it as it is.

    Converted are JSON objects of another shape, and failures without a JSON object, such as the HTML page of a proxy.
    """
    fields = load(body)
    if status < 500 if fields is None else "error" in fields or "message" in fields:
        return None
    return orjson.dumps({"error": worker_error_fields(status, body)})


def refusal_event(status: int, body: bytes) -> bytes:
    """An engine's error response as the last event of a stream, in OpenAI's shape whatever its own is."""
    return _last_event(worker_error_fields(status, body))


def error_fields(error: RouterError) -> dict[str, Any]:
    """Return the members of OpenAI's error object."""
    return {"message": error.message, "type": error.type, "param": error.param, "code": error.code}


def worker_error_fields(status: int, body: bytes) -> dict[str, Any]:
    """Return the members of an engine's error under OpenAI's names. Any but the message may be missing."""
    fields = load(body) or {}
    error = fields.get("error", fields)
    if isinstance(error, dict) and "message" in error and _is_writable(error):
        return error
    message = error if isinstance(error, str) else fields.get("detail")
    if not isinstance(message, str):
        message = f"The worker answered with status {status}."
    return {"message": message, "type": _type_of(status), "param": None, "code": str(status)}


def _type_of(status: int) -> str:
    """Return the type of a worker's error, as the router types its own: LiteLLM goes by the type before the status."""
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return WorkerError.type
    return UnknownPath.type if status == HTTPStatus.NOT_FOUND else ClientError.type


def _is_writable(error: dict[str, Any]) -> bool:
    """Return whether the error can be serialised: orjson parses deeper nesting than it serialises."""
    try:
        orjson.dumps({"error": error})
    except orjson.JSONEncodeError:
        return False
    return True


def _last_event(error: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps({"error": error}) + b"\n\ndata: [DONE]\n\n"


class ErrorShape(NamedTuple):
    """How one API represents errors."""

    body: Callable[[RouterError], bytes] = error_body
    """Makes the body of an error response."""
    event: Callable[[RouterError], bytes] = error_event
    """Makes the last event of a stream that has begun."""
    refusal: Callable[[int, bytes], bytes | None] = refusal
    """Converts an engine's status and body to this shape; None if clients can read its own."""
    refusal_event: Callable[[int, bytes], bytes] = refusal_event
    """Converts an engine's status and body to the last event of a stream that has begun."""

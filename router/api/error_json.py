"""Errors as OpenAI clients read them."""

from contextlib import suppress
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
    fields = _object(body)
    error = None if fields is None else fields.get("error", fields)
    if isinstance(error, dict) and "message" in error:
        return _last_event(error)
    if isinstance(error, str):
        return error_event(WorkerError(error, code=str(status)))
    return error_event(_nameless(status))


def refusal_body(status: int, body: bytes) -> bytes | None:
    """What to say instead of a failure that is told by no object, as by a proxy's page; None where it is by one."""
    return error_body(_nameless(status)) if status >= 500 and _object(body) is None else None


def _object(body: bytes) -> dict[str, Any] | None:
    with suppress(orjson.JSONDecodeError):
        if isinstance(fields := orjson.loads(body), dict):
            return fields
    return None


def _nameless(status: int) -> RouterError:
    return WorkerError(f"The worker answered with status {status}.", code=str(status))


def _fields(error: RouterError) -> dict[str, Any]:
    return {"message": error.message, "type": error.type, "param": error.param, "code": error.code}


def _last_event(error: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps({"error": error}) + b"\n\ndata: [DONE]\n\n"

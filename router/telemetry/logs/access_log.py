"""The access log: one line per call, without anything that may be secret (query, headers, body)."""

import logging
from collections.abc import Mapping
from urllib.parse import quote

from starlette.types import Scope

from router.telemetry.calls.recorded_call import GOOD, RecordedCall
from router.telemetry.logs.log_format import FIELDS
from router.telemetry.logs.repeats import ACCESS_LOGGER

log = logging.getLogger(ACCESS_LOGGER)


def log_call(scope: Scope, call: RecordedCall) -> None:
    """Log a line about a call that has ended: info if it went well, else a warning.

    Replaces the access log of uvicorn, which logs the query string, where some clients put their keys.
    """
    level = logging.INFO if call.outcome in GOOD else logging.WARNING
    if not log.isEnabledFor(level):
        return
    path = quote(scope["path"])
    address = scope["client"][0] if scope.get("client") else None
    fields = {"address": address, "method": scope["method"], "path": path, **fields_of_call(call)}
    known = {name: value for name, value in fields.items() if value is not None}
    log.log(level, "%s %s %s", scope["method"], path, call.status or "-", extra={FIELDS: known})


def fields_of_call(call: RecordedCall) -> Mapping[str, object]:
    """Return what is known of the call by name; None for what is unknown."""
    usage = call.usage
    return {
        "status": call.status,
        "outcome": call.outcome.value,
        "error": call.error,
        "request": call.request,
        "client": call.client,
        "model": call.model,
        "worker": call.worker,
        "tries": call.tries or None,
        "prompt_tokens": None if usage is None else usage.input_tokens,
        "cached_tokens": None if usage is None else usage.cached_tokens,
        "output_tokens": None if usage is None else usage.output_tokens,
        "queue_ms": _milliseconds(call.queue_seconds),
        "ttft_ms": _milliseconds(call.first_token_seconds),
        "duration_ms": _milliseconds(call.seconds),
    }


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)

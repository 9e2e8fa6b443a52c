"""The access log: one line per call, without anything that may be secret (query, headers, body)."""

import logging
import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Final
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.core.model.events import Cancelled, Failed, Finished
from router.core.model.request import Usage
from router.errors import RouterError
from router.front.call_record import SCOPE_KEY, CallRecord
from router.telemetry.logs.log_format import FIELDS
from router.telemetry.logs.repeats import ACCESS_LOGGER

log = logging.getLogger(ACCESS_LOGGER)


class CallOutcome(StrEnum):
    """How a call ended."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    """Its client left."""
    FAILED = "failed"
    """A worker failed it, or the router did."""
    REFUSED = "refused"
    """It was answered with an error before a worker had it."""


GOOD: Final = frozenset({CallOutcome.FINISHED, CallOutcome.CANCELLED})
"""Outcomes that are logged at the level info; the others are warnings."""


class AccessLog:
    """ASGI middleware that logs a line when a call has ended.

    Replaces the access log of uvicorn, which logs the query string, where some clients put their keys.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call, or the lifespan."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call = LoggedCall(time.monotonic)

        async def note_status(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.status = message["status"]
            await send(message)

        try:
            await self._app({**scope, SCOPE_KEY: call}, receive, note_status)
        finally:
            outcome = call.outcome
            level = logging.INFO if outcome in GOOD else logging.WARNING
            if log.isEnabledFor(level):
                path = quote(scope["path"])
                address = scope["client"][0] if scope.get("client") else None
                fields = {"address": address, "method": scope["method"], "path": path, **call.fields()}
                known = {name: value for name, value in fields.items() if value is not None}
                log.log(level, "%s %s %s", scope["method"], path, call.status or "-", extra={FIELDS: known})


class LoggedCall(CallRecord):
    """Keeps what the log says of a call. Nothing here is text of a prompt or an answer, and nothing is a key."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: returns seconds and never goes backwards."""
        self.status: int | None = None
        """The status of the answer; None while there is none."""
        self._clock = clock
        self._arrived: Final = clock()
        self._request: str | None = None
        self._client: str | None = None
        self._model: str | None = None
        self._worker: str | None = None
        self._tries = 0
        self._queued: float | None = None
        self._queue_seconds: float | None = None
        self._first_token_seconds: float | None = None
        self._usage: Usage | None = None
        self._error: str | None = None
        self._outcome: CallOutcome | None = None

    @property
    def outcome(self) -> CallOutcome:
        """How the call ended; of a path that is not for engines, its status decides."""
        failed = self.status is None or self.status >= 400
        return self._outcome or (CallOutcome.REFUSED if failed else CallOutcome.FINISHED)

    def note_id(self, request: str) -> None:
        self._request = request

    def note_call(self, client: str, model: str) -> None:
        self._client, self._model = client, model

    def note_queued(self) -> None:
        self._queued = self._clock()

    def note_sent(self, worker: str) -> None:
        self._tries += 1
        self._worker = worker
        self._leave_queue()

    def note_first_token(self) -> None:
        """Of several attempts, the first one that streams counts."""
        if self._first_token_seconds is None:
            self._first_token_seconds = self._clock() - self._arrived

    def note_end(self, ending: Finished | Failed | Cancelled) -> None:
        self._leave_queue()
        self._usage = ending.usage
        if isinstance(ending, Finished):
            self._outcome = CallOutcome.FINISHED
        elif isinstance(ending, Failed):
            self._outcome = CallOutcome.FAILED

    def note_failure(self) -> None:
        self._outcome = CallOutcome.FAILED

    def note_error(self, error: RouterError) -> None:
        self._error = error.reason or (error.type if error.code is None else str(error.code))
        if self._outcome is None:
            failed = self._tries > 0 or type(error) is RouterError  # which is that of a fault in the router
            self._outcome = CallOutcome.FAILED if failed else CallOutcome.REFUSED

    def note_gone(self) -> None:
        self._outcome = self._outcome or CallOutcome.CANCELLED

    def fields(self) -> Mapping[str, object]:
        """Return what is known of the call by name; None for what is unknown."""
        usage = self._usage
        return {
            "status": self.status,
            "outcome": self.outcome.value,
            "error": self._error,
            "request": self._request,
            "client": self._client,
            "model": self._model,
            "worker": self._worker,
            "tries": self._tries or None,
            "prompt_tokens": None if usage is None else usage.input_tokens,
            "cached_tokens": None if usage is None else usage.cached_tokens,
            "output_tokens": None if usage is None else usage.output_tokens,
            "queue_ms": _milliseconds(self._queue_seconds),
            "ttft_ms": _milliseconds(self._first_token_seconds),
            "duration_ms": _milliseconds(self._clock() - self._arrived),
        }

    def _leave_queue(self) -> None:
        """Note how long the call waited until it was sent to a worker for the first time, or was refused."""
        if self._queued is not None and self._queue_seconds is None:
            self._queue_seconds = self._clock() - self._queued


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)

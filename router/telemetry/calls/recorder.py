"""Gives each call that a front serves a record, and hands it on when the call has ended."""

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.front.call_record import SCOPE_KEY
from router.telemetry.calls.recorded_call import RecordedCall


class CallRecorder:
    """ASGI middleware that keeps a record of each call."""

    def __init__(
        self,
        app: ASGIApp,
        begin: Callable[[Scope], RecordedCall],
        on_end: Callable[[Scope, RecordedCall], None] | None,
    ) -> None:
        """`begin`: returns the record of a call that arrives; `on_end`: called with it when the call has ended, if
        anybody wants to know.
        """
        self._app = app
        self._begin = begin
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call, or the lifespan."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call = self._begin(scope)

        async def note_status(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.status = message["status"]
            await send(message)

        try:
            await self._app({**scope, SCOPE_KEY: call}, receive, note_status)
        finally:
            call.end()
            if self._on_end is not None:
                self._on_end(scope, call)

"""The access log: one line per answered call, without anything that may be secret (query, headers, body)."""

import logging
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger(__name__)


class AccessLog:
    """ASGI middleware that logs a line when a response starts.

    Replaces the access log of uvicorn, which logs the query string, where some clients put their keys.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:

        async def send_and_log(message: Message) -> None:
            if message["type"] == "http.response.start":
                host, port = scope["client"] or ("", 0)
                path = quote(scope["path"])
                log.info('%s:%d - "%s %s" %d', host, port, scope["method"], path, message["status"])
            await send(message)

        await self._app(scope, receive, send_and_log if scope["type"] == "http" else send)

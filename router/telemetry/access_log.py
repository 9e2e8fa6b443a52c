"""One line for each call that was answered, with nothing of it that may be secret: no query, no header, no body."""

import logging
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger(__name__)


class AccessLog:
    """Writes a line as each answer begins. uvicorn's own holds the query, where some put their keys."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a call, or the lifespan."""

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                host, port = scope["client"] or ("", 0)
                path = quote(scope["path"])
                log.info('%s:%d - "%s %s" %d', host, port, scope["method"], path, message["status"])
            await send(message)

        await self._app(scope, receive, noted if scope["type"] == "http" else send)

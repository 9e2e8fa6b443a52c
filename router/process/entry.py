"""The ASGI application that clients reach: the data path, and the control plane for every other path."""

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from router.api.endpoints.azure import without_azure
from router.api.families import family_of
from router.front.drain import Drain, refuse


class Entry:
    """Routes calls to models around FastAPI, whose middleware would slow down every chunk of a stream."""

    def __init__(self, gateway: ASGIApp, control: ASGIApp, drain: Drain, origins: Sequence[str] = ()) -> None:
        """`gateway`: serves calls to models; `control`: everything else.

        `origins`: those of web pages that may read answers; `*` for all.
        """
        self._app: ASGIApp = self._route
        if origins:
            self._app = CORSMiddleware(
                self._route, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["*"]
            )
        self._gateway = gateway
        self._control = control
        self.drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call, or the ASGI lifespan."""
        await self._app(scope, receive, send)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call by the part of the router that it is for."""
        path = without_azure(scope.get("path", "")).path
        if family_of(path) is None:
            await self._control(scope if path == scope.get("path", "") else {**scope, "path": path}, receive, send)
        elif self.drain.begun:
            await refuse(scope, receive, send)
        else:
            with self.drain.track_call():
                await self._gateway(scope, receive, send)

"""The ASGI application that clients reach: the data path, and the control plane for every other path."""

from collections.abc import Awaitable, Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from router.api.families import family_of, without_azure
from router.control.operator_access import OperatorAccess
from router.control.page.routes import EVENTS_PATH
from router.errors import RouterError, UnknownPath
from router.front.exchange import Exchange
from router.front.gateway import Gateway


class Entry:
    """Routes calls to models around FastAPI, whose middleware would slow down every chunk of a stream."""

    def __init__(self, gateway: Gateway, control: ASGIApp, access: OperatorAccess, origins: Sequence[str]) -> None:
        """`gateway`: serves calls to models; `control`: everything else, as far as `access` lets a call pass.

        `origins`: those of web pages that may read answers; `*` for all.
        """
        self._app: ASGIApp = self._route
        if origins:
            self._app = CORSMiddleware(
                self._route, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["*"]
            )
        self._gateway = gateway
        self._control = control
        self._access = access

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serve one call, or the ASGI lifespan. Not a coroutine itself: it would be resumed with each that serves."""
        return self._app(scope, receive, send)

    def _route(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serve one call by the part of the router that it is for, under OpenAI's name of its path."""
        given = scope.get("path", "")
        path, deployment = without_azure(given)
        if path != given:
            scope = {**scope, "path": path}
        family = family_of(path)
        if family is None:
            return self._serve_control(scope, receive, send)
        if self._access.port is not None and self._access.is_operators_port(scope):
            return _refuse(UnknownPath(given), scope, receive, send)
        return self._gateway.serve(Exchange(scope, receive, send, deployment), family)

    def _serve_control(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serve a call that is not for engines, or the lifespan."""
        if scope["type"] == "http":
            try:
                self._access.check(scope)
            except RouterError as error:
                return _refuse(error, scope, receive, send)
            scope = _asked_as_get(scope)
        return self._control(scope, receive, send)


def _asked_as_get(scope: Scope) -> Scope:
    """Return a call for the head of an answer as one for the answer, whose body the connection then leaves out.

    An answer without an end has no such head.
    """
    if scope["method"] == "HEAD" and scope["path"] != EVENTS_PATH:
        return {**scope, "method": "GET"}
    return scope


def _refuse(error: RouterError, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
    return Exchange(scope, receive, send).fail(error)

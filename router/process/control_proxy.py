"""Passes calls that are not for engines from a front to the control plane in the scheduler's process, and back."""

import asyncio
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Final, Self
from urllib.parse import quote

import httpcore
import orjson
from starlette.types import ASGIApp, Receive, Scope, Send

from router.control.admin import BODY_LIMIT
from router.control.page.routes import EVENT_STREAM
from router.control.unix_sockets import UnixSockets
from router.errors import CapacityError, RouterError, ShuttingDown
from router.front.byte_budget import ByteBudget
from router.front.drain import Drain
from router.front.exchange import ClientGone, Exchange

ADDRESS_HEADER: Final = b"x-d2lpm-client-address"
"""Carries the client's address. Only fronts can set it: one that a client sends is removed."""
HOP_HEADERS: Final = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"te", b"upgrade", b"expect"})
NOT_PASSED_ON: Final = HOP_HEADERS | {ADDRESS_HEADER, b"content-length", b"accept-encoding"}
"""Headers of a client's call that are not passed on; the last three are set here."""
TIMEOUT_SECONDS: Final = 60.0
TIMEOUTS: Final = dict.fromkeys(("connect", "read", "write", "pool"), TIMEOUT_SECONDS)
MAX_CONNECTIONS: Final = 100
MAX_IDLE_CONNECTIONS: Final = 20
IDLE_SECONDS: Final = 5.0
"""Idle connections are kept for less time than by the other side, which so closes none at the moment of a call."""
NO_ANSWER: Final = (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException)
"""What is raised where the other side does not answer, or breaks off."""
RETRY_SECONDS: Final = 1.0
"""Seconds after which a call may be repeated that came while no scheduler ran."""
HOST: Final = b"scheduler"
AWAY: Final = "scheduler away"
"""What /ready says while it is answered as the last time."""
HEALTH: Final = "/health"
READY: Final = "/ready"
READINESS: Final = (READY, "/ping")
READINESS_SECONDS: Final = 0.25
"""Seconds in which the scheduler must say whether the router is ready; a load balancer waits for little more."""


class ControlProxy:
    """An ASGI application that passes each call on. It answers /health itself: this process runs.

    While the scheduler does not answer and new calls wait for it, /ready is answered as the last time: if all replicas
    of a cluster said no while another of them begins to lead, a load balancer would refuse what they would serve.
    """

    def __init__(
        self, path: str, budget: ByteBudget, drain: Drain, accepts: Callable[[], bool] = lambda: False
    ) -> None:
        """`path`: of the Unix socket of the control plane; `budget`: counts the bodies; `drain`: ends streams;
        `accepts`: whether new calls are accepted, and wait if the scheduler is away.
        """
        self._path = path
        self._budget = budget
        self._drain = drain
        self._accepts = accepts
        self._ready: Mapping[str, object] | None = None
        """The last answer about readiness, if it was yes."""

    async def __aenter__(self) -> Self:
        self._connections = httpcore.AsyncConnectionPool(
            max_connections=MAX_CONNECTIONS,
            max_keepalive_connections=MAX_IDLE_CONNECTIONS,
            keepalive_expiry=IDLE_SECONDS,
            uds=self._path,
            network_backend=UnixSockets(),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._connections.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call."""
        exchange = Exchange(scope, receive, send)
        try:
            with self._budget.hold(exchange.address or "") as hold:
                body = await exchange.body(BODY_LIMIT, hold)
                if scope["path"] == HEALTH and exchange.method == "GET":
                    await send_whole(send, 200, [(b"content-type", b"application/json")], b'{"status":"ok"}')
                    return
                if self._drain.begun and scope["path"] in READINESS:
                    raise ShuttingDown  # this process; in a cluster, others serve on
                answer = await self._answer(scope, body)
                try:
                    await self._pass_back(answer, exchange, send)
                finally:
                    await answer.aclose()
        except ClientGone:
            pass
        except RouterError as error:
            await exchange.fail(error)
        except NO_ANSWER:
            away = "The scheduler's process does not answer; try again later."
            await exchange.fail(CapacityError(away, retry_after=RETRY_SECONDS))

    async def _answer(self, scope: Scope, body: bytes) -> httpcore.Response:
        """Return the scheduler's answer, or for it the last one about readiness. Raises `NO_ANSWER`."""
        if scope["path"] != READY:
            return await self._pass_on(scope, body)
        try:
            async with asyncio.timeout(READINESS_SECONDS if self._ready is not None else TIMEOUT_SECONDS):
                answer = await self._pass_on(scope, body)
                content = await answer.aread()
        except (*NO_ANSWER, TimeoutError) as error:
            if self._ready is not None and self._accepts():
                degraded = orjson.dumps({**self._ready, "degraded": AWAY})
                return httpcore.Response(200, headers=[(b"content-type", b"application/json")], content=degraded)
            raise httpcore.NetworkError(str(error)) from None
        self._ready = orjson.loads(content) if answer.status == HTTPStatus.OK else None
        return answer

    async def _pass_on(self, scope: Scope, body: bytes) -> httpcore.Response:
        headers = [(name, value) for name, value in scope["headers"] if name not in NOT_PASSED_ON]
        if scope.get("client"):
            headers.append((ADDRESS_HEADER, scope["client"][0].encode()))
        headers.append((b"accept-encoding", b"identity"))
        headers.append((b"content-length", str(len(body)).encode()))
        if not any(name == b"host" for name, _ in headers):  # as clients of HTTP/1.0 may
            headers.append((b"host", HOST))
        target = quote(scope["path"], safe="/:@!$&'()*+,;=~").encode()
        if query := scope.get("query_string"):
            target += b"?" + query
        url = httpcore.URL(scheme=b"http", host=HOST, port=None, target=target)
        request = httpcore.Request(
            scope["method"], url, headers=headers, content=body, extensions={"timeout": TIMEOUTS}
        )
        return await self._connections.handle_async_request(request)

    async def _pass_back(self, answer: httpcore.Response, exchange: Exchange, send: Send) -> None:
        """Send the answer on: a stream of events block by block, and any other answer as a whole."""
        headers = [(name.lower(), value) for name, value in answer.headers]
        if not any(name == b"content-type" and value.startswith(EVENT_STREAM.encode()) for name, value in headers):
            await send_whole(send, answer.status, headers, await answer.aread())
            return
        with exchange.while_connected():
            await exchange.begin(answer.status, [each for each in headers if each[0] not in HOP_HEADERS])
            async for block in answer.aiter_stream():
                await exchange.write(block)
                if self._drain.begun:
                    break
            await exchange.end()


async def send_whole(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    """Send an answer as one block, without the headers of the other connection.

    Its length stays if it says one: that of an answer to HEAD is not the length of what was sent.
    """
    kept = [(name, value) for name, value in headers if name not in HOP_HEADERS]
    if not any(name == b"content-length" for name, _ in kept):
        kept.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": kept})
    await send({"type": "http.response.body", "body": body})


class FromFronts:
    """ASGI middleware on the other side: gives each call the address of its client."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call, or the lifespan."""
        if scope["type"] == "http":
            named: Mapping[bytes, bytes] = dict(scope["headers"])
            address = named.get(ADDRESS_HEADER)
            client = None if address is None else (address.decode(), 0)
            headers = [(name, value) for name, value in scope["headers"] if name != ADDRESS_HEADER]
            scope = {**scope, "client": client, "headers": headers}
        await self._app(scope, receive, send)

"""The router on a real server inside the test's event loop, and emulated workers as processes."""

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from io import BytesIO
from typing import Any, Final, Self

import aiohttp
import uvicorn

from router.config.settings import Settings
from router.core.scheduler import Scheduler
from router.front.gateway import Gateway
from router.front.http.connection import connection_class
from router.process.single import Router, build
from router.runtime.emulate import start_emulated_workers
from router.upstream.discovery import resolve

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
TIMEOUT_S: Final = 60.0
"""Seconds after which what never comes fails the test instead of hanging it."""


def chat(content: str = "Hello", **more: object) -> dict[str, object]:
    """A body for `CHAT`."""
    return {"model": "m", "messages": [{"role": "user", "content": content}], **more}


class Post:
    """A call on its way: the router sees it whether or not anybody waits for its answer."""

    def __init__(self, request: Awaitable[aiohttp.ClientResponse]) -> None:
        self._task = asyncio.ensure_future(request)

    async def response(self) -> aiohttp.ClientResponse:
        """The answer, once its head is here."""
        return await self._task

    async def read(self) -> bytes:
        """The whole body of the answer."""
        return await (await self._task).read()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connection if the answer is not at its end."""
        if not self._task.done():
            self._task.cancel()
        for response in await asyncio.gather(self._task, return_exceptions=True):
            if isinstance(response, aiohttp.ClientResponse):
                response.close()


class RunningRouter:
    """A router that listens, seen from outside (`http`, with its address as base) and from inside."""

    def __init__(self, url: str, http: aiohttp.ClientSession, app: Router) -> None:
        self.url = url
        self.http = http
        self.drain = app.drain
        self.connections = app.connections
        gateway = gateway_of(app)
        self.hasher = gateway._hasher
        self.scheduler_host = gateway._scheduler_host
        self.directory = gateway._directory
        self.background = gateway._responses._background

    @property
    def scheduler(self) -> Scheduler:
        """The core, to look at."""
        return self.scheduler_host.scheduler

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, _, port = self.url.removeprefix("http://").partition(":")
        return host, int(port)

    def post(self, body: Mapping[str, object] | bytes, path: str = CHAT, **headers: str) -> "Post":
        """Begin a call, in JSON unless the headers say otherwise. Underscores in their names stand for hyphens."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {"content-type": "application/json"}
        named |= {name.replace("_", "-").lower(): value for name, value in headers.items()}
        return Post(self.http.post(path, data=BytesIO(data), headers=named))

    async def fairness(self) -> Any:
        """What /fairness says."""
        return await self.get_json("/fairness")

    async def get_json(self, path: str) -> Any:
        """A control path's answer."""
        async with self.http.get(path) as response:
            return await response.json()

    async def check_at_rest(self) -> None:
        """Wait until every call has ended; AssertionError if anything is left of them in any count."""
        await until(lambda: not self.scheduler.live)
        self.check_counts()
        report = await self.fairness()
        for entry in [*report["clients"].values(), *report["workers"].values()]:
            assert (entry["queued"], entry["running"], entry.get("unstarted_tokens", 0)) == (0, 0, 0), entry

    def check_counts(self) -> None:
        """Raise AssertionError unless the inside is as empty as before the first call."""
        scheduler, scheduler_host = self.scheduler, self.scheduler_host
        assert (scheduler.live, scheduler.waiting, scheduler.prefixes.watched) == (0, 0, 0)
        assert not scheduler.ledger.bills
        scheduler.ledger.check_conservation()
        assert not scheduler_host._dispatches
        assert not scheduler_host._streams


async def until(true: Callable[[], bool]) -> None:
    """Wait for what can be seen only by looking; TimeoutError if it never comes."""
    async with asyncio.timeout(TIMEOUT_S):
        while not true():  # noqa: ASYNC110 - nobody is there to set an event
            await asyncio.sleep(0.002)


@asynccontextmanager
async def running_router(*workers: str, **settings: Any) -> AsyncIterator[RunningRouter]:
    """A router before these workers' URLs. At its end every count must be zero, whatever happened to it.

    `resolve`, if it is among the settings, finds the addresses of names.
    """
    find = settings.pop("resolve", resolve)
    app = build(Settings.model_validate({"worker": workers, "poll_interval": 0.05, **settings}), find)
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=2 * TIMEOUT_S)
    async with serving(app) as url, aiohttp.ClientSession(url, connector=connector, timeout=timeout) as http:
        router = RunningRouter(url, http, app)
        yield router
        await router.check_at_rest()


def gateway_of(app: Any) -> Gateway:
    """The data path of an application."""
    assert isinstance(app, Router)
    gateway = app._data
    assert isinstance(gateway, Gateway)
    return gateway


@asynccontextmanager
async def serving(app: Router) -> AsyncIterator[str]:
    """Serve an ASGI application on a free port of loopback, as the command does; gives its URL."""
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        # As uvloop does, under which the command serves; asyncio leaves it out for a socket made like this one.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        config = uvicorn.Config(
            app,
            http=connection_class(app.connections),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
        )
        config.load()
        server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)
        await server.startup([listener])
        try:
            yield "http://{}:{}".format(*listener.getsockname())
        finally:
            # Not server.shutdown(), which sleeps: whatever is still open here is cut.
            for listening in server.servers:
                listening.close()
            for connection in list(server.server_state.connections):
                connection.transport.abort()
            await server.lifespan.shutdown()


@contextmanager
def emulated_workers(count: int, *flags: str) -> Iterator[list[str]]:
    """Emulated workers as processes, as fast as they can; gives their URLs. Their model is called `m`."""
    command = [sys.executable, "-m", "workers", "--port", "0", "--exit-with-parent", "--model", "m"]
    with start_emulated_workers(count, [*command, "--hardware", "instant", "--speed", "0", *flags]) as workers:
        yield [worker.url for worker in workers]

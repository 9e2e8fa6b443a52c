"""Runs the router on a real server in the test's event loop, and emulated workers as processes."""

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from io import BytesIO
from typing import Any, Final, Self

import aiohttp
import uvicorn

from router.channel.client import SchedulerClient
from router.channel.host import SchedulerHost
from router.config.settings import Settings
from router.core.model.prompt_key import PromptHasher
from router.core.scheduler import Scheduler
from router.front.drain import Drain
from router.front.handoff.loose_ends import LooseEnds
from router.front.http.connection import connection_class
from router.front.http.connection_limits import Connections
from router.front.stored.background import BackgroundResponses
from router.process.single import Router, build
from router.runtime.emulate import start_emulated_workers
from router.upstream.connections import WorkerConnections
from router.upstream.directory import WorkerDirectory
from router.upstream.discovery.sources import resolve

from .forked_router import forked_router
from .processes import needs_one_process, process_count

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
TIMEOUT_S: Final = 120.0
"""Seconds after which a wait fails the test instead of blocking it forever."""


def chat(content: str = "Hello", **more: object) -> dict[str, object]:
    """A body for `CHAT`."""
    return {"model": "m", "messages": [{"role": "user", "content": content}], **more}


class Post:
    """A call in flight. It is sent at once, whether or not the test awaits its answer."""

    def __init__(self, request: Awaitable[aiohttp.ClientResponse]) -> None:
        self._task = asyncio.ensure_future(request)

    async def response(self) -> aiohttp.ClientResponse:
        """The answer, once its headers have arrived."""
        return await self._task

    async def read(self) -> bytes:
        """The whole body of the answer."""
        return await (await self._task).read()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connection unless the answer is complete."""
        if not self._task.done():
            self._task.cancel()
        for response in await asyncio.gather(self._task, return_exceptions=True):
            if isinstance(response, aiohttp.ClientResponse):
                response.close()


class RunningRouter:
    """A running router. `http` is a client with the router's URL as base.

    Members that give access to internals skip the test if these are in other processes.
    """

    def __init__(self, url: str, http: aiohttp.ClientSession, app: Router | None, admin_key: str | None = None) -> None:
        """`app`: the router, if it runs in this process; `admin_key`: the operator's key, if there is one."""
        self._admin = {} if admin_key is None else {"authorization": f"Bearer {admin_key}"}
        self.url = url
        self.http = http
        self._app = app

    def _inside(self, what: str) -> Router:
        """Return the router. `what`: the part of it that the test reaches into."""
        return self._app or needs_one_process(f"the test reaches into {what}")

    @property
    def drain(self) -> Drain:
        """The drain of all calls."""
        return self._inside("the drain of a front").drain

    @property
    def connections(self) -> Connections:
        """The connections of clients."""
        return self._inside("the connections of a front").connections

    @property
    def hasher(self) -> PromptHasher:
        """What hashes prompts."""
        return self._inside("the hasher of a front").front.gateway._parser._hasher

    @property
    def worker_connections(self) -> WorkerConnections:
        """The connections to workers."""
        return self._inside("a front's connections to workers").front.worker_connections

    @property
    def loose_ends(self) -> LooseEnds:
        """What is left of calls that two workers had at once."""
        return self._inside("the loose ends of a front").front.handoffs.loose_ends

    @property
    def background(self) -> BackgroundResponses:
        """The background responses."""
        return self._inside("the background responses of a front").front.background

    @property
    def scheduler_client(self) -> SchedulerClient:
        """The front's side of the channel."""
        return self._inside("the channel").front.scheduler_client

    @property
    def scheduler_host(self) -> SchedulerHost:
        """What feeds the scheduler."""
        return self._inside("the scheduler").side.host

    @property
    def directory(self) -> WorkerDirectory:
        """The endpoints of the workers."""
        return self._inside("the directory of workers").side.directory

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler in the core."""
        return self.scheduler_host.scheduler

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that the router listens on."""
        host, _, port = self.url.removeprefix("http://").partition(":")
        return host, int(port)

    def post(self, body: Mapping[str, object] | bytes, path: str = CHAT, **headers: str) -> "Post":
        """Start a call. The content type is JSON by default. Underscores in header names stand for hyphens."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {"content-type": "application/json"}
        named |= {name.replace("_", "-").lower(): value for name, value in headers.items()}
        return Post(self.http.post(path, data=BytesIO(data), headers=named))

    async def fairness(self) -> Any:
        """The answer of /fairness."""
        return await self.get_json("/fairness", **self._admin)

    async def get_json(self, path: str, **headers: str) -> Any:
        """The JSON answer of a path of the control plane."""
        async with self.http.get(path, headers=headers) as response:
            return await response.json()

    async def until_waiting(self, count: int) -> None:
        """Wait until so many requests wait for a worker, and no more."""
        if self._app is not None:
            await until(lambda: self.scheduler.waiting == count)
        else:
            await self._until_clients(lambda clients: sum(each["queued"] for each in clients) == count)

    async def until_running(self, count: int) -> None:
        """Wait until so many requests are at workers, and no more."""
        await self._until_clients(lambda clients: sum(each["running"] for each in clients) == count)

    async def until_all_ended(self) -> None:
        """Wait until the scheduler counts no request."""
        if self._app is not None:
            await until(lambda: not self.scheduler.live)
        else:
            await self._until_clients(lambda clients: not any(each["queued"] + each["running"] for each in clients))

    async def _until_clients(self, are: Callable[[list[dict[str, Any]]], bool]) -> None:
        """Poll until this holds of all clients. Raises TimeoutError after `TIMEOUT_S`."""
        async with asyncio.timeout(TIMEOUT_S):
            while not are([*(await self.fairness())["clients"].values()]):  # noqa: ASYNC110 - other processes
                await asyncio.sleep(0.01)

    async def check_at_rest(self) -> None:
        """Wait until every call has ended. Raises AssertionError if a count is not zero then."""
        await self.until_all_ended()
        if self._app is not None:
            self.check_counts()
        report = await self.fairness()
        for entry in [*report["clients"].values(), *report["workers"].values()]:
            assert (entry["queued"], entry["running"], entry.get("unstarted_tokens", 0)) == (0, 0, 0), entry

    def check_counts(self) -> None:
        """Raise AssertionError unless the router's internal state is as empty as before the first call."""
        scheduler = self.scheduler
        assert (scheduler.live, scheduler.waiting, scheduler.prefixes.watched) == (0, 0, 0)
        assert not scheduler.attempts
        scheduler.ledger.check_conservation()
        assert self.scheduler_host.at_rest
        assert self.scheduler_client.at_rest


async def until(condition: Callable[[], bool]) -> None:
    """Poll until a condition is true. Raises TimeoutError after `TIMEOUT_S`."""
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():  # noqa: ASYNC110 - no code sets an event
            await asyncio.sleep(0.002)


@asynccontextmanager
async def running_router(*workers: str | Mapping[str, object], **settings: Any) -> AsyncIterator[RunningRouter]:
    """Run a router in front of workers with these URLs. On exit, checks that every count is zero.

    `resolve` among the settings replaces the resolver of host names. The front and the scheduler exchange encoded
    messages, as between processes, unless `encoded` is False. With `make test PROCESSES=3` they are processes.
    """
    find, encoded = settings.pop("resolve", None), settings.pop("encoded", True)
    given = Settings.model_validate({"worker": workers, "poll_interval": 0.05, **settings})
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(listening())
        if process_count() == 1:
            app = build(given, find or resolve, encoded=encoded)
            await stack.enter_async_context(serving(app, listener, access_log=given.access_log))
        else:
            app = None
            if find is not None:
                needs_one_process("the test gives the router a resolver")
            await stack.enter_async_context(forked_router(given, listener))
        url = "http://{}:{}".format(*listener.getsockname())
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=2 * TIMEOUT_S)
        http = await stack.enter_async_context(aiohttp.ClientSession(url, connector=connector, timeout=timeout))
        key = given.admin_key
        router = RunningRouter(url, http, app, None if key is None else key.get_secret_value())
        yield router
        await router.check_at_rest()


def listening() -> socket.socket:
    """Listen on a free port of loopback."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    # The command runs on uvloop, which sets this option. asyncio does not set it for a socket made like this one.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


@asynccontextmanager
async def serving(app: Router, listener: socket.socket, *, access_log: bool) -> AsyncIterator[None]:
    """Serve the router at this socket, as the command does."""
    config = uvicorn.Config(
        app.front.recorded(app, access_log=access_log),
        http=connection_class(app.connections),
        interface="asgi3",
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
        yield
    finally:
        # Not server.shutdown(), which sleeps. Connections that are still open are aborted.
        for listening in server.servers:
            listening.close()
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        await server.lifespan.shutdown()


@contextmanager
def emulated_workers(count: int, *flags: str) -> Iterator[list[str]]:
    """Run emulated workers as processes, at full speed, with a model named `m`. Yields their URLs."""
    command = [sys.executable, "-m", "workers", "--port", "0", "--exit-with-parent", "--model", "m"]
    with start_emulated_workers(count, [*command, "--hardware", "instant", "--speed", "0", *flags]) as workers:
        yield [worker.url for worker in workers]

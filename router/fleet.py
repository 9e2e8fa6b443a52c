"""The connections to the workers: forwards one call and streams its answer back."""

from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from io import BytesIO
from types import TracebackType
from typing import Self

import aiohttp
from yarl import URL

from router.core.model import RequestId, WorkerId
from router.errors import WorkerBroke, WorkerUnreachable

IDLE_SECONDS = 3.0
"""How long an unused connection is kept: shorter than the 5 s after which an engine closes it on its side."""
BLOCK_LIMIT = 2**20
"""Bytes of a body that aiohttp takes as one block; a larger one it wants as a file, which it sends in pieces."""
PASSED_ON = ("content-type", "retry-after")
"""An engine's response headers that are meant for the client."""


@dataclass(slots=True)
class Backend:
    """One worker as it is reached, and what was last seen of it."""

    id: WorkerId
    url: str
    api_key: str | None = field(default=None, repr=False)
    healthy: bool = False
    models: frozenset[str] = frozenset()
    """The names it last answered to; kept while it is away, so that a call for them is refused as busy, not unknown."""

    @property
    def authorization(self) -> dict[str, str]:
        """The worker's own key; a client's never goes to a worker."""
        return {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}


class Upstream:
    """A worker's answer while it comes in. Raises WorkerBroke when the connection fails before its end."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.status = response.status
        sent = response.headers  # aiohttp's str of any bytes
        self.headers = [(k.encode(), v.encode("utf-8", "surrogateescape")) for k in PASSED_ON if (v := sent.get(k))]
        self._response = response

    async def read(self) -> bytes:
        """What has come in, at least a byte of it; nothing at the end."""
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise WorkerBroke("The worker's answer broke off.") from error

    async def read_all(self) -> bytes:
        """The whole answer."""
        try:
            return await self._response.content.read()
        except (aiohttp.ClientError, OSError) as error:
            raise WorkerBroke("The worker's answer broke off.") from error


class Fleet:
    """All workers by id, reached over one pool of connections."""

    def __init__(self, backends: Iterable[Backend], connect_timeout: float) -> None:
        """`connect_timeout`: seconds in which a worker must accept a connection."""
        self._backends = {backend.id: backend for backend in backends}
        self._connect_timeout = connect_timeout
        self._session: aiohttp.ClientSession | None = None
        self._urls: dict[tuple[WorkerId, str], URL] = {}

    @property
    def backends(self) -> Collection[Backend]:
        """The workers, in the order in which they were given."""
        return self._backends.values()

    def knows(self, model: str) -> bool:
        """Whether any worker, alive or not, has this model; before one was seen at all, every name may be right."""
        return any(model in b.models for b in self.backends) or not any(b.models for b in self.backends)

    async def __aenter__(self) -> Self:
        """Open the pool, inside the event loop that will use it."""
        # No limit of connections, and none of time: a stream may be long, and the window limits what is in flight.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("user-agent", "accept", "accept-encoding"),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def forward(self, worker: WorkerId, path: str, body: bytes, request: RequestId) -> AsyncIterator[Upstream]:
        """Send a call to a worker; leaving the context early closes the connection, by which an engine aborts.

        Raises WorkerUnreachable when there is no answer: `accepted` is False only if nothing can have reached it.
        """
        assert self._session is not None, "the fleet is not open"
        backend = self._backends[worker]
        data = body if len(body) <= BLOCK_LIMIT else BytesIO(body)
        headers = {"content-type": "application/json", "x-request-id": request, **backend.authorization}
        try:
            response = await self._session.post(
                self._url(backend, path), data=data, headers=headers, allow_redirects=False
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise WorkerUnreachable(f"The worker {worker} cannot be reached.", accepted=False) from error
        except (aiohttp.ClientError, OSError) as error:
            raise WorkerUnreachable(f"The worker {worker} closed the connection.", accepted=True) from error
        try:
            yield Upstream(response)
        finally:
            response.close()

    def _url(self, backend: Backend, path: str) -> URL:
        key = (backend.id, path)
        if key not in self._urls:
            self._urls[key] = URL(backend.url + path)
        return self._urls[key]

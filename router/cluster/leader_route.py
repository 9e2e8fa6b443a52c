"""How fronts find the leader: they read the lease, and connect to the address that it names."""

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Self, TypeVar

from router.channel.socket import FrontEnd, Route
from router.cluster.entrance import watch_connection
from router.cluster.handshake import HANDSHAKE_SECONDS, Purpose, prove
from router.cluster.lease import LONGEST_POLL_SECONDS, POLL_SECONDS, LeaderRecord, LeaseStore
from router.cluster.pipe import Connection, join
from router.cluster.store import StoreUnreachable
from router.cluster.tls import NAME, ClusterTls
from router.runtime.periodic import PeriodicTask

P = TypeVar("P", bound=asyncio.Protocol)

log = logging.getLogger(__name__)

PATIENCE_SECONDS: Final = 5.0
"""Seconds without a leader for which new calls wait: the lease of one that has died ends after two."""
CONNECT_SECONDS: Final = 1.0
"""Seconds in which the leader must accept a connection."""


class LeaderRoute(PeriodicTask, Route):
    """Follows the lease while the context is entered. While the store does not answer, the last leader counts."""

    patience = PATIENCE_SECONDS
    answers_within = PATIENCE_SECONDS  # one that hangs is soon followed by another

    def __init__(self, store: LeaseStore, secret: bytes, tls: ClusterTls | None = None) -> None:
        """`secret`: of the cluster; `tls`: None for connections that are not encrypted."""
        super().__init__(POLL_SECONDS)
        self._tls = tls
        self._store = store
        self._secret = secret
        self._changed = asyncio.Event()
        self._failing = False
        self._looks_again_after = LONGEST_POLL_SECONDS
        self._lost = asyncio.Event()
        """Set once the front connects, as it has lost the leader then, or leaves it for another."""
        self.leader: LeaderRecord | None = None
        """Who held the lease when it was last read."""

    async def __aenter__(self) -> Self:
        """Read the lease."""
        await self._store.__aenter__()
        await self._run_once()
        return await super().__aenter__()

    async def __aexit__(self, *_: object) -> None:
        await super().__aexit__(*_)
        await self._store.__aexit__(None, None, None)

    async def connect(self, end: FrontEnd) -> None:
        self._lost.set()
        await self._connect(Purpose.CHANNEL, lambda: end)

    async def superseded(self, epoch: int) -> None:
        while self.leader is None or self.leader.epoch <= epoch:
            self._changed.clear()
            await self._changed.wait()

    async def open_control(self) -> Connection:
        """Open a connection to the control plane of the leader. Raises OSError."""
        reader = asyncio.StreamReader()
        transport, protocol = await self._connect(Purpose.CONTROL, lambda: asyncio.StreamReaderProtocol(reader))
        return reader, asyncio.StreamWriter(transport, protocol, reader, asyncio.get_running_loop())

    async def _connect(self, purpose: Purpose, end: Callable[[], P]) -> tuple[asyncio.Transport, P]:
        """Connect this side's end. Raises OSError, for one if the leader shows no certificate of the cluster."""
        connection = await self._open(purpose)
        create = asyncio.get_running_loop().create_connection
        try:
            if self._tls is None:
                return await create(end, sock=connection)
            context, seconds = self._tls.client(), HANDSHAKE_SECONDS
            return await create(end, sock=connection, ssl=context, server_hostname=NAME, ssl_handshake_timeout=seconds)
        except BaseException:
            connection.close()
            raise

    async def _open(self, purpose: Purpose) -> socket.socket:
        if self.leader is None:
            raise ConnectionError("no replica leads")
        host, _, port = self.leader.address.rpartition(":")
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_SECONDS):
            found = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
            family, kind, protocol, _, address = found[0]
            connection = socket.socket(family, kind, protocol)
            connection.setblocking(False)
            try:
                watch_connection(connection)
                await loop.sock_connect(connection, address)
                await prove(connection, self._secret, purpose)
            except BaseException:
                connection.close()
                raise
        return connection

    async def _pause(self) -> None:
        """Wait until the lease is to be read again, which is soon for a front without a leader."""
        await super()._pause()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._looks_again_after - POLL_SECONDS):
                await self._lost.wait()
        self._lost.clear()

    async def _run_once(self) -> None:
        try:
            view = await self._store.view()
        except StoreUnreachable as error:
            if not self._failing:
                log.error("the cluster's store does not answer: %s", error)
            self._failing, self._looks_again_after = True, LONGEST_POLL_SECONDS
            return
        self._failing, self._looks_again_after = False, view.looks_again_after
        if view.leader is not None and view.leader != self.leader:
            self.leader = view.leader
            self._changed.set()


class ControlTunnel:
    """A Unix socket at which calls reach the leader's control plane, while the context is entered."""

    def __init__(self, path: str, route: LeaderRoute) -> None:
        """`path`: of the socket."""
        self._path = path
        self._route = route
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        """Listen."""
        self._server = await asyncio.start_unix_server(self._accept, self._path)  # replaces that of a dead front
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop listening, and cut what is connected."""
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve((reader, writer)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, inner: Connection) -> None:
        try:
            outer = await self._route.open_control()
        except OSError:  # TimeoutError is one; the call is answered by 503
            inner[1].close()
            return
        await join(inner, outer)

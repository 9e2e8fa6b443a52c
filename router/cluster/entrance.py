"""The leader's TCP port: the fronts of all replicas connect there, for their channel and for the control plane."""

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Final, Self

from router.channel.socket import ChannelServer
from router.cluster.handshake import HANDSHAKE_SECONDS, Purpose, admit
from router.cluster.pipe import Connection, join
from router.cluster.tls import ClusterTls
from router.errors import ConfigError

log = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS: Final = 5
"""Seconds after which a connection is given up whose other end's machine is gone."""
BACKLOG: Final = 1024
MOST_UNPROVEN: Final = 256
"""Connections at most that have not proven yet that they know the secret. If another one comes, the oldest is cut:
a front needs one round trip, and whoever knows no secret can exhaust neither memory nor file descriptors."""
PAUSE_SECONDS: Final = 0.1
"""Seconds before another connection is accepted, if there was no file descriptor left for one."""


def bind(host: str, port: int) -> socket.socket:
    """Reserve the address of the entrance. Nobody can connect before it is entered. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
    except OSError as error:
        made.close()
        raise ConfigError(f"cluster_address: cannot listen on {host}:{port}: {error.strerror}") from None
    made.setblocking(False)
    return made


def watch_connection(connection: socket.socket) -> None:
    """Have the kernel end a connection whose other end's machine is gone, and send small messages at once."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, KEEP_ALIVE_SECONDS * 1000)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEP_ALIVE_SECONDS // 2)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)


class Entrance:
    """Accepts connections while the context is entered."""

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        channel: ChannelServer,
        control: str,
        most_unproven: int = MOST_UNPROVEN,
        tls: ClusterTls | None = None,
    ) -> None:
        """`listener`: bound, not listening; `secret`: of the cluster; `control`: path of the control plane's socket;
        `most_unproven`: see `MOST_UNPROVEN`; `tls`: None for connections that are not encrypted.
        """
        self._listener = listener
        self._secret = secret
        self._channel = channel
        self._control = control
        self._most_unproven = most_unproven
        self._tls = tls
        self._tasks: set[asyncio.Task[None]] = set()
        self._unproven: dict[asyncio.Task[None], None] = {}
        """Those of `_tasks` whose clients have not proven that they know the secret, in order of their arrival."""

    async def __aenter__(self) -> Self:
        """Listen."""
        self._listener.listen(BACKLOG)
        self._start(self._accept())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop listening, and cut what is connected."""
        self._listener.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        while True:
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            except OSError as error:
                log.error("no connection of a front can be accepted: %s", error.strerror)
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            connection.setblocking(False)
            self._start(self._serve(connection))
            await asyncio.sleep(0)  # `sock_accept` does not let others run while connections wait

    async def _admit(self, connection: socket.socket) -> Purpose | None:
        """Return what a connection is for; None if it is refused, and closed."""
        own: asyncio.Task[None] | None = asyncio.current_task()
        assert own is not None
        self._unproven[own] = None
        if len(self._unproven) > self._most_unproven:
            oldest = next(iter(self._unproven))
            del self._unproven[oldest]
            oldest.cancel()
        try:
            watch_connection(connection)
            return await admit(connection, self._secret)
        except OSError as error:  # TimeoutError is one
            log.warning("a connection to the leader is refused: %s", error or "it took too long")
            connection.close()
            return None
        except asyncio.CancelledError:
            connection.close()
            raise
        finally:
            self._unproven.pop(own, None)

    async def _serve(self, connection: socket.socket) -> None:
        purpose = await self._admit(connection)
        if purpose is None:
            return
        try:
            if purpose is Purpose.CHANNEL:
                await self._connect(self._channel.new_end, connection)
                return
            outer = await self._connect_streams(connection)
        except OSError as error:  # ssl.SSLError is one
            log.warning("a connection to the leader is refused: %s", error)
            connection.close()
            return
        with suppress(OSError):  # the control plane ends before the entrance
            await join(outer, await asyncio.open_unix_connection(self._control))
        outer[1].close()

    async def _connect(self, end: Callable[[], asyncio.Protocol], connection: socket.socket) -> asyncio.Transport:
        """Connect this side's end. Raises OSError if the other side shows no certificate of the cluster."""
        connect = asyncio.get_running_loop().connect_accepted_socket
        context = None if self._tls is None else self._tls.server()
        seconds = None if self._tls is None else HANDSHAKE_SECONDS
        # What it returns beside the transport is, with uvloop and TLS, not the end but a protocol of uvloop's own.
        transport, _ = await connect(end, connection, ssl=context, ssl_handshake_timeout=seconds)
        return transport

    async def _connect_streams(self, connection: socket.socket) -> Connection:
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        transport = await self._connect(lambda: protocol, connection)
        return reader, asyncio.StreamWriter(transport, protocol, reader, asyncio.get_running_loop())

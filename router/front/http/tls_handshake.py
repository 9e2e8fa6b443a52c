"""The TLS handshake of a client connection, which counts in the limits from its accept on.

If asyncio's server does the handshakes, nobody knows of a connection until its own is complete: any number of them
could be open, and nothing could close one to make room. So the server accepts plain connections, and each of them does
its handshake here.
"""

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from functools import partial

from uvicorn.protocols.utils import get_remote_addr

from router.front.http.connection_limits import Connections


class TlsHandshake(asyncio.Protocol):
    """A connection until its handshake is complete. It counts as idle: it is closed first if there are too many."""

    def __init__(
        self,
        build: Callable[["TlsHandshake"], asyncio.Protocol],
        context: ssl.SSLContext,
        connections: Connections,
    ) -> None:
        """`build`: returns the protocol that takes over, which first calls `release` when it is connected."""
        self._build = build
        self._context = context
        self._connections = connections
        self._address = ""
        self._task: asyncio.Task[None] | None = None
        self._counted = False

    @property
    def unread_bytes(self) -> int:
        """Always 0: nothing was sent but the server's part of the handshake."""
        return 0

    def cut(self) -> None:
        """Close the connection at once."""
        if self._task is not None:
            self._task.cancel()

    def release(self) -> None:
        """Take the connection out of the counts."""
        if self._counted:
            self._counted = False
            self._connections.remove(self, self._address)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin the handshake, or close the connection if there are too many or no file is left for it.

        A connection that is refused gets no answer: the handshake before it would cost more than the refusal saves.
        """
        client = get_remote_addr(transport)
        self._address = client[0] if client else ""
        self._counted = True
        if self._connections.add(self, self._address):
            self._begin(transport)
        else:
            self._refuse(429)
        transport.abort()

    def _begin(self, transport: asyncio.Transport) -> None:
        """Begin the handshake on a copy of the socket."""
        # A transport that was accepted may read before it is encrypted. Another one, of the same socket, does not.
        try:
            own = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        except OSError:  # the process can open no more files
            self._refuse(503)
            return
        self._task = asyncio.get_running_loop().create_task(self._complete(own))
        self._task.add_done_callback(partial(self._end, own))

    def _refuse(self, status: int) -> None:
        """Count a refusal by the status that it would have over HTTP."""
        self._connections.refused[status] += 1
        self.release()

    async def _complete(self, accepted: socket.socket) -> None:
        """Do the handshake, within the time for a head. Closes the socket if it fails."""
        loop, seconds = asyncio.get_running_loop(), self._connections.limits.head_seconds
        try:
            await loop.connect_accepted_socket(
                lambda: self._build(self), accepted, ssl=self._context, ssl_handshake_timeout=seconds
            )
        except OSError:  # by the client's fault, or at the timeout; ssl.SSLError is an OSError
            accepted.close()

    def _end(self, accepted: socket.socket, task: asyncio.Task[None]) -> None:
        """Called when the handshake has ended, or was cut, perhaps before it began."""
        if task.cancelled():
            accepted.close()
        self.release()

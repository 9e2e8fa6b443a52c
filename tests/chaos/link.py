"""The address by which the router knows one worker, which refuses connections while the worker is away."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from random import Random

from .evidence import Evidence
from .faults import Kind
from .worker_connection import WorkerConnection


class Link:
    """The address of one worker, which keeps its port while the worker is away. `kind` is its current fault."""

    def __init__(self, worker: int, evidence: Evidence, random: Random) -> None:
        self.worker = worker
        self.target = 0
        """The port of the worker's process."""
        self.kind: Kind | None = None
        self._place = _kept_port()
        self.port: int = self._place.getsockname()[1]
        self._evidence = evidence
        self.random = random
        self._listener: socket.socket | None = None
        self._accepted: set[socket.socket] = set()
        """Connections that no task has begun to serve."""
        self._connections: set[WorkerConnection] = set()
        self._serving: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """The address by which the router knows the worker."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def connections(self) -> int:
        """Number of open connections from the router."""
        return len(self._connections)

    def listen(self, target: int) -> None:
        """Accept connections for the process at the port `target`; the link's own port stays the same.

        Not by an `asyncio.Server`: if one is closed in the turn of the event loop in which it accepts a connection, it
        loses the socket without closing it.
        """
        self.target = target
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=1024)
        self._listener.setblocking(False)
        asyncio.get_running_loop().add_reader(self._listener, self._accept, self._listener)

    def refuse(self) -> None:
        """Stop listening and abort all connections, as the kernel does when a process dies."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        for connection in list(self._connections):
            connection.harm(self.kind)
            connection.reset()

    def close(self) -> None:
        """Stop for good."""
        self.refuse()
        self._place.close()

    def harm(self, kind: Kind) -> None:
        """Record this fault for every call in flight here, and abort their connections if the fault does that."""
        for connection in list(self._connections):
            connection.harm(kind)
            if kind is Kind.RESET and connection.busy:
                connection.reset()

    def _accept(self, listener: socket.socket) -> None:
        """Serve a connection in a task, and close it even if the task is cancelled before it begins."""
        try:
            accepted, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        accepted.setblocking(False)
        self._accepted.add(accepted)
        serving = asyncio.create_task(self._serve(accepted, listener))
        self._serving.add(serving)

        def end(task: "asyncio.Task[None]") -> None:
            self._serving.discard(task)
            if accepted in self._accepted:
                self._accepted.remove(accepted)
                accepted.close()

        serving.add_done_callback(end)

    async def _serve(self, accepted: socket.socket, listener: socket.socket) -> None:
        self._accepted.remove(accepted)
        reader, writer = await asyncio.open_connection(sock=accepted)
        if self._listener is not listener:
            writer.transport.abort()  # the worker went away just after the connection was accepted
            return
        connection = WorkerConnection(self, self.target, reader, writer)
        self._connections.add(connection)
        try:
            await connection.run()
        finally:
            self._connections.discard(connection)
            writer.close()

    def note(self, request: str, kind: Kind, *, begun: bool) -> None:
        """Record that a request met a fault here."""
        self._evidence.add(request, self.worker, kind, begun=begun)


@contextmanager
def kept_ports(count: int) -> Iterator[list[int]]:
    """Yield ports that nobody else gets meanwhile. A server with SO_REUSEADDR can listen there, and again later."""
    with ExitStack() as stack:
        yield [stack.enter_context(_kept_port()).getsockname()[1] for _ in range(count)]


def _kept_port() -> socket.socket:
    """Return a socket that keeps its port for whoever listens there, and does not listen itself."""
    place = socket.socket()
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    place.bind(("127.0.0.1", 0))
    return place

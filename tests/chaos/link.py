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
        self._server: asyncio.Server | None = None
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

    async def listen(self, target: int) -> None:
        """Accept connections for the process at the port `target`; the link's own port stays the same."""
        self.target = target
        listener = socket.create_server(("127.0.0.1", self.port))
        self._server = await asyncio.start_server(self._accept, sock=listener, backlog=1024)

    def refuse(self) -> None:
        """Stop listening and abort all connections, as the kernel does when a process dies."""
        if self._server is not None:
            self._server.close()
            self._server = None
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

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection in a task, and close it even if the task is cancelled before it begins."""
        if self._server is None:
            writer.transport.abort()  # accepted in the turn of the event loop in which the worker went away
            return
        connection = WorkerConnection(self, self.target, reader, writer)
        self._connections.add(connection)
        serving = asyncio.create_task(connection.run())
        self._serving.add(serving)

        def end(task: "asyncio.Task[None]") -> None:
            self._serving.discard(task)
            self._connections.discard(connection)
            writer.close()

        serving.add_done_callback(end)

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

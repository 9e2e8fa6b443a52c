"""One worker's address as the router knows it, which refuses connections while the worker is away."""

import asyncio
import os
import socket
from contextlib import suppress
from random import Random

from .evidence import Evidence
from .faults import Kind
from .line import Line


class Link:
    """One worker's address. `kind` is the fault that the worker suffers now."""

    def __init__(self, worker: int, evidence: Evidence, random: Random) -> None:
        self.worker = worker
        self.target = 0
        """The port of the worker's process."""
        self.kind: Kind | None = None
        self.port = 0
        self._evidence = evidence
        self.random = random
        self._server: asyncio.Server | None = None
        self._lines: set[Line] = set()
        self._serving: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """The address by which the router knows the worker."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def connections(self) -> int:
        """The open connections to the router."""
        return len(self._lines)

    async def listen(self, target: int) -> None:
        """Take connections for the process at that port, oneself always at the same."""
        self.target = target
        listener = socket.create_server(("127.0.0.1", self.port)) if self.port else _anywhere()
        self.port = listener.getsockname()[1]
        self._server = await asyncio.start_server(self._accept, sock=listener, backlog=1024)

    def refuse(self) -> None:
        """Take no connection, and cut those there are, as the kernel does when a process dies."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for line in list(self._lines):
            line.harm(self.kind)
            line.reset()

    def harm(self, kind: Kind) -> None:
        """Let every call under way here meet this fault, and cut its connection if the fault does that."""
        for line in list(self._lines):
            line.harm(kind)
            if kind is Kind.RESET and line.busy:
                line.reset()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection in a task; it is closed even if the task is cancelled before it begins."""
        if self._server is None:
            writer.transport.abort()  # accepted in the turn of the event loop in which the worker went away
            return
        line = Line(self, self.target, reader, writer)
        self._lines.add(line)
        serving = asyncio.create_task(line.run())
        self._serving.add(serving)

        def end(task: "asyncio.Task[None]") -> None:
            self._serving.discard(task)
            self._lines.discard(line)
            writer.close()

        serving.add_done_callback(end)

    def note(self, request: str, kind: Kind, *, begun: bool) -> None:
        """Record that a request met a fault here."""
        self._evidence.add(request, self.worker, kind, begun=begun)


def _anywhere() -> socket.socket:
    """A listener at a port that no outgoing connection takes while nobody listens there."""
    for number in range(10_000):
        with suppress(OSError):
            return socket.create_server(("127.0.0.1", 20_000 + (os.getpid() * 100 + number) % 10_000))
    raise OSError("no port is free")

"""Between the router and one worker: passes bytes on, and does to them what the schedule says.

The router knows the worker by this address, which refuses connections while the worker is away.
"""

import asyncio
import contextlib
import re
import socket
import struct
from random import Random
from typing import Final

from .evidence import Evidence
from .faults import Kind
from .nonsense import AMID, failure, nonsense

BLOCK: Final = 1 << 16
BEHIND: Final = 0.15
"""Seconds by which a slow worker's blocks are late."""
LONGEST_CUT: Final = 6
"""Blocks after which a stream is cut, at most."""
LENGTH: Final = re.compile(rb"\r\ncontent-length: (\d+)", re.IGNORECASE)
NAME: Final = re.compile(rb"\r\nx-request-id: ([^\r]+)", re.IGNORECASE)
NOT_FOUND: Final = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"


class Link:
    """One worker's address. `kind` is the fault that it suffers now."""

    def __init__(self, worker: int, target: int, evidence: Evidence, random: Random) -> None:
        """`target`: the port of the worker's process."""
        self.worker = worker
        self.kind: Kind | None = None
        self.port = 0
        self._target = target
        self._evidence = evidence
        self.random = random
        self._server: asyncio.Server | None = None
        self._lines: set[Line] = set()

    @property
    def url(self) -> str:
        """Where the router finds the worker."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def connections(self) -> int:
        """Open ones to the router."""
        return len(self._lines)

    async def listen(self) -> None:
        """Take connections, always at the same port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]

    def refuse(self) -> None:
        """Take no connection, and cut those there are, as the kernel does when a process dies."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for line in list(self._lines):
            line.harm(self.kind)
            line.reset()

    def harm(self, kind: Kind) -> None:
        """What is under way here meets this fault; it is cut where the fault is that."""
        for line in list(self._lines):
            line.harm(kind)
            if kind is Kind.RESET and line.busy:
                line.reset()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = Line(self, reader, writer)
        self._lines.add(line)
        try:
            await line.run(self._target)
        finally:
            self._lines.discard(line)
            writer.close()

    def note(self, request: str, kind: Kind, *, begun: bool) -> None:
        """A request met a fault here."""
        self._evidence.add(request, self.worker, kind, begun=begun)


class Line:
    """A connection of the router's, and the one to the worker that belongs to it."""

    def __init__(self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._link = link
        self._reader = reader
        self._writer = writer
        self._request: str | None = None
        """The call under way; None for a poll."""
        self._harmed = False
        self._spoilt_by: Kind | None = None
        self._left = 0
        """Blocks of the answer until then."""
        self._begun = False

    @property
    def busy(self) -> bool:
        """Whether a call was sent here last."""
        return self._request is not None

    async def run(self, target: int) -> None:
        """Pass on what comes, until either side ends."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            worker_reader, worker_writer = await asyncio.open_connection("127.0.0.1", target)
            answers = asyncio.ensure_future(self._pass_answers(worker_reader))
            calls = asyncio.ensure_future(self._pass_calls(worker_writer))
            try:
                await asyncio.wait([answers, calls], return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (answers, calls):
                    task.cancel()
                await asyncio.gather(answers, calls, return_exceptions=True)
                worker_writer.transport.abort()

    def harm(self, kind: Kind | None) -> None:
        """Note that the call under way meets a fault, once for each try."""
        if kind is not None and self._request is not None and not self._harmed:
            self._harmed = True
            self._link.note(self._request, kind, begun=self._begun)

    def reset(self) -> None:
        """Drop the router's connection, as a dead process does."""
        transport = self._writer.transport
        if not transport.is_closing():
            raw = transport.get_extra_info("socket")
            with contextlib.suppress(OSError):
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()

    async def _pass_calls(self, worker: asyncio.StreamWriter) -> None:
        while True:
            head = await self._reader.readuntil(b"\r\n\r\n")
            length = LENGTH.search(head)
            body = await self._reader.readexactly(int(length[1])) if length else b""
            name = NAME.search(head)
            self._request = name[1].decode() if name and head.startswith(b"POST /v1/") else None
            self._harmed = self._begun = False
            self._spoilt_by = None
            if not await self._suffer(head):
                worker.write(head + body)
                await worker.drain()

    async def _suffer(self, head: bytes) -> bool:
        """Let a call meet the worker's fault; whether that answers it."""
        link, random = self._link, self._link.random
        if self._request is None:
            if link.kind is Kind.BLIND and head.startswith((b"GET /metrics", b"GET /v1/loads")):
                await self._answer(NOT_FOUND)
                return True
            return False
        match link.kind:
            case Kind.ERRORS:
                self.harm(link.kind)
                await self._answer(failure(random))
                return True
            case Kind.RESET:
                self._spoilt_by, self._left = Kind.RESET, random.randint(0, LONGEST_CUT)
            case Kind.GARBAGE if random.random() < 0.5:
                self._spoilt_by, self._left = Kind.GARBAGE, random.randint(1, LONGEST_CUT)
            case Kind.GARBAGE:
                self.harm(link.kind)
                await self._answer(nonsense(random))
                self._writer.close()
                return True
            case Kind.HANG | Kind.KILL | Kind.LEAVE:
                self.harm(link.kind)
        return False

    async def _answer(self, block: bytes) -> None:
        self._writer.write(block)
        await self._writer.drain()

    async def _pass_answers(self, worker: asyncio.StreamReader) -> None:
        while block := await worker.read(BLOCK):
            if self._link.kind is Kind.SLOW:
                await asyncio.sleep(BEHIND)
            if self._spoilt_by is not None:
                self._left -= 1
                if self._left < 0:
                    await self._spoil(self._spoilt_by)
                    return
            self._begun = self._begun or self._request is not None
            await self._answer(block)

    async def _spoil(self, kind: Kind) -> None:
        self.harm(kind)
        if kind is Kind.GARBAGE:
            await self._answer(self._link.random.choice(AMID))
        else:
            self.reset()

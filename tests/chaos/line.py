"""A connection between the router and one worker that passes bytes on and applies the scheduled faults to them."""

import asyncio
import contextlib
import re
import socket
import struct
from random import Random
from typing import Final, Protocol

from .faults import Kind
from .nonsense import AMID, failure, nonsense

BLOCK: Final = 1 << 16
BEHIND: Final = 0.15
"""Seconds by which a slow worker's blocks are late."""
LONGEST_CUT: Final = 6
"""Blocks after which a stream is cut, at most."""
LENGTH: Final = re.compile(rb"\r\ncontent-length: (\d+)", re.IGNORECASE)
NAME: Final = re.compile(rb"\r\nx-request-id: ([^\r]+)", re.IGNORECASE)
PAGES: Final = (b"GET /metrics", b"GET /v1/loads")
NOT_FOUND: Final = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"


class Fate(Protocol):
    """The fault that a worker suffers, and the record of the calls that met it."""

    @property
    def kind(self) -> Kind | None:
        """The kind of the current fault, if there is one."""

    @property
    def random(self) -> Random:
        """The source of randomness."""

    def note(self, request: str, kind: Kind, *, begun: bool) -> None:
        """Record that a call met a fault."""


class Line:
    """A connection from the router, and the matching one to the worker."""

    def __init__(self, fate: Fate, target: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """`target`: the port of the worker's process."""
        self._fate = fate
        self._target = target
        self._reader = reader
        self._writer = writer
        self._worker: asyncio.StreamWriter | None = None
        self._answers: asyncio.Task[None] | None = None
        self._call = b""
        """That was sent last, while nothing came back for it."""
        self._request: str | None = None
        """Its id; None for a poll."""
        self._harmed = False
        self._begun = False
        """Whether an event of its answer was passed on."""
        self._missing: int | None = None
        """Bytes of its answer that are still to come, where it tells its length."""
        self._spoilt_by: Kind | None = None
        self._left = 0
        """Blocks of the answer until then."""

    @property
    def busy(self) -> bool:
        """True while a call is under way."""
        return self._request is not None

    async def run(self) -> None:
        """Pass bytes on until either side ends."""
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                while True:
                    await self._pass_call()
        finally:
            if self._answers is not None:
                self._answers.cancel()
                await asyncio.gather(self._answers, return_exceptions=True)
            if self._worker is not None:
                self._worker.transport.abort()

    def harm(self, kind: Kind | None) -> None:
        """Record that the call under way meets a fault, once for each attempt."""
        if kind is not None and self._request is not None and not self._harmed:
            self._harmed = True
            self._fate.note(self._request, kind, begun=self._begun)

    def reset(self) -> None:
        """Drop the router's connection, as a dead process does."""
        transport = self._writer.transport
        if not transport.is_closing():
            raw = transport.get_extra_info("socket")
            with contextlib.suppress(OSError):
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()

    async def _pass_call(self) -> None:
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = LENGTH.search(head)
        body = await self._reader.readexactly(int(length[1])) if length else b""
        name = NAME.search(head)
        self._request = name[1].decode() if name and head.startswith(b"POST /v1/") else None
        self._harmed = self._begun = False
        self._spoilt_by = None
        if await self._suffer(head):
            return
        self._call = head + body
        worker = self._worker or await self._connect()
        worker.write(self._call)
        await worker.drain()

    async def _connect(self) -> asyncio.StreamWriter:
        try:
            answers, self._worker = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            self.harm(self._fate.kind or Kind.KILL)
            raise
        self._answers = asyncio.ensure_future(self._pass_answers(answers))
        return self._worker

    async def _suffer(self, head: bytes) -> bool:
        """Let a call meet the worker's fault; whether that answers it."""
        fate = self._fate
        if self._request is None:
            if fate.kind is Kind.BLIND and head.startswith(PAGES):
                await self._answer(NOT_FOUND)
                return True
            return False
        match fate.kind:
            case Kind.ERRORS:
                self.harm(fate.kind)
                await self._answer(failure(fate.random))
                return True
            case Kind.RESET:
                self._spoilt_by, self._left = Kind.RESET, fate.random.randint(0, LONGEST_CUT)
            case Kind.GARBAGE if fate.random.random() < 0.5:
                self._spoilt_by, self._left = Kind.GARBAGE, fate.random.randint(1, LONGEST_CUT)
            case Kind.GARBAGE:
                self.harm(fate.kind)
                await self._answer(nonsense(fate.random))
                self._writer.close()
                return True
            case Kind.HANG | Kind.KILL | Kind.LEAVE:
                self.harm(fate.kind)
        return False

    async def _answer(self, block: bytes) -> None:
        self._writer.write(block)
        await self._writer.drain()

    async def _pass_answers(self, answers: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while block := await answers.read(BLOCK):
                if self._call:
                    self._call = b""
                    length = LENGTH.search(block)
                    self._missing = int(length[1]) + block.index(b"\r\n\r\n") + 4 if length else None
                if self._fate.kind is Kind.SLOW:
                    await asyncio.sleep(BEHIND)
                if self._spoilt_by is not None:
                    self._left -= 1
                    if self._left < 0:
                        await self._spoil(self._spoilt_by)
                        break
                self._begun = self._begun or b"data: " in block
                await self._answer(block)
                self._count(block)
        await self._end()

    def _count(self, block: bytes) -> None:
        """Stop counting faults for a call once its answer is complete."""
        if self._missing is not None:
            self._missing -= len(block)
        if self._missing == 0 or (self._missing is None and block.endswith(b"0\r\n\r\n")):
            self._request = None

    async def _end(self) -> None:
        """The worker's side is at its end: so is the router's, but for a call that only crossed that end."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.transport.abort()
        if self._call and not self._harmed and self._fate.kind is None:
            with contextlib.suppress(OSError):
                (await self._connect()).write(self._call)
                return
        self._writer.close()

    async def _spoil(self, kind: Kind) -> None:
        self.harm(kind)
        if kind is Kind.GARBAGE:
            await self._answer(self._fate.random.choice(AMID))
        else:
            self.reset()

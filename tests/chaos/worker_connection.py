"""A connection between the router and one worker that forwards bytes and applies the scheduled faults."""

import asyncio
import contextlib
import re
import socket
import struct
from random import Random
from typing import Final, Protocol

from .faults import Kind
from .invalid_answers import AMID, failure, invalid_answer

BLOCK: Final = 1 << 16
BEHIND: Final = 0.15
"""Seconds by which a slow worker's blocks are delayed."""
LONGEST_CUT: Final = 6
"""Most blocks of a stream before it is cut."""
LENGTH: Final = re.compile(rb"\r\ncontent-length: (\d+)", re.IGNORECASE)
NAME: Final = re.compile(rb"\r\nx-request-id: ([^\r]+)", re.IGNORECASE)
PAGES: Final = (b"GET /metrics", b"GET /v1/loads")
NOT_FOUND: Final = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"


class WorkerFault(Protocol):
    """The current fault of a worker, and the record of the calls that met it."""

    @property
    def kind(self) -> Kind | None:
        """The kind of the current fault, if there is one."""

    @property
    def random(self) -> Random:
        """The source of randomness."""

    def note(self, request: str, kind: Kind, *, begun: bool) -> None:
        """Record that a call met a fault."""


class WorkerConnection:
    """A connection from the router, and the matching one to the worker."""

    def __init__(
        self, fault: WorkerFault, target: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """`target`: the port of the worker's process."""
        self._fault = fault
        self._target = target
        self._reader = reader
        self._writer = writer
        self._worker: asyncio.StreamWriter | None = None
        self._answers: asyncio.Task[None] | None = None
        self._call = b""
        """The call sent last, until its answer begins."""
        self._request: str | None = None
        """The id of the call; None for a poll."""
        self._harmed = False
        self._begun = False
        """True if an event of its answer was passed on."""
        self._missing: int | None = None
        """Bytes of its answer that are still to come, if the answer has a content-length."""
        self._spoilt_by: Kind | None = None
        self._left = 0
        """Blocks of the answer before the fault."""

    @property
    def busy(self) -> bool:
        """True while a call is in flight."""
        return self._request is not None

    async def run(self) -> None:
        """Forward bytes until either side closes."""
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
        """Record that the call in flight meets a fault, once for each attempt."""
        if kind is not None and self._request is not None and not self._harmed:
            self._harmed = True
            self._fault.note(self._request, kind, begun=self._begun)

    def reset(self) -> None:
        """Abort the router's connection, as the kernel does for a dead process."""
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
            self.harm(self._fault.kind or Kind.KILL)
            raise
        self._answers = asyncio.ensure_future(self._pass_answers(answers))
        return self._worker

    async def _suffer(self, head: bytes) -> bool:
        """Apply the worker's fault to a call; return whether the fault has answered it."""
        fault = self._fault
        if self._request is None:
            if fault.kind is Kind.BLIND and head.startswith(PAGES):
                await self._answer(NOT_FOUND)
                return True
            return False
        match fault.kind:
            case Kind.ERRORS:
                self.harm(fault.kind)
                await self._answer(failure(fault.random))
                return True
            case Kind.RESET:
                self._spoilt_by, self._left = Kind.RESET, fault.random.randint(0, LONGEST_CUT)
            case Kind.GARBAGE if fault.random.random() < 0.5:
                self._spoilt_by, self._left = Kind.GARBAGE, fault.random.randint(1, LONGEST_CUT)
            case Kind.GARBAGE:
                self.harm(fault.kind)
                await self._answer(invalid_answer(fault.random))
                self._writer.close()
                return True
            case Kind.HANG | Kind.KILL | Kind.LEAVE:
                self.harm(fault.kind)
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
                if self._fault.kind is Kind.SLOW:
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
        """Close the router's side when the worker closes, unless a new call has just crossed with the close."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.transport.abort()
        if self._call and not self._harmed and self._fault.kind is None:
            with contextlib.suppress(OSError):
                (await self._connect()).write(self._call)
                return
        self._writer.close()

    async def _spoil(self, kind: Kind) -> None:
        self.harm(kind)
        if kind is Kind.GARBAGE:
            await self._answer(self._fault.random.choice(AMID))
        else:
            self.reset()

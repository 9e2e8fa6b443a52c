"""Calls over raw connections at little CPU cost, so that the load generator is not the bottleneck."""

import asyncio
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import orjson

from .asks import COMPLETIONS

REASON: Final = re.compile(rb"\r\nx-d2lpm-dropped-reason: ([^\r]*)\r\n", re.IGNORECASE)
LENGTH: Final = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)
END_OF_CHUNKS: Final = b"\r\n0\r\n\r\n"
DONE: Final = b"data: [DONE]\n\n" + END_OF_CHUNKS


@dataclass(slots=True)
class Reply:
    """How a call ended; times are those of `time.monotonic`."""

    sent: float
    status: int = 0
    """The status; 0 if the connection ended before it came."""
    reason: str | None = None
    """The router's reason for a refusal."""
    first: float | None = None
    """When the first byte of the body came."""
    ended: float = 0.0
    whole: bool = False
    """True if the answer is complete and holds no error."""


def post(body: Mapping[str, object]) -> bytes:
    """Return a completions call as the bytes of its HTTP request."""
    data = orjson.dumps(body)
    lines = (
        f"POST {COMPLETIONS} HTTP/1.1",
        "host: localhost",
        "content-type: application/json",
        f"content-length: {len(data)}",
    )
    return "\r\n".join([*lines, "", ""]).encode() + data


class RawConnection(asyncio.Protocol):
    """One connection for one call at a time."""

    def __init__(self) -> None:
        self.closed = False
        self._transport: asyncio.Transport | None = None
        self._reply: Reply | None = None
        self._answered: asyncio.Future[Reply] | None = None
        self._head = b""
        self._tail = b""
        self._left: int | None = None
        """Bytes of a body of known length still to come."""
        self._sound = True
        self._leaves = False

    @classmethod
    async def open(cls, address: tuple[str, int]) -> "RawConnection":
        """Connect. Raises OSError."""
        _, line = await asyncio.get_running_loop().create_connection(cls, *address)
        return line

    def begin(self, call: bytes, *, leaves: bool = False) -> "asyncio.Future[Reply]":
        """Send a call on an open, idle line; the future's result is the reply, whatever happens.

        `leaves`: disconnect as soon as the body begins.
        """
        assert self._transport is not None
        self._leaves = leaves
        self._head, self._tail, self._left, self._sound = b"", b"", None, True
        self._answered = asyncio.get_running_loop().create_future()
        self._reply = Reply(time.monotonic())
        self._transport.write(call)
        return self._answered

    def close(self) -> None:
        """Close the connection, also during a call."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Keep the transport."""
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's signature
        """End the call in flight as incomplete."""
        self.closed = True
        self._end(whole=False)

    def data_received(self, data: bytes) -> None:
        """Read the head, then look for the end of the body."""
        reply = self._reply
        if reply is None:
            return
        if not reply.status:
            self._head += data
            head, found, data = self._head.partition(b"\r\n\r\n")
            if not found:
                return
            self._read_head(reply, head + b"\r\n")
        if data and reply.first is None:
            reply.first = time.monotonic()
            if self._leaves:
                self.close()
        if b'"error"' in data:
            self._sound = False
        if self._left is not None:
            self._left -= len(data)
            if self._left <= 0:
                self._end(whole=self._sound)
            return
        self._tail = (self._tail + data)[-len(DONE) :]
        if self._tail.endswith(END_OF_CHUNKS):
            self._end(whole=self._sound and self._tail == DONE)

    def _read_head(self, reply: Reply, head: bytes) -> None:
        reply.status = int(head[9:12])
        if (length := LENGTH.search(head)) is not None:
            self._left = int(length[1])
        if reply.status != 200 and (reason := REASON.search(head)) is not None:
            reply.reason = reason[1].decode()

    def _end(self, *, whole: bool) -> None:
        reply, self._reply = self._reply, None
        if reply is not None and self._answered is not None and not self._answered.done():
            reply.ended, reply.whole = time.monotonic(), whole and reply.status == 200
            self._answered.set_result(reply)

"""Writes an application's answer byte for byte as uvicorn does, at a third of the cost.

Only HTTP/1.0 differs: it has no chunks, so that an answer without a length ends when the connection closes.

uvicorn validates each header. The router's headers have lower-case names, as ASGI requires, and values that an HTTP
parser has accepted or that the router made itself, so the only check here is for line breaks.

The head of an answer is sent together with the block that follows it at once. A server writes the two one after the
other, and with TCP_NODELAY each would cost a system call and a packet.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from router.front.byte_budget import UnreadBytes

JOINED_BYTES: Final = 64 * 1024
"""Largest block that is joined with the head. Copying more costs as much as a second system call."""

CallSoon = Callable[[Callable[[], None]], asyncio.Handle | None]
"""`call_soon` of an event loop."""


class CorkedTransport(asyncio.Transport):
    """Wraps the transport of the socket and can hold back one write.

    A held write is sent with the next write, or at the end of the current turn of the event loop.
    """

    def __init__(self, transport: asyncio.Transport, call_soon: CallSoon) -> None:
        """`call_soon`: the event loop's."""
        super().__init__()
        self._transport = transport
        self._call_soon = call_soon
        self.holds_next = False
        """Whether to hold the next write until another follows, or until the loop's next turn."""
        self._held = b""
        self._release_soon: asyncio.Handle | None = None
        """Sends the held write in the loop's next turn. Dropped once it has, as the two refer to each other."""
        # Bound directly, because some are called several times per request.
        self.get_extra_info = transport.get_extra_info  # type: ignore[method-assign]
        self.is_closing = transport.is_closing  # type: ignore[method-assign]
        self.pause_reading = transport.pause_reading  # type: ignore[method-assign]
        self.resume_reading = transport.resume_reading  # type: ignore[method-assign]

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write `data`, joined with the held write if there is one, or hold it."""
        if self._held:
            held, self._held = self._held, b""
            if self._release_soon is not None:
                self._release_soon.cancel()
                self._release_soon = None
            if len(data) <= JOINED_BYTES:
                data = b"".join((held, data))
            else:
                self._transport.write(held)
        elif self.holds_next:
            self.holds_next = False
            self._held = bytes(data)
            self._release_soon = self._call_soon(self._release)
            return
        self._transport.write(data)

    def uncork(self) -> Callable[[bytes], None]:
        """Write what is held, and return the `write` of the transport that has the socket."""
        self._release()
        return self._transport.write

    def get_write_buffer_size(self) -> int:
        """Return the bytes that the network has not accepted yet, including the held write."""
        return self._transport.get_write_buffer_size() + len(self._held)

    def write_eof(self) -> None:
        """Send the held write and close the writing side."""
        self._release()
        self._transport.write_eof()

    def close(self) -> None:
        """Send the held write and close."""
        self._release()
        self._transport.close()

    def abort(self) -> None:
        """Send the held write and abort."""
        self._release()
        self._transport.abort()

    def _release(self) -> None:
        self._release_soon = None
        held, self._held = self._held, b""
        if held and not self.is_closing():
            self._transport.write(held)


WITHOUT_BODY: Final = frozenset({204, 304})
"""Statuses of answers that have neither a length nor chunks."""
HTTP_1_0: Final = "1.0"
HEAD_BYTES: Final = 512
"""Estimated size of a head, or of the end of an answer."""
CLOSING: Final = (b"connection", b"close")
IN_CHUNKS: Final = (b"transfer-encoding", b"chunked")


class StreamWriter:
    """Writes blocks of a chunked answer at once, without a coroutine per block."""

    __slots__ = ("_cycle", "_transport_write", "flow")

    def __init__(self, cycle: RequestResponseCycle, transport_write: Callable[[bytes], None]) -> None:
        self._cycle = cycle
        self._transport_write = transport_write
        self.flow = cycle.flow
        """While its `write_paused` is true, the client does not read, and blocks must go through `send`."""

    def write(self, block: bytes) -> None:
        """Write a block that is not empty; after a disconnect, do nothing."""
        if not self._cycle.disconnected:
            self._transport_write(b"%x\r\n%b\r\n" % (len(block), block))


async def send(cycle: RequestResponseCycle, unread: UnreadBytes, message: Any) -> None:
    """Write one ASGI message of the answer to this cycle's call.

    Waits while the client does not read and the budget has no room for more unread bytes. Raises RuntimeError, as
    uvicorn does, if a message is out of order or the body does not match the declared length.
    """
    if cycle.flow.write_paused and not cycle.disconnected and not unread.try_add(_size(message)):
        await cycle.flow.drain()
    if cycle.disconnected:
        return
    kind = message["type"]
    if kind == "http.response.start" and not cycle.response_started:
        _write_head(cycle, message["status"], message.get("headers", ()))
    elif kind == "http.response.body" and cycle.response_started and not cycle.response_complete:
        _write_body(cycle, message.get("body", b""), last=not message.get("more_body", False))
    else:
        raise RuntimeError(f"The application sent {kind!r} out of order.")


def _size(message: Any) -> int:
    """Estimate the bytes that a message adds to the answer."""
    return len(message.get("body", b"")) or HEAD_BYTES


def _write_head(cycle: RequestResponseCycle, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
    cycle.response_started = True
    cycle.waiting_for_100_continue = False
    all_headers = [*cycle.default_headers, *headers]
    for name, value in all_headers:
        if name == b"content-length":
            cycle.expected_content_length = int(value)
            cycle.chunked_encoding = False
        elif name == b"connection" and value == b"close":
            cycle.keep_alive = False
    if not cycle.keep_alive and CLOSING not in all_headers:
        all_headers.append(CLOSING)
    if status in WITHOUT_BODY:
        cycle.chunked_encoding = False
    elif cycle.chunked_encoding is None and cycle.scope["method"] != "HEAD" and cycle.scope["http_version"] != HTTP_1_0:
        cycle.chunked_encoding = True
        all_headers.append(IN_CHUNKS)
    head = b"\r\n".join([STATUS_LINE[status].removesuffix(b"\r\n"), *map(b": ".join, all_headers), b"", b""])
    if not head.count(b"\r") == head.count(b"\n") == len(all_headers) + 2:
        raise RuntimeError("A header contains a line break.")
    cycle.transport.write(head)


def _write_body(cycle: RequestResponseCycle, body: bytes, *, last: bool) -> None:
    if cycle.scope["method"] == "HEAD":
        cycle.expected_content_length = 0
    elif cycle.chunked_encoding:
        block = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
        cycle.transport.write(block + b"0\r\n\r\n" if last else block)
    elif cycle.chunked_encoding is None:  # the connection closes at its end
        cycle.transport.write(body)
    else:
        cycle.expected_content_length -= len(body)
        if cycle.expected_content_length < 0:
            raise RuntimeError("The answer is longer than its content-length.")
        cycle.transport.write(body)
    if last:
        _finish(cycle)


def _finish(cycle: RequestResponseCycle) -> None:
    if cycle.expected_content_length:
        raise RuntimeError("The answer is shorter than its content-length.")
    cycle.response_complete = True
    cycle.message_event.set()
    if not cycle.keep_alive:
        cycle.transport.close()
    cycle.on_response()

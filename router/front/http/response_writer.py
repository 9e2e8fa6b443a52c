"""What an application sends, put on the wire byte for byte as uvicorn does, at a third of the cost.

uvicorn looks into each header for what anybody may have put there. Ours have lower-case names, as ASGI has it, and
values that a parser of HTTP has accepted or that are of our own making: all that is looked for is a break of the line.
"""

from collections.abc import Iterable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from router.front.http.unread_bytes import UnreadBytes

WITHOUT_BODY = frozenset({204, 304})
"""An answer with one of these has neither a length nor chunks."""
HEAD_BYTES = 512
"""About what a head takes, or the end of an answer."""
CLOSING = (b"connection", b"close")
IN_CHUNKS = (b"transfer-encoding", b"chunked")


async def send(cycle: RequestResponseCycle, unread: UnreadBytes, message: Any) -> None:
    """See ASGI: the answer to the call of this cycle, message by message.

    Waits while the client does not read and may have no more unread.

    Raises RuntimeError, as uvicorn does, for what comes out of turn or is not as long as it was said to be.
    """
    if cycle.flow.write_paused and not cycle.disconnected and not unread.try_add(_size(message)):
        await cycle.flow.drain()
    if cycle.disconnected:
        return
    kind = message["type"]
    if kind == "http.response.start" and not cycle.response_started:
        _begin(cycle, message["status"], message.get("headers", ()))
    elif kind == "http.response.body" and cycle.response_started and not cycle.response_complete:
        _go_on(cycle, message.get("body", b""), last=not message.get("more_body", False))
    else:
        raise RuntimeError(f"An application sent {kind!r} out of turn.")


def _size(message: Any) -> int:
    """About how many bytes of the answer a message is."""
    return len(message.get("body", b"")) or HEAD_BYTES


def _begin(cycle: RequestResponseCycle, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
    cycle.response_started = True
    cycle.waiting_for_100_continue = False
    named = [*cycle.default_headers, *headers]
    for name, value in named:
        if name == b"content-length":
            cycle.expected_content_length = int(value)
            cycle.chunked_encoding = False
        elif name == b"connection" and value == b"close":
            cycle.keep_alive = False
    if not cycle.keep_alive and CLOSING not in named:
        named.append(CLOSING)
    if cycle.chunked_encoding is None and cycle.scope["method"] != "HEAD" and status not in WITHOUT_BODY:
        cycle.chunked_encoding = True
        named.append(IN_CHUNKS)
    head = b"\r\n".join([STATUS_LINE[status].removesuffix(b"\r\n"), *map(b": ".join, named), b"", b""])
    if len(head.splitlines()) != len(named) + 2:
        raise RuntimeError("A header has a line break in it.")
    cycle.transport.write(head)


def _go_on(cycle: RequestResponseCycle, body: bytes, *, last: bool) -> None:
    if cycle.scope["method"] == "HEAD":
        cycle.expected_content_length = 0
    elif cycle.chunked_encoding:
        block = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
        cycle.transport.write(block + b"0\r\n\r\n" if last else block)
    else:
        cycle.expected_content_length -= len(body)
        if cycle.expected_content_length < 0:
            raise RuntimeError("The answer is longer than its content-length.")
        cycle.transport.write(body)
    if last:
        _end(cycle)


def _end(cycle: RequestResponseCycle) -> None:
    if cycle.expected_content_length:
        raise RuntimeError("The answer is shorter than its content-length.")
    cycle.response_complete = True
    cycle.message_event.set()
    if not cycle.keep_alive:
        cycle.transport.close()
    cycle.on_response()

"""One HTTP exchange with a client over ASGI: the request's body, the answer, and whether the client is connected.

Of the headers, few pass between clients and engines. A client could steer an engine by others, such as a priority, a
rank or another request's id; and an engine's other headers are about its connection with the router.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final

from starlette.types import Receive, Scope, Send

from router.api.body.call import Head
from router.api.families import error_shape_of
from router.core.model.request import WorkerId
from router.errors import BadRequest, BodyTooLarge, RouterError, UnsupportedEncoding
from router.front.byte_budget import Hold
from router.front.call_record import SCOPE_KEY, CallRecord
from router.front.http.connection_limits import BREAK_OFF, ON_DISCONNECT, STREAM_WRITER, UNREAD_OWNER, OnDisconnect
from router.front.http.response_writer import WITHOUT_BODY, StreamWriter

Headers = Sequence[tuple[bytes, bytes]]
HeaderList = list[tuple[bytes, bytes]]
JSON_TYPE: Final = (b"content-type", b"application/json")
UNBUFFERED: Final = (b"x-accel-buffering", b"no")
"""Tells nginx, and other proxies that know this header, to pass a stream on as it comes."""

TO_THE_CLIENT: Final = frozenset(
    {
        *(b"content-type", b"cache-control", b"retry-after", b"allow"),
        *(b"endpoint-load-metrics", b"openai-processing-ms", b"openai-version"),
    }
)
RATE_LIMITS: Final = b"x-ratelimit-"
"""What OpenAI's rate limit headers begin with."""
TO_THE_WORKER: Final = (b"traceparent", b"tracestate", b"baggage", b"endpoint-load-metrics-format")
"""The context of a trace (W3C), and the wish for a report of the engine's load (ORCA)."""

PIECE_BYTES: Final = 2**20
"""Bodies longer than this are joined in a thread. Joining pieces of this size releases Python's global lock."""


class ClientGone(Exception):
    """The client closed its connection, so no answer can be sent."""


class Exchange:
    """A request and its answer. The answer is sent whole (`respond`) or in blocks (`begin`, `write`, `end`)."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, deployment: str | None = None) -> None:
        """`deployment`: the model that Azure's name of the path named, in place of the body."""
        self.path: str = scope["path"]
        """The path as OpenAI names it."""
        self.deployment = deployment
        self.method: str = scope["method"]
        self.headers: Mapping[bytes, bytes] = dict(scope["headers"])
        """Headers by lower-case name. Of a repeated header the last one counts, because proxies append theirs."""
        self._all_headers: Headers = scope["headers"]
        self.address: str | None = scope["client"][0] if scope.get("client") else None
        self.record: CallRecord | None = scope.get(SCOPE_KEY)
        """What becomes of the call is noted here; None if nobody wants to know."""
        given = _usable_id(self.headers.get(b"x-request-id"))
        self.id_given = given is not None
        """Whether the client gave the id, so that another call may have it."""
        self.request_id = given or new_request_id()
        """Sent with every answer. The client's own, if it gave one that is usable and that no other call has."""
        self.begun = False
        """Whether the status line is sent. After that, an error can only be sent inside the stream."""
        self.whole = False
        """Whether the answer that has begun is not a stream. In it, no error can be sent at all."""
        content_type = self.headers.get(b"content-type", b"").decode("latin-1")
        self.head = Head(self.path, self.method, scope.get("query_string", b""), content_type)
        """The parts of the call that are known before its body."""
        self._extensions: Mapping[str, Any] = scope.get("extensions") or {}
        """Empty once the connection is lost."""
        self._on_disconnect: OnDisconnect | None = self._extensions.get(ON_DISCONNECT)
        self._connected: WhileConnected | None = None
        self._receive = receive
        self._send = send

    def is_repeated(self, header: bytes) -> bool:
        """Return whether the client sent this header more than once."""
        if len(self._all_headers) == len(self.headers):
            return False
        return sum([name == header for name, _ in self._all_headers]) > 1

    def headers_for(self, worker: WorkerId) -> dict[str, str]:
        """Return the headers of the client's call that a worker gets, in the context of the attempt there if the call
        is traced. Names are in lower case.
        """
        passed = {name.decode(): self.headers[name].decode("latin-1") for name in TO_THE_WORKER if name in self.headers}
        return passed if self.record is None else self.record.headers_for(worker, passed)

    def charge_unread_to(self, owner: str) -> None:
        """Count bytes that the client does not read against this owner's part of the budget."""
        charge: Callable[[str], None] | None = self._extensions.get(UNREAD_OWNER)
        if charge is not None:
            charge(owner)

    async def body(self, limit: int, hold: Hold) -> bytes:
        """Read the whole body, of at most `limit` bytes, and count it in `hold`.

        Raises UnsupportedEncoding if the body is compressed, BodyTooLarge if it exceeds `limit`, BadRequest if its
        declared length is not a number, Refused or NoRoom if the budget has no room for it, and ClientGone if the
        client disconnects before its end.
        """
        if self.headers.get(b"content-encoding", b"identity").strip().lower() not in (b"", b"identity"):
            raise UnsupportedEncoding
        declared = self.headers.get(b"content-length", b"0").strip(b" \t")
        if not declared.isdigit():
            raise BadRequest("The content-length is not a number.")
        if int(declared) > limit:
            raise BodyTooLarge(limit)
        hold.check(int(declared))
        received, pieces, size, more = bytearray(), list[bytes](), 0, True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            block: bytes = message.get("body", b"")
            more = message.get("more_body", False)
            hold.add(len(block))
            size += len(block)
            if size > limit:
                raise BodyTooLarge(limit)
            if not more and size == len(block):
                return block  # all of it, as nearly always
            received += block  # not a list: as list items, blocks of two bytes would take twenty times as much memory
            if len(received) >= PIECE_BYTES:
                pieces.append(bytes(received))
                received.clear()
        pieces.append(bytes(received))
        return pieces[0] if len(pieces) == 1 else await asyncio.to_thread(b"".join, pieces)

    def while_connected(self) -> "WhileConnected":
        """Return a context manager that raises ClientGone inside the `with` as soon as the client disconnects.

        To be entered after the request's body is read. The current task is cancelled at once, whatever it awaits, if
        the server reports disconnects (extension `ON_DISCONNECT`).
        """
        self._connected = WhileConnected(self._on_disconnect)
        return self._connected

    def ignore_disconnect(self) -> None:
        """Go on even if the client disconnects, until `heed_disconnect` is called."""
        if self._connected is not None:
            self._connected.ignores_disconnect = True

    def heed_disconnect(self) -> None:
        """Stop on a disconnect again, also on one that happened since `ignore_disconnect`."""
        if self._connected is not None and self._connected.ignores_disconnect:
            self._connected.ignores_disconnect = False
            self._connected.check()

    async def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """Send the whole answer."""
        length = [] if status in WITHOUT_BODY else [(b"content-length", str(len(body)).encode())]
        await self.begin(status, [*headers, *length])
        await self._send({"type": "http.response.body", "body": body})

    def begin(self, status: int, headers: Headers) -> Awaitable[None]:
        """Send the status line and the headers."""
        self.begun = True
        if self.record is not None:
            self.record.note_id(self.request_id)
        all_headers = [*headers, (b"x-request-id", self.request_id.encode())]
        return self._send({"type": "http.response.start", "status": status, "headers": all_headers})

    def write(self, block: bytes) -> Awaitable[None]:
        """Send a block of the body. Waits while the client does not read."""
        return self._send({"type": "http.response.body", "body": block, "more_body": True})

    async def stream(self, headers: Headers, block: bytes, *, last: bool = False) -> None:
        """Send a block of a stream, after its head if that is not sent yet."""
        if not self.begun:
            await self.begin(200, [*headers, UNBUFFERED])
        await self._send({"type": "http.response.body", "body": block, "more_body": not last})

    def end(self, last: bytes = b"") -> Awaitable[None]:
        """Send the last block of the body."""
        return self._send({"type": "http.response.body", "body": last})

    def stream_writer(self) -> StreamWriter | None:
        """Return a writer for blocks of the body that has begun; None if they can only be sent by `write`."""
        writer: Callable[[], StreamWriter | None] | None = self._extensions.get(STREAM_WRITER)
        return None if writer is None else writer()

    def break_off(self) -> None:
        """Close the connection, because the answer that has begun cannot be completed."""
        close: Callable[[], None] | None = self._extensions.get(BREAK_OFF)
        if close is not None:
            close()

    async def fail(self, error: RouterError) -> None:
        """Answer with an error in the API's own shape: as a status, or as an event if a stream has begun.

        If part of an answer that is not a stream is already sent, close the connection instead.
        """
        if self.record is not None:
            self.record.note_error(error)
        shape = error_shape_of(self.path)
        if self.whole:
            self.break_off()
        elif self.begun:
            await self.end(shape.event(error))
        else:
            await self.respond(error.status, [JSON_TYPE, *error.headers()], shape.body(error))


def to_the_client(headers: Mapping[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    """Return the headers of an engine's answer that its client gets; names are in lower case."""
    return [(name, value) for name, value in headers.items() if name in TO_THE_CLIENT or name.startswith(RATE_LIMITS)]


def new_request_id() -> str:
    """Return a random id for a call whose client sent no usable one."""
    return os.urandom(16).hex()


def _usable_id(given: bytes | None) -> str | None:
    """Return the client's own request id if it can be used in headers and logs, else None."""
    if given and len(given) <= 128 and given.isascii() and given.decode().isprintable():
        return given.decode()
    return None


class WhileConnected:
    """Cancels the task that entered it when the client disconnects, and turns that into ClientGone."""

    __slots__ = ("_gone", "_on_disconnect", "_task", "ignores_disconnect")

    def __init__(self, on_disconnect: OnDisconnect | None) -> None:
        self._on_disconnect = on_disconnect
        self._task: asyncio.Task[object] | None = None
        """The task to cancel; None outside the context."""
        self._gone = False
        self.ignores_disconnect = False
        """Whether the task goes on for now although the client has disconnected."""

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        if self._on_disconnect is not None:
            self._on_disconnect(self._disconnected)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if self._gone and task is not None and isinstance(error, asyncio.CancelledError):
            task.uncancel()
            raise ClientGone from None

    def check(self) -> None:
        """Cancel the task if the client has disconnected."""
        if self._gone and self._task is not None:
            self._task.cancel()

    def _disconnected(self) -> None:
        if self._task is not None:
            self._gone = True
            if not self.ignores_disconnect:
                self._task.cancel()

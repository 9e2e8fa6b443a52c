"""One HTTP exchange with a client, over ASGI: its body, its answer, and whether it is still there."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType

from starlette.types import Receive, Scope, Send

from router.api.body.call import Head
from router.api.registry import error_shape_of
from router.errors import BadRequest, BodyTooLarge, RouterError, UnsupportedEncoding
from router.front.byte_budget import Hold
from router.front.http.connection_limits import BREAK_OFF, ON_DISCONNECT, UNREAD_OWNER, OnDisconnect

Headers = Sequence[tuple[bytes, bytes]]
JSON_TYPE = (b"content-type", b"application/json")

PIECE_BYTES = 2**20
"""A longer body is put together in a thread; the joining of so many bytes does not hold Python's lock."""


class ClientGone(Exception):
    """The client closed its connection; nobody is left to answer."""


class Exchange:
    """A request and the answer to it. The answer begins once: whole (`respond`), or in blocks (`begin`, `write`)."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.path: str = scope["path"]
        self.method: str = scope["method"]
        self.headers: Mapping[bytes, bytes] = dict(scope["headers"])
        """By lower-case name; of a repeated one the last, which a proxy appends."""
        self.address: str | None = scope["client"][0] if scope.get("client") else None
        self.request_id = ""
        """Told in every answer; set before the first."""
        self.begun = False
        """Whether the status line is out; after that, an error can only be told inside the stream."""
        self.whole = False
        """Whether what is out is the beginning of an answer in one piece, in which no error can be told at all."""
        self._query: bytes = scope.get("query_string", b"")
        extensions = scope.get("extensions") or {}
        self._when_left: OnDisconnect | None = extensions.get(ON_DISCONNECT)
        self._belong: Callable[[str], None] | None = extensions.get(UNREAD_OWNER)
        self._break_off: Callable[[], None] | None = extensions.get(BREAK_OFF)
        self._connected: WhileConnected | None = None
        self._receive = receive
        self._send = send

    @property
    def head(self) -> Head:
        """What the call says before its body."""
        content_type = self.headers.get(b"content-type", b"").decode("latin-1")
        return Head(self.path, self.method, self._query, content_type)

    def charge_unread_to(self, owner: str) -> None:
        """What the client leaves unread counts against this owner's budget."""
        if self._belong is not None:
            self._belong(owner)

    async def body(self, limit: int, hold: Hold) -> bytes:
        """The whole body, of at most `limit` bytes, which count in `hold`.

        Raises UnsupportedEncoding for one that is packed, BodyTooLarge beyond its limit, Refused or NoRoom if there is
        no room for it, and ClientGone if the client leaves before its end.
        """
        if self.headers.get(b"content-encoding", b"identity").strip().lower() not in (b"", b"identity"):
            raise UnsupportedEncoding
        declared = self.headers.get(b"content-length", b"0").strip(b" \t")
        if not declared.isdigit():
            raise BadRequest("The content-length is not a number.")
        if int(declared) > limit:
            raise BodyTooLarge(limit)
        hold.check(int(declared))
        block, more = await self._block()
        hold.add(len(block))
        if len(block) > limit:
            raise BodyTooLarge(limit)
        return await self._rest(block, limit, hold) if more else block

    async def _rest(self, first: bytes, limit: int, hold: Hold) -> bytes:
        """A body that comes in several blocks."""
        received, pieces, size = bytearray(first), [], len(first)
        more = True
        while more:
            block, more = await self._block()
            hold.add(len(block))
            received += block  # not to a list: blocks of two bytes would take twenty times that
            size += len(block)
            if size > limit:
                raise BodyTooLarge(limit)
            if len(received) >= PIECE_BYTES:
                pieces.append(bytes(received))
                received.clear()
        pieces.append(bytes(received))
        return pieces[0] if len(pieces) == 1 else await asyncio.to_thread(b"".join, pieces)

    async def _block(self) -> tuple[bytes, bool]:
        """What has come of the body, and whether there is more of it."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        return message.get("body", b""), message.get("more_body", False)

    def while_connected(self) -> "WhileConnected":
        """Cut what is done inside the `with` short when the client leaves: then it ends in ClientGone.

        To be entered once the request's body is read. The client's leaving is seen at once, whatever is awaited, if the
        server tells of it (`ON_DISCONNECT`).
        """
        self._connected = WhileConnected(self._when_left)
        return self._connected

    def ignore_disconnect(self) -> None:
        """From now on, let the client's leaving cut nothing short, until it may again."""
        if self._connected is not None:
            self._connected.ignores_disconnect = True

    def heed_disconnect(self) -> None:
        """Let the client's leaving cut short what is done, also if it has left since `stay`."""
        if self._connected is not None and self._connected.ignores_disconnect:
            self._connected.ignores_disconnect = False
            self._connected.look()

    async def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """Answer in one piece."""
        length = (b"content-length", str(len(body)).encode())
        await self.begin(status, [*headers, length])
        await self._send({"type": "http.response.body", "body": body})

    def begin(self, status: int, headers: Headers) -> Awaitable[None]:
        """Send the status line and the headers."""
        self.begun = True
        named = [*headers, (b"x-request-id", self.request_id.encode())]
        return self._send({"type": "http.response.start", "status": status, "headers": named})

    def write(self, block: bytes) -> Awaitable[None]:
        """Send a part of the body; waits while the client does not read."""
        return self._send({"type": "http.response.body", "body": block, "more_body": True})

    def end(self, last: bytes = b"") -> Awaitable[None]:
        """Send the last part of the body."""
        return self._send({"type": "http.response.body", "body": last})

    def break_off(self) -> None:
        """End the connection: the answer that has begun cannot be completed."""
        if self._break_off is not None:
            self._break_off()

    async def fail(self, error: RouterError) -> None:
        """Answer with an error, as its client reads them: by its status, or inside the stream that has begun.

        Where a part of a whole answer is out, the connection is broken off.
        """
        shape = error_shape_of(self.path)
        if self.whole:
            self.break_off()
        elif self.begun:
            await self.end(shape.event(error))
        else:
            await self.respond(error.status, [JSON_TYPE, *error.headers()], shape.body(error))


def new_request_id() -> str:
    """An id for a call whose client gave none that is fit."""
    return os.urandom(16).hex()


class WhileConnected:
    """See `Exchange.while_connected`."""

    __slots__ = ("_gone", "_task", "_when_left", "ignores_disconnect")

    def __init__(self, when_left: OnDisconnect | None) -> None:
        self._when_left = when_left
        self._task: asyncio.Task[object] | None = None
        """The one to be cut short; None before and after."""
        self._gone = False
        self.ignores_disconnect = False
        """Whether what is done goes on for now although the client has left."""

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        if self._when_left is not None:
            self._when_left(self._leave)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if self._gone and task is not None and isinstance(error, asyncio.CancelledError):
            task.uncancel()
            raise ClientGone from None

    def look(self) -> None:
        """Cut short what is done if the client has left."""
        if self._gone and self._task is not None:
            self._task.cancel()

    def _leave(self) -> None:
        if self._task is not None:
            self._gone = True
            if not self.ignores_disconnect:
                self._task.cancel()

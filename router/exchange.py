"""One HTTP exchange with a client, over ASGI: its body, its answer, and whether it is still there."""

import asyncio
import os
from collections.abc import Awaitable, Mapping, Sequence
from types import TracebackType
from typing import Final

from starlette.types import Receive, Scope, Send

from router.api import errors_of
from router.api.call import Head
from router.connections import LEAVING, WhenLeft
from router.core.holdings import Holdings
from router.errors import BadRequest, BodyTooLarge, Refused, RouterError, UnsupportedEncoding

Headers = Sequence[tuple[bytes, bytes]]
JSON_TYPE = (b"content-type", b"application/json")
AT_ONCE: Final = 64 * 1024
"""Bytes of a body that is worked on at once, in a millisecond or less; a longer one is given to a thread."""


class ClientGone(Exception):
    """The client closed its connection; nobody is left to answer."""


class Intake:
    """How much of bodies may be received: of one, and of all that are not yet whole.

    Beyond the latter, addresses with more than an equal part of it are refused, so that whoever sends much and slowly
    keeps out nobody else. All together are at most twice that.
    """

    def __init__(self, body_limit: int, limit: int) -> None:
        """Both in bytes; `limit` for all."""
        self.body_limit = body_limit
        self._limit = limit
        self._held: Holdings[str] = Holdings()

    def take(self, address: str, amount: int) -> None:
        """So much more is here of a body from this address. Raises Refused where that is too much for now."""
        self._held.add(address, amount)
        if self._held.total > self._limit and self._held.of(address) * len(self._held) > self._limit:
            raise Refused("Too many bodies are being received.", retry_after=1.0, reason="rejected-receiving")

    def give_back(self, address: str, amount: int) -> None:
        """It is whole, or refused."""
        self._held.remove(address, amount)


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
        self._query: bytes = scope.get("query_string", b"")
        self._when_left: WhenLeft | None = (scope.get("extensions") or {}).get(LEAVING)
        self._receive = receive
        self._send = send

    @property
    def head(self) -> Head:
        """What the call says before its body."""
        content_type = self.headers.get(b"content-type", b"").decode("latin-1")
        return Head(self.path, self.method, self._query, content_type)

    async def body(self, intake: Intake) -> bytes:
        """The whole body.

        Raises UnsupportedEncoding for one that is packed, BodyTooLarge beyond its limit, Refused if too many are
        received at once, and ClientGone if the client leaves before its end.
        """
        if self.headers.get(b"content-encoding", b"identity").strip().lower() not in (b"", b"identity"):
            raise UnsupportedEncoding
        declared = self.headers.get(b"content-length", b"0").strip(b" \t")
        if not declared.isdigit():
            raise BadRequest("The content-length is not a number.")
        if int(declared) > intake.body_limit:
            raise BodyTooLarge(intake.body_limit)
        first, more = await self._block()
        if len(first) > intake.body_limit:
            raise BodyTooLarge(intake.body_limit)
        return await self._rest(first, intake) if more else first

    async def _rest(self, first: bytes, intake: Intake) -> bytes:
        """A body that comes in several blocks."""
        blocks = [first]
        size, more = len(first), True
        address = self.address or ""
        try:
            intake.take(address, size)
            while more:
                block, more = await self._block()
                blocks.append(block)
                size += len(block)
                intake.take(address, len(block))
                if size > intake.body_limit:
                    raise BodyTooLarge(intake.body_limit)
        finally:
            intake.give_back(address, size)
        return b"".join(blocks)

    async def _block(self) -> tuple[bytes, bool]:
        """What has come of the body, and whether there is more of it."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        return message.get("body", b""), message.get("more_body", False)

    def while_connected(self) -> "WhileConnected":
        """Cut the body of the `with` short when the client leaves: then it ends in ClientGone.

        To be entered once the request's body is read. The client's leaving is seen at once, whatever is awaited, if the
        server tells of it (`LEAVING`).
        """
        return WhileConnected(self._when_left)

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

    async def fail(self, error: RouterError) -> None:
        """Answer with an error, as its client reads them: by its status, or inside the stream that has begun."""
        shape = errors_of(self.path)
        if self.begun:
            await self.end(shape.event(error))
        else:
            await self.respond(error.status, [JSON_TYPE, *error.headers()], shape.body(error))


def new_request_id() -> str:
    """An id for a call whose client gave none that is fit."""
    return os.urandom(16).hex()


class WhileConnected:
    """See `Exchange.while_connected`."""

    __slots__ = ("_gone", "_task", "_when_left")

    def __init__(self, when_left: WhenLeft | None) -> None:
        self._when_left = when_left
        self._task: asyncio.Task[object] | None = None
        """The one to be cut short; None before and after."""
        self._gone = False

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

    def _leave(self) -> None:
        if self._task is not None:
            self._gone = True
            self._task.cancel()

"""HTTP/1.1 to one worker, on asyncio and httptools: the data path's client.

A general client library costs as much for each request as the scheduler, and a worker needs little of one: send a
body, read the answer as it comes, use the connection again, or close it at once when the client leaves, since that is
the only abort that every engine understands.

A connection carries one call at a time. What came in and was not read yet is bounded: beyond that the socket is left
alone, so a slow client slows its own call and no other.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from errno import EADDRNOTAVAIL, EMFILE, ENFILE, ENOBUFS, ENOMEM
from typing import Final, NamedTuple, cast
from urllib.parse import urlsplit

import httptools

from router.errors import NoWorker, WorkerBroke, WorkerHung, WorkerUnreachable
from router.runtime.fair_timer import FairTimer, stalled_since

IDLE_SECONDS: Final = 3.0
"""How long an unused connection may be used again: shorter than the 5 s after which an engine closes it."""
REUSE_RACE_SECONDS: Final = 1.0
"""How soon behind a call its connection closes if the worker closed it as idle, and did not see the call."""
LOCAL_ERRORS: Final = frozenset({EMFILE, ENFILE, ENOBUFS, ENOMEM, EADDRNOTAVAIL})
"""Errors of a connection that say nothing about the worker."""
BUFFER_BYTES: Final = 64 * 1024
"""How much of an answer may wait for its client before the socket is left alone."""
HEAD_BYTES: Final = 64 * 1024
"""How much a worker may send before its headers are complete."""
GATHER_SECONDS: Final = 0.01
"""For which more is left to come in, where a worker sends in crumbs: each costs as much as a block."""
SMALL_BLOCKS: Final = 64
"""Blocks in a row that are of no use yet, after which they count as crumbs."""
SMALL_BLOCK_BYTES: Final = 64
"""Of a block of a whole answer, below which it is one."""


SWITCHING_PROTOCOLS: Final = 101
LAST_STATUS: Final = 599


class IdleTimeouts(NamedTuple):
    """How many seconds a worker may say nothing; None for as long as it likes."""

    first: float | None = None
    """From the call to the first token."""
    between: float | None = None
    """From then on, while somebody waits for more."""


UNLIMITED: Final = IdleTimeouts()


class Connection(asyncio.Protocol):
    """A connection to a worker and, while it carries a call, the answer to that."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        """Of the answer, by lower-case name."""
        self.idle_since = 0.0
        self._transport: asyncio.Transport | None = None
        self._data_waiter: asyncio.Future[None] | None = None
        self._lost = False
        self._parser = httptools.HttpResponseParser(self)
        self._blocks: list[bytes] = []
        self.on_body = self._blocks.append
        """See httptools, which calls it for every chunk."""
        self._unread_bytes = 0
        """Bytes that came in and were not read yet."""
        self._head_complete = self._body_complete = self._keep_alive = self._paused = False
        self._streaming = False
        self._timeouts: IdleTimeouts | None = None
        """What the call under way allows."""
        self._sent_at = self._waiting_since = 0.0
        self._check: FairTimer | None = None
        self._timed_out = False

    @property
    def reusable(self) -> bool:
        """Whether another call may be sent: the last answer is complete, and the connection is open and is read."""
        return self._body_complete and not self._lost and not self._paused and self._keep_alive

    @property
    def closed_before_answer(self) -> bool:
        """Whether it was closed as the call came, before anything was heard of an answer."""
        return self._lost and not self._unread_bytes and self._loop.time() - self._sent_at <= REUSE_RACE_SECONDS

    @property
    def exhausted(self) -> bool:
        """The answer is complete and all of it was read."""
        return self._body_complete and not self._blocks

    async def send(self, head: bytes, body: bytes, silence: IdleTimeouts) -> None:
        """Send a call and wait for the status and the headers of its answer.

        Raises WorkerUnreachable without one, and WorkerHung if it takes too long.
        """
        self._parser = httptools.HttpResponseParser(self)
        self.headers = {}
        self._unread_bytes = 0
        self._blocks.clear()
        self._head_complete = self._body_complete = self._streaming = False
        assert self._transport is not None
        self._transport.writelines((head, body))
        del body  # it may be a copy that nobody else has
        self._timeouts = silence
        self._sent_at = self._loop.time()
        self._schedule_check(silence.first)
        while not self._head_complete:
            if self._timed_out:
                raise WorkerHung
            if self._lost:
                raise WorkerUnreachable("The worker closed the connection without an answer.", accepted=True)
            await self._wait_for_data()

    async def read(self) -> bytes:
        """What has come in since the last time, at least a byte; nothing at the end of the answer.

        Raises WorkerBroke if the connection ends before the answer, and WorkerHung if nothing comes for too long.
        """
        while not self._blocks:
            if self._body_complete:
                return b""
            if self._timed_out:
                raise WorkerHung
            if self._lost:
                raise WorkerBroke("The worker's answer broke off.")
            await self._wait_for_data()
        block = self._blocks[0] if len(self._blocks) == 1 else b"".join(self._blocks)
        self._blocks.clear()
        self._unread_bytes = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return block

    def abort(self) -> None:
        """Close the connection at once; it carries no other call."""
        self._lost = True
        self._cancel_check()
        if self._transport is not None:
            self._transport.abort()

    async def gather(self, seconds: float = GATHER_SECONDS) -> None:
        """Let more come in before it is read: nothing is taken from the socket for so long."""
        if self._body_complete or self._lost or self._paused or self._transport is None:
            return
        self._transport.pause_reading()
        await asyncio.sleep(seconds)
        if not self._lost:
            self._transport.resume_reading()

    def begin_stream(self) -> None:
        """The first token is here: from now on the silence between tokens counts."""
        self._streaming = True
        if self._timeouts is not None and not self._body_complete:
            self._schedule_check(self._timeouts.between)

    def end_call(self) -> None:
        """The call is over: nobody is silent."""
        self._timeouts = None

    def _schedule_check(self, limit: float | None) -> None:
        """Look at the worker's silence no later than in so many seconds.

        One timer for all calls: it is only set where it would come too late, and what comes in or is sent only moves
        the time from which silence counts.
        """
        if limit is None:
            return
        if self._check is not None:
            if self._check.when <= self._loop.time() + limit:
                return
            self._check.cancel()
        self._check = FairTimer(self._loop, limit, self._check_silence)

    def _cancel_check(self) -> None:
        if self._check is not None:
            self._check.cancel()
            self._check = None

    def _check_silence(self) -> None:
        """Give the call up if the worker has said nothing for too long; else look again when it may have."""
        self._check = None
        if self._timeouts is None:
            return
        now = self._loop.time()
        limit = self._timeouts.between if self._streaming else self._timeouts.first
        if limit is None:
            return
        waiting = self._data_waiter is not None and not self._data_waiter.done()
        since = self._sent_at if not self._streaming else self._waiting_since if waiting else now
        if now - since >= limit:
            self._timed_out = True
            self.abort()
            self._wake_reader()
        else:
            self._schedule_check(since + limit - now)

    def _wait_for_data(self) -> "asyncio.Future[None]":
        """Done when something has come in, or nothing more will."""
        self._waiting_since = self._loop.time()
        self._data_waiter = self._loop.create_future()
        return self._data_waiter

    def _wake_reader(self) -> None:
        if self._data_waiter is not None and not self._data_waiter.done():
            self._data_waiter.set_result(None)

    # What the event loop tells.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its bases
        self._loop = asyncio.get_running_loop()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`. What is no HTTP, or comes unasked, ends the connection."""
        self._unread_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.abort()
        if self._unread_bytes > HEAD_BYTES:
            self._limit_unread()
        self._wake_reader()

    def _limit_unread(self) -> None:
        """Much has come in and was not read: too much, if that is a head; for a while, if somebody reads too slowly."""
        if not self._head_complete:
            self.abort()
        elif self._unread_bytes > BUFFER_BYTES and self._blocks and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.Protocol`. An answer without a length ends here, if the worker closed in good order."""
        self._lost = True
        self._cancel_check()
        if (
            error is None
            and self._head_complete
            and not {b"content-length", b"transfer-encoding"} & self.headers.keys()
        ):
            self._body_complete = True
        del self._parser  # it refers to this: only a look for cycles would free the two
        self._wake_reader()

    # What the parser finds.

    def on_header(self, name: bytes, value: bytes) -> None:
        """See httptools."""
        self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """See httptools."""
        if self._body_complete:
            self.abort()
        self.status = self._parser.get_status_code()
        if (
            self.status == SWITCHING_PROTOCOLS or self.status > LAST_STATUS
        ):  # neither was asked for, nor can be passed on
            self.abort()
            return
        self._keep_alive = self._parser.should_keep_alive()
        self._head_complete = self.status >= 200

    def on_message_complete(self) -> None:
        """See httptools. An interim answer (1xx) is none."""
        self._body_complete = self._head_complete


class WorkerResponse:
    """A worker's answer to one call. To be closed: before its end that aborts the call, after it it frees the way."""

    def __init__(self, connection: Connection, release: Callable[[Connection], None]) -> None:
        self.status = connection.status
        self.headers = connection.headers
        self.read = connection.read
        self.gather = connection.gather
        self._connection = connection
        self._release = release
        self._beginning: bytes | None = None
        self._ended = False

    @property
    def exhausted(self) -> bool:
        """Nothing of the answer is left: the next `read` would tell its end."""
        return self._connection.exhausted

    async def read_beginning(self, limit: int, take: Callable[[int], bool]) -> tuple[bytes, bool]:
        """The answer's beginning, the same each time, and whether that is all; `read` gives what comes after it.

        That is a block beyond `limit` bytes at most, or the block for which there was no room: `take` is asked for that
        of each. Raises WorkerBroke if it breaks off.
        """
        if self._beginning is None:
            first, reads, has_room = bytearray(), 0, True
            while has_room and len(first) <= limit and (block := await self.read()):
                has_room = take(len(block))
                first += block
                reads += 1
                if reads > SMALL_BLOCKS and len(first) < SMALL_BLOCK_BYTES * reads:
                    await self.gather()
            self._beginning, self._ended = bytes(first), has_room and len(first) <= limit
        return self._beginning, self._ended

    def begin_stream(self) -> None:
        """The first token is here: from now on the silence between tokens counts."""
        self._connection.begin_stream()

    def close(self) -> None:
        """End the call, whether or not its answer is complete."""
        self._connection.end_call()
        self._release(self._connection)


class WorkerClient:
    """The connections to one worker; as many as there are calls at once."""

    def __init__(self, url: str, connect_timeout: float) -> None:
        """`url`: scheme, host and port; `connect_timeout`: seconds."""
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._ssl else 80)
        self._authority = parts.netloc.encode()
        self._connect_timeout = connect_timeout
        self._idle: deque[Connection] = deque()
        """Those that no call uses, longest unused first."""

    async def send(
        self, method: str, path: str, headers: dict[str, str], body: bytes, silence: IdleTimeouts = UNLIMITED
    ) -> WorkerResponse:
        """Send a call; returns when the answer's headers are here.

        A connection that was used before may close as the call comes: then it is sent once more, on a fresh one.

        Raises WorkerUnreachable, whose `accepted` is False only if nothing of the call can have reached the worker,
        WorkerHung, and NoWorker where the router itself can open no connection.
        """
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        head = b"%b %b HTTP/1.1\r\nhost: %b\r\n%bcontent-length: %d\r\n\r\n" % (
            method.encode(),
            path.encode(),
            self._authority,
            lines.encode("latin-1"),
            len(body),
        )
        used = self._take_idle()
        if used is not None:
            try:
                return await self._send_on(used, head, body, silence)
            except WorkerUnreachable:
                if not used.closed_before_answer:
                    raise
        try:
            fresh = await self._connect()
        except WorkerUnreachable as error:
            raise WorkerUnreachable(error.message, accepted=used is not None) from error
        return await self._send_on(fresh, head, body, silence)

    async def _send_on(self, connection: Connection, head: bytes, body: bytes, silence: IdleTimeouts) -> WorkerResponse:
        try:
            sending = connection.send(head, body, silence)
            del body
            await sending
        except asyncio.CancelledError:
            connection.abort()
            raise
        return WorkerResponse(connection, self._release)

    def close(self) -> None:
        """Close the connections that no call uses."""
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    def _take_idle(self) -> Connection | None:
        """The connection used last, if it can be used again; those that have been idle for too long are closed."""
        oldest = asyncio.get_running_loop().time() - IDLE_SECONDS
        while self._idle and self._idle[0].idle_since < oldest:
            self._idle.popleft().abort()
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        return None

    async def _connect(self) -> Connection:
        due = asyncio.get_running_loop().time() + self._connect_timeout
        try:
            return await self._open()
        except WorkerUnreachable:
            if not stalled_since(asyncio.get_running_loop(), due):
                raise
            return await self._open()

    async def _open(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, connection = await loop.create_connection(Connection, self._host, self._port, ssl=self._ssl)
        except OSError as error:  # a TimeoutError is one
            if error.errno in LOCAL_ERRORS:
                raise NoWorker("The router has no connection left; try again.", retry_after=1.0) from error
            raise WorkerUnreachable("The worker cannot be reached.", accepted=False) from error
        return connection

    def _release(self, connection: Connection) -> None:
        if connection.reusable:
            connection.idle_since = asyncio.get_running_loop().time()
            self._idle.append(connection)
        else:
            connection.abort()

"""The HTTP/1.1 client of the data path: calls to one worker, on asyncio and httptools.

A general client library costs as much CPU per request as the scheduler does, and the router needs little of one. It
sends a body, reads the answer as it arrives, and reuses the connection. When the client disconnects it closes the
connection at once, since that is the only abort that every engine understands.

A connection carries one call at a time. The bytes received but not yet read are bounded: beyond the bound the socket is
not read, so a slow client slows its own call and no other.
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
from router.runtime.fair_timer import FairTimer, fired_late

IDLE_SECONDS: Final = 3.0
"""How long an unused connection may be reused: shorter than the 5 s after which an engine closes it."""
REUSE_RACE_SECONDS: Final = 1.0
"""If a reused connection closes within this time of sending a call, without an answer, the worker is taken to have
closed it as idle before it saw the call."""
LOCAL_ERRORS: Final = frozenset({EMFILE, ENFILE, ENOBUFS, ENOMEM, EADDRNOTAVAIL})
"""Error numbers of a failed connect that are the router's own limits and say nothing about the worker."""
MAX_UNREAD_BYTES: Final = 64 * 1024
"""Bytes of an answer that may be unread before the router stops reading the socket."""
MAX_HEAD_BYTES: Final = 64 * 1024
"""Bytes that a worker may send before its headers are complete, and after them without a byte of the body: extensions
of a chunk, and trailers."""
GATHER_SECONDS: Final = 0.01
"""How long to let data accumulate when a worker sends tiny blocks: each costs as much CPU as a large one."""
SMALL_BLOCKS: Final = 64
"""Blocks read of an answer before their average size is checked."""
SMALL_BLOCK_BYTES: Final = 64
"""Average block size below which an answer counts as sent in tiny blocks."""
SWITCHING_PROTOCOLS: Final = 101
LAST_STATUS: Final = 599


class IdleTimeouts(NamedTuple):
    """Seconds for which a worker may send nothing; None for no limit."""

    first: float | None = None
    """From sending the call to the first token."""
    between: float | None = None
    """Between later tokens, counted only while the router waits for data."""


UNLIMITED: Final = IdleTimeouts()


class Connection(asyncio.Protocol):
    """A connection to a worker and, while it carries a call, the answer to that call."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        """Headers of the answer, by lower-case name; neither those of an interim answer (1xx) nor trailers."""
        self.idle_since = 0.0
        self._transport: asyncio.Transport | None = None
        self._data_waiter: asyncio.Future[None] | None = None
        self._lost = False
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._blocks: list[bytes] = []
        self.on_body = self._blocks.append
        """Called by httptools with each part of the body."""
        self._unread_bytes = 0
        """Bytes received since the last `read`."""
        self._head_complete = self._body_complete = self._keep_alive = self._paused = False
        self._streaming = False
        self._awaits_body = True
        """Whether the task that waits needs a part of the body, or its end."""
        self._timeouts: IdleTimeouts | None = None
        """Timeouts of the current call; None while no call is in flight."""
        self._sent_at = self._waiting_since = 0.0
        self._check: FairTimer | None = None
        self._timed_out = False
        self._sink: Callable[[bytes], bool] | None = None
        """Takes blocks as they arrive, while `push` waits."""

    @property
    def reusable(self) -> bool:
        """True if another call may be sent: the last answer is complete, the worker has taken all of the call that it
        answers, and the connection is open and not paused.
        """
        if not self._body_complete or self._lost or self._paused or not self._keep_alive or self._transport is None:
            return False
        return not self._transport.get_write_buffer_size()

    @property
    def closed_before_answer(self) -> bool:
        """True if the connection closed just as the call was sent, before any byte of an answer arrived."""
        return self._lost and not self._unread_bytes and self._loop.time() - self._sent_at <= REUSE_RACE_SECONDS

    @property
    def exhausted(self) -> bool:
        """True if the answer is complete and all of it has been read."""
        return self._body_complete and not self._blocks

    async def send(self, head: bytes, body: bytes, timeouts: IdleTimeouts, *, head_only: bool) -> None:
        """Send a call and wait for its answer to begin: for status and headers, and unless `head_only` for the first
        bytes of the body.

        Raises WorkerUnreachable if the connection closes without an answer, and WorkerHung if the headers do not come
        within `timeouts.first`. What happens later is raised by `read`. Aborts the call if it is cancelled before.
        """
        self._parser = httptools.HttpResponseParser(self)
        self.headers = {}
        self._unread_bytes = 0
        self._blocks.clear()
        self._head_complete = self._body_complete = self._streaming = False
        assert self._transport is not None
        self._transport.writelines((head, body))
        body = b""  # this may have been the only reference to a large copy
        self._timeouts = timeouts
        self._sent_at = self._loop.time()
        self._schedule_check(timeouts.first)
        self._awaits_body = not head_only
        try:
            while not (self._head_complete and self._has_news):
                if self._timed_out:
                    raise WorkerHung
                if self._lost:
                    raise WorkerUnreachable("The worker closed the connection without an answer.", accepted=True)
                await self._wait_for_data()
        except asyncio.CancelledError:
            self.abort()
            raise
        self._awaits_body = True

    @property
    def _has_news(self) -> bool:
        """Whether what has arrived concerns the reader; a head alone does not, as its caller can do nothing with it."""
        return bool(self._blocks) or self._body_complete or self._lost or not self._awaits_body

    async def read(self) -> bytes:
        """Return the body received since the last read, waiting for at least one byte; b"" at the end of the answer.

        Raises WorkerBroke if the connection closes before the answer is complete, and WorkerHung on a timeout.
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

    async def push(self, sink: Callable[[bytes], bool]) -> bytes | None:
        """Call `sink` with each block in the turn of the event loop in which it arrives. Then return, as `read` does,
        what is left: a block that `sink` declined by returning False, or the last one of the answer.

        Returns None after `stop_push`. Raises what `read` and `sink` raise.
        """
        if not (self._blocks or self._body_complete or self._lost):
            self._sink = sink
            try:
                await self._wait_for_data()
                if not self._pushes:
                    return None
            finally:
                self._sink = None
        return await self.read()

    @property
    def _pushes(self) -> bool:
        """Whether blocks go to the sink of `push`."""
        return self._sink is not None

    def stop_push(self) -> None:
        """Make `push` return None."""
        self._sink = None
        self._wake_reader()

    def _push_blocks(self, sink: Callable[[bytes], bool]) -> bool:
        """Give the sink what has arrived. Returns whether `push` goes on waiting."""
        block = self._blocks[0] if len(self._blocks) == 1 else b"".join(self._blocks)
        try:
            taken = sink(block)
        except Exception as error:  # the task that waits in `push` raises it
            self._sink = None
            if self._data_waiter is not None and not self._data_waiter.done():
                self._data_waiter.set_exception(error)
            return False
        if taken:
            self._blocks.clear()
            self._unread_bytes = 0
            self._waiting_since = self._loop.time()
        return taken and self._sink is not None

    def abort(self) -> None:
        """Close the connection at once, which aborts its call."""
        self._lost = True
        self._cancel_check()
        if self._transport is not None:
            self._transport.abort()

    async def gather(self, seconds: float = GATHER_SECONDS) -> None:
        """Do not read the socket for this long, so that the next read returns a larger block."""
        if self._body_complete or self._lost or self._paused or self._transport is None:
            return
        self._transport.pause_reading()
        await asyncio.sleep(seconds)
        if not self._lost:
            self._transport.resume_reading()

    def begin_stream(self) -> None:
        """Switch to the timeout between tokens: the first token has arrived."""
        self._streaming = True
        if self._timeouts is not None and not self._body_complete:
            self._schedule_check(self._timeouts.between)

    def end_call(self) -> None:
        """Stop watching for timeouts: the call is over."""
        self._timeouts = None

    def _schedule_check(self, limit: float | None) -> None:
        """Have the timeout checked in at most `limit` seconds.

        All calls of the connection share one timer, which is replaced only if it would fire too late. Sending and
        receiving do not touch the timer: they only move the time from which silence counts.
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
        """Abort the call if the worker has sent nothing for too long; otherwise check again when that may be so."""
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
        """Return a future that completes when data arrives, the connection closes or the call times out."""
        self._waiting_since = self._loop.time()
        self._data_waiter = self._loop.create_future()
        return self._data_waiter

    def _wake_reader(self) -> None:
        if self._data_waiter is not None and not self._data_waiter.done():
            self._data_waiter.set_result(None)

    # Callbacks of asyncio.Protocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has the methods but not the base class
        self._loop = asyncio.get_running_loop()

    def data_received(self, data: bytes) -> None:
        """Parse the data. Data that is not HTTP, or that answers no call, closes the connection."""
        parser = self._parser
        assert parser is not None
        self._unread_bytes += len(data)
        try:
            parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.abort()
        sink = self._sink
        if sink is not None and self._blocks and not (self._body_complete or self._lost) and self._push_blocks(sink):
            return
        if self._unread_bytes > MAX_HEAD_BYTES:
            self._limit_unread()
        if self._has_news:
            self._wake_reader()

    def _limit_unread(self) -> None:
        """Bound the unread bytes: abort if too many are no body, pause the socket if the reader is too slow."""
        if not (self._head_complete and self._blocks):
            self.abort()
        elif self._unread_bytes > MAX_UNREAD_BYTES and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        """Wake the reader. An answer without a length is complete here if the worker closed without an error."""
        aborted, self._lost = self._lost, True
        self._cancel_check()
        if (
            error is None
            and not aborted
            and self._head_complete
            and not {b"content-length", b"transfer-encoding"} & self.headers.keys()
        ):
            self._body_complete = True
        self._parser = None  # it refers back to the connection: only the cycle collector would free the two
        self._wake_reader()

    # Callbacks of the httptools parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._head_complete:  # otherwise a trailer
            self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        if self._body_complete:
            raise WorkerBroke("The worker sent a second answer.")  # ends the parsing, and `data_received` aborts
        parser = self._parser
        assert parser is not None
        self.status = parser.get_status_code()
        # The router never asks for an upgrade, and a status above 599 cannot be passed on.
        if self.status == SWITCHING_PROTOCOLS or self.status > LAST_STATUS:
            self.abort()
            return
        self._keep_alive = parser.should_keep_alive()
        self._head_complete = self.status >= 200
        if not self._head_complete:
            self.headers = {}

    def on_message_complete(self) -> None:
        """Mark the answer as complete, unless this is an interim answer (1xx), which the final one follows."""
        self._body_complete = self._head_complete


class WorkerResponse:
    """A worker's answer to one call.

    The caller must close it: before the end that aborts the call, after the end it frees the connection for reuse.
    """

    def __init__(self, connection: Connection, release: Callable[[Connection], None]) -> None:
        self.status = connection.status
        self.headers = connection.headers
        self.read = connection.read
        self.gather = connection.gather
        self.push = connection.push
        self.stop_push = connection.stop_push
        self._connection = connection
        self._release = release
        self._beginning: bytes | None = None
        self._ended = False

    @property
    def exhausted(self) -> bool:
        """True if the whole answer has been read: the next `read` would return b""."""
        return self._connection.exhausted

    async def read_beginning(self, limit: int, reserve: Callable[[int], bool]) -> tuple[bytes, bool]:
        """Return the beginning of the answer and whether that is all of it; `read` then continues after it.

        Reading stops with the block that exceeds `limit` bytes in total, or for whose size `reserve` returns False.
        Repeated calls return the same bytes. Raises WorkerBroke if the answer breaks off.
        """
        if self._beginning is None:
            first, reads, has_room = bytearray(), 0, True
            while has_room and len(first) <= limit and (block := await self.read()):
                has_room = reserve(len(block))
                first += block
                reads += 1
                if reads > SMALL_BLOCKS and len(first) < SMALL_BLOCK_BYTES * reads:
                    await self.gather()
            self._beginning, self._ended = bytes(first), has_room and len(first) <= limit
        return self._beginning, self._ended

    def begin_stream(self) -> None:
        """Switch to the timeout between tokens: the first token has arrived."""
        self._connection.begin_stream()

    def close(self) -> None:
        """End the call: abort it if its answer is incomplete, otherwise keep the connection for reuse."""
        self._connection.end_call()
        self._release(self._connection)


class WorkerClient:
    """Sends calls to one worker, over as many connections as there are concurrent calls."""

    def __init__(self, url: str, connect_timeout: float, trusted: ssl.SSLContext | None = None) -> None:
        """`url` has scheme, host and port; `connect_timeout` is in seconds. `trusted`: who signs the worker's
        certificate; None for those that the machine trusts, which takes time to read.
        """
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._ssl = (trusted or ssl.create_default_context()) if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._ssl else 80)
        self._authority = parts.netloc
        self._connect_timeout = connect_timeout
        self._idle: deque[Connection] = deque()
        """Connections without a call, longest unused first."""

    async def send(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        body: bytes,
        timeouts: IdleTimeouts = UNLIMITED,
        *,
        once: bool = False,
    ) -> WorkerResponse:
        """Send a call and return once its answer has begun: with the first bytes of its body, since nobody needs the
        headers before. That saves waking the task, as engines send the headers at once.

        If a reused connection closes just as the call is sent, send the call once more on a new connection, unless a
        worker must never see it twice (`once`). Then the headers alone are waited for, too: they show that it has seen
        the call.

        Raises WorkerUnreachable, whose `accepted` is False only if no part of the call can have reached the worker;
        WorkerHung on a timeout; and NoWorker if the router itself cannot open another connection.
        """
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        start = f"{method} {path} HTTP/1.1\r\nhost: {self._authority}\r\n"
        head = f"{start}{lines}content-length: {len(body)}\r\n\r\n".encode("latin-1")
        used = self._take_idle()
        if used is not None:
            try:
                await used.send(head, body, timeouts, head_only=once)
                return WorkerResponse(used, self._release)
            except WorkerUnreachable:
                if once or not used.closed_before_answer:
                    raise
        try:
            fresh = await self._connect()
        except WorkerUnreachable as error:
            accepted = used is not None
            raise WorkerUnreachable(error.message, accepted=accepted, unconnected=error.unconnected) from error
        await fresh.send(head, body, timeouts, head_only=once)
        return WorkerResponse(fresh, self._release)

    def close(self) -> None:
        """Close the connections that carry no call."""
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    def _take_idle(self) -> Connection | None:
        """Return the most recently used reusable connection, if any, and close those that were idle for too long."""
        oldest = asyncio.get_running_loop().time() - IDLE_SECONDS
        while self._idle and self._idle[0].idle_since < oldest:
            self._idle.popleft().abort()
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        return None

    async def _connect(self) -> Connection:
        deadline = asyncio.get_running_loop().time() + self._connect_timeout
        try:
            return await self._open()
        except WorkerUnreachable:
            if not fired_late(asyncio.get_running_loop(), deadline):
                raise
            return await self._open()  # the router stalled: the worker may have accepted in time

    async def _open(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, connection = await loop.create_connection(Connection, self._host, self._port, ssl=self._ssl)
        except OSError as error:  # a TimeoutError is one
            if error.errno in LOCAL_ERRORS:
                raise NoWorker("The router has no connection left; try again.", retry_after=1.0) from error
            message = "The worker cannot be reached."
            raise WorkerUnreachable(message, accepted=False, unconnected=error) from error
        return connection

    def _release(self, connection: Connection) -> None:
        if connection.reusable:
            connection.idle_since = asyncio.get_running_loop().time()
            self._idle.append(connection)
        else:
            connection.abort()

"""A worker's streamed answer on its way to the client."""

from collections.abc import Awaitable, Callable

from router.api.continuation import Rewriter
from router.api.families import Reader
from router.front.byte_budget import Hold
from router.front.exchange import Exchange, Headers
from router.front.http.response_writer import StreamWriter
from router.upstream.http_client import SMALL_BLOCKS, WorkerResponse


class AnswerStream:
    """Passes the blocks of one worker's stream on, and counts the bytes that are held until an event is complete."""

    __slots__ = ("_before", "_feed", "_held_blocks", "_hold", "_reader", "_rewriter", "_upstream", "_writer", "unsent")

    def __init__(self, upstream: WorkerResponse, reader: Reader, rewriter: Rewriter | None, hold: Hold) -> None:
        """`rewriter`: puts the stream of a worker that continues another's into the form of the first."""
        self._upstream = upstream
        self._reader = reader
        self._rewriter = rewriter
        self._feed: Callable[[bytes], bytes] = reader.feed if rewriter is None else self._rewrite
        self._hold = hold
        self._before = hold.amount
        self._held_blocks = 0
        """Blocks since the last complete event."""
        self._writer: StreamWriter | None = None
        """Where blocks are passed on to as they arrive; None while they must be read."""
        self.unsent = b""
        """What `relay` has not sent yet, and is to be sent together with the end of the answer."""

    async def relay(
        self,
        exchange: Exchange,
        headers: Headers,
        on_first_token: Callable[[], None],
        held_back: Callable[[], bool] | None = None,
        before_block: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Pass the answer on until its end. The last block stays in `unsent` if the end has arrived with it.

        `on_first_token`: called after the block with the first token is sent; `held_back`: whether nothing may be sent
        yet; `before_block`: awaited before a block is sent, until the first token. Raises what `read` raises.
        """
        reader, upstream = self._reader, self._upstream
        of_this_worker = reader if self._rewriter is None else self._rewriter
        counted, writer = False, None
        while not reader.broken and (ready := await self.read(writer)) is not None:
            self.unsent += ready
            waits, complete = held_back is not None and held_back(), upstream.exhausted
            if self.unsent and not complete and not waits:
                if before_block is not None:
                    await before_block()
                block, self.unsent = self.unsent, b""
                await exchange.stream(headers, block)
            if not counted and of_this_worker.started and not waits:
                counted = True
                upstream.begin_stream()
                if exchange.record is not None:
                    exchange.record.note_first_token()
                on_first_token()
            if complete:
                break
            writer = exchange.stream_writer() if counted and not self.unsent else None
        if self._rewriter is not None:
            self.unsent += reader.feed(self._rewriter.close())
        self.unsent += reader.close()

    async def read(self, writer: StreamWriter | None = None) -> bytes | None:
        """Return what the client gets of the next block; None at the end of the answer.

        `writer`: blocks are passed on to it in the turn of the event loop in which they arrive, until one must be
        returned. That is the last block, one that comes while the client does not read, and one after two that
        completed no event, as blocks that are too small are gathered.

        Raises WorkerBroke, WorkerHung, and Refused or NoRoom if the bytes of an incomplete event have no room.
        """
        upstream = self._upstream
        if self._held_blocks > SMALL_BLOCKS:
            await upstream.gather()
        self._writer = None if self._held_blocks else writer
        block = await (upstream.read() if self._writer is None else upstream.push(self._pass_on))
        if not block:
            return None if block is not None else b""  # `_pass_on` has stopped it
        ready = self._feed(block)
        if not ready or self._held_blocks:
            self._count(block, ready)
        return ready

    def _pass_on(self, block: bytes) -> bool:
        writer = self._writer
        if writer is None or writer.flow.write_paused:
            return False
        ready = self._feed(block)
        if ready:
            writer.write(ready)
        if not ready or self._held_blocks or self._reader.broken:
            self._count(block, ready)
            if self._held_blocks > 1 or self._reader.broken:
                self._upstream.stop_push()
        return True

    def _count(self, block: bytes, ready: bytes) -> None:
        if not ready:
            self._hold.add(len(block))
            self._held_blocks += 1
        elif self._held_blocks:
            self._hold.set(self._before)
            self._held_blocks = 0

    def _rewrite(self, block: bytes) -> bytes:
        assert self._rewriter is not None
        return self._reader.feed(self._rewriter.feed(block))

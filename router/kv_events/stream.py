"""One publisher of KV events: subscribed to, its gaps repaired, its floods and silences bounded.

A stream is read in sessions. A session begins with a replay of all that the publisher still keeps, where it keeps
anything, and lasts until the connection breaks, or more comes than is read, or nothing does; then what it told is
forgotten, and after a pause a new one begins. Nothing that a publisher sends ends more than its own session.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count

import msgpack
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from router.core.kv_blocks.block_names import BlockChange, BlockNames, TooManyBlocks
from router.core.kv_blocks.kv_events import Continuity, KvEventFault, MessageOrder, read_batch
from router.core.model.block_key import BlockHasher
from router.upstream.kv_endpoints import KvPublisher

log = logging.getLogger(__name__)

REPLAY_END = (-1).to_bytes(8, "big", signed=True)
"""The number that ends a replay."""
MESSAGES_PER_TURN = 32
"""Messages read before others of this process get their turn."""
SPOILING = frozenset({KvEventFault.BAD_FIELDS, KvEventFault.UNREADABLE})
"""Faults that may have hidden a removal."""


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """What one publisher may do to us, and how long we wait for it."""

    blocks: int = 1_000_000
    """Blocks that it may name."""
    message_bytes: int = 16 * 1024 * 1024
    bytes_per_second: float = 8e6
    burst_bytes: float = 64e6
    """Above these two, it floods."""
    replay_messages: int = 20_000
    replay_seconds: float = 2.0
    """Longest wait for the next message of a replay."""
    replay_every_seconds: float = 2.0
    """Shortest time between two replays of one session."""
    silence_seconds: float = 10.0
    """Longest time without a message after a request that must have filled blocks."""
    pause_seconds: float = 0.2
    """Before the next session after a broken connection."""
    penalty_seconds: float = 10.0
    """Before the next session after a flood, or too many blocks."""
    log_seconds: float = 60.0
    """Between two lines of the log."""


class SessionEnded(Exception):
    """A session is over, and why."""

    def __init__(self, fault: KvEventFault) -> None:
        super().__init__(fault)
        self.fault = fault


class FaultLog:
    """What was wrong with one worker's events: counted, and in the log at most once a minute."""

    def __init__(self, worker: str, log_seconds: float) -> None:
        self.counts: Counter[KvEventFault] = Counter()
        self._worker = worker
        self._log_seconds = log_seconds
        self._quiet_until = 0.0

    def add(self, *faults: KvEventFault) -> None:
        """Count them."""
        if not faults:
            return
        self.counts.update(faults)
        now = asyncio.get_running_loop().time()
        if now >= self._quiet_until:
            self._quiet_until = now + self._log_seconds
            so_far = ", ".join(f"{fault} {count}" for fault, count in sorted(self.counts.items()))
            log.warning("worker %s: KV events: %s (so far: %s); it is served on", self._worker, faults[-1], so_far)


class EventStream:
    """One publisher. What it says is told by `tell`, as changes; `complete` and `block_tokens` by `on_state`."""

    def __init__(
        self,
        source: KvPublisher,
        context: zmq.asyncio.Context,
        hasher: BlockHasher,
        complaints: FaultLog,
        limits: StreamLimits,
        tell: Callable[[BlockChange], None],
        on_state: Callable[[], None],
        on_restart: Callable[[], None],
    ) -> None:
        """`on_restart`: the publisher is another process than before."""
        self._source = source
        self._context = context
        self._hasher = hasher
        self._complaints = complaints
        self._limits = limits
        self._tell = tell
        self._on_state = on_state
        self._on_restart = on_restart
        self._continuity = Continuity()
        self._names = BlockNames(hasher, limits.blocks)
        self._following = False
        self._complete = False
        self._catching_up = False
        """While the past is read: what it was then is nothing to tell."""
        self._before: Continuity | None = None
        """Of the session before, until this one has shown whether its publisher is the same."""
        self._awaited_since: float | None = None
        self._next_repair = 0.0

    @property
    def block_tokens(self) -> int | None:
        """Tokens in a block; None while nothing is known."""
        return self._names.block_tokens if self._following else None

    @property
    def complete(self) -> bool:
        """Whether all that the publisher's engine holds was told."""
        return self._complete

    def await_news(self, now: float) -> None:
        """The engine must have filled blocks by this time of the event loop's clock."""
        if self._awaited_since is None:
            self._awaited_since = now

    async def run(self) -> None:
        """Follow the publisher, for ever."""
        while True:
            try:
                await self._session()
            except SessionEnded as end:
                self._forget()
                self._following = False
                self._on_state()
                self._complaints.add(end.fault)
                slow = end.fault in (KvEventFault.FLOOD, KvEventFault.TOO_MANY_BLOCKS)
                await asyncio.sleep(self._limits.penalty_seconds if slow else self._limits.pause_seconds)

    async def _session(self) -> None:
        """Subscribe and read. Raises Ended."""
        with ExitStack() as opened:
            subscription = self._context.socket(zmq.SUB)
            opened.callback(subscription.close, 0)
            self._configure(subscription)
            monitor = subscription.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            opened.callback(subscription.disable_monitor)
            opened.callback(monitor.close, 0)  # or the context may wait for it without end
            subscription.connect(self._source.endpoint)
            await self._connected(monitor)
            parts = [self._read(subscription), self._until_disconnected(monitor), self._until_silent()]
            tasks = [asyncio.create_task(part) for part in parts]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _configure(self, subscription: zmq.asyncio.Socket) -> None:
        subscription.setsockopt(zmq.MAXMSGSIZE, self._limits.message_bytes)
        # So that a machine that is gone without a word is missed.
        subscription.setsockopt(zmq.HEARTBEAT_IVL, 1000)
        subscription.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3000)
        subscription.setsockopt(zmq.RCVHWM, 100_000)
        subscription.setsockopt(zmq.RECONNECT_IVL, 100)
        subscription.setsockopt(zmq.IPV6, 1)
        subscription.setsockopt(zmq.SUBSCRIBE, self._source.topic)

    async def _connected(self, monitor: zmq.asyncio.Socket) -> None:
        try:
            async with asyncio.timeout(self._limits.silence_seconds):
                while (await recv_monitor_message(monitor))["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    pass
        except TimeoutError:
            raise SessionEnded(KvEventFault.DISCONNECTED) from None
        self._awaited_since = None
        self._next_repair = 0.0
        self._catching_up = False
        before, self._continuity = self._continuity, Continuity()
        self._before = before if before.next_number else self._before
        self._names = BlockNames(self._hasher, self._limits.blocks)

    async def _until_disconnected(self, monitor: zmq.asyncio.Socket) -> None:
        while (await recv_monitor_message(monitor))["event"] != zmq.EVENT_DISCONNECTED:
            pass
        raise SessionEnded(KvEventFault.DISCONNECTED)

    async def _until_silent(self) -> None:
        clock = asyncio.get_running_loop().time
        limit = self._limits.silence_seconds
        while self._awaited_since is None or clock() < self._awaited_since + limit:  # noqa: ASYNC110 - it moves
            await asyncio.sleep(limit / 5)
        raise SessionEnded(KvEventFault.SILENT)

    async def _read(self, subscription: zmq.asyncio.Socket) -> None:
        """Take in what comes. Raises Ended where that is too much."""
        self._catching_up = True
        await self._repair()
        self._catching_up = False
        self._announce(BlockChange(True, b"", self._names.hashes))
        clock = asyncio.get_running_loop().time
        allowed, counted = self._limits.burst_bytes, clock()
        for number in count(1):
            frames = await subscription.recv_multipart()
            self._awaited_since = None
            now = clock()
            allowed = min(self._limits.burst_bytes, allowed + (now - counted) * self._limits.bytes_per_second)
            allowed, counted = allowed - sum(map(len, frames)), now
            if allowed < 0:
                raise SessionEnded(KvEventFault.FLOOD)
            await self._live(frames)
            if number % MESSAGES_PER_TURN == 0:
                await asyncio.sleep(0)

    async def _live(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != 8:
            self._complaints.add(KvEventFault.UNREADABLE)
        elif frames[0] != self._source.topic:
            self._complaints.add(KvEventFault.FOREIGN_TOPIC)
        else:
            await self._numbered(int.from_bytes(frames[1], "big"), frames[2])

    async def _numbered(self, number: int, payload: bytes) -> None:
        mark = hash(payload)
        arrival = self._continuity.order(number, mark)
        if arrival is MessageOrder.RESTARTED:
            self._restarted()
            arrival = self._continuity.order(number, mark)
        if arrival is MessageOrder.GAP:
            if self._continuity.next_number:
                self._complaints.add(KvEventFault.GAP)
            await self._repair()
            arrival = self._continuity.order(number, mark)
        if arrival is not MessageOrder.REPEATED:
            self._take(number, mark, payload)

    async def _repair(self) -> None:
        """Take in what is missing and can still be had."""
        if self._source.replay is None:
            return
        clock = asyncio.get_running_loop().time
        await asyncio.sleep(max(0.0, self._next_repair - clock()))
        self._next_repair = clock() + self._limits.replay_every_seconds
        with ExitStack() as opened:
            dealer = self._context.socket(zmq.DEALER)
            opened.callback(dealer.close, 0)
            dealer.setsockopt(zmq.MAXMSGSIZE, self._limits.message_bytes)
            dealer.setsockopt(zmq.IPV6, 1)
            dealer.connect(self._source.replay)
            await dealer.send_multipart([b"", self._continuity.next_number.to_bytes(8, "big")])
            await self._replay(dealer)

    async def _replay(self, dealer: zmq.asyncio.Socket) -> None:
        """Take in the answer to a request for past messages, as far as it is one."""
        left = self._limits.burst_bytes
        for replayed in range(self._limits.replay_messages):
            try:
                async with asyncio.timeout(self._limits.replay_seconds):
                    frames = await dealer.recv_multipart()
            except TimeoutError:
                return
            left -= sum(map(len, frames))
            if len(frames) < 2 or len(frames[-2]) != 8 or left < 0:
                return
            if frames[-2] == REPLAY_END:
                self._complete = self._complete or not self._continuity.next_number
                return
            number, mark = int.from_bytes(frames[-2], "big"), hash(frames[-1])
            if self._continuity.order(number, mark) in (MessageOrder.NEXT, MessageOrder.GAP):
                self._take(number, mark, frames[-1])
            if replayed % MESSAGES_PER_TURN == 0:
                await asyncio.sleep(0)

    def _take(self, number: int, mark: int, payload: bytes) -> None:
        """Take in one message, whatever is missing before it."""
        self._compare_with_before(number, mark)
        if number != self._continuity.next_number:
            self._missed()
        elif not number:
            self._complete = True
        self._continuity.record(number, mark)
        try:
            batch = read_batch(msgpack.unpackb(payload, strict_map_key=False))
        except (ValueError, TypeError, RecursionError):
            self._complaints.add(KvEventFault.UNREADABLE)
            self._forget()
            return
        self._complaints.add(*batch.faults)
        spoilt = bool(SPOILING.intersection(batch.faults))
        if spoilt:
            self._forget()
        try:
            change = self._names.apply(batch.events)
        except TooManyBlocks:
            raise SessionEnded(KvEventFault.TOO_MANY_BLOCKS) from None
        self._complete = self._complete or (change.cleared and not spoilt)
        self._complaints.add(*self._names.faults)
        self._names.faults.clear()
        if not self._catching_up:
            self._announce(change)

    def _announce(self, change: BlockChange) -> None:
        self._following = self._names.block_tokens is not None
        self._on_state()
        self._tell(change)

    def _compare_with_before(self, number: int, mark: int) -> None:
        """The first message of a session tells whether the process is the one of the session before."""
        if self._before is not None:
            if self._before.order(number, mark) is MessageOrder.RESTARTED:
                self._on_restart()
            self._before = None

    def _missed(self) -> None:
        """There were messages before the next one that cannot be had."""
        if self._continuity.next_number:
            self._complaints.add(KvEventFault.UNREPAIRED)
        else:
            log.info(
                "%s has published KV events before, and they cannot be had: its map starts empty", self._source.endpoint
            )
        self._forget()

    def _restarted(self) -> None:
        self._forget()
        self._continuity = Continuity()
        self._on_restart()

    def _forget(self) -> None:
        """What the publisher told counts no longer."""
        self._complete = False
        if len(self._names) and not self._catching_up:
            self._tell(BlockChange(True, b"", b""))
        self._names.clear()

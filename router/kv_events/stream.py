"""Follows one publisher of KV events: subscribes, repairs gaps, and limits floods and silence.

A stream is read in sessions. A session begins with a replay of all that the publisher still keeps, if it keeps
anything. It lasts until the connection breaks, more arrives than the router reads, or nothing arrives. Then its content
is forgotten, and a new session begins after a pause. Nothing that a publisher sends ends more than its own session.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from typing import Final

import msgpack
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from router.core.kv_blocks.block_names import BlockChange, BlockNames, TooManyBlocks
from router.core.kv_blocks.kv_events import Continuity, KvEventFault, MessageOrder, read_batch
from router.core.model.block_key import BlockHasher
from router.upstream.kv_endpoints import KvPublisher

log = logging.getLogger(__name__)

REPLAY_END: Final = (-1).to_bytes(8, "big", signed=True)
"""The number that ends a replay."""
MESSAGES_PER_TURN: Final = 32
"""Messages read before other tasks of the event loop get a turn."""
SPOILING_FAULTS: Final = frozenset({KvEventFault.BAD_FIELDS, KvEventFault.UNREADABLE})
"""Faults that may hide a removal."""
UNMATCHED_FAULTS: Final = frozenset({KvEventFault.BAD_FIELDS, KvEventFault.ODD_BLOCK})
"""Faults of blocks that are cached, in a form that cannot be matched. SGLang publishes pairs of tokens where it drafts
with EAGLE, and vLLM also stores parts of blocks of some models.
"""


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Limits on what one publisher may send, and on how long the router waits for it."""

    blocks: int = 1_000_000
    """Blocks kept of one publisher."""
    message_bytes: int = 16 * 1024 * 1024
    bytes_per_second: float = 8e6
    burst_bytes: float = 64e6
    """A publisher that exceeds this burst, on top of `bytes_per_second`, is flooding."""
    replay_messages: int = 20_000
    replay_seconds: float = 2.0
    """Longest wait for the next message of a replay."""
    replay_every_seconds: float = 2.0
    """Shortest time between two replays in one session."""
    silence_seconds: float = 10.0
    """Longest time without a message after a request that must have filled blocks, if none came while it ran."""
    pause_seconds: float = 0.2
    """Pause after a broken connection, before the next session."""
    penalty_seconds: float = 10.0
    """Pause after a flood or too many blocks, before the next session; twice as long each time in a row ..."""
    longest_penalty_seconds: float = 600.0
    """... up to this: each session reads a whole replay."""
    log_seconds: float = 60.0
    """Shortest time between two log lines."""


class SessionPauses:
    """How long to wait after each session of one publisher."""

    def __init__(self, limits: StreamLimits) -> None:
        self._limits = limits
        self._penalty = limits.penalty_seconds

    def after(self, fault: KvEventFault) -> float:
        """Return the seconds to wait before the next session, after one that ended because of `fault`."""
        if fault not in (KvEventFault.FLOOD, KvEventFault.TOO_MANY_BLOCKS):
            self._penalty = self._limits.penalty_seconds
            return self._limits.pause_seconds
        penalty, self._penalty = self._penalty, min(2 * self._penalty, self._limits.longest_penalty_seconds)
        return penalty


class SessionEnded(Exception):
    """A session is over because of `fault`."""

    def __init__(self, fault: KvEventFault) -> None:
        super().__init__(fault)
        self.fault = fault


class FaultLog:
    """The faults of one worker's events: all counted, and logged at most once every `log_seconds`."""

    def __init__(self, worker: str, log_seconds: float) -> None:
        self.counts: Counter[KvEventFault] = Counter()
        self._worker = worker
        self._log_seconds = log_seconds
        self._quiet_until = 0.0

    def add(self, *faults: KvEventFault) -> None:
        """Count the faults, and log the last one unless there was a log line shortly before."""
        if not faults:
            return
        self.counts.update(faults)
        now = asyncio.get_running_loop().time()
        if now >= self._quiet_until:
            self._quiet_until = now + self._log_seconds
            counts = ", ".join(f"{fault} {count}" for fault, count in sorted(self.counts.items()))
            log.warning(
                "worker %s: KV events: %s (so far: %s); the worker stays in use", self._worker, faults[-1], counts
            )


class EventStream:
    """Follows one publisher. Reports block changes to `on_change`, and new values of its properties to `on_state`."""

    def __init__(
        self,
        source: KvPublisher,
        context: zmq.asyncio.Context,
        hasher: BlockHasher,
        fault_log: FaultLog,
        limits: StreamLimits,
        on_change: Callable[[BlockChange], None],
        on_state: Callable[[], None],
        on_restart: Callable[[], None],
    ) -> None:
        """`on_restart`: called if the publisher is another process than before."""
        self._source = source
        self._context = context
        self._hasher = hasher
        self._fault_log = fault_log
        self._limits = limits
        self._on_change = on_change
        self._on_state = on_state
        self._on_restart = on_restart
        self._continuity = Continuity()
        self._names = BlockNames(hasher, limits.blocks)
        self._following = False
        self._complete = False
        self._catching_up = False
        """True while a replay is read: past changes are not reported one by one."""
        self._previous: Continuity | None = None
        """The continuity of the previous session, until this session has shown whether its publisher is the same."""
        self._awaited_since: float | None = None
        self._heard_at = 0.0
        """When the last message arrived, or the session began if that was later."""
        self._next_repair = 0.0

    @property
    def block_tokens(self) -> int | None:
        """Tokens in a block; None while nothing is known."""
        return self._names.block_tokens if self._following else None

    @property
    def complete(self) -> bool:
        """Whether everything that the publisher's engine holds has been reported."""
        return self._complete

    def await_news(self, within: float) -> None:
        """Expect a message, unless one came in the last `within` seconds, in which the engine must have filled blocks.

        An engine publishes blocks as it fills them, so those of a request may be known before its end is.
        """
        now = asyncio.get_running_loop().time()
        if self._awaited_since is None and self._heard_at < now - within:
            self._awaited_since = now

    async def run(self) -> None:
        """Follow the publisher forever."""
        pauses = SessionPauses(self._limits)
        while True:
            try:
                await self._session()
            except SessionEnded as end:
                self._reset()
                self._following = False
                self._on_state()
                self._fault_log.add(end.fault)
                await asyncio.sleep(pauses.after(end.fault))

    async def _session(self) -> None:
        """Subscribe and read. Raises SessionEnded."""
        with ExitStack() as stack:
            subscription = self._context.socket(zmq.SUB)
            stack.callback(subscription.close, 0)
            self._configure(subscription)
            monitor = subscription.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            stack.callback(subscription.disable_monitor)
            stack.callback(monitor.close, 0)  # otherwise the context may wait for it forever
            subscription.connect(self._source.endpoint)
            await self._wait_until_connected(monitor)
            loops = [self._read_messages(subscription), self._watch_connection(monitor), self._watch_silence()]
            tasks = [asyncio.create_task(part) for part in loops]
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
        # Heartbeats detect a machine that disappeared without closing its connection.
        subscription.setsockopt(zmq.HEARTBEAT_IVL, 1000)
        subscription.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3000)
        subscription.setsockopt(zmq.RCVHWM, 100_000)
        subscription.setsockopt(zmq.RECONNECT_IVL, 100)
        subscription.setsockopt(zmq.IPV6, 1)
        subscription.setsockopt(zmq.SUBSCRIBE, self._source.topic)

    async def _wait_until_connected(self, monitor: zmq.asyncio.Socket) -> None:
        try:
            async with asyncio.timeout(self._limits.silence_seconds):
                while (await recv_monitor_message(monitor))["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    pass
        except TimeoutError:
            raise SessionEnded(KvEventFault.DISCONNECTED) from None
        self._awaited_since = None
        self._heard_at = asyncio.get_running_loop().time()
        self._next_repair = 0.0
        self._catching_up = False
        previous, self._continuity = self._continuity, Continuity()
        self._previous = previous if previous.next_number else self._previous
        self._names = BlockNames(self._hasher, self._limits.blocks)

    async def _watch_connection(self, monitor: zmq.asyncio.Socket) -> None:
        while (await recv_monitor_message(monitor))["event"] != zmq.EVENT_DISCONNECTED:
            pass
        raise SessionEnded(KvEventFault.DISCONNECTED)

    async def _watch_silence(self) -> None:
        clock = asyncio.get_running_loop().time
        limit = self._limits.silence_seconds
        while self._awaited_since is None or clock() < self._awaited_since + limit:  # noqa: ASYNC110 - the deadline moves
            await asyncio.sleep(limit / 5)
        raise SessionEnded(KvEventFault.SILENT)

    async def _read_messages(self, subscription: zmq.asyncio.Socket) -> None:
        """Read the replay and then all new messages. Raises SessionEnded if there are too many bytes."""
        self._catching_up = True
        await self._repair()
        self._catching_up = False
        self._report(BlockChange(True, b"", self._names.hashes))
        clock = asyncio.get_running_loop().time
        allowed, counted = self._limits.burst_bytes, clock()
        for number in count(1):
            frames = await subscription.recv_multipart()
            now = clock()
            self._awaited_since, self._heard_at = None, now
            allowed = min(self._limits.burst_bytes, allowed + (now - counted) * self._limits.bytes_per_second)
            allowed, counted = allowed - sum(map(len, frames)), now
            if allowed < 0:
                raise SessionEnded(KvEventFault.FLOOD)
            await self._handle_message(frames)
            if number % MESSAGES_PER_TURN == 0:
                await asyncio.sleep(0)

    async def _handle_message(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != 8:
            self._fault_log.add(KvEventFault.UNREADABLE)
        elif frames[0] != self._source.topic:
            self._fault_log.add(KvEventFault.FOREIGN_TOPIC)
        else:
            await self._handle_numbered(int.from_bytes(frames[1], "big"), frames[2])

    async def _handle_numbered(self, number: int, payload: bytes) -> None:
        mark = hash(payload)
        arrival = self._continuity.order(number, mark)
        if arrival is MessageOrder.RESTARTED:
            self._handle_restart()
            arrival = self._continuity.order(number, mark)
        if arrival is MessageOrder.GAP:
            if self._continuity.next_number:
                self._fault_log.add(KvEventFault.GAP)
            await self._repair()
            arrival = self._continuity.order(number, mark)
        if arrival is not MessageOrder.REPEATED:
            self._take(number, mark, payload)

    async def _repair(self) -> None:
        """Request the missing messages, and apply what the publisher still has, until it has no more.

        Engines answer through a queue of ZeroMQ's that drops what it has no room for (1000 messages), so the answer to
        one request may have holes.
        """
        if self._source.replay is not None:
            while await self._replay(self._source.replay):
                pass

    async def _replay(self, endpoint: str) -> bool:
        """Request one replay. Returns whether to repeat that: its answer has a hole behind its first message."""
        clock = asyncio.get_running_loop().time
        await asyncio.sleep(max(0.0, self._next_repair - clock()))
        self._next_repair = clock() + self._limits.replay_every_seconds
        with ExitStack() as stack:
            dealer = self._context.socket(zmq.DEALER)
            stack.callback(dealer.close, 0)
            dealer.setsockopt(zmq.MAXMSGSIZE, self._limits.message_bytes)
            dealer.setsockopt(zmq.RCVHWM, self._limits.replay_messages)
            dealer.setsockopt(zmq.IPV6, 1)
            dealer.connect(endpoint)
            await dealer.send_multipart([b"", self._continuity.next_number.to_bytes(8, "big")])
            return await self._apply_replay(dealer)

    async def _apply_replay(self, dealer: zmq.asyncio.Socket) -> bool:
        """Apply the answer to a replay request, as far as it is valid. Returns as `_replay` does."""
        bytes_left, taken = self._limits.burst_bytes, 0
        for replayed in range(self._limits.replay_messages):
            try:
                async with asyncio.timeout(self._limits.replay_seconds):
                    frames = await dealer.recv_multipart()
            except TimeoutError:
                return bool(taken)  # the end was dropped, too
            bytes_left -= sum(map(len, frames))
            if len(frames) < 2 or len(frames[-2]) != 8 or bytes_left < 0:
                return False
            if frames[-2] == REPLAY_END:
                self._complete = self._complete or not self._continuity.next_number
                return False
            number, mark = int.from_bytes(frames[-2], "big"), hash(frames[-1])
            order = self._continuity.order(number, mark)
            if order is MessageOrder.GAP and taken:
                return True
            if order in (MessageOrder.NEXT, MessageOrder.GAP):
                self._take(number, mark, frames[-1])
                taken += 1
            if replayed % MESSAGES_PER_TURN == 0:
                await asyncio.sleep(0)
        return False

    def _take(self, number: int, mark: int, payload: bytes) -> None:
        """Apply one message, whatever is missing before it."""
        self._compare_with_previous(number, mark)
        if number != self._continuity.next_number:
            self._handle_missed()
        elif not number:
            self._complete = True
        self._continuity.record(number, mark)
        try:
            batch = read_batch(msgpack.unpackb(payload, strict_map_key=False))
        except (ValueError, TypeError, RecursionError):
            self._fault_log.add(KvEventFault.UNREADABLE)
            self._reset()
            return
        self._fault_log.add(*batch.faults)
        spoiled = bool(SPOILING_FAULTS.intersection(batch.faults))
        if spoiled:
            self._reset()
        try:
            change = self._names.apply(batch.events)
        except TooManyBlocks:
            raise SessionEnded(KvEventFault.TOO_MANY_BLOCKS) from None
        self._complete = self._complete or (change.cleared and not spoiled)
        self._complete = self._complete and UNMATCHED_FAULTS.isdisjoint(self._names.faults)
        self._fault_log.add(*self._names.faults)
        self._names.faults.clear()
        if not self._catching_up:
            self._report(change)

    def _report(self, change: BlockChange) -> None:
        self._following = self._names.block_tokens is not None
        self._on_state()
        self._on_change(change)

    def _compare_with_previous(self, number: int, mark: int) -> None:
        """Find out from the first message of a session whether its process is the one of the previous session."""
        if self._previous is not None:
            if self._previous.order(number, mark) is MessageOrder.RESTARTED:
                self._on_restart()
            self._previous = None

    def _handle_missed(self) -> None:
        """Start again, because messages before the next one are missing and cannot be replayed."""
        if self._continuity.next_number:
            self._fault_log.add(KvEventFault.UNREPAIRED)
        else:
            log.info(
                "%s published KV events before that cannot be replayed: its cache is unknown at first",
                self._source.endpoint,
            )
        self._reset()

    def _handle_restart(self) -> None:
        self._reset()
        self._continuity = Continuity()
        self._on_restart()

    def _reset(self) -> None:
        """Forget what the publisher reported."""
        self._complete = False
        if len(self._names) and not self._catching_up:
            self._on_change(BlockChange(True, b"", b""))
        self._names.clear()

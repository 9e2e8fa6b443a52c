"""A test double of an engine's publisher of KV events on real sockets, and a follower of it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, Self

import msgpack
import zmq
import zmq.asyncio

from router.core.kv_blocks.kv_events import KvEventFault
from router.core.model.block_key import ROOT, BlockHasher
from router.core.model.events import BlocksChanged, BlocksLost, Event
from router.core.model.request import WorkerId
from router.kv_events.stream import REPLAY_END, StreamLimits
from router.kv_events.subscriber import WorkerFollower
from router.upstream.directory import WorkerEndpoint
from router.upstream.kv_endpoints import KvPublisher
from router.upstream.polling.poll_client import PollClient
from tests.support.running import TIMEOUT_S

HASHER = BlockHasher(b"secret")
WORKER = WorkerId("w")
LIMITS = StreamLimits(replay_seconds=TIMEOUT_S, replay_every_seconds=0, pause_seconds=0.01, penalty_seconds=0.01)


def block(number: int, parent: int | None = None) -> dict[str, Any]:
    """A BlockStored event of one block with two tokens. `number` is both the block's hash and its token ids."""
    return {
        "type": "BlockStored",
        **{"block_hashes": [number], "parent_block_hash": parent, "token_ids": [number, number], "block_size": 2},
    }


def hashes(*numbers: int) -> bytes:
    return b"".join(HASHER.chain(ROOT, [number, number], 2) for number in numbers)


class Publisher:
    """An engine's publisher under the control of a test. It replays the messages in `past`."""

    def __init__(self, context: zmq.asyncio.Context, replays: bool, ports: tuple[int, int] = (0, 0)) -> None:
        self.past: list[tuple[int, bytes]] = []
        self.replay_starts: list[int] = []
        self.dropped: set[int] = set()
        """The messages that the next replay lacks, as if its queue had no room for them; -1 for its end."""
        self._next = 0
        self._context = context
        self._live, self._replay = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
        try:
            self.ports = (_bind(self._live, ports[0]), _bind(self._replay, ports[1]))
        except zmq.ZMQError:
            self._live.close(0)
            self._replay.close(0)
            raise
        live, past = (f"tcp://127.0.0.1:{port}" for port in self.ports)
        self.source = KvPublisher(live, past if replays else None, b"kv")
        self._answering = asyncio.create_task(self._answer())

    async def subscribed(self) -> None:
        """Wait for a subscriber: messages published before are lost."""
        async with asyncio.timeout(TIMEOUT_S):
            assert (await self._live.recv())[:1] == b"\x01"

    async def publish(self, *events: object, lost: bool = False, kept: bool = True) -> None:
        """Publish a message. `lost`: do not send it; `kept`: keep it for a replay."""
        await self.send_payload(msgpack.packb([0.5 + self._next, list(events), 0]), lost=lost, kept=kept)

    async def send_payload(self, payload: bytes, *, lost: bool = False, kept: bool = True) -> None:
        number = self._next
        self._next += 1
        if kept:
            self.past.append((number, payload))
        if not lost:
            await self.send_frames(b"kv", number.to_bytes(8, "big"), payload)

    async def send_frames(self, *frames: bytes) -> None:
        await self._live.send_multipart(list(frames))

    async def close(self) -> None:
        """Close all sockets, as when the process ends."""
        self._answering.cancel()
        await asyncio.gather(self._answering, return_exceptions=True)
        self._live.close(0)
        self._replay.close(0)

    async def restart(self, past: Sequence[tuple[int, bytes]] = ()) -> Self:
        """Restart on the same ports: as a new process, or with `past` as the same process after a broken connection."""
        await self.close()
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                try:
                    another = type(self)(self._context, self.source.replay is not None, self.ports)
                    another.past, another._next = list(past), len(past)
                    return another
                except zmq.ZMQError:  # a closed socket frees its port a little later
                    await asyncio.sleep(0.01)

    async def _answer(self) -> None:
        while True:
            caller, _, start = await self._replay.recv_multipart()
            self.replay_starts.append(int.from_bytes(start, "big"))
            dropped, self.dropped = self.dropped, set()
            for number, payload in self.past:
                if number >= self.replay_starts[-1] and number not in dropped:
                    await self._replay.send_multipart([caller, b"", b"kv", number.to_bytes(8, "big"), payload])
            if -1 not in dropped:
                await self._replay.send_multipart([caller, b"", b"", REPLAY_END, b""])


def _bind(socket: zmq.asyncio.Socket, port: int) -> int:
    if not port:
        return socket.bind_to_random_port("tcp://127.0.0.1")
    socket.bind(f"tcp://127.0.0.1:{port}")
    return port


class FollowerScene(SimpleNamespace):
    """A publisher, its follower, and the events that the follower reports."""

    publisher: Publisher
    follower: WorkerFollower
    events: list[Event]
    held: set[bytes]

    def feed(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, BlocksLost) or (isinstance(event, BlocksChanged) and event.cleared):
            self.held.clear()
        if isinstance(event, BlocksChanged):
            self.held -= {event.removed[at : at + 8] for at in range(0, len(event.removed), 8)}
            self.held |= {event.stored[at : at + 8] for at in range(0, len(event.stored), 8)}

    def holds(self, *numbers: int) -> Callable[[], bool]:
        expected = {hashes(number) for number in numbers}
        return lambda: self.held == expected

    @property
    def complete(self) -> bool:
        return self.follower.report.complete

    @property
    def faults(self) -> dict[KvEventFault, int]:
        return dict(self.follower.report.faults)


@asynccontextmanager
async def followed_publisher(
    *, replays: bool = True, before: int = 0, dropped: Iterable[int] = (), limits: StreamLimits = LIMITS
) -> AsyncIterator[FollowerScene]:
    """Follow a publisher that published `before` blocks before the follower subscribed.

    `dropped`: the messages that its first replay lacks.
    """
    context = zmq.asyncio.Context()
    publisher = Publisher(context, replays)
    publisher.dropped.update(dropped)
    for number in range(before):
        await publisher.publish(block(100 + number), lost=True)
    scene = FollowerScene(publisher=publisher, events=[], held=set())
    scene.follower = WorkerFollower(
        WorkerEndpoint(WORKER, "http://127.0.0.1:1", sources=(publisher.source,)),
        scene.feed,
        HASHER,
        limits,
        lambda: None,
        lambda endpoint: None,  # noqa: ARG005
    )
    async with PollClient() as client:
        task = asyncio.create_task(scene.follower.run(context, client))
        await publisher.subscribed()
        try:
            yield scene
        finally:
            task.cancel()
            async with asyncio.timeout(TIMEOUT_S):
                await asyncio.gather(task, return_exceptions=True)
            await scene.publisher.close()
            context.destroy(linger=0)

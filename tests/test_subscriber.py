"""KV events over real sockets: followed, repaired, bounded, and given up without harm."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import httpx
import msgpack
import pytest
import zmq
import zmq.asyncio
from running import PATIENCE, RunningRouter, chat, emulated_workers, running_router, until

from router.core.block_key import ROOT, BlockHasher
from router.core.commands import Decision, Deficit, Dispatch
from router.core.kv_events import Fault
from router.core.model import (
    BlocksChanged,
    BlocksFollowed,
    BlocksLost,
    ClientId,
    Event,
    Evicted,
    Failed,
    Finished,
    RequestId,
    Ticked,
    Usage,
    WorkerId,
    WorkerJoined,
    WorkerLeft,
)
from router.core.window import Load
from router.errors import WorkerBroke
from router.event_sources import Source, reachable, read_sglang_sources, read_vllm_sources
from router.event_stream import END, StreamLimits
from router.fleet import Backend
from router.replay import replay_file
from router.subscriber import Fills, Follower

HASHER = BlockHasher(b"secret")
WORKER = WorkerId("w")
LIMITS = StreamLimits(replay_seconds=PATIENCE, replay_every_seconds=0, pause_seconds=0.01, penalty_seconds=0.01)


def block(number: int, parent: int | None = None) -> dict[str, Any]:
    """An event that stores one block of two tokens, named and filled with a number."""
    return {
        "type": "BlockStored",
        **{"block_hashes": [number], "parent_block_hash": parent, "token_ids": [number, number], "block_size": 2},
    }


def hashes(*numbers: int) -> bytes:
    return b"".join(HASHER.chain(ROOT, [number, number], 2) for number in numbers)


class Publisher:
    """An engine's publisher that a test plays. Past messages are those in `past`."""

    def __init__(self, context: zmq.asyncio.Context, replays: bool, ports: tuple[int, int] = (0, 0)) -> None:
        self.past: list[tuple[int, bytes]] = []
        self.asked: list[int] = []
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
        self.source = Source(live, past if replays else None, b"kv")
        self._answering = asyncio.create_task(self._answer())

    async def subscribed(self) -> None:
        """Wait until somebody is listening: what is published before is lost."""
        async with asyncio.timeout(PATIENCE):
            assert (await self._live.recv())[:1] == b"\x01"

    async def publish(self, *events: object, lost: bool = False, kept: bool = True) -> None:
        """Send a message, or lose it on the way; keep it for a replay, or not."""
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
        """End as a process does."""
        self._answering.cancel()
        await asyncio.gather(self._answering, return_exceptions=True)
        self._live.close(0)
        self._replay.close(0)

    async def again(self, past: Sequence[tuple[int, bytes]] = ()) -> Self:
        """Another process at the same ports, which knows nothing, or the same one behind a broken connection."""
        await self.close()
        async with asyncio.timeout(PATIENCE):
            while True:
                try:
                    another = type(self)(self._context, self.source.replay is not None, self.ports)
                    another.past, another._next = list(past), len(past)
                    return another
                except zmq.ZMQError:  # a closed socket gives its port back a little later
                    await asyncio.sleep(0.01)

    async def _answer(self) -> None:
        while True:
            caller, _, start = await self._replay.recv_multipart()
            self.asked.append(int.from_bytes(start, "big"))
            for number, payload in self.past:
                if number >= self.asked[-1]:
                    await self._replay.send_multipart([caller, b"", b"kv", number.to_bytes(8, "big"), payload])
            await self._replay.send_multipart([caller, b"", b"", END, b""])


def _bind(socket: zmq.asyncio.Socket, port: int) -> int:
    if not port:
        return socket.bind_to_random_port("tcp://127.0.0.1")
    socket.bind(f"tcp://127.0.0.1:{port}")
    return port


class Scene(SimpleNamespace):
    """A publisher, who follows it, and what that tells."""

    publisher: Publisher
    follower: Follower
    told: list[Event]
    held: set[bytes]

    def feed(self, event: Event) -> None:
        self.told.append(event)
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
    def faults(self) -> dict[Fault, int]:
        return dict(self.follower.report.faults)


@asynccontextmanager
async def following(*, replays: bool = True, before: int = 0, limits: StreamLimits = LIMITS) -> AsyncIterator[Scene]:
    """Follow a publisher that has published so many blocks before."""
    context = zmq.asyncio.Context()
    publisher = Publisher(context, replays)
    for number in range(before):
        await publisher.publish(block(100 + number), lost=True)
    scene = Scene(publisher=publisher, told=[], held=set())
    scene.follower = Follower(
        Backend(WORKER, "http://127.0.0.1:1", sources=(publisher.source,)), scene.feed, HASHER, limits, lambda: None
    )
    async with httpx.AsyncClient() as client:
        task = asyncio.create_task(scene.follower.run(context, client))
        await publisher.subscribed()
        try:
            yield scene
        finally:
            task.cancel()
            async with asyncio.timeout(PATIENCE):
                await asyncio.gather(task, return_exceptions=True)
            await scene.publisher.close()
            context.destroy(linger=0)


async def test_events_are_told() -> None:
    """From an engine's first message on, all that it stores and drops is told, and nothing else is believed of it."""
    async with following(replays=False) as scene:
        await scene.publisher.publish(block(1), block(2))
        await until(scene.holds(1, 2))
        assert scene.told[0] == BlocksFollowed(WORKER, 2)
        await scene.publisher.publish({"type": "BlockRemoved", "block_hashes": [1]}, block(3))
        await until(scene.holds(2, 3))
        assert (scene.complete, scene.faults) == (True, {})


async def test_a_gap_is_repaired() -> None:
    """Messages lost on the way are had again, in order, before what came after them."""
    async with following() as scene:
        await scene.publisher.publish(block(1))
        await until(scene.holds(1))
        await scene.publisher.publish({"type": "BlockRemoved", "block_hashes": [1]}, block(2), lost=True)
        await scene.publisher.publish(block(3), lost=True)
        await scene.publisher.publish(block(4))
        await until(scene.holds(2, 3, 4))
        assert (scene.complete, scene.faults, scene.publisher.asked) == (True, {Fault.GAP: 1}, [0, 1])


async def test_a_follower_that_is_stopped_amid_a_repair_stops() -> None:
    """However fast past messages come in: it ends, and takes in no more of them."""
    lost = range(2, 2000)
    async with following() as scene:
        await scene.publisher.publish(block(1))
        await until(scene.holds(1))
        for number in lost:
            await scene.publisher.publish(block(number), lost=True)
        await scene.publisher.publish(block(lost.stop))
        async with asyncio.timeout(PATIENCE):
            while len(scene.held) == 1:  # noqa: ASYNC110 - a turn of the loop at a time, or it may be over
                await asyncio.sleep(0)
    assert 1 < len(scene.held) < len(lost)


async def test_a_gap_that_stays_empties_the_view() -> None:
    """What cannot be had again may have removed anything: nothing from before counts, and belief counts again."""
    async with following() as scene:
        await scene.publisher.publish(block(1))
        await until(scene.holds(1))
        await scene.publisher.publish(block(2), lost=True, kept=False)
        await scene.publisher.publish(block(3))
        await until(scene.holds(3))
        assert not scene.complete
        assert scene.faults == {Fault.GAP: 1, Fault.UNREPAIRED: 1}
        await scene.publisher.publish({"type": "AllBlocksCleared"}, block(4))
        await until(scene.holds(4))
        assert scene.complete


async def test_a_cold_start_learns_from_the_past() -> None:
    """Who subscribes late and can have all past messages knows all."""
    async with following(before=3) as scene:
        await until(scene.holds(100, 101, 102))
        assert scene.complete


async def test_a_cold_start_without_the_past_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """Who subscribes late and cannot have them starts empty, says so, and knows that there may be more."""
    caplog.set_level(logging.INFO)
    async with following(before=3, replays=False) as scene:
        await scene.publisher.publish(block(1))
        await until(scene.holds(1))
        assert not scene.complete
    assert "its map starts empty" in caplog.text


async def test_another_process_is_another_cache() -> None:
    """A worker that has restarted is forgotten at once, and what the new one tells counts."""
    async with following() as scene:
        for number in range(3):
            await scene.publisher.publish(block(number))
        await until(scene.holds(0, 1, 2))
        scene.publisher = await scene.publisher.again()
        await until(scene.holds())
        assert scene.told[-1] == BlocksLost(WORKER)
        await scene.publisher.subscribed()
        await scene.publisher.publish(block(7))
        await until(scene.holds(7))
        assert Evicted(WORKER) in scene.told
        assert (scene.complete, scene.faults) == (True, {Fault.DISCONNECTED: 1})


async def test_numbers_that_begin_anew() -> None:
    """A publisher that counts anew behind the same connection is another process too."""
    async with following(replays=False) as scene:
        await scene.publisher.publish(block(1))
        await scene.publisher.publish(block(2))
        await until(scene.holds(1, 2))
        await scene.publisher.send_frames(b"kv", bytes(8), msgpack.packb([9.0, [block(3)], 0]))
        await until(scene.holds(3))
        assert Evicted(WORKER) in scene.told
        assert scene.complete


@pytest.mark.parametrize(
    ("frames", "fault"),
    [
        ([b"kv", b"short", b""], Fault.UNREADABLE),
        ([b"kv"], Fault.UNREADABLE),
        ([b"kv2", bytes(8), b""], Fault.FOREIGN_TOPIC),
    ],
)
async def test_what_is_no_message_is_ignored(frames: list[bytes], fault: Fault) -> None:
    """It is counted, and what is known stays."""
    async with following() as scene:
        await scene.publisher.publish(block(1))
        await until(scene.holds(1))
        await scene.publisher.send_frames(*frames)
        await scene.publisher.publish(block(2))
        await until(scene.holds(1, 2))
        assert (scene.complete, scene.faults) == (True, {fault: 1})


@pytest.mark.parametrize(
    "payload", [b"\xc1", b"", msgpack.packb("text"), msgpack.packb([1.0, [block(1) | {"block_size": 0}]])]
)
async def test_a_message_that_cannot_be_read_spoils_what_is_known(payload: bytes) -> None:
    """Whatever it said, it may have removed anything: belief counts again, but the stream goes on."""
    async with following() as scene:
        await scene.publisher.publish(block(1))
        await until(scene.holds(1))
        await scene.publisher.send_payload(payload)
        await scene.publisher.publish(block(2))
        await until(scene.holds(2))
        assert not scene.complete
        assert set(scene.faults) <= {Fault.UNREADABLE, Fault.BAD_FIELDS}


async def test_garbage_makes_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """However much of it comes, the log gets one line."""
    async with following() as scene:
        for _ in range(100):
            await scene.publisher.send_payload(b"\xc1")
        await scene.publisher.publish(block(1))
        await until(scene.holds(1))
        assert scene.faults == {Fault.UNREADABLE: 100}
    assert len(caplog.records) == 1


async def test_a_flood_is_left_alone() -> None:
    """Who sends more than is read is not read for a while, and what it said does not count meanwhile."""
    limits = StreamLimits(burst_bytes=2000, bytes_per_second=1, penalty_seconds=PATIENCE, replay_seconds=PATIENCE)
    async with following(limits=limits) as scene:
        await scene.publisher.publish(block(1))
        await until(scene.holds(1))
        for number in range(40):
            await scene.publisher.publish(block(number))
        await until(lambda: Fault.FLOOD in scene.faults)
        assert scene.told[-1] == BlocksLost(WORKER)


async def test_too_many_blocks_are_not_kept() -> None:
    """Who names more blocks than are kept is followed no longer."""
    limits = StreamLimits(blocks=3, penalty_seconds=PATIENCE, replay_seconds=PATIENCE)
    async with following(limits=limits) as scene:
        await scene.publisher.publish(block(1), block(2), block(3))
        await until(scene.holds(1, 2, 3))
        await scene.publisher.publish(block(4))
        await until(lambda: Fault.TOO_MANY_BLOCKS in scene.faults)
        assert scene.told[-1] == BlocksLost(WORKER)


async def test_silence_is_noticed() -> None:
    """A publisher that tells nothing of what its engine must have stored is not believed, and subscribed to anew."""
    limits = StreamLimits(silence_seconds=0.05, pause_seconds=0.01, replay_seconds=PATIENCE)
    async with following(limits=limits) as scene:
        await scene.publisher.publish(block(1))
        await until(scene.holds(1))
        scene.follower.expects_news()
        await until(lambda: Fault.SILENT in scene.faults)
        await until(scene.holds(1))
        assert BlocksLost(WORKER) in scene.told


def test_where_vllm_publishes() -> None:
    """One publisher a rank, at the worker's own host where it listens everywhere."""
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv"}
    ranks = {
        "1": config | {"endpoint": "tcp://*:5558", "replay_endpoint": None},
        "0": config | {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://10.0.0.7:6000"},
        "2": config | {"enable_kv_cache_events": False},
    }
    assert read_vllm_sources(_json(ranks), "gpu1") == (
        Source("tcp://gpu1:5557", "tcp://10.0.0.7:6000", b"kv"),
        Source("tcp://gpu1:5558", None, b"kv"),
    )
    assert read_vllm_sources(b"{}", "gpu1") == ()


def test_where_sglang_publishes() -> None:
    """Ports count up by rank; a server without events names none."""
    told = {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "topic": "kv", "dp_size": 2}
    body = _json({"kv_events": told | {"replay_endpoint_port_base": 6000}})
    assert read_sglang_sources(body, "::1") == (
        Source("tcp://[::1]:5557", "tcp://[::1]:6000", b"kv"),
        Source("tcp://[::1]:5558", "tcp://[::1]:6001", b"kv"),
    )
    assert read_sglang_sources(_json({"kv_events": None}), "gpu1") == ()
    assert read_sglang_sources(b"{}", "gpu1") == ()


@pytest.mark.parametrize("endpoint", [None, 7, "", "ipc:///tmp/x", "tcp://*", "tcp://*:nan", "tcp://h:99999"])
def test_what_cannot_be_reached(endpoint: object) -> None:
    """A publisher that no other machine can reach is not subscribed to."""
    with pytest.raises(WorkerBroke):
        reachable(endpoint, "gpu1")


@pytest.mark.parametrize("body", [b"", b"[]", b'{"0": 7}', b"\xff"])
def test_a_bad_answer_about_sources(body: bytes) -> None:
    """An answer that is not what an engine sends is refused."""
    with pytest.raises(WorkerBroke):
        read_vllm_sources(body, "gpu1")


def _json(body: object) -> bytes:
    return httpx.Request("POST", "http://x", json=body).content


async def ask(router: RunningRouter, content: str) -> tuple[int, int]:
    """Tokens predicted and found in the cache."""
    async with router.post(chat(content, max_tokens=4)) as post:
        response = await post.response()
        usage = (await response.json())["usage"]["prompt_tokens_details"] or {}
        return int(response.headers["x-d2lpm-predicted-cached-tokens"]), usage["cached_tokens"]


@pytest.mark.parametrize(("dialect", "size"), [("vllm", 16), ("sglang", 16), ("sglang", 1)])
async def test_predictions_are_exact(dialect: str, size: int) -> None:
    """With events and the engine's own tokens, what is predicted is what the engine finds, whatever it has evicted."""
    flags = ("--kv-events=0", f"--dialect={dialect}", f"--block-size={size}", "--kv-tokens=1600")
    with emulated_workers(2, *flags) as urls:
        async with running_router(*urls, token_budget=PATIENCE, min_match_tokens=1) as router:
            hits = 0
            for number in range(40):
                predicted, actual = await ask(router, f"{number % 7} tells " + "a long story " * (30 + number % 3))
                if number > 14:  # before, a worker may have told nothing yet
                    assert predicted == actual
                hits += actual
                changes = router.scheduler.blocks.changes
                await until(lambda seen=changes: router.scheduler.blocks.changes >= seen)  # type: ignore[misc]
            router.scheduler.blocks.check_integrity()
            assert hits


async def test_a_worker_that_leaves_and_joins_is_followed_anew() -> None:
    """Nothing is known of a worker that has left; when it joins again, its past is learned again."""
    with emulated_workers(1, "--kv-events=0") as urls:
        async with running_router(*urls, token_budget=PATIENCE) as router:
            await ask(router, "a long story " * 60)
            blocks = router.scheduler.blocks
            await until(lambda: bool(blocks.blocks))
            held = blocks.blocks
            (worker,) = [state.worker for state in router.scheduler.cluster]
            router.fleet.lost(worker.id)
            router.conductor.feed(WorkerLeft(worker.id))
            assert not blocks.blocks
            router.conductor.feed(WorkerJoined(worker))
            await until(lambda: blocks.blocks == held)


async def test_the_past_is_not_told_as_if_it_were_now() -> None:
    """What was stored and dropped before the subscription is told as it is at its end, at once."""
    async with following(before=0) as scene:
        await until(lambda: bool(scene.publisher.asked))
        for number in range(20):
            removed = {"type": "BlockRemoved", "block_hashes": [number - 1]}
            await scene.publisher.publish(block(number), *([removed] if number else []), lost=True)
        scene.publisher = await scene.publisher.again(past=scene.publisher.past)
        await scene.publisher.subscribed()
        await until(scene.holds(19))
        assert [event for event in scene.told if isinstance(event, BlocksChanged)] == [
            BlocksChanged(WORKER, cleared=True, stored=hashes(19))
        ]


async def test_a_journal_with_events_replays(tmp_path: Path) -> None:
    """What events told is in the journal, so that a replay decides the same."""
    journal = tmp_path / "journal"
    with emulated_workers(2, "--kv-events=0", "--kv-tokens=1600") as urls:
        async with running_router(*urls, token_budget=PATIENCE, journal=journal) as router:
            for number in range(12):
                await ask(router, f"{number % 5} tells " + "a long story " * 30)
            await until(lambda: bool(router.scheduler.blocks.blocks))
    text = journal.read_bytes()
    assert b"BlocksFollowed" in text
    assert b"BlocksChanged" in text
    assert replay_file(journal).difference is None


async def test_the_state_is_in_the_metrics() -> None:
    """Metrics tell which workers are followed, and what came of the calls' tokens."""
    with emulated_workers(1, "--kv-events=0") as urls:
        async with running_router(*urls, token_budget=PATIENCE) as router:
            await ask(router, "a long story " * 60)
            await until(lambda: bool(router.scheduler.blocks.blocks))
            await ask(router, "a long story " * 60)
            async with router.http.get("/metrics") as response:
                text = await response.text()
            (worker,) = [state.worker.id for state in router.scheduler.cluster]
            assert f'd2lpm_kv_events_complete{{worker="{worker}"}} 1.0' in text
            assert 'd2lpm_token_lookups_total{outcome="known"} 1.0' in text


async def test_requests_are_heard_of_once_a_worker_publishes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then a long prompt's end says that news must come."""
    expected: list[WorkerId] = []
    monkeypatch.setattr(Follower, "expects_news", lambda follower: expected.append(follower.backend.id))
    with emulated_workers(1, "--kv-events=0") as urls:
        async with running_router(*urls) as router:
            await ask(router, "a long story ")
            await until(lambda: bool(router.scheduler.blocks.blocks))
            assert not expected
            await ask(router, "a long story " * 1000)
            await until(lambda: bool(expected))
            assert expected == [state.worker.id for state in router.scheduler.cluster]


def test_a_worker_fills_blocks_by_what_it_computes() -> None:
    """A long prompt that was not cached fills some; one that was, that is short, or that failed, may fill none."""
    filled: list[WorkerId] = []
    fills = Fills(filled.append)
    endings: list[Finished | Failed] = [
        Finished(RequestId("computed"), Usage(1024, 1)),
        Finished(RequestId("cached"), Usage(1024, 1, 1)),
        Finished(RequestId("unknown")),
        Failed(RequestId("failed"), accepted=True, usage=Usage(1024, 1)),
        Finished(RequestId("elsewhere"), Usage(1024, 1)),
    ]
    for ending in endings[:-1]:
        decision = Decision(ClientId("ann"), {}, Deficit(), Load(), None, ())
        fills.observe(0.0, Ticked(), [Dispatch(ending.request, WORKER, 0, "room", decision)])
    for ending in endings:
        fills.observe(1.0, ending, [])
    assert filled == [WORKER]

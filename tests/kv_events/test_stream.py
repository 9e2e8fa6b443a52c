"""One publisher over real sockets: followed, repaired, bounded, and given up without harm."""

import asyncio
import logging

import msgpack
import pytest

from router.core.kv_blocks.kv_events import KvEventFault
from router.core.model.events import BlocksChanged, BlocksFollowed, BlocksLost, Evicted
from router.kv_events.stream import StreamLimits
from tests.support.publishing import WORKER, block, followed_publisher, hashes
from tests.support.running import TIMEOUT_S, until


async def test_events_are_told() -> None:
    """From an engine's first message on, all that it stores and drops is told, and nothing else is believed of it."""
    async with followed_publisher(replays=False) as scene:
        await scene.publisher.publish(block(1), block(2))
        await until(scene.holds(1, 2))
        assert scene.events[0] == BlocksFollowed(WORKER, 2)
        await scene.publisher.publish({"type": "BlockRemoved", "block_hashes": [1]}, block(3))
        await until(scene.holds(2, 3))
        assert (scene.complete, scene.faults) == (True, {})


async def test_a_gap_is_repaired() -> None:
    """Messages lost on the way are had again, in order, before what came after them."""
    async with followed_publisher() as scene:
        await scene.publisher.publish(block(1))
        await until(scene.holds(1))
        await scene.publisher.publish({"type": "BlockRemoved", "block_hashes": [1]}, block(2), lost=True)
        await scene.publisher.publish(block(3), lost=True)
        await scene.publisher.publish(block(4))
        await until(scene.holds(2, 3, 4))
        assert (scene.complete, scene.faults, scene.publisher.replay_starts) == (True, {KvEventFault.GAP: 1}, [0, 1])


async def test_a_follower_that_is_stopped_amid_a_repair_stops() -> None:
    """However fast past messages come in: it ends, and takes in no more of them."""
    lost = range(2, 2000)
    async with followed_publisher() as scene:
        await scene.publisher.publish(block(1))
        await until(scene.holds(1))
        for number in lost:
            await scene.publisher.publish(block(number), lost=True)
        await scene.publisher.publish(block(lost.stop))
        async with asyncio.timeout(TIMEOUT_S):
            while len(scene.held) == 1:  # noqa: ASYNC110 - a turn of the loop at a time, or it may be over
                await asyncio.sleep(0)
    assert 1 < len(scene.held) < len(lost)


async def test_a_gap_that_stays_empties_the_view() -> None:
    """What cannot be had again may have removed anything: nothing from before counts, and belief counts again."""
    async with followed_publisher() as scene:
        await scene.publisher.publish(block(1))
        await until(scene.holds(1))
        await scene.publisher.publish(block(2), lost=True, kept=False)
        await scene.publisher.publish(block(3))
        await until(scene.holds(3))
        assert not scene.complete
        assert scene.faults == {KvEventFault.GAP: 1, KvEventFault.UNREPAIRED: 1}
        await scene.publisher.publish({"type": "AllBlocksCleared"}, block(4))
        await until(scene.holds(4))
        assert scene.complete


async def test_a_cold_start_learns_from_the_past() -> None:
    """Who subscribes late and can have all past messages knows all."""
    async with followed_publisher(before=3) as scene:
        await until(scene.holds(100, 101, 102))
        assert scene.complete


async def test_a_cold_start_without_the_past_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """Who subscribes late and cannot have them starts empty, says so, and knows that there may be more."""
    caplog.set_level(logging.INFO)
    async with followed_publisher(before=3, replays=False) as scene:
        await scene.publisher.publish(block(1))
        await until(scene.holds(1))
        assert not scene.complete
    assert "its map starts empty" in caplog.text


async def test_another_process_is_another_cache() -> None:
    """A worker that has restarted is forgotten at once, and what the new one tells counts."""
    async with followed_publisher() as scene:
        for number in range(3):
            await scene.publisher.publish(block(number))
        await until(scene.holds(0, 1, 2))
        scene.publisher = await scene.publisher.restart()
        await until(scene.holds())
        assert scene.events[-1] == BlocksLost(WORKER)
        await scene.publisher.subscribed()
        await scene.publisher.publish(block(7))
        await until(scene.holds(7))
        assert Evicted(WORKER) in scene.events
        assert (scene.complete, scene.faults) == (True, {KvEventFault.DISCONNECTED: 1})


async def test_numbers_that_begin_anew() -> None:
    """A publisher that counts anew behind the same connection is another process too."""
    async with followed_publisher(replays=False) as scene:
        await scene.publisher.publish(block(1))
        await scene.publisher.publish(block(2))
        await until(scene.holds(1, 2))
        await scene.publisher.send_frames(b"kv", bytes(8), msgpack.packb([9.0, [block(3)], 0]))
        await until(scene.holds(3))
        assert Evicted(WORKER) in scene.events
        assert scene.complete


@pytest.mark.parametrize(
    ("frames", "fault"),
    [
        ([b"kv", b"short", b""], KvEventFault.UNREADABLE),
        ([b"kv"], KvEventFault.UNREADABLE),
        ([b"kv2", bytes(8), b""], KvEventFault.FOREIGN_TOPIC),
    ],
)
async def test_what_is_no_message_is_ignored(frames: list[bytes], fault: KvEventFault) -> None:
    """It is counted, and what is known stays."""
    async with followed_publisher() as scene:
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
    async with followed_publisher() as scene:
        await scene.publisher.publish(block(1))
        await until(scene.holds(1))
        await scene.publisher.send_payload(payload)
        await scene.publisher.publish(block(2))
        await until(scene.holds(2))
        assert not scene.complete
        assert set(scene.faults) <= {KvEventFault.UNREADABLE, KvEventFault.BAD_FIELDS}


async def test_garbage_makes_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """However much of it comes, the log gets one line."""
    async with followed_publisher() as scene:
        for _ in range(100):
            await scene.publisher.send_payload(b"\xc1")
        await scene.publisher.publish(block(1))
        await until(scene.holds(1))
        assert scene.faults == {KvEventFault.UNREADABLE: 100}
    assert len(caplog.records) == 1


async def test_a_flood_is_left_alone() -> None:
    """Who sends more than is read is not read for a while, and what it said does not count meanwhile."""
    limits = StreamLimits(burst_bytes=2000, bytes_per_second=1, penalty_seconds=TIMEOUT_S, replay_seconds=TIMEOUT_S)
    async with followed_publisher(limits=limits) as scene:
        await scene.publisher.publish(block(1))
        await until(scene.holds(1))
        for number in range(40):
            await scene.publisher.publish(block(number))
        await until(lambda: KvEventFault.FLOOD in scene.faults)
        assert scene.events[-1] == BlocksLost(WORKER)


async def test_too_many_blocks_are_not_kept() -> None:
    """Who names more blocks than are kept is followed no longer."""
    limits = StreamLimits(blocks=3, penalty_seconds=TIMEOUT_S, replay_seconds=TIMEOUT_S)
    async with followed_publisher(limits=limits) as scene:
        await scene.publisher.publish(block(1), block(2), block(3))
        await until(scene.holds(1, 2, 3))
        await scene.publisher.publish(block(4))
        await until(lambda: KvEventFault.TOO_MANY_BLOCKS in scene.faults)
        assert scene.events[-1] == BlocksLost(WORKER)


async def test_silence_is_noticed() -> None:
    """A publisher that tells nothing of what its engine must have stored is not believed, and subscribed to anew."""
    limits = StreamLimits(silence_seconds=0.05, pause_seconds=0.01, replay_seconds=TIMEOUT_S)
    async with followed_publisher(limits=limits) as scene:
        await scene.publisher.publish(block(1))
        await until(scene.holds(1))
        scene.follower.await_news()
        await until(lambda: KvEventFault.SILENT in scene.faults)
        await until(scene.holds(1))
        assert BlocksLost(WORKER) in scene.events


async def test_the_past_is_not_told_as_if_it_were_now() -> None:
    """What was stored and dropped before the subscription is told as it is at its end, at once."""
    async with followed_publisher(before=0) as scene:
        await until(lambda: bool(scene.publisher.replay_starts))
        for number in range(20):
            removed = {"type": "BlockRemoved", "block_hashes": [number - 1]}
            await scene.publisher.publish(block(number), *([removed] if number else []), lost=True)
        scene.publisher = await scene.publisher.restart(past=scene.publisher.past)
        await scene.publisher.subscribed()
        await until(scene.holds(19))
        assert [event for event in scene.events if isinstance(event, BlocksChanged)] == [
            BlocksChanged(WORKER, cleared=True, stored=hashes(19))
        ]

"""Follows one publisher over real sockets: repairs gaps, enforces limits, and gives the publisher up without harm."""

import asyncio
import logging

import msgpack
import pytest

from router.core.kv_blocks.kv_events import KvEventFault
from router.core.model.events import BlocksChanged, BlocksFollowed, BlocksLost, Evicted
from router.kv_events.stream import SessionPauses, StreamLimits
from tests.support.publishing import WORKER, block, followed_publisher, hashes
from tests.support.running import TIMEOUT_S, until


async def test_events_are_reported() -> None:
    """From an engine's first message on, everything it stores and removes is reported, and nothing else is assumed."""
    async with followed_publisher(replays=False) as scene:
        await scene.publisher.publish(block(1), block(2))
        await until(scene.holds(1, 2))
        assert scene.events[0] == BlocksFollowed(WORKER, 2)
        await scene.publisher.publish({"type": "BlockRemoved", "block_hashes": [1]}, block(3))
        await until(scene.holds(2, 3))
        assert (scene.complete, scene.faults) == (True, {})


async def test_a_gap_is_repaired() -> None:
    """Lost messages are replayed, in order, before the messages that came after them."""
    async with followed_publisher() as scene:
        await scene.publisher.publish(block(1))
        await until(scene.holds(1))
        await scene.publisher.publish({"type": "BlockRemoved", "block_hashes": [1]}, block(2), lost=True)
        await scene.publisher.publish(block(3), lost=True)
        await scene.publisher.publish(block(4))
        await until(scene.holds(2, 3, 4))
        assert (scene.complete, scene.faults, scene.publisher.replay_starts) == (True, {KvEventFault.GAP: 1}, [0, 1])


@pytest.mark.parametrize("dropped", [(2, 3), (4, 5, -1)])
async def test_a_replay_with_a_hole_is_requested_again(dropped: tuple[int, ...]) -> None:
    """What an engine's queue had no room for in one replay is in the next one, so everything is known."""
    limits = StreamLimits(replay_seconds=0.1, replay_every_seconds=0)
    async with followed_publisher(before=6, dropped=dropped, limits=limits) as scene:
        await until(scene.holds(*range(100, 106)))
        assert (scene.complete, scene.faults) == (True, {})


async def test_a_follower_stops_during_a_repair() -> None:
    """A follower that is stopped during a replay applies no more messages, however fast they arrive."""
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


async def test_a_gap_that_cannot_be_repaired_empties_the_view() -> None:
    """Messages that cannot be replayed may have removed any block, so earlier blocks no longer count and estimates
    do.
    """
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


@pytest.mark.parametrize("odd", [{"token_ids": [[1, 2], [2, 3]]}, {"token_ids": [1], "block_size": 1}])
async def test_blocks_that_cannot_be_matched_leave_a_worker_incomplete(odd: dict[str, object]) -> None:
    """Pairs of tokens, and blocks of another size, are cached and match nothing, so estimates count as well."""
    async with followed_publisher() as scene:
        await scene.publisher.publish(block(1))
        await until(scene.holds(1))
        assert scene.complete
        await scene.publisher.publish(block(2) | odd, block(3))
        await until(scene.holds(1, 3))
        assert not scene.complete


async def test_a_late_subscriber_replays_past_messages() -> None:
    """A late subscriber that can replay all past messages knows all blocks."""
    async with followed_publisher(before=3) as scene:
        await until(scene.holds(100, 101, 102))
        assert scene.complete


async def test_a_late_subscriber_without_replay_is_incomplete(caplog: pytest.LogCaptureFixture) -> None:
    """A late subscriber that cannot replay past messages starts empty, logs that, and is not complete."""
    caplog.set_level(logging.INFO)
    async with followed_publisher(before=3, replays=False) as scene:
        await scene.publisher.publish(block(1))
        await until(scene.holds(1))
        assert not scene.complete
    assert "its cache is unknown at first" in caplog.text


async def test_a_restarted_worker_is_forgotten() -> None:
    """The blocks of a worker that restarts are forgotten at once, and those of the new process count."""
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


async def test_restarted_numbering_means_a_new_process() -> None:
    """A publisher that counts from the start again on the same connection is a new process, too."""
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
async def test_invalid_messages_are_ignored(frames: list[bytes], fault: KvEventFault) -> None:
    """Frames that are not a message are counted as a fault, and the known blocks stay."""
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
async def test_an_unreadable_message_empties_the_view(payload: bytes) -> None:
    """An unreadable message may have removed any block: the view is emptied, but the stream continues."""
    async with followed_publisher() as scene:
        await scene.publisher.publish(block(1))
        await until(scene.holds(1))
        await scene.publisher.send_payload(payload)
        await scene.publisher.publish(block(2))
        await until(scene.holds(2))
        assert not scene.complete
        assert set(scene.faults) <= {KvEventFault.UNREADABLE, KvEventFault.BAD_FIELDS}


async def test_garbage_makes_one_log_line_per_minute(caplog: pytest.LogCaptureFixture) -> None:
    """Any number of unreadable messages within a minute makes one log line."""
    async with followed_publisher() as scene:
        for _ in range(100):
            await scene.publisher.send_payload(b"\xc1")
        await scene.publisher.publish(block(1))
        await until(scene.holds(1))
        assert scene.faults == {KvEventFault.UNREADABLE: 100}
    assert len(caplog.records) == 1


async def test_a_flooding_publisher_is_not_read() -> None:
    """A publisher that sends too much is not read for a while, and its blocks do not count meanwhile."""
    limits = StreamLimits(burst_bytes=2000, bytes_per_second=1, penalty_seconds=TIMEOUT_S, replay_seconds=TIMEOUT_S)
    async with followed_publisher(limits=limits) as scene:
        await scene.publisher.publish(block(1))
        await until(scene.holds(1))
        for number in range(40):
            await scene.publisher.publish(block(number))
        await until(lambda: KvEventFault.FLOOD in scene.faults)
        assert scene.events[-1] == BlocksLost(WORKER)


async def test_too_many_blocks_are_not_kept() -> None:
    """A publisher with more blocks than the limit is no longer followed."""
    limits = StreamLimits(blocks=3, penalty_seconds=TIMEOUT_S, replay_seconds=TIMEOUT_S)
    async with followed_publisher(limits=limits) as scene:
        await scene.publisher.publish(block(1), block(2), block(3))
        await until(scene.holds(1, 2, 3))
        await scene.publisher.publish(block(4))
        await until(lambda: KvEventFault.TOO_MANY_BLOCKS in scene.faults)
        assert scene.events[-1] == BlocksLost(WORKER)


def test_a_publisher_that_exceeds_the_limits_again_is_read_more_rarely() -> None:
    """Reading the replay of a publisher takes time, and is in vain while it has more blocks than the router keeps."""
    pauses = SessionPauses(StreamLimits(pause_seconds=1, penalty_seconds=10, longest_penalty_seconds=35))
    faults = [*[KvEventFault.TOO_MANY_BLOCKS] * 4, KvEventFault.DISCONNECTED, KvEventFault.FLOOD, KvEventFault.FLOOD]
    assert list(map(pauses.after, faults)) == [10, 20, 35, 35, 1, 10, 20]


async def test_a_silent_publisher_is_subscribed_to_anew() -> None:
    """A publisher that is silent although its engine must have stored blocks is not trusted, and is subscribed to
    anew.
    """
    limits = StreamLimits(silence_seconds=0.05, pause_seconds=0.01, replay_seconds=TIMEOUT_S)
    async with followed_publisher(limits=limits) as scene:
        await scene.publisher.publish(block(1))
        await until(scene.holds(1))
        scene.follower.await_news(0.0)
        await until(lambda: KvEventFault.SILENT in scene.faults)
        await until(scene.holds(1))
        assert BlocksLost(WORKER) in scene.events


async def test_a_publisher_that_has_reported_a_request_may_be_silent_after_it() -> None:
    """The blocks of a request are published before its end is known; nothing more must come if no request does."""
    limits = StreamLimits(silence_seconds=0.05, pause_seconds=0.01, replay_seconds=TIMEOUT_S)
    async with followed_publisher(limits=limits) as scene:
        await scene.publisher.publish(block(1))
        await until(scene.holds(1))
        scene.follower.await_news(TIMEOUT_S)
        await asyncio.sleep(3 * limits.silence_seconds)
        assert scene.faults == {}
        assert scene.complete


async def test_replayed_messages_are_reported_as_one_change() -> None:
    """What was stored and removed before the subscription is reported once, as the state at the end."""
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

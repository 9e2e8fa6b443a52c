"""The feed of the live page: one computation for all readers, none without readers, and a bound on its cost."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from itertools import count
from typing import Any

import pytest

from router.control.page.feed import MOST_OF_A_CORE, READER_LIMIT, PageFeed
from router.errors import CapacityError
from router.telemetry.report import FairnessReport, Service

REPORT = FairnessReport("dlpm", None, {}, Service(0, 0, 0, 0.0), {})


class Source:
    """Counts the reports that are asked for. The first `failures` of them fail."""

    def __init__(self, failures: int = 0) -> None:
        self.asked = 0
        self.ending = False
        self._failures = failures
        self._times = count()
        self.feed = PageFeed(self.read, list, lambda: self.ending, 0.0, lambda: float(next(self._times)))

    async def read(self) -> FairnessReport:
        self.asked += 1
        if self.asked <= self._failures:
            raise RuntimeError("not yet")
        return REPORT


async def take(frames: AsyncIterator[bytes], number: int) -> list[Any]:
    async with asyncio.timeout(60):
        return [json.loads(await anext(frames))["time"] for _ in range(number)]


async def test_all_readers_get_the_same_frames_computed_once() -> None:
    """Readers see frames in order, none twice, and a frame costs as many reports as one reader would."""
    source = Source()
    async with aclosing(source.feed.frames()) as one, aclosing(source.feed.frames()) as two:
        for times in await asyncio.gather(take(one, 20), take(two, 20)):
            assert times == sorted(set(times))
            assert times[-1] < source.asked
        assert source.feed.readers == 2
    assert source.feed.readers == 0


async def test_without_readers_nothing_is_computed() -> None:
    """The last reader to leave ends the computing; the next one gets a frame of its own time, and no older one."""
    source = Source()
    async with aclosing(source.feed.frames()) as frames:
        await take(frames, 3)
    asked = source.asked
    for _ in range(10):
        await asyncio.sleep(0)
    assert source.asked == asked
    async with aclosing(source.feed.frames()) as frames:
        assert await take(frames, 1) == [float(asked)]


async def test_a_slow_reader_misses_frames() -> None:
    """Frames are not kept for a reader that does not read: it goes on with the latest."""
    source = Source()
    async with aclosing(source.feed.frames()) as slow, aclosing(source.feed.frames()) as fast:
        (first,) = await take(slow, 1)
        last = (await take(fast, 20))[-1]
        (second,) = await take(slow, 1)
        assert second >= last > first + 1


async def test_a_frame_that_fails_is_left_out() -> None:
    """An error inside a report is logged, and the stream goes on."""
    source = Source(failures=3)
    async with aclosing(source.feed.frames()) as frames:
        await take(frames, 1)
    assert source.asked == 4


async def test_streams_end_when_the_router_ends() -> None:
    """Each stream ends by itself, so that no page delays a shutdown."""
    source = Source()

    async def read_to_the_end() -> int:
        return len([frame async for frame in source.feed.frames()])

    readers = [asyncio.create_task(read_to_the_end()) for _ in range(3)]
    async with asyncio.timeout(60):
        while source.asked < 3:  # noqa: ASYNC110 - no code sets an event
            await asyncio.sleep(0)
        source.ending = True
        assert all(await asyncio.gather(*readers))


async def test_the_number_of_readers_is_bounded() -> None:
    """One more than may be is refused, and finds room once another has left."""
    source = Source()
    streams = [source.feed.frames() for _ in range(READER_LIMIT)]
    await asyncio.gather(*(take(stream, 1) for stream in streams))
    with pytest.raises(CapacityError):
        source.feed.check_room()
    await streams.pop().aclose()
    source.feed.check_room()
    for stream in streams:
        await stream.aclose()


def test_a_costly_frame_delays_the_next_one() -> None:
    """Frames take at most a few hundredths of a core, however long one takes; a cheap one comes once a second."""
    feed = PageFeed(Source().read, list, bool)
    for cost in (0.001, 0.02, 0.1, 2.0):
        pause = feed.pause_after(cost)
        assert pause >= 1.0
        assert cost / pause <= MOST_OF_A_CORE
    assert feed.pause_after(0.001) == 1.0

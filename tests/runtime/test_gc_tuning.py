"""When full garbage collections run."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from router.runtime.gc_tuning import MIDDLE_THRESHOLD, YOUNGEST_THRESHOLD, FullCollections, tune_collector
from tests.support.running import until


class Knot:
    """A cycle."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def collector_as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


async def test_a_full_collection_runs_when_no_call_is_in_flight() -> None:
    """An idle router collects all garbage, including frozen objects, and a busy one does not."""
    idle = False
    knot = Knot()
    gone = weakref.ref(knot)
    tune_collector()
    del knot
    asked = 0

    def is_idle() -> bool:
        nonlocal asked
        asked += 1
        return idle

    async with FullCollections(is_idle, min_interval=0.001, max_interval=3600.0) as collector:
        await until(lambda: asked > 2)
        assert (collector.collections, gone() is None) == (0, False)
        idle = True
        await until(lambda: collector.collections > 0)
        assert gone() is None


async def test_a_router_that_is_never_idle_collects_new_objects() -> None:
    """After the longest interval, a busy router collects new garbage, but no frozen objects."""
    async with FullCollections(lambda: False, min_interval=0.001, max_interval=0.01) as collector:
        await until(lambda: collector.collections > 0)
        knot = Knot()
        gone = weakref.ref(knot)
        del knot
        looks = collector.collections
        await until(lambda: collector.collections > looks)
        assert gone() is None


def test_old_objects_are_never_collected_automatically() -> None:
    """The third generation is never collected by the number of new objects."""
    tune_collector()
    before = gc.get_stats()[2]["collections"]
    kept = [[number] for number in range(YOUNGEST_THRESHOLD * MIDDLE_THRESHOLD * 15)]
    assert gc.get_stats()[2]["collections"] == before
    assert gc.get_stats()[1]["collections"] > 0
    assert len(kept) == YOUNGEST_THRESHOLD * MIDDLE_THRESHOLD * 15

"""LPM, in scenarios: the request with the longest cached prefix goes next, unless too many wait."""

import pytest

from router.core.fleet.window import FixedWindow
from router.core.policies.dlpm.lpm import LpmParameters
from router.core.scheduler_settings import SchedulerSettings
from tests.core.scenario import CHUNK_TOKENS, ONE_AT_A_TIME, Scene


def scene(cut_off: int = 0, *, settings: SchedulerSettings = ONE_AT_A_TIME) -> Scene:
    return Scene("rr+lpm", LpmParameters(cut_off), settings=settings)


def test_the_longest_match_goes_first() -> None:
    """Whoever sends it; of equals, the oldest."""
    talk = scene()
    running = talk.arrive("ada", "document 1")
    cold, warm = talk.arrive("bob", "hello"), talk.arrive("ada", "document 2")
    later, warmer = talk.arrive("cyd", "world"), talk.arrive("ada", "document 1?")
    talk.finish(running)
    talk.serve_all()
    assert talk.order == [running, warmer, warm, cold, later]


def test_the_order_follows_the_cache() -> None:
    """A prefix computed for one request moves others up, and an eviction moves them down."""
    talk = scene()
    running, first = talk.arrive("ada", "something"), talk.arrive("ada", "book: why?")
    other, follower = talk.arrive("ada", "letters"), talk.arrive("ada", "book: how?")
    talk.finish(running)
    talk.finish(first)
    assert talk.order == [running, first, follower]
    last = talk.arrive("ada", "book: who?")
    talk.evict("w1")
    talk.finish(follower)
    talk.finish(other)
    assert talk.order[3:] == [other, last]


def test_an_uncached_request_waits_as_long_as_cached_ones_arrive() -> None:
    """Longest match is not fair: waiting does not raise priority."""
    talk = scene()
    talk.arrive("heavy", "document!")
    cold = talk.arrive("light", "hello")
    for letter in "abcdefghij":
        talk.arrive("heavy", "document" + letter)
        talk.serve(talk.order[-1])
    assert cold not in talk.dispatched


def test_above_the_cut_off_the_oldest_request_goes_first() -> None:
    """Above the cut-off matches do not count; at the cut-off they do, for all waiting requests."""
    talk = scene(cut_off=3)
    running = talk.arrive("ada", "document 1")
    first, second, third = (talk.arrive("ada", text) for text in ("one", "two", "three"))
    warm, last = talk.arrive("ada", "document 2"), talk.arrive("ada", "four")
    talk.serve(running)
    talk.serve(first)
    assert talk.order == [running, first, second]
    talk.serve(second)
    assert talk.order[3:] == [warm]
    talk.serve_all()
    assert talk.order[4:] == [third, last]


@pytest.mark.parametrize(("waiting", "goes"), [(128, "warm"), (129, "first")])
def test_the_cut_off_is_that_of_sglang(waiting: int, goes: str) -> None:
    """By default 128 waiting requests are compared, and 129 are not."""
    talk = Scene("rr+lpm", settings=ONE_AT_A_TIME)
    running = talk.arrive("ada", "document 1")
    requests = [talk.arrive("ada", "else") for _ in range(waiting - 1)]
    warm = talk.arrive("ada", "document 2")
    talk.serve(running)
    assert talk.order[1] == {"warm": warm, "first": requests[0]}[goes]


def test_cancelled_requests_do_not_count_towards_the_cut_off() -> None:
    """Cancellations can bring a queue below its cut-off, too."""
    talk = scene(cut_off=2)
    running = talk.arrive("ada", "document 1")
    gone, cold, warm = talk.arrive("ada", "one"), talk.arrive("ada", "two"), talk.arrive("ada", "document 2")
    talk.cancel(gone)
    talk.serve(running)
    assert talk.order == [running, warm]
    assert cold not in talk.dispatched


@pytest.mark.parametrize("cut_off", [0, 1])
def test_no_request_passes_a_head_that_does_not_fit(cut_off: int) -> None:
    """Above the cut-off and below it, room is kept for the request whose turn it is."""
    window = FixedWindow(requests=4, unstarted_tokens=8 * CHUNK_TOKENS)
    talk = scene(cut_off, settings=SchedulerSettings(window=window))
    running = talk.arrive("ada", "first")
    big, small = talk.arrive("ada", "document"), talk.arrive("bob", "a")
    assert talk.order == [running]
    talk.start(running)
    assert talk.order == [running, big]
    talk.start(big)
    assert talk.order == [running, big, small]


def test_a_negative_cut_off_is_rejected() -> None:
    with pytest.raises(ValueError, match="cut_off"):
        LpmParameters(-1)

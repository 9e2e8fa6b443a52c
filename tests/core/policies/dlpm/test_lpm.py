"""LPM sends the request with the longest cached prefix next, unless too many wait."""

import pytest

from router.core.fleet.window import FixedWindow
from router.core.policies.dlpm.dlpm_parameters import LpmParameters
from router.core.scheduler_settings import SchedulerSettings
from tests.core.scenario import CHUNK_TOKENS, ONE_AT_A_TIME, Scene


def new_scene(cut_off: int = 0, *, settings: SchedulerSettings = ONE_AT_A_TIME) -> Scene:
    return Scene("rr+lpm", LpmParameters(cut_off), settings=settings)


def test_the_longest_match_goes_first() -> None:
    """The longest match goes first, whoever sends it; of equals, the oldest."""
    scene = new_scene()
    running = scene.arrive("ada", "document 1")
    cold, warm = scene.arrive("bob", "hello"), scene.arrive("ada", "document 2")
    later, warmer = scene.arrive("cyd", "world"), scene.arrive("ada", "document 1?")
    scene.finish(running)
    scene.serve_all()
    assert scene.order == [running, warmer, warm, cold, later]


def test_the_order_follows_the_cache() -> None:
    """A prefix computed for one request moves others up, and an eviction moves them down."""
    scene = new_scene()
    running, first = scene.arrive("ada", "something"), scene.arrive("ada", "book: why?")
    other, follower = scene.arrive("ada", "letters"), scene.arrive("ada", "book: how?")
    scene.finish(running)
    scene.finish(first)
    assert scene.order == [running, first, follower]
    last = scene.arrive("ada", "book: who?")
    scene.evict("w1")
    scene.finish(follower)
    scene.finish(other)
    assert scene.order[3:] == [other, last]


def test_an_uncached_request_waits_as_long_as_cached_ones_arrive() -> None:
    """Waiting does not raise a request's priority, so longest match is not fair."""
    scene = new_scene()
    scene.arrive("heavy", "document!")
    cold = scene.arrive("light", "hello")
    for letter in "abcdefghij":
        scene.arrive("heavy", "document" + letter)
        scene.serve(scene.order[-1])
    assert cold not in scene.dispatched


def test_above_the_cut_off_the_oldest_request_goes_first() -> None:
    """Above the cut-off matches do not count; at the cut-off they do, for all waiting requests."""
    scene = new_scene(cut_off=3)
    running = scene.arrive("ada", "document 1")
    first, second, third = (scene.arrive("ada", text) for text in ("one", "two", "three"))
    warm, last = scene.arrive("ada", "document 2"), scene.arrive("ada", "four")
    scene.serve(running)
    scene.serve(first)
    assert scene.order == [running, first, second]
    scene.serve(second)
    assert scene.order[3:] == [warm]
    scene.serve_all()
    assert scene.order[4:] == [third, last]


@pytest.mark.parametrize(("waiting", "goes"), [(128, "warm"), (129, "first")])
def test_the_cut_off_is_that_of_sglang(waiting: int, goes: str) -> None:
    """By default 128 waiting requests are compared, and 129 are not."""
    scene = Scene("rr+lpm", settings=ONE_AT_A_TIME)
    running = scene.arrive("ada", "document 1")
    requests = [scene.arrive("ada", "else") for _ in range(waiting - 1)]
    warm = scene.arrive("ada", "document 2")
    scene.serve(running)
    assert scene.order[1] == {"warm": warm, "first": requests[0]}[goes]


def test_cancelled_requests_do_not_count_towards_the_cut_off() -> None:
    """Cancellations can bring a queue below its cut-off, too."""
    scene = new_scene(cut_off=2)
    running = scene.arrive("ada", "document 1")
    gone, cold, warm = scene.arrive("ada", "one"), scene.arrive("ada", "two"), scene.arrive("ada", "document 2")
    scene.cancel(gone)
    scene.serve(running)
    assert scene.order == [running, warm]
    assert cold not in scene.dispatched


@pytest.mark.parametrize("cut_off", [0, 1])
def test_no_request_passes_a_head_that_does_not_fit(cut_off: int) -> None:
    """Above the cut-off and below it, room is kept for the request whose turn it is."""
    window = FixedWindow(requests=4, unstarted_tokens=8 * CHUNK_TOKENS)
    scene = new_scene(cut_off, settings=SchedulerSettings(window=window))
    running = scene.arrive("ada", "first")
    big, small = scene.arrive("ada", "document"), scene.arrive("bob", "a")
    assert scene.order == [running]
    scene.start(running)
    assert scene.order == [running, big]
    scene.start(big)
    assert scene.order == [running, big, small]


def test_a_negative_cut_off_is_rejected() -> None:
    """The error names the parameter."""
    with pytest.raises(ValueError, match="cut_off"):
        LpmParameters(-1)

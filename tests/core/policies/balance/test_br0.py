"""BR-0 chooses the request that fills the emptiest rank best, and sends it there."""

import pytest

from router.core.fleet.window import FixedWindow
from router.core.policies.balance.balance_parameters import Br0Parameters
from router.core.scheduler_settings import SchedulerSettings
from tests.core.scenario import Scene

TWO_PLACES = SchedulerSettings(window=FixedWindow(2, 10**6))


def group(*parameters: object, ranks: int = 2) -> Scene:
    """Return ranks that step together, with two places each."""
    scene = Scene("br0", *parameters, workers=(), settings=TWO_PLACES)
    for number in range(1, ranks + 1):
        scene.join(f"w{number}", barrier="group")
    return scene


def test_a_request_goes_to_the_rank_with_the_most_free_places() -> None:
    """Of ranks with as many free places, the lightest takes it; a cached prefix counts like any other context."""
    scene = group(ranks=3)
    long, short = scene.arrive("ada", "a" * 20), scene.arrive("ada", "b")
    third = scene.arrive("ada", "c")
    assert {scene.worker_of(each) for each in (long, short, third)} == {"w1", "w2", "w3"}
    scene.serve(third)
    again = scene.arrive("ada", "a" * 20)
    assert scene.worker_of(again) == "w3"
    assert scene.worker_of(scene.arrive("ada", "d")) == scene.worker_of(short)


@pytest.mark.parametrize(
    "parameters", [Br0Parameters(), Br0Parameters(threshold=99), Br0Parameters(threshold=99, candidates=9, subset=2)]
)
def test_the_request_that_fills_the_margin_goes_first(parameters: Br0Parameters) -> None:
    """When a place becomes free, the largest request goes that does not make its rank the fullest, whatever came
    first.
    """
    scene = group(parameters)
    running = [scene.arrive("ada", letter * size) for letter, size in zip("abcd", (20, 4, 20, 4), strict=True)]
    assert [scene.worker_of(request) for request in running] == ["w1", "w2", "w2", "w1"]
    waiting = [scene.arrive("ada", letter * size) for letter, size in zip("xyz", (40, 18, 2), strict=True)]
    scene.serve(running[2])
    assert scene.order[4:] == [waiting[1]]
    assert scene.worker_of(waiting[1]) == "w2"
    scene.serve_all()
    assert {*scene.order} == {*running, *waiting}


def test_a_request_that_fits_nowhere_goes_all_the_same() -> None:
    """If every waiting request exceeds the margin, the one with the least loss goes: no place stays empty."""
    scene = group()
    running = [scene.arrive("ada", letter * 4) for letter in "abcd"]
    longer, long = scene.arrive("ada", "x" * 40), scene.arrive("ada", "y" * 30)
    scene.serve(running[0])
    assert scene.order[4:] == [long]
    scene.serve(running[1])
    assert scene.order[5:] == [longer]


def test_a_subset_of_requests_fills_a_margin_that_no_single_one_fills() -> None:
    """With two places free at a rank, stage 2 sends the two requests whose sum fills its margin best."""
    scene = group(Br0Parameters(threshold=99, candidates=9, subset=2), ranks=1)
    sizes = zip("tuvwxyz", (20, 1, 2, 3, 9, 12, 40), strict=True)
    requests = [scene.arrive("ada", letter * size) for letter, size in sizes]
    assert scene.order == requests[:2]
    scene.join("w2", barrier="group")
    assert {*scene.order[2:]} == {requests[4], requests[5]}


def test_bypassing_the_pool_keeps_the_order_of_arrival() -> None:
    """With `bypass`, requests go in order of arrival, each to the rank with the largest score."""
    scene = group(Br0Parameters(bypass=True))
    running = [scene.arrive("ada", letter * size) for letter, size in zip("abc", (20, 4, 9), strict=True)]
    assert [scene.worker_of(request) for request in running] == ["w1", "w2", "w2"]
    assert scene.worker_of(scene.arrive("ada", "d")) == "w1"
    first, _ = scene.arrive("ada", "x" * 40), scene.arrive("ada", "y" * 9)
    scene.serve(running[0])
    assert scene.order[4:] == [first]


def test_groups_are_balanced_apart() -> None:
    """A rank's margin counts up to the fullest of its own group, however full another group is."""
    scene = Scene("br0", Br0Parameters(), workers=(), settings=TWO_PLACES)
    for worker, barrier in (("w1", "one"), ("w2", "one"), ("v1", "two"), ("v2", "two")):
        scene.join(worker, barrier=barrier)
    for letter, size in zip("abcd", (30, 20, 4, 4), strict=True):
        scene.arrive("ada", letter * size)
    assert [scene.worker_of(request) for request in scene.order] == ["w1", "w2", "v1", "v2"]
    assert scene.worker_of(scene.arrive("ada", "e" * 8)) == "w2"  # the only rank with a margin

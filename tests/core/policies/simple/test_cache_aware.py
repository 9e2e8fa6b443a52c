"""The placement `cache_aware` follows SGLang's rule."""

import pytest

from router.core.policies.simple.simple_parameters import CacheAwareParameters
from tests.core.scenario import ONE_AT_A_TIME, Scene

W = ("w1", "w2", "w3")


def test_a_request_goes_to_a_worker_that_holds_enough_of_it() -> None:
    """Enough is more than the threshold of its prompt, once the waiting requests are served, even behind a longer
    queue.
    """
    scene = Scene("cache_aware", CacheAwareParameters(cache_threshold=0.5), workers=W, settings=ONE_AT_A_TIME)
    first = scene.arrive("ada", "document1234")
    for tail in ("abcdefg", "hijklmn"):
        scene.arrive("bob", "document" + tail)
    scene.serve_all()
    assert {scene.worker_of(request) for request in scene.order} == {scene.worker_of(first)}
    assert [scene.dispatched[request].why for request in scene.order] == ["smallest tree", "prefix", "prefix"]
    half = scene.arrive("bob", "document" + "x" * 8)
    assert scene.dispatched[half].why == "smallest tree"


def test_a_miss_goes_to_the_smallest_tree_whatever_its_load() -> None:
    """Tokens sent before count, not running requests: one long prompt outweighs several short ones."""
    scene = Scene("cache_aware", workers=W[:2])
    long = scene.arrive("ada", "a long document")
    scene.serve(long)
    short = [scene.arrive("ada", letter * 3) for letter in "pqrs"]
    assert {scene.worker_of(request) for request in short} == {*W[:2]} - {scene.worker_of(long)}


def test_equally_small_trees_take_turns() -> None:
    """An idle fleet is not filled from one end, and trees at their limit are equal, whatever they were sent."""
    scene = Scene("cache_aware", CacheAwareParameters(tree_tokens=64), workers=W)
    placed = [
        scene.worker_of(scene.arrive("ada", letter * size)) for letter, size in zip("abcdef", (9, 2, 5), strict=False)
    ]
    assert set(placed) == set(W)
    assert {scene.worker_of(scene.arrive("ada", letter * 4)) for letter in "uvw"} == set(W)


@pytest.mark.parametrize(("absolute", "relative", "most"), [(3, 1.0, 5), (0, 3.0, 4), (3, 3.0, 5), (5, 1.0, 7)])
def test_out_of_balance_a_request_goes_to_the_shortest_queue(absolute: int, relative: float, most: int) -> None:
    """Beside a load of one, a hot prefix's worker takes this many requests before it exceeds both thresholds."""
    parameters = CacheAwareParameters(0.3, absolute, relative)
    scene = Scene("cache_aware", parameters, workers=W[:2])
    other = scene.arrive("bob", "x")
    placed = [scene.worker_of(scene.arrive("ada", "document")) for _ in range(12)]
    assert placed.index(scene.worker_of(other)) == most
    assert scene.dispatched[scene.order[1 + most]].why == "load"


def test_a_worker_that_returns_has_an_empty_tree() -> None:
    """The worker's cache is gone, so it gets the next miss."""
    scene = Scene("cache_aware", workers=W[:2])
    for letter in "abcd":
        scene.serve(scene.arrive("ada", letter * 8))
    scene.leave("w1")
    scene.join("w1")
    misses = []
    for letter in "ef":  # one at a time, as a worker that comes back gets them
        misses.append(scene.arrive("ada", letter * 8))
        scene.serve(misses[-1])
    assert [scene.worker_of(miss) for miss in misses] == ["w1", "w1"]


@pytest.mark.parametrize("wrong", ["cache_threshold", "balance_abs_threshold", "balance_rel_threshold", "tree_tokens"])
def test_negative_parameters_are_rejected(wrong: str) -> None:
    """The error names the parameter."""
    with pytest.raises(ValueError, match=wrong):
        CacheAwareParameters(**{wrong: -1})

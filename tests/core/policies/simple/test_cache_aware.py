"""SGLang's cache-aware rule, in scenarios."""

import pytest

from router.core.policies.simple.cache_aware import CacheAwareParameters
from tests.core.scenario import ONE_AT_A_TIME, Scene

W = ("w1", "w2", "w3")


def test_a_request_goes_to_a_worker_that_holds_enough_of_it() -> None:
    """Enough is more than the threshold of its prompt, once the waiting requests are served, even behind a longer
    queue.
    """
    talk = Scene("cache_aware", CacheAwareParameters(cache_threshold=0.5), workers=W, settings=ONE_AT_A_TIME)
    first = talk.arrive("ada", "document1234")
    for tail in ("abcdefg", "hijklmn"):
        talk.arrive("bob", "document" + tail)
    talk.serve_all()
    assert {talk.worker_of(request) for request in talk.order} == {talk.worker_of(first)}
    assert [talk.dispatched[request].why for request in talk.order] == ["smallest tree", "prefix", "prefix"]
    half = talk.arrive("bob", "document" + "x" * 8)
    assert talk.dispatched[half].why == "smallest tree"


def test_a_miss_goes_to_the_smallest_tree_whatever_its_load() -> None:
    """Tokens sent before count, not running requests: one long prompt outweighs several short ones."""
    talk = Scene("cache_aware", workers=W[:2])
    long = talk.arrive("ada", "a long document")
    talk.serve(long)
    short = [talk.arrive("ada", letter * 3) for letter in "pqrs"]
    assert {talk.worker_of(request) for request in short} == {*W[:2]} - {talk.worker_of(long)}


def test_equally_small_trees_take_turns() -> None:
    """An idle fleet is not filled from one end, and trees at their limit are equal, whatever they were sent."""
    talk = Scene("cache_aware", CacheAwareParameters(tree_tokens=64), workers=W)
    placed = [
        talk.worker_of(talk.arrive("ada", letter * size)) for letter, size in zip("abcdef", (9, 2, 5), strict=False)
    ]
    assert set(placed) == set(W)
    assert {talk.worker_of(talk.arrive("ada", letter * 4)) for letter in "uvw"} == set(W)


@pytest.mark.parametrize(("absolute", "relative", "most"), [(3, 1.0, 5), (0, 3.0, 4), (3, 3.0, 5), (5, 1.0, 7)])
def test_out_of_balance_a_request_goes_to_the_shortest_queue(absolute: int, relative: float, most: int) -> None:
    """Beside a load of one, a hot prefix's worker takes this many requests before it exceeds both thresholds."""
    parameters = CacheAwareParameters(0.3, absolute, relative)
    talk = Scene("cache_aware", parameters, workers=W[:2])
    other = talk.arrive("bob", "x")
    placed = [talk.worker_of(talk.arrive("ada", "document")) for _ in range(12)]
    assert placed.index(talk.worker_of(other)) == most
    assert talk.dispatched[talk.order[1 + most]].why == "load"


def test_a_worker_that_returns_has_an_empty_tree() -> None:
    """Its cache is gone, so it receives the next miss."""
    talk = Scene("cache_aware", workers=W[:2])
    for letter in "abcd":
        talk.serve(talk.arrive("ada", letter * 8))
    talk.leave("w1")
    talk.join("w1")
    misses = []
    for letter in "ef":  # one at a time, as a worker that comes back gets them
        misses.append(talk.arrive("ada", letter * 8))
        talk.serve(misses[-1])
    assert [talk.worker_of(miss) for miss in misses] == ["w1", "w1"]


@pytest.mark.parametrize("wrong", ["cache_threshold", "balance_abs_threshold", "balance_rel_threshold", "tree_tokens"])
def test_negative_parameters_are_rejected(wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        CacheAwareParameters(**{wrong: -1})

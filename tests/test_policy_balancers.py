"""Placements that look at load alone."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scenario import MODEL, Scene

from router.core.model import WorkerId
from router.core.policies.balancers import lightest
from router.core.policy import Candidate

W = ("w1", "w2", "w3")


@given(loads=st.lists(st.integers(0, 5), min_size=1, max_size=6), turn=st.integers(0, 100))
def test_the_lightest_is_none_but_the_lightest(loads: list[int], turn: int) -> None:
    """Its load is the least there is, and as many turns as there are equals show each of them once."""
    candidates = [Candidate(WorkerId(f"w{index}"), 0, 1, load) for index, load in enumerate(loads)]
    equals = loads.count(min(loads))
    chosen = [lightest(candidates, turn + step) for step in range(equals)]
    assert {candidate.load for candidate in chosen} == {min(loads)}
    assert len({candidate.worker for candidate in chosen}) == equals


def test_round_robin_takes_turns_whatever_the_load_and_the_prefix() -> None:
    """Every worker gets every third request."""
    talk = Scene("round_robin", workers=W)
    for _ in range(9):
        talk.arrive("ada", "document")
    placed = [talk.worker_of(request) for request in talk.order]
    assert placed == placed[:3] * 3
    assert set(placed) == set(W)


def test_round_robin_takes_turns_for_each_model() -> None:
    """Two models that alternate do not leave each other every second worker."""
    talk = Scene("round_robin", workers=())
    for worker in W[:2]:
        talk.join(worker, MODEL, "qwen")
    requests = [talk.arrive("ada", "document", model=model) for _ in range(4) for model in (MODEL, "qwen")]
    placed = Counter((talk.requests[request].model, talk.worker_of(request)) for request in requests)
    assert set(placed.values()) == {2}


@pytest.mark.parametrize("streamed", [True, False])
def test_least_requests_counts_what_waits_and_what_runs(streamed: bool) -> None:
    """The next request goes where the fewest are, started or not; a worker that finishes is chosen again."""
    talk = Scene("least_requests", workers=W)
    for prompt in "abcdef":
        talk.arrive("ada", prompt, streamed=streamed)
    assert set(Counter(talk.worker_of(request) for request in talk.order).values()) == {2}
    talk.finish(talk.order[3])
    assert talk.worker_of(talk.arrive("ada", "g")) == talk.worker_of(talk.order[3])


def test_a_worker_that_joins_is_the_lightest() -> None:
    """Load flows to it until it is as loaded as the others."""
    talk = Scene("least_requests", workers=W[:2])
    for prompt in "abcd":
        talk.arrive("ada", prompt)
    talk.join("w3")
    assert [talk.worker_of(talk.arrive("ada", prompt)) for prompt in "ef"] == ["w3", "w3"]

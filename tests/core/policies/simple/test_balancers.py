"""Placements that look at no prefix: turns, load and chance."""

from collections import Counter
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.model.request import WorkerId
from router.core.policies.base import Candidate
from router.core.policies.simple.balancers import lightest
from tests.core.scenario import MODEL, Scene

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


def test_each_client_takes_turns_by_itself() -> None:
    """Clients that alternate do not leave each other every second worker."""
    talk = Scene("client_rr+fcfs", workers=W[:2])
    requests = [talk.arrive(client, "document") for _ in range(4) for client in ("ada", "bob")]
    placed = Counter((talk.requests[request].client, talk.worker_of(request)) for request in requests)
    assert set(placed.values()) == {2}
    assert {client: talk.worker_of(talk.arrive(client, "document")) for client in ("ada", "bob")} == {
        "ada": "w1",
        "bob": "w2",
    }


def test_clients_that_send_one_request_each_spread_over_the_workers() -> None:
    """They begin at different workers, model by model."""
    talk = Scene("client_rr+fcfs", workers=())
    for worker in W[:2]:
        talk.join(worker, MODEL, "qwen")
    for number in range(8):
        talk.arrive(f"c{number}", "document", model=(MODEL, "qwen")[number % 2])
    placed = Counter((talk.requests[request].model, talk.worker_of(request)) for request in talk.order)
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


def ranks_chosen(policy: str, workers: tuple[str, ...]) -> set[str]:
    """Among how loaded a worker's peers each of many requests was placed, some of which end."""
    talk, random, seen = Scene(policy, workers=workers), Random(1), set[str]()
    for _ in range(200):
        loads = {state.worker.id: state.load.requests for state in talk.scheduler.cluster}
        chosen = loads[talk.worker_of(talk.arrive("ada", "document"))]
        least, most = min(loads.values()), max(loads.values())
        if list(loads.values()).count(most) == 1 and len(loads) > 1:
            seen.add("most" if chosen == most else "least" if chosen == least else "between")
        if random.random() < 0.6:
            talk.serve(random.choice(list(talk.scheduler.ledger.bills)))
    return seen


def test_of_two_choices_the_lighter_one_is_taken() -> None:
    """The most loaded worker never, the lightest not always; of two workers always the lighter; and one will do."""
    assert ranks_chosen("two_choices", W) == {"least", "between"}
    assert ranks_chosen("two_choices", W[:2]) == {"least"}
    assert not ranks_chosen("two_choices", W[:1])
    assert ranks_chosen("random", W) == {"most", "least", "between"}


@pytest.mark.parametrize("policy", ["random", "two_choices"])
def test_chance_favours_no_worker(policy: str) -> None:
    """On an idle fleet each gets its third, and no turns are taken."""
    talk = Scene(policy, workers=W)
    for _ in range(600):
        talk.serve(talk.arrive("ada", "document"))
    placed = [talk.worker_of(request) for request in talk.order]
    assert all(160 <= count <= 240 for count in Counter(placed).values())
    pairs = Counter(pairwise(placed))
    assert len(pairs) == 9
    assert min(pairs.values()) > 30


def test_chance_is_seeded() -> None:
    """The same seed places alike, so that a history can be played again."""
    first, second = (Scene("random", workers=W) for _ in range(2))
    for talk in (first, second):
        for _ in range(20):
            talk.arrive("ada", "document")
    assert [first.worker_of(request) for request in first.order] == [second.worker_of(r) for r in second.order]

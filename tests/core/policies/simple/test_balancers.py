"""These placements ignore prefixes and choose by turn, load or chance."""

from collections import Counter
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.model.events import FrontAway, FrontBack
from router.core.model.request import WorkerId
from router.core.policies.base import Candidate
from router.core.policies.simple.balancers import lightest
from tests.core.scenario import CHUNK_TOKENS, MODEL, ONE_AT_A_TIME, Scene

W = ("w1", "w2", "w3")


@given(loads=st.lists(st.integers(0, 5), min_size=1, max_size=6), turn=st.integers(0, 100))
def test_lightest_has_the_lowest_load(loads: list[int], turn: int) -> None:
    """The chosen worker has the lowest load, and successive turns choose each of the equals once."""
    candidates = [Candidate(WorkerId(f"w{index}"), 0, 1, load) for index, load in enumerate(loads)]
    equals = loads.count(min(loads))
    chosen = [lightest(candidates, turn + step) for step in range(equals)]
    assert {candidate.load for candidate in chosen} == {min(loads)}
    assert len({candidate.worker for candidate in chosen}) == equals


def test_calls_of_a_lost_front_are_no_load() -> None:
    """Calls whose front is away count at no worker until it comes back."""
    scene = Scene("least_requests", workers=W[:2])
    first, second, third = (scene.arrive("ada", "document") for _ in range(3))
    busy = scene.worker_of(third)
    (other,) = {*W[:2]} - {busy}
    away = tuple(each for each in (first, second, third) if scene.worker_of(each) == busy)
    scene.feed(FrontAway(away))
    assert scene.worker_of(scene.arrive("ada", "document")) == busy
    scene.feed(FrontBack(away))
    assert [scene.worker_of(scene.arrive("ada", "document")) for _ in range(2)] == [other, other]


def test_round_robin_ignores_load_and_prefix() -> None:
    """Every worker gets every third request."""
    scene = Scene("round_robin", workers=W)
    for _ in range(9):
        scene.arrive("ada", "document")
    placed = [scene.worker_of(request) for request in scene.order]
    assert placed == placed[:3] * 3
    assert set(placed) == set(W)


def test_round_robin_rotates_per_model() -> None:
    """Two models that alternate do not leave each other only every second worker."""
    scene = Scene("round_robin", workers=())
    for worker in W[:2]:
        scene.join(worker, MODEL, "qwen")
    requests = [scene.arrive("ada", "document", model=model) for _ in range(4) for model in (MODEL, "qwen")]
    placed = Counter((scene.requests[request].model, scene.worker_of(request)) for request in requests)
    assert set(placed.values()) == {2}


def test_client_round_robin_rotates_per_client() -> None:
    """Clients that alternate do not leave each other only every second worker."""
    scene = Scene("client_rr+fcfs", workers=W[:2])
    requests = [scene.arrive(client, "document") for _ in range(4) for client in ("ada", "bob")]
    placed = Counter((scene.requests[request].client, scene.worker_of(request)) for request in requests)
    assert set(placed.values()) == {2}
    assert {client: scene.worker_of(scene.arrive(client, "document")) for client in ("ada", "bob")} == {
        "ada": "w1",
        "bob": "w2",
    }


def test_clients_that_send_one_request_each_spread_over_the_workers() -> None:
    """Clients start at different workers, per model."""
    scene = Scene("client_rr+fcfs", workers=())
    for worker in W[:2]:
        scene.join(worker, MODEL, "qwen")
    for number in range(8):
        scene.arrive(f"c{number}", "document", model=(MODEL, "qwen")[number % 2])
    placed = Counter((scene.requests[request].model, scene.worker_of(request)) for request in scene.order)
    assert set(placed.values()) == {2}


@pytest.mark.parametrize("streamed", [True, False])
def test_least_requests_counts_waiting_and_running_requests(streamed: bool) -> None:
    """The next request goes to the worker with the fewest requests, started or not; a worker that finishes is chosen
    again.
    """
    scene = Scene("least_requests", workers=W)
    for prompt in "abcdef":
        scene.arrive("ada", prompt, streamed=streamed)
    assert set(Counter(scene.worker_of(request) for request in scene.order).values()) == {2}
    scene.finish(scene.order[3])
    assert scene.worker_of(scene.arrive("ada", "g")) == scene.worker_of(scene.order[3])


def test_a_new_worker_has_the_lowest_load() -> None:
    """A new worker gets all requests until it is as loaded as the others."""
    scene = Scene("least_requests", workers=W[:2])
    for prompt in "abcd":
        scene.arrive("ada", prompt)
    scene.join("w3")
    assert [scene.worker_of(scene.arrive("ada", prompt)) for prompt in "ef"] == ["w3", "w3"]


def test_least_kv_counts_whole_inputs_and_output() -> None:
    """A long prompt counts though it is cached, and so does output: two short requests go to the other worker, but not
    the next one, when one of them has streamed more tokens than they lack of the long one.
    """
    scene = Scene("least_kv", workers=W[:2])
    for _ in range(4):
        scene.serve(scene.arrive("ada", "d" * 20))
    long = scene.arrive("ada", "d" * 20)
    assert scene.dispatched[long].cached_tokens > 0
    first, second = scene.arrive("ada", "x" * 8), scene.arrive("ada", "y" * 8)
    assert scene.worker_of(first) == scene.worker_of(second) != scene.worker_of(long)
    scene.start(first)
    scene.progress(first, 10 * CHUNK_TOKENS)
    assert scene.worker_of(scene.arrive("ada", "z")) == scene.worker_of(long)


@pytest.mark.parametrize("policy", ["least_kv", "two_choices_kv"])
def test_placement_by_tokens_counts_the_inputs_that_wait(policy: str) -> None:
    """With no room anywhere, two short requests wait for one worker while a long one waits for the other, and the next
    one for the other once the long one is gone.
    """
    scene = Scene(policy, workers=W[:2], settings=ONE_AT_A_TIME)
    assert {scene.worker_of(scene.arrive("ada", letter * 4)) for letter in "ab"} == {*W[:2]}
    long = scene.arrive("ada", "x" * 20)
    first, second = scene.arrive("ada", "y" * 2), scene.arrive("ada", "z" * 2)
    scene.cancel(long)
    last = scene.arrive("ada", "w" * 2)
    scene.serve_all()
    assert scene.worker_of(first) == scene.worker_of(second) != scene.worker_of(last)


def ranks_chosen(policy: str, workers: tuple[str, ...]) -> set[str]:
    """Return the ranks by load of the workers that many requests were placed on, while some requests end."""
    scene, random, seen = Scene(policy, workers=workers), Random(1), set[str]()
    for _ in range(200):
        loads = {state.worker.id: state.load.requests for state in scene.scheduler.fleet}
        chosen = loads[scene.worker_of(scene.arrive("ada", "document"))]
        least, most = min(loads.values()), max(loads.values())
        if list(loads.values()).count(most) == 1 and len(loads) > 1:
            seen.add("most" if chosen == most else "least" if chosen == least else "between")
        if random.random() < 0.6:
            scene.serve(random.choice(list(scene.scheduler.attempts)))
    return seen


def test_two_choices_takes_the_lighter_of_two() -> None:
    """The most loaded worker is never chosen and the lightest not always; of two workers the lighter is; one worker is
    enough.
    """
    assert ranks_chosen("two_choices", W) == {"least", "between"}
    assert ranks_chosen("two_choices", W[:2]) == {"least"}
    assert not ranks_chosen("two_choices", W[:1])
    assert ranks_chosen("random", W) == {"most", "least", "between"}


@pytest.mark.parametrize("policy", ["random", "two_choices", "two_choices_kv"])
def test_random_placement_favours_no_worker(policy: str) -> None:
    """On an idle fleet each of three workers gets a third, and not in rotation."""
    scene = Scene(policy, workers=W)
    for _ in range(600):
        scene.serve(scene.arrive("ada", "document"))
    placed = [scene.worker_of(request) for request in scene.order]
    assert all(160 <= count <= 240 for count in Counter(placed).values())
    pairs = Counter(pairwise(placed))
    assert len(pairs) == 9
    assert min(pairs.values()) > 30


def test_random_placement_is_seeded() -> None:
    """The same seed gives the same placements, so that a history can be replayed."""
    first, second = (Scene("random", workers=W) for _ in range(2))
    for scene in (first, second):
        for _ in range(20):
            scene.arrive("ada", "document")
    assert [first.worker_of(request) for request in first.order] == [second.worker_of(r) for r in second.order]

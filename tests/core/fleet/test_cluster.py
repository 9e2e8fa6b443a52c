"""The cluster knows the workers, their models, their capacity and their speed."""

from math import inf

import pytest

from router.core.fleet.cluster import Cluster
from router.core.fleet.window import FixedWindow, LearnedWindow
from router.core.model.cost import NOTHING, Tokens
from router.core.model.events import WorkerReported
from router.core.model.request import RequestId, Worker, WorkerId

W1, W2, W3 = WorkerId("w1"), WorkerId("w2"), WorkerId("w3")
A = RequestId("a")


def cluster(*workers: WorkerId) -> Cluster:
    made = Cluster(FixedWindow())
    for worker in workers or (W1, W2):
        made.join(Worker(worker, frozenset(["llama"])))
    return made


def test_workers_serve_their_models_in_the_order_in_which_they_joined() -> None:
    """New facts about a worker change its models, not its position."""
    made = cluster(W2, W1)
    made.join(Worker(W2, frozenset(["llama", "qwen"])))
    assert ([*made.serving("llama")], [*made.serving("qwen")]) == ([W2, W1], [W2])


def test_a_worker_that_left_serves_nothing_and_stays_until_its_requests_have_ended() -> None:
    """A worker is forgotten when the last of its requests has ended."""
    made = cluster()
    state = made[W1]
    flight = state.add(A, 10, 5, 0.0, streamed=True)
    assert [*made.serving("llama")] == [W1, W2]
    made.leave(W1)
    made.forget_if_gone(state)
    assert ([*made.serving("llama")], W1 in made) == ([W2], True)
    state.remove(flight, 1.0, computed=True)
    made.forget_if_gone(state)
    assert W1 not in made


def test_an_idle_worker_that_left_is_forgotten_when_that_is_asked_for() -> None:
    """Until then it is known, as long as the policy has it."""
    made = cluster()
    made.leave(W1)
    assert (W1 in made, made.in_use(W1)) == (True, False)
    made.forget_if_gone(made[W1])
    assert [state.worker.id for state in made] == [W2]


def test_a_worker_that_comes_back_keeps_what_runs_there() -> None:
    """A worker that was away for a moment keeps its load."""
    made = cluster()
    state = made[W1]
    flight = state.add(A, 10, 5, 0.0, streamed=True)
    made.leave(W1)
    made.join(Worker(W1, frozenset(["llama"])))
    assert ([*made.serving("llama")], made[W1].load.requests) == ([W1, W2], 1)
    state.remove(flight, 1.0, computed=True)
    made.forget_if_gone(state)
    assert W1 in made


def test_a_reported_capacity_stays() -> None:
    """Neither a report nor a join without a capacity removes a known one."""
    made = cluster()
    made.on_report(WorkerReported(W1, running=3, waiting=2, kv_tokens=500), 1.0)
    made.on_report(WorkerReported(W1, running=1, waiting=0), 2.0)
    made.join(Worker(W1, frozenset(["llama"])))
    assert made[W1].worker.kv_tokens == 500


def test_a_capacity_known_at_the_join_limits_the_window() -> None:
    """The window knows the capacity from the beginning."""
    made = Cluster(LearnedWindow())
    made.join(Worker(W1, frozenset(["llama"]), kv_tokens=100))
    made[W1].add(A, 90, 50, 0.0, streamed=True)
    assert not made[W1].has_room


def busy(made: Cluster, worker: WorkerId, rate: float) -> None:
    """Keep a worker full for thirty seconds while it serves `rate` cost units in each."""
    state = made[worker]
    flight = state.add(A, 1, 5, 0.0, streamed=True)
    state.start(flight, 0.0, seen=True)
    for second in range(1, 31):
        state.serve(flight, NOTHING, Tokens(output=1), rate)
        state.on_report(1, 0, None, float(second))


def test_speed_is_the_rate_of_service_over_the_fleets_mean() -> None:
    """The mean covers full workers; a worker of unknown rate counts as the mean."""
    made = Cluster(FixedWindow(requests=1))
    for worker in (W1, W2, W3):
        made.join(Worker(worker, frozenset(["llama"])))
    assert made.speed(W1) == 1.0
    busy(made, W1, 400.0)
    busy(made, W2, 100.0)
    assert made.speed(W1) == pytest.approx(1.6, rel=0.05)
    assert made.speed(W2) == pytest.approx(0.4, rel=0.05)
    assert made.speed(W3) == 1.0


def test_workers_that_are_about_equally_fast_are_equal() -> None:
    """Rates also differ with what is served, which must not move shares."""
    made = Cluster(FixedWindow(requests=1))
    for worker in (W1, W2):
        made.join(Worker(worker, frozenset(["llama"])))
    busy(made, W1, 110.0)
    busy(made, W2, 90.0)
    assert made.speed(W1) == made.speed(W2) == 1.0


def test_a_deadline_is_gone_with_its_worker() -> None:
    """A forgotten worker has no deadline."""
    made = cluster()
    state = made[W1]
    flight = state.add(A, 10, 5, 0.0, streamed=False)
    assert made.index.next_deadline < inf
    made.leave(W1)
    state.remove(flight, 0.0, computed=True)
    made.forget_if_gone(state)
    assert made.index.next_deadline == inf


def test_unknown_models_are_not_cached() -> None:
    """Clients may name any number of models; only served ones are cached."""
    made = cluster()
    for number in range(1000):
        assert not made.serving(f"invented {number}")
    assert len(made._serving) == 0

"""The workers as the core knows them."""

from router.core.cluster import Cluster
from router.core.model import RequestId, Worker, WorkerId, WorkerReported
from router.core.window import FixedWindow, Load

W1, W2 = WorkerId("w1"), WorkerId("w2")
A, B = RequestId("a"), RequestId("b")


def cluster(*workers: WorkerId) -> Cluster:
    made = Cluster(FixedWindow())
    for worker in workers or (W1, W2):
        made.join(Worker(worker, frozenset(["llama"])))
    return made


def test_workers_serve_their_models_in_the_order_in_which_they_joined() -> None:
    """New facts about a worker change what it serves, not its place."""
    made = cluster(W2, W1)
    made.join(Worker(W2, frozenset(["llama", "qwen"])))
    assert (made.serving("llama"), made.serving("qwen")) == ([W2, W1], [W2])


def test_a_worker_that_left_serves_nothing_and_stays_until_its_requests_have_ended() -> None:
    """What runs there is counted to its end; then the worker is forgotten."""
    made = cluster()
    made[W1].add(A, 10, streamed=True)
    assert made.serving("llama") == [W1, W2]
    made.leave(W1)
    assert (made.serving("llama"), W1 in made) == ([W2], True)
    made.remove(A, W1)
    assert W1 not in made


def test_an_idle_worker_that_leaves_is_forgotten_at_once() -> None:
    """Nothing holds it."""
    made = cluster()
    made.leave(W1)
    assert [state.worker.id for state in made] == [W2]


def test_a_worker_that_comes_back_keeps_what_runs_there() -> None:
    """A worker that was away for a moment has not lost its load."""
    made = cluster()
    made[W1].add(A, 10, streamed=True)
    made.leave(W1)
    made.join(Worker(W1, frozenset(["llama"])))
    assert (made.serving("llama"), made[W1].load) == ([W1, W2], Load(1, 1, 10))
    made.remove(A, W1)
    assert W1 in made


def test_load_counts_what_waits_for_its_first_token() -> None:
    """A start takes a request's tokens from the count once, and an end whatever is left of it."""
    state = cluster()[W1]
    state.add(A, 10, streamed=True)
    state.add(B, 5, streamed=True)
    assert state.load == Load(2, 2, 15)
    state.start(A, 0.0)
    state.start(A, 0.0)
    assert state.load == Load(2, 1, 5)
    state.remove(A)
    state.remove(B)
    assert state.load == Load(0, 0, 0)


def test_a_call_that_does_not_stream_counts_as_started() -> None:
    """Its first token will never be seen, so it must not hold up what can be."""
    state = cluster()[W1]
    state.add(A, 10, streamed=False)
    assert state.load == Load(1, 0, 0)


def test_reports_are_kept_and_a_capacity_once_told_stays() -> None:
    """A worker that falls silent about its cache has not lost it."""
    made = cluster()
    made.report(WorkerReported(W1, running=3, waiting=2, kv_tokens=500))
    made.report(WorkerReported(W1, running=1, waiting=0))
    assert (made[W1].engine_running, made[W1].engine_waiting) == (1, 0)
    assert made[W1].worker.kv_tokens == 500


def test_invented_models_leave_no_trace() -> None:
    """Clients may name models without end; only those that somebody serves are remembered."""
    made = cluster()
    for number in range(1000):
        assert made.serving(f"invented {number}") == []
    assert len(made._serving) == 0

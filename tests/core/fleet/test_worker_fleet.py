"""The fleet knows the workers, their models, their capacity and their speed."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.fleet.health import HealthRules
from router.core.fleet.window import FixedWindow, LearnedWindow
from router.core.fleet.worker_fleet import WorkerFleet
from router.core.model.cost import NOTHING, Tokens
from router.core.model.events import WorkerReported
from router.core.model.request import BarrierId, RequestId, Worker, WorkerId

W1, W2, W3 = WorkerId("w1"), WorkerId("w2"), WorkerId("w3")
A = RequestId("a")


def fleet(*workers: WorkerId) -> WorkerFleet:
    made = WorkerFleet(FixedWindow())
    for worker in workers or (W1, W2):
        made.join(Worker(worker, frozenset(["llama"])))
    return made


def test_workers_serve_their_models_in_the_order_in_which_they_joined() -> None:
    """New facts about a worker change its models, not its position."""
    made = fleet(W2, W1)
    made.join(Worker(W2, frozenset(["llama", "qwen"])))
    assert ([*made.serving("llama")], [*made.serving("qwen")]) == ([W2, W1], [W2])


def test_a_worker_that_left_serves_nothing_and_stays_until_its_requests_have_ended() -> None:
    """A worker is forgotten when the last of its requests has ended."""
    made = fleet()
    state = made[W1]
    flight = state.add(10, 5, 0.0, streamed=True)
    assert [*made.serving("llama")] == [W1, W2]
    made.leave(W1)
    made.forget_if_gone(state)
    assert ([*made.serving("llama")], W1 in made) == ([W2], True)
    state.remove(flight, 1.0, computed=True)
    made.forget_if_gone(state)
    assert W1 not in made


def test_an_idle_worker_that_left_is_forgotten_when_that_is_asked_for() -> None:
    """Until then it is known, as long as the policy has it."""
    made = fleet()
    made.leave(W1)
    assert (W1 in made, made.in_use(W1)) == (True, False)
    made.forget_if_gone(made[W1])
    assert [state.worker.id for state in made] == [W2]


def test_a_worker_that_comes_back_keeps_what_runs_there() -> None:
    """A worker that was away for a moment keeps its load."""
    made = fleet()
    state = made[W1]
    flight = state.add(10, 5, 0.0, streamed=True)
    made.leave(W1)
    made.join(Worker(W1, frozenset(["llama"])))
    assert ([*made.serving("llama")], made[W1].load.requests) == ([W1, W2], 1)
    state.remove(flight, 1.0, computed=True)
    made.forget_if_gone(state)
    assert W1 in made


def test_a_reported_capacity_stays() -> None:
    """Neither a report nor a join without a capacity removes a known one."""
    made = fleet()
    made.on_report(WorkerReported(W1, running=3, waiting=2, kv_tokens=500), 1.0)
    made.on_report(WorkerReported(W1, running=1, waiting=0), 2.0)
    made.join(Worker(W1, frozenset(["llama"])))
    assert made[W1].worker.kv_tokens == 500


def test_a_capacity_known_at_the_join_limits_the_window() -> None:
    """The window knows the capacity from the beginning."""
    made = WorkerFleet(LearnedWindow())
    made.join(Worker(W1, frozenset(["llama"]), kv_tokens=100))
    made[W1].add(90, 50, 0.0, streamed=True)
    assert not made[W1].has_room


def busy(made: WorkerFleet, worker: WorkerId, rate: float) -> None:
    """Keep a worker full for thirty seconds while it serves `rate` cost units in each."""
    state = made[worker]
    flight = state.add(1, 5, 0.0, streamed=True)
    state.start(flight, 0.0, seen=True)
    for second in range(1, 31):
        state.serve(flight, NOTHING, Tokens(output=1), rate)
        state.on_report(1, 0, None, float(second))


def test_speed_is_the_rate_of_service_over_the_fleets_mean() -> None:
    """The mean covers full workers; a worker of unknown rate counts as the mean."""
    made = WorkerFleet(FixedWindow(requests=1))
    for worker in (W1, W2, W3):
        made.join(Worker(worker, frozenset(["llama"])))
    assert made.rates.speed(W1) == 1.0
    busy(made, W1, 400.0)
    busy(made, W2, 100.0)
    assert made.rates.speed(W1) == pytest.approx(1.6, rel=0.05)
    assert made.rates.speed(W2) == pytest.approx(0.4, rel=0.05)
    assert made.rates.speed(W3) == 1.0


def test_workers_that_are_about_equally_fast_are_equal() -> None:
    """Rates also differ with what is served, which must not move shares."""
    made = WorkerFleet(FixedWindow(requests=1))
    for worker in (W1, W2):
        made.join(Worker(worker, frozenset(["llama"])))
    busy(made, W1, 110.0)
    busy(made, W2, 90.0)
    assert made.rates.speed(W1) == made.rates.speed(W2) == 1.0


def test_a_deadline_is_gone_with_its_worker() -> None:
    """A forgotten worker has no deadline."""
    made = fleet()
    state = made[W1]
    flight = state.add(10, 5, 0.0, streamed=False)
    assert made.index.next_deadline < inf
    made.leave(W1)
    state.remove(flight, 0.0, computed=True)
    made.forget_if_gone(state)
    assert made.index.next_deadline == inf


def test_unknown_models_are_not_cached() -> None:
    """Clients may name any number of models; only served ones are cached."""
    made = fleet()
    for number in range(1000):
        assert not made.serving(f"invented {number}")
    assert len(made._serving) == 0


class VisitedFleet(WorkerFleet):
    """Counts how often a group was visited."""

    visits = 0

    def group(self, worker: WorkerId) -> list[WorkerId]:
        self.visits += 1
        return super().group(worker)


def ranks(made: WorkerFleet) -> WorkerFleet:
    """Let two groups of four ranks and a worker alone join, all with the same model."""
    for number in range(9):
        group = None if number == 8 else BarrierId(f"group {number // 4}")
        made.join(Worker(WorkerId(f"w{number}"), frozenset(["llama"]), barrier=group))
    return made


@pytest.mark.interpreted("a test extends the fleet")
def test_no_ejected_worker_is_visited_before_its_time() -> None:
    """However many events there are, groups are visited once after each change, and when a worker is due."""
    made = VisitedFleet(FixedWindow())
    for worker in ranks(made).group(W1):
        made.eject(worker, 10.0)
    assert made.to_readmit(0.0) == []
    before = made.visits
    for event in range(1000):
        assert made.to_readmit(event / 100) == []
        assert made.next_readmission == 10.0
    assert made.visits == before
    assert made.to_readmit(10.0) == made.group(W1)


@given(
    st.lists(
        st.tuples(st.sampled_from(["eject", "leave", "join", "answer", "call", "wait"]), st.integers(0, 8)),
        max_size=60,
    )
)
def test_workers_are_readmitted_when_they_are_due(steps: list[tuple[str, int]]) -> None:
    """Ejected workers are due once the time of their group is over and all of it answer, or if they are missed."""
    made, now, calls = ranks(WorkerFleet(FixedWindow(), HealthRules(silence=5.0))), 0.0, 0
    for step, number in steps:
        worker = WorkerId(f"w{number}")
        is_present = worker in made and not made[worker].left
        match step:
            case "eject" if is_present:
                made.eject(worker, now + number)
            case "leave" if is_present:
                made.leave(worker)
            case "join":
                group = None if number == 8 else BarrierId(f"group {number // 4}")
                made.join(Worker(worker, frozenset(["llama"]), barrier=group))
            case "answer" if is_present:
                made[worker].mark_answering(now)
            case "call" if is_present:
                calls += 1
                made[worker].add(10, 5, now, streamed=True)
            case "wait":
                now += number
                made.advance(now)
        assert set(made.to_readmit(now)) == due(made, now)
        for each in due(made, now):
            made.readmit(each, now)
        assert not made.to_readmit(now)


def due(made: WorkerFleet, now: float) -> set[WorkerId]:
    """Return the workers that are to be readmitted, by visiting all."""
    found = set()
    for worker, until in made.ejected.items():
        group = made.group(worker)
        is_silent = any(made[each].silent for each in group)
        latest = max([until, *[made.ejected[each] for each in group if each in made.ejected]])
        if not made.serving("llama") or (latest <= now and not is_silent):
            found.add(worker)
    return found

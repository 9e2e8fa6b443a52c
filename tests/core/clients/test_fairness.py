"""Jain's index, waiting times, and whose gap is measured where."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.clients.fairness import WAITS_KEPT, Fairness, RecentService, jain_index, percentile
from router.core.clients.last_minute import MINUTE
from router.core.clients.service_gap import Outstanding
from router.core.clients.shares import Shares
from router.core.fleet.window import FixedWindow
from router.core.model.cost import LinearCost
from router.core.model.request import ClientId, Request, RequestId, WorkerId
from router.core.settings import SchedulerSettings
from tests.core.scenario import Scene

ADA, BOB = ClientId("ada"), ClientId("bob")
W1, W2 = WorkerId("w1"), WorkerId("w2")


def request(client: ClientId, weight: float = 1.0) -> Request:
    return Request(RequestId("r"), client, "llama", (), weight=weight)


def backlogged(*clients: ClientId, queue: WorkerId | None = W1, pooled: bool = False) -> Fairness:
    fairness = Fairness(LinearCost(), Shares(), pooled=pooled)
    for client in clients:
        fairness.backlog_began(queue, client, 0.0)
    return fairness


@given(shares=st.lists(st.integers(0, 1000), min_size=1))
def test_jain_lies_between_one_nth_and_one(shares: list[int]) -> None:
    """1 when all are equal, 1/n when one has everything; no index where there is nothing to share."""
    index = jain_index(shares)
    if index is None:
        assert not any(shares)
    else:
        assert 1 / len(shares) - 1e-9 <= index <= 1 + 1e-9
    assert jain_index([7] * len(shares)) == pytest.approx(1)
    assert jain_index([7, *[0] * (len(shares) - 1)]) == pytest.approx(1 / len(shares))


@given(values=st.lists(st.integers(), min_size=1), share=st.floats(0.01, 1))
def test_a_percentile_is_the_smallest_value_that_is_enough(values: list[int], share: float) -> None:
    """At least the share of the values does not exceed it, and no smaller value has that."""
    found = percentile(values, share)
    enough = [v for v in values if sum(other <= v for other in values) >= share * len(values) - 1e-9]
    assert found == min(enough)


def test_there_is_no_percentile_of_nothing() -> None:
    """None, not zero."""
    assert percentile([], 0.95) is None


@given(steps=st.lists(st.tuples(st.floats(0, 40), st.integers(0, 100)), max_size=20), later=st.floats(0, 80))
def test_recent_service_is_that_of_the_last_minute(steps: list[tuple[float, int]], later: float) -> None:
    """To the second: what is older is forgotten, what is younger is counted."""
    recent, now, diary = RecentService(), 0.0, []
    for pause, service in steps:
        now += pause
        recent.add(service, 2.0, now)
        diary.append((now, service))
    now += later
    certain = sum(service for at, service in diary if at >= now - MINUTE + 1)
    possible = sum(service for at, service in diary if at >= now - MINUTE)
    assert certain <= recent.cost(now) <= possible
    assert recent.per_weight(now) == recent.cost(now) / 2


def test_jain_looks_at_those_that_were_backlogged_lately() -> None:
    """Who never had to wait had all it wanted, and who waited long ago is another time's matter."""
    fairness = backlogged(ADA, BOB)
    for client, service in ((ADA, 30), (BOB, 10), (ClientId("never waited"), 1000)):
        fairness.add_service(request(client), W1, service, 1.0)
    assert fairness.jain(2.0) == pytest.approx(jain_index([30, 10]))
    fairness.backlog_ended(W1, BOB, 3.0)
    assert fairness.jain(50.0) == pytest.approx(jain_index([30, 10]))
    fairness.add_service(request(ADA), W1, 30, 60.0)
    assert fairness.jain(3.0 + MINUTE + 1) == 1


def test_a_client_is_backlogged_while_it_waits_in_any_queue() -> None:
    """The end of one of its backlogs is not the end of its waiting."""
    fairness = backlogged(ADA)
    fairness.backlog_began(W2, ADA, 0.0)
    fairness.backlog_ended(W1, ADA, 0.0)
    fairness.add_service(request(ADA), W2, 5, 100.0)
    assert fairness.jain(100.0) == 1


def test_service_counts_per_weight() -> None:
    """Who weighs twice and gets twice is even."""
    fairness = backlogged(ADA, BOB)
    fairness.add_service(request(ADA), W1, 30, 0.0)
    fairness.add_service(request(BOB, weight=2.0), W1, 60, 0.0)
    assert fairness.gap(W1) == 0
    assert fairness.jain(0.0) == pytest.approx(1)


def test_each_worker_has_its_own_gap() -> None:
    """Service elsewhere is not compared with service here."""
    fairness = backlogged(ADA, BOB)
    fairness.add_service(request(ADA), W1, 30, 0.0)
    fairness.add_service(request(ADA), W2, 1000, 0.0)
    assert (fairness.gap(W1), fairness.gap(W2)) == (30, 0)


def test_a_pool_has_one_gap_over_all_workers() -> None:
    """Who waits for all is compared by what it gets from all."""
    fairness = backlogged(ADA, BOB, queue=None, pooled=True)
    fairness.add_service(request(ADA), W1, 30, 0.0)
    fairness.add_service(request(ADA), W2, 30, 0.0)
    assert fairness.gap(None) == 60


@pytest.mark.parametrize("pooled", [True, False])
def test_the_bound_is_kept_where_the_gap_is(pooled: bool) -> None:
    """A worker's dispatches raise its own bound, or the pool's."""
    fairness = backlogged(ADA, pooled=pooled)
    fairness.request_dispatched(request(ADA), W1, Outstanding(10, 0, 50), waited=1.0)
    bound = fairness.bound(None if pooled else W1, 100)
    assert bound is not None
    assert bound > 200
    fairness.attempt_ended(request(ADA), W1, Outstanding(10, 0, 50))
    if not pooled:
        assert fairness.bound(W2, 100) == 200


def test_no_bound_is_told_of_a_pool_whose_workers_serve_different_models() -> None:
    """A refill for one of them reaches clients of others; what came of that is no gap once all are alike again."""
    talk = Scene("dlpm_home", settings=SchedulerSettings(window=FixedWindow(requests=1)))
    talk.join("w1", "llama", "ada's adapter")
    talk.join("w2", "llama")
    fairness, quantum = talk.scheduler.fairness, talk.scheduler.policy.properties.gap_quantum
    for letter in "abc":
        calls = [talk.arrive(client, f"{client} {letter}", model="llama") for client in ("ada", "bob", "cy")]
    for call in [*talk.order]:
        talk.start(call)
    assert calls[-1] not in talk.dispatched
    assert fairness.bound(None, quantum) is None
    assert fairness.gap(None) > 0
    talk.join("w2", "llama", "ada's adapter")
    assert fairness.bound(None, quantum) is not None
    assert fairness.gap(None) == 0


@pytest.mark.parametrize("change", [lambda talk: talk.leave("w2"), lambda talk: talk.join("w2", "b", "llama")])
def test_a_queue_of_one_worker_has_its_bound_whatever_others_serve(change: Callable[[Scene], None]) -> None:
    """Who waits in it waits for that worker alone."""
    talk = Scene("rr+dlpm", workers=("w1", "w2"))
    change(talk)
    assert talk.scheduler.fairness.bound(W1, 100) is not None


def test_a_worker_that_is_gone_is_not_measured() -> None:
    """If it comes back its gap begins anew; its bound does not, for the credit that its clients had there is theirs."""
    fairness = backlogged(ADA, BOB)
    fairness.request_dispatched(request(ADA), W1, Outstanding(10, 0, 50), waited=1.0)
    fairness.add_service(request(ADA), W1, 50, 0.0)
    bound = fairness.bound(W1, 100)
    fairness.worker_left(W1)
    assert (fairness.gap(W1), fairness.bound(W1, 100)) == (0, bound)


def test_waiting_times_are_those_of_the_last_requests() -> None:
    """Old waits are forgotten, and nobody has the waits of another."""
    fairness = backlogged()
    for waited in [1000.0] + [1.0] * (WAITS_KEPT - 10) + [9.0] * 10:
        fairness.request_dispatched(request(ADA), W1, Outstanding(0, 0, 1), waited)
    assert (fairness.waits(ADA), fairness.waits(BOB)) == ((1.0, 1.0), (None, None))
    for _ in range(4):
        fairness.request_dispatched(request(ADA), W1, Outstanding(0, 0, 1), 9.0)
    assert fairness.waits(ADA).p95 == 9.0


def test_shares_are_of_what_all_were_served_lately() -> None:
    """In cost units, whatever the weights; nobody has a share of nothing."""
    fairness = backlogged()
    assert fairness.share(ADA, 0.0) is None
    fairness.add_service(request(ADA), W1, 30, 0.0)
    fairness.add_service(request(BOB, weight=2.0), W2, 90, 10.0)
    assert [fairness.share(client, 10.0) for client in (ADA, BOB, ClientId("cyd"))] == [0.25, 0.75, 0.0]
    assert fairness.share(ADA, MINUTE + 2) == 0.0

"""Fairness reports Jain's index, waiting times and service gaps over the right clients and queues."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.clients.fairness import (
    WAITS_KEPT,
    Fairness,
    Outstanding,
    RecentBacklog,
    RecentService,
    jain_index,
    percentile,
)
from router.core.clients.shares import Shares
from router.core.clients.turns import MINUTE
from router.core.fleet.window import FixedWindow
from router.core.model.cost import LinearCost
from router.core.model.request import ClientId, Request, RequestId, WorkerId
from router.core.scheduler_settings import SchedulerSettings
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
    """Jain's index is 1 if all are equal and 1/n if one has everything; there is none if nothing was served."""
    index = jain_index(shares)
    if index is None:
        assert not any(shares)
    else:
        assert 1 / len(shares) - 1e-9 <= index <= 1 + 1e-9
    assert jain_index([7] * len(shares)) == pytest.approx(1)
    assert jain_index([7, *[0] * (len(shares) - 1)]) == pytest.approx(1 / len(shares))


@given(values=st.lists(st.integers(), min_size=1), share=st.floats(0.01, 1))
def test_a_percentile_is_the_smallest_value_that_is_enough(values: list[int], share: float) -> None:
    """At least the given share of values does not exceed the percentile, and no smaller value has that property."""
    found = percentile(values, share)
    enough = [v for v in values if sum(other <= v for other in values) >= share * len(values) - 1e-9]
    assert found == min(enough)


def test_there_is_no_percentile_of_nothing() -> None:
    """A percentile of no values is None, not zero."""
    assert percentile([], 0.95) is None


@given(steps=st.lists(st.tuples(st.floats(0, 40), st.integers(0, 100)), max_size=20), later=st.floats(0, 80))
def test_recent_service_is_that_of_the_last_minute(steps: list[tuple[float, int]], later: float) -> None:
    """Older service is forgotten and younger service counted, to the second."""
    recent, now, history = RecentService(), 0.0, []
    for pause, service in steps:
        now += pause
        recent.add(service / 2.0, service, now)
        history.append((now, service))
    now += later
    certain = sum(service for at, service in history if at >= now - MINUTE + 1)
    possible = sum(service for at, service in history if at >= now - MINUTE)
    assert certain <= recent.cost(now) <= possible
    assert recent.per_weight(now) == recent.cost(now) / 2


def test_jain_covers_clients_with_a_lasting_backlog() -> None:
    """Only clients that were backlogged for half of the last minute count."""
    fairness = backlogged(ADA, BOB)
    for client, service in ((ADA, 30), (BOB, 10), (ClientId("never waited"), 1000)):
        fairness.add_service(request(client), W1, service, 1.0)
    assert fairness.jain(2.0) == pytest.approx(jain_index([30, 10]))
    fairness.backlog_ended(W1, BOB, 31.0)
    assert fairness.jain(60.0) == pytest.approx(jain_index([30, 10]))
    fairness.add_service(request(ADA), W1, 30, 60.0)
    assert fairness.jain(63.0) == 1


def test_clients_that_seldom_ask_do_not_count_in_jain() -> None:
    """A thousand clients that wait for moments do not change the index of those that wait all the time."""
    fairness = backlogged(ADA, BOB)
    for n in range(1000):
        rarely, now = ClientId(f"rarely {n}"), 10.0 + n / 100
        fairness.backlog_began(W1, rarely, now)
        fairness.backlog_ended(W1, rarely, now + 0.5)
    for client, service in ((ADA, 30), (BOB, 10)):
        fairness.add_service(request(client), W1, service, 21.0)
    assert fairness.jain(30.0) == pytest.approx(jain_index([30, 10]))


@given(st.lists(st.tuples(st.floats(0, 90), st.floats(0, 90)), max_size=20), st.floats(0, 90))
def test_backlogs_of_the_last_minute_are_added_up(spans: list[tuple[float, float]], later: float) -> None:
    """The seconds of a client's backlogs are those within the last minute, but for the one in which it begins."""
    recent, now, history = RecentBacklog(), 0.0, []
    for pause, length in spans:
        recent.began(now + pause)
        history.append((now + pause, now + pause + length))
        now += pause + length
        recent.ended(now)
    recent.began(now)
    history.append((now, now + later))
    now += later
    certain = sum(max(0.0, end - max(begin, now - MINUTE + 1)) for begin, end in history)
    possible = sum(max(0.0, end - max(begin, now - MINUTE - 1)) for begin, end in history)
    assert certain - 1e-6 <= recent.seconds(now) <= possible + 1e-6


def test_a_client_is_backlogged_while_it_waits_in_any_queue() -> None:
    """The end of one of a client's backlogs does not end the others."""
    fairness = backlogged(ADA)
    fairness.backlog_began(W2, ADA, 0.0)
    fairness.backlog_ended(W1, ADA, 0.0)
    fairness.add_service(request(ADA), W2, 5, 100.0)
    assert fairness.jain(100.0) == 1


def test_service_counts_per_weight() -> None:
    """A client with twice the weight and twice the service is even."""
    fairness = backlogged(ADA, BOB)
    fairness.add_service(request(ADA), W1, 30, 0.0)
    fairness.add_service(request(BOB, weight=2.0), W1, 60, 0.0)
    assert fairness.gap(W1) == 0
    assert fairness.jain(1.0) == pytest.approx(1)


def test_each_worker_has_its_own_gap() -> None:
    """A gap in one worker's queue does not count service at other workers."""
    fairness = backlogged(ADA, BOB)
    fairness.add_service(request(ADA), W1, 30, 0.0)
    fairness.add_service(request(ADA), W2, 1000, 0.0)
    assert (fairness.gap(W1), fairness.gap(W2)) == (30, 0)


def test_a_pool_has_one_gap_over_all_workers() -> None:
    """Clients that wait for any worker are compared by their service from all workers."""
    fairness = backlogged(ADA, BOB, queue=None, pooled=True)
    fairness.add_service(request(ADA), W1, 30, 0.0)
    fairness.add_service(request(ADA), W2, 30, 0.0)
    assert fairness.gap(None) == 60


@pytest.mark.parametrize("pooled", [True, False])
def test_the_bound_is_kept_where_the_gap_is(pooled: bool) -> None:
    """A dispatch raises the bound of its worker, or of the pool."""
    fairness = backlogged(ADA, pooled=pooled)
    fairness.request_dispatched(request(ADA), W1, Outstanding(10, 0, 50), waited=1.0, now=1.0)
    bound = fairness.bound(None if pooled else W1, 100)
    assert bound is not None
    assert bound > 200
    fairness.attempt_ended(request(ADA), W1, Outstanding(10, 0, 50))
    if not pooled:
        assert fairness.bound(W2, 100) == 200


def test_a_pool_of_different_models_has_no_bound() -> None:
    """A pool has no bound while a refill for one model reaches clients of other models; the gap begins again when all
    workers serve the same models.
    """
    scene = Scene("dlpm_home", settings=SchedulerSettings(window=FixedWindow(requests=1)))
    scene.join("w1", "llama", "ada's adapter")
    scene.join("w2", "llama")
    fairness, quantum = scene.scheduler.fairness, scene.scheduler.policy.properties.gap_quantum
    for letter in "abc":
        calls = [scene.arrive(client, f"{client} {letter}", model="llama") for client in ("ada", "bob", "cy")]
    for call in [*scene.order]:
        scene.start(call)
    assert calls[-1] not in scene.dispatched
    assert fairness.bound(None, quantum) is None
    assert fairness.gap(None) > 0
    scene.join("w2", "llama", "ada's adapter")
    assert fairness.bound(None, quantum) is not None
    assert fairness.gap(None) == 0


@pytest.mark.parametrize("change", [lambda scene: scene.leave("w2"), lambda scene: scene.join("w2", "b", "llama")])
def test_a_queue_of_one_worker_has_its_bound_whatever_others_serve(change: Callable[[Scene], None]) -> None:
    """Clients in a worker's queue wait for that worker alone."""
    scene = Scene("rr+dlpm", workers=("w1", "w2"))
    change(scene)
    assert scene.scheduler.fairness.bound(W1, 100) is not None


def test_a_departed_worker_keeps_its_bound_but_not_its_gap() -> None:
    """The bound stays because the clients' deficits at that worker stay."""
    fairness = backlogged(ADA, BOB)
    fairness.request_dispatched(request(ADA), W1, Outstanding(10, 0, 50), waited=1.0, now=1.0)
    fairness.add_service(request(ADA), W1, 50, 0.0)
    bound = fairness.bound(W1, 100)
    fairness.worker_left(W1)
    assert (fairness.gap(W1), fairness.bound(W1, 100)) == (0, bound)


def test_waiting_times_are_those_of_the_last_requests() -> None:
    """Old waits are forgotten, and clients do not share waits."""
    fairness = backlogged()
    for waited in [1000.0] + [1.0] * (WAITS_KEPT - 10) + [9.0] * 10:
        fairness.request_dispatched(request(ADA), W1, Outstanding(0, 0, 1), waited, now=9.0)
    assert (fairness.waits(ADA), fairness.waits(BOB)) == ((1.0, 1.0), (None, None))
    for _ in range(4):
        fairness.request_dispatched(request(ADA), W1, Outstanding(0, 0, 1), 9.0, now=9.0)
    assert fairness.waits(ADA).p95 == 9.0


def test_shares_are_parts_of_all_recent_service() -> None:
    """Shares are in cost units, whatever the weights; a client without service has none."""
    fairness = backlogged()
    assert fairness.share(ADA, 0.0) is None
    fairness.add_service(request(ADA), W1, 30, 0.0)
    fairness.add_service(request(BOB, weight=2.0), W2, 90, 10.0)
    assert [fairness.share(client, 10.0) for client in (ADA, BOB, ClientId("cyd"))] == [0.25, 0.75, 0.0]
    assert fairness.share(ADA, MINUTE + 2) == 0.0

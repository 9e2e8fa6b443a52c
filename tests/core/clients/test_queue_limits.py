"""Queue limits bound what waits, and choose which request gives way when a limit is reached."""

from collections import Counter
from collections.abc import Sequence
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.clients.queue_limits import LONGEST_RETRY, QueueLimits, Surplus, WaitingLimits
from router.core.model.commands import Refusal
from router.core.model.request import ClientId, Request, RequestId


def waiter(name: str, client: str = "c", size: int = 0, weight: float = 1.0) -> Request:
    return Request(RequestId(name), ClientId(client), "m", (), weight=weight, body_bytes=size)


A, B, C = waiter("a"), waiter("b"), waiter("c")


def limits_of(requests: int = 2, time_to_live: float = 10.0) -> QueueLimits:
    return QueueLimits(WaitingLimits(requests, time_to_live))


def fill(waiting: QueueLimits, requests: Sequence[Request]) -> list[Surplus]:
    """Let these requests arrive one by one, remove the surplus, and return it."""
    removed = []
    for request in requests:
        waiting.enter(request, 0, request.weight)
        surplus = waiting.surplus(request.id)
        for each, _ in surplus:
            waiting.leave(each, 0, served=False)
        removed += surplus
    return removed


def numbered(client: str, count: int, size: int = 0, weight: float = 1.0) -> list[Request]:
    return [waiter(f"{client}{number}", client, size, weight) for number in range(1, count + 1)]


def test_a_request_beyond_the_limit_is_refused() -> None:
    """The queue takes as many requests as its limit, and one that leaves makes room."""
    waiting = limits_of(requests=2)
    assert fill(waiting, [A, B, C]) == [Surplus(C.id, Refusal.QUEUE_FULL)]
    waiting.leave(A.id, 1, served=True)
    assert fill(waiting, [C]) == []
    assert len(waiting) == 2


def test_a_dispatched_request_is_no_surplus() -> None:
    """A request that no longer waits is not surplus, even with a limit of 0."""
    waiting = limits_of(requests=0)
    waiting.enter(A, 0, 1.0)
    waiting.leave(A.id, 0, served=True)
    assert waiting.surplus(A.id) == []


def test_a_flood_costs_the_flooder() -> None:
    """In a full queue, a client with less waiting finds room at the cost of the other's newest requests, until it has
    as much.
    """
    waiting = limits_of(requests=6)
    assert fill(waiting, numbered("flood", 6)) == []
    removed = fill(waiting, numbered("light", 4))
    assert removed == [
        *(Surplus(RequestId(f"flood{number}"), Refusal.DISPLACED) for number in (6, 5, 4)),
        Surplus(RequestId("light4"), Refusal.QUEUE_FULL),
    ]


def test_a_client_at_its_share_displaces_no_other() -> None:
    """Clients with equally many requests do not displace each other; a third displaces the first by name."""
    waiting = limits_of(requests=4)
    fill(waiting, [*numbered("x", 2), *numbered("y", 2)])
    assert fill(waiting, [waiter("x3", "x")]) == [Surplus(RequestId("x3"), Refusal.QUEUE_FULL)]
    assert fill(waiting, [waiter("z1", "z")]) == [Surplus(RequestId("x2"), Refusal.DISPLACED)]


def test_weights_scale_shares() -> None:
    """A client of weight 3 keeps three quarters of the queue beside one of weight 1."""
    waiting = limits_of(requests=8)
    fill(waiting, [*numbered("heavy", 8, weight=3.0), *numbered("light", 8)])
    assert Counter(each.client for each in waiting.waiters.values()) == {"heavy": 6, "light": 2}


def test_bytes_are_bounded_as_requests_are() -> None:
    """A client with few large requests gives way to small ones, not the client with many small ones."""
    waiting = QueueLimits(WaitingLimits(100, 10.0, body_bytes=1000))
    fill(waiting, [*numbered("large", 3, size=300), *numbered("small", 10, size=10)])
    assert fill(waiting, [waiter("new", "new", 50)]) == [Surplus(RequestId("large3"), Refusal.DISPLACED)]


def test_no_request_is_displaced_in_vain() -> None:
    """A request that would not fit anyway is refused alone, and nothing else changes."""
    waiting = QueueLimits(WaitingLimits(100, 10.0, body_bytes=100))
    fill(waiting, [*numbered("x", 5, size=10), *numbered("y", 5, size=10)])
    assert fill(waiting, [waiter("z", "z", 45)]) == [Surplus(RequestId("z"), Refusal.QUEUE_FULL)]
    assert fill(waiting, [waiter("u", "u", 10)]) == [Surplus(RequestId("x5"), Refusal.DISPLACED)]


@pytest.mark.parametrize("limits", [WaitingLimits(client_requests=2), WaitingLimits(client_bytes=200)])
def test_a_client_has_limits_of_its_own(limits: WaitingLimits) -> None:
    """A client beyond its own limit has its request refused, even if the queue is empty, and other clients are
    unaffected.
    """
    waiting = QueueLimits(limits)
    removed = fill(waiting, [*numbered("x", 3, size=100), *numbered("y", 2, size=100)])
    assert removed == [Surplus(RequestId("x3"), Refusal.CLIENT_FULL)]


@given(
    limits=st.builds(
        WaitingLimits,
        st.integers(0, 8),
        st.just(10.0),
        st.none() | st.integers(0, 60),
        st.none() | st.integers(0, 5),
        st.none() | st.integers(0, 40),
    ),
    arrivals=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 20), st.booleans()), max_size=40),
)
def test_the_limits_hold_and_light_clients_are_spared(
    limits: WaitingLimits, arrivals: list[tuple[str, int, bool]]
) -> None:
    """The limits are never exceeded, displaced requests belong to other clients, and each refused request is removed
    once.
    """
    waiting = QueueLimits(limits)
    here: dict[RequestId, Request] = {}
    for number, (client, size, leaves) in enumerate(arrivals):
        request = waiter(f"{number}", client, size, weight="abcd".index(client) + 1.0)
        waiting.enter(request, 0, request.weight)
        here[request.id] = request
        for each, reason in waiting.surplus(request.id):
            waiting.leave(each, 0, served=False)
            left = here.pop(each)
            assert (left.id == request.id) is (reason is not Refusal.DISPLACED)
            assert (left.client == request.client) <= (reason is not Refusal.DISPLACED)
        if leaves and here:
            waiting.leave(here.popitem()[0], 0, served=False)
        assert {*waiting.waiters} == {*here}
        assert len(here) <= limits.requests
        assert sum(each.body_bytes for each in here.values()) <= (limits.body_bytes or 10**6) or not limits.body_bytes
        for name in "abcd":
            of_client = [each for each in here.values() if each.client == name]
            assert limits.client_requests is None or len(of_client) <= limits.client_requests
            assert limits.client_bytes is None or sum(each.body_bytes for each in of_client) <= limits.client_bytes


def test_requests_expire_in_order_of_arrival() -> None:
    """A request expires at its deadline, and the next deadline is that of the first one that stays."""
    waiting = limits_of()
    waiting.enter(A, 0, 1.0)
    waiting.enter(B, 3, 1.0)
    waiting.enter(C, 3, 1.0)
    assert (waiting.expired(9.9), waiting.next_deadline) == ([], 10)
    assert waiting.expired(10) == [A.id]
    assert waiting.expired(100) == [A.id, B.id, C.id]
    waiting.leave(A.id, 10, served=False)
    assert waiting.next_deadline == 13


def test_an_empty_queue_has_no_deadline() -> None:
    """The deadline is infinite after the last request has left."""
    waiting = limits_of()
    waiting.enter(A, 0, 1.0)
    waiting.leave(A.id, 1, served=False)
    assert (len(waiting), waiting.next_deadline) == (0, inf)


def test_retry_follows_the_drain_rate() -> None:
    """If one request is served every two seconds, four waiting requests take eight seconds."""
    waiting = limits_of(requests=100)
    for second in range(0, 40, 2):
        waiting.enter(A, second, 1.0)
        waiting.leave(A.id, second, served=True)
    for number in range(4):
        waiting.enter(waiter(str(number)), 40, 1.0)
    assert waiting.retry_after(40) == 8


def test_a_request_that_gave_up_does_not_count_as_drained() -> None:
    """Clients that leave do not make the queue look fast."""
    waiting = limits_of(requests=100)
    waiting.enter(C, 0, 1.0)
    for second in range(20):
        waiting.enter(A, second, 1.0)
        waiting.leave(A.id, second, served=False)
    assert waiting.retry_after(20) == LONGEST_RETRY


@given(steps=st.lists(st.tuples(st.booleans(), st.floats(0, 100)), max_size=30))
def test_a_retry_is_never_immediate_nor_far_away(steps: list[tuple[bool, float]]) -> None:
    """The estimate is between one second and one minute, whatever the history."""
    waiting = limits_of(requests=100)
    now = 0.0
    for number, (served, pause) in enumerate(steps):
        now += pause
        waiting.enter(waiter(str(number)), now, 1.0)
        if served:
            waiting.leave(RequestId(str(number)), now, served=True)
        assert 1 <= waiting.retry_after(now) <= LONGEST_RETRY


@pytest.mark.parametrize("waits", [True, False])
def test_retry_is_a_guess_before_anything_was_served(waits: bool) -> None:
    """Without a drain rate, a queue gives the longest time and an empty queue the shortest."""
    waiting = limits_of()
    if waits:
        waiting.enter(A, 0, 1.0)
    assert waiting.retry_after(5) == (LONGEST_RETRY if waits else 1.0)

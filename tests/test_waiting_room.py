"""Bounds on waiting."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.model import RequestId
from router.core.waiting_room import LONGEST_RETRY, WaitingLimits, WaitingRoom

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")


def room(requests: int = 2, time_to_live: float = 10.0) -> WaitingRoom:
    return WaitingRoom(WaitingLimits(requests, time_to_live))


def test_it_is_overfull_beyond_its_limit() -> None:
    """As many wait as may, and one that leaves makes room."""
    waiting = room(requests=2)
    overfull = []
    for request in (A, B, C):
        waiting.enter(request, 0)
        overfull.append(waiting.overfull)
    waiting.leave(A, 1, served=True)
    assert [*overfull, waiting.overfull] == [False, False, True, False]


def test_requests_expire_in_the_order_in_which_they_came() -> None:
    """At its deadline a request is late, and the next deadline is that of the first that stays."""
    waiting = room()
    waiting.enter(A, 0)
    waiting.enter(B, 3)
    waiting.enter(C, 3)
    assert (waiting.expired(9.9), waiting.next_deadline) == ([], 10)
    assert waiting.expired(10) == [A]
    assert waiting.expired(100) == [A, B, C]
    waiting.leave(A, 10, served=False)
    assert waiting.next_deadline == 13


def test_an_empty_room_has_no_deadline() -> None:
    """When the last has left, nobody is waited for."""
    waiting = room()
    waiting.enter(A, 0)
    waiting.leave(A, 1, served=False)
    assert (len(waiting), waiting.next_deadline) == (0, None)


def test_retry_follows_the_drain_rate() -> None:
    """Four that wait behind a queue that serves one every two seconds are a matter of eight seconds."""
    waiting = room(requests=100)
    for second in range(0, 40, 2):
        waiting.enter(A, second)
        waiting.leave(A, second, served=True)
    for number in range(4):
        waiting.enter(RequestId(str(number)), 40)
    assert waiting.retry_after(40) == 8


def test_a_request_that_gave_up_drains_nothing() -> None:
    """Clients that leave do not make the queue look fast."""
    waiting = room(requests=100)
    waiting.enter(C, 0)
    for second in range(20):
        waiting.enter(A, second)
        waiting.leave(A, second, served=False)
    assert waiting.retry_after(20) == LONGEST_RETRY


@given(steps=st.lists(st.tuples(st.booleans(), st.floats(0, 100)), max_size=30))
def test_a_retry_is_never_immediate_nor_far_away(steps: list[tuple[bool, float]]) -> None:
    """Whatever the history, the answer lies within a second and a minute."""
    waiting = room(requests=100)
    now = 0.0
    for number, (served, pause) in enumerate(steps):
        now += pause
        waiting.enter(RequestId(str(number)), now)
        if served:
            waiting.leave(RequestId(str(number)), now, served=True)
        assert 1 <= waiting.retry_after(now) <= LONGEST_RETRY


@pytest.mark.parametrize("waits", [True, False])
def test_before_anything_was_served_a_guess_is_made(waits: bool) -> None:
    """Without a rate, a queue is worth the longest answer and an empty one the shortest."""
    waiting = room()
    if waits:
        waiting.enter(A, 0)
    assert waiting.retry_after(5) == (LONGEST_RETRY if waits else 1.0)

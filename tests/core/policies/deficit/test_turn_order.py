"""Waiting clients take turns: the one whose last turn is the longest ago first, and it is late after a turn of each."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.model.request import ClientId, Request, RequestId
from router.core.policies.deficit.turn_order import TurnOrder
from router.core.policies.deficit.turn_rounds import TurnRounds

ADA, BOB, CYD = CLIENTS = [ClientId(name) for name in ("ada", "bob", "cyd")]


def waiting(*clients: ClientId, overdue_after: float = 1.0) -> TurnOrder:
    turns = TurnOrder(overdue_after)
    for client in clients:
        turns.join(client, 10.0, 0.0)
    return turns


def request(client: ClientId) -> Request:
    return Request(RequestId(client), client, "llama", ())


@given(st.lists(st.sampled_from(CLIENTS)))
def test_the_client_whose_last_turn_is_the_longest_ago_goes_first(served: list[ClientId]) -> None:
    """Clients go in the order of their last turns; those that had none in the order in which they began to wait."""
    turns = waiting(*CLIENTS)
    for client in served:
        turns.move_to_back(client)
    history = [*CLIENTS, *served]
    expected = sorted(CLIENTS, key=lambda client: -history[::-1].index(client))
    assert sorted(CLIENTS, key=lambda client: turns.turn(request(client), 0)) == expected


@given(st.lists(st.tuples(st.sampled_from(CLIENTS), st.sampled_from(["dispatch", "costly call", "cheap call"]))))
def test_no_turn_changes_while_the_clock_stands(steps: list[tuple[ClientId, str]]) -> None:
    """A dispatch takes a turn in rounds, too, and a cheap call gives a client that waits a whole head start again."""
    turns = waiting(*CLIENTS)
    turns.rounds = rounds = TurnRounds(lambda _: False, lambda _: None)
    for client in CLIENTS:
        rounds.join(client)
    known: dict[int, list[int]] = {}
    for client, step in steps:
        if step == "dispatch":
            rounds.take(client, may_begin=True)
            turns.move_to_back(client)
        else:
            turns.renew(client, 10.0, 1.0 if step == "cheap call" else 20.0)
        now = [turns.turn(request(each), 0) for each in CLIENTS]
        assert known.setdefault(turns.clock, now) == now


@pytest.mark.parametrize("overdue_after", [1e-30, 1.0, 2.0])
def test_a_client_is_late_after_so_many_dispatches_per_active_client(overdue_after: float) -> None:
    """It is late that many dispatches after its last turn, and again after as many more."""
    turns = waiting(ADA, BOB, overdue_after=overdue_after)
    late = list[int]()
    for _ in range(13):
        turns.dispatches += 1
        turns.move_to_back(BOB)
        if ADA in turns.pop_late(3):
            late.append(turns.dispatches)
    every = max(1, round(3 * overdue_after))
    assert late == [*range(every, 14, every)]


def test_a_client_that_waits_no_more_is_not_late() -> None:
    """Nothing is kept of a client that ceases to wait, its head start included."""
    turns = waiting(ADA, BOB)
    turns.leave(ADA)
    turns.dispatches = 10
    assert turns.pop_late(1) == [BOB]
    assert [*turns.head_starts] == [BOB]


@pytest.mark.parametrize(("head_start", "cost", "fresh"), [(0.0, 0.0, False), (5.0, 5.0, False), (5.0, 4.0, True)])
def test_a_cheap_request_begins_with_a_head_start(head_start: float, cost: float, fresh: bool) -> None:
    """A client has a head start if the input of its first request costs less."""
    turns = TurnOrder(1.0)
    turns.join(ADA, head_start, cost)
    assert (ADA in turns.head_starts) == fresh


def test_a_head_start_ends_when_it_is_used_up() -> None:
    """A client has its head start until it was charged as much."""
    turns = waiting(ADA)
    assert [turns.use_up(ADA, cost) for cost in (6.0, -3.0, 6.0, 1.0)] == [False, False, False, True]
    assert not turns.head_starts

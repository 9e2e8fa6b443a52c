"""The bytes that are held for clients, and who is refused where there is no room."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import CapacityError, NoRoom, Refused
from router.front.byte_budget import ByteBudget

LIMIT = 1200


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 400)), max_size=60))
def test_the_limit_is_kept_and_who_comes_next_finds_room(steps: list[tuple[int, int]]) -> None:
    """Whoever takes how much in whatever order: each that takes all it can leaves as much as that to those behind."""
    budget = ByteBudget(LIMIT)
    holds = [budget.hold(f"owner {number}") for number in range(5)]
    for number, amount in steps:
        taken = holds[number].try_add(amount)
        assert taken == (holds[number].amount + amount * (not taken) <= LIMIT - budget.held - amount * (not taken))
        assert budget.held == sum(hold.amount for hold in holds) <= LIMIT
        with budget.hold("new") as new:
            assert new.try_add((LIMIT - budget.held) // 2)
    for hold in holds:
        with hold:
            pass
    assert budget.held == 0


def test_one_alone_has_half() -> None:
    """As much as it leaves free."""
    hold = ByteBudget(LIMIT).hold("owner")
    hold.add(LIMIT // 2)
    assert not hold.try_add(1)


@pytest.mark.parametrize("attackers", [1, 4, 15, 100])
def test_many_that_take_all_they_can_leave_as_much_to_another_as_each_has(attackers: int) -> None:
    """Of n, each holds the n+1st part, to a piece; one more part is free, and half of it goes to who comes next."""
    limit = 256 * 2**20
    budget = ByteBudget(limit)
    holds = [budget.hold(f"attacker {number}") for number in range(attackers)]
    piece = 16 * 1024
    while sum([hold.try_add(piece) for hold in holds]):
        pass
    part = limit // (attackers + 1)
    assert max(hold.amount for hold in holds) <= part + piece
    assert limit - budget.held >= part - piece
    with budget.hold("polite") as polite:
        polite.add((part - piece) // 2)


@pytest.mark.parametrize(
    ("others", "own", "wrong"),
    [((), 600, Refused), ((400, 400), 0, NoRoom), ((300,), 500, Refused), ((300, 300, 300), 0, Refused)],
)
def test_a_refusal_tells_whose_fault_it_is(others: tuple[int, ...], own: int, wrong: type[CapacityError]) -> None:
    """429 to whoever holds more than an equal part, 503 to who does not; both say when to come again."""
    budget = ByteBudget(LIMIT)
    for number, amount in enumerate(others):
        budget.hold(f"other {number}").set(amount)
    hold = budget.hold("owner")
    hold.set(own)
    with pytest.raises(wrong) as refused:
        hold.add(300)
    assert type(refused.value) is wrong
    assert refused.value.retry_after
    assert (hold.amount, budget.refused[wrong.status]) == (own, 1)


def test_what_is_moved_counts_for_its_new_owner() -> None:
    """As when a call's head has told whose connection it is."""
    budget = ByteBudget(LIMIT)
    hold = budget.hold("10.0.0.1")
    hold.add(100)
    hold.transfer("client ann")
    assert (budget.held_by("10.0.0.1"), budget.held_by("client ann")) == (0, 100)

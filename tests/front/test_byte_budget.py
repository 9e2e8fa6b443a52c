"""The byte budget: who can hold how much, and which refusal an owner without room gets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import CapacityError, NoRoom, Refused
from router.front.byte_budget import ByteBudget

LIMIT = 1200


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 400)), max_size=60))
def test_the_limit_holds_and_a_new_owner_finds_room(steps: list[tuple[int, int]]) -> None:
    """In any order of holds and releases, a new owner can hold half of the bytes that are free."""
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


def test_a_single_owner_can_hold_half() -> None:
    """An owner can hold as much as it leaves free."""
    hold = ByteBudget(LIMIT).hold("owner")
    hold.add(LIMIT // 2)
    assert not hold.try_add(1)


@pytest.mark.parametrize("attackers", [1, 4, 15, 100])
def test_greedy_owners_leave_a_full_share_free(attackers: int) -> None:
    """Each of n holds at most 1/(n+1) of the budget; that much stays free, and a new owner can hold half of it."""
    limit = 256 * 2**20
    budget = ByteBudget(limit)
    holds = [budget.hold(f"attacker {number}") for number in range(attackers)]
    step = 16 * 1024
    while sum([hold.try_add(step) for hold in holds]):
        pass
    share = limit // (attackers + 1)
    assert max(hold.amount for hold in holds) <= share + step
    assert limit - budget.held >= share - step
    with budget.hold("polite") as polite:
        polite.add((share - step) // 2)


@pytest.mark.parametrize(
    ("others", "own", "expected"),
    [((), 600, Refused), ((400, 400), 0, NoRoom), ((300,), 500, Refused), ((300, 300, 300), 0, Refused)],
)
def test_a_refusal_depends_on_the_owners_share(
    others: tuple[int, ...], own: int, expected: type[CapacityError]
) -> None:
    """An owner above its equal share gets 429, one below gets 503; both with Retry-After."""
    budget = ByteBudget(LIMIT)
    for number, amount in enumerate(others):
        budget.hold(f"other {number}").set(amount)
    hold = budget.hold("owner")
    hold.set(own)
    with pytest.raises(expected) as refused:
        hold.add(300)
    assert type(refused.value) is expected
    assert refused.value.retry_after
    assert (hold.amount, budget.refused[expected.status]) == (own, 1)


def test_transferred_bytes_count_for_the_new_owner() -> None:
    """The head of a call can identify the client of a connection."""
    budget = ByteBudget(LIMIT)
    hold = budget.hold("10.0.0.1")
    hold.add(100)
    hold.transfer("client ann")
    assert budget.held == 100
    assert [budget.has_room(owner, 550) for owner in ("10.0.0.1", "client ann")] == [True, False]

"""The closed form of a refill equals the loop that it replaces."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.policies.deficit.deficits import DeficitTable

deficits_and_quanta = st.dictionaries(
    st.sampled_from("abcdef"), st.tuples(st.integers(-5000, 300), st.integers(1, 400)), min_size=1
)


def table_of(counters: dict[str, tuple[int, int]]) -> DeficitTable[str]:
    table: DeficitTable[str] = DeficitTable()
    for key, (deficit, quantum) in counters.items():
        table.join(key, quantum, deficit)
    return table


def refill_by_looping(counters: Mapping[str, tuple[float, int]], contenders: list[str]) -> tuple[int, dict[str, float]]:
    """Run CHECKREFILL as a loop: while no contender is positive, add a quantum to every counter, up to one quantum."""
    deficit = {key: float(deficit) for key, (deficit, _) in counters.items()}
    rounds = 0
    while all(deficit[key] <= 0 for key in contenders):
        rounds += 1
        for key, (_, quantum) in counters.items():
            deficit[key] = max(deficit[key], min(deficit[key] + quantum, quantum))
    return rounds, deficit


@given(counters=deficits_and_quanta, data=st.data())
def test_the_closed_form_equals_the_loop(counters: dict[str, tuple[int, int]], data: st.DataObject) -> None:
    """One refill gives each counter, contender or not, what adding one quantum at a time gives."""
    contenders = data.draw(st.lists(st.sampled_from(sorted(counters)), min_size=1, unique=True))
    table = table_of(counters)
    rounds = table.refill(contenders)
    assert (rounds, {key: table.deficit(key) for key in table}) == refill_by_looping(counters, contenders)


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["join", "charge", "refill", "begin"]),
            st.sampled_from("abc"),
            st.integers(-300, 500),
        ),
        max_size=30,
    )
)
def test_counters_are_plain_numbers_through_any_history(steps: list[tuple[str, str, int]]) -> None:
    """Joins, charges, refills and resets in any order do what they would do to a dictionary of numbers."""
    table: DeficitTable[str] = DeficitTable()
    naive: dict[str, tuple[float, int]] = {}
    for step, key, amount in steps:
        match step:
            case "join":
                table.join(key, quantum=abs(amount) + 1, deficit=amount)
                naive[key] = naive[key][0] if key in naive else amount, abs(amount) + 1
            case "charge":
                table.charge(key, amount)
                naive.update({each: (naive[each][0] - amount, naive[each][1]) for each in naive if each == key})
            case "refill" if key in naive:
                table.refill([key])
                _, deficit = refill_by_looping(naive, [key])
                naive = {each: (deficit[each], quantum) for each, (_, quantum) in naive.items()}
            case "begin":
                table.reset()
                naive = {each: (quantum, quantum) for each, (_, quantum) in naive.items()}
        assert {each: table.deficit(each) for each in table} == {each: deficit for each, (deficit, _) in naive.items()}


@given(
    debt=st.floats(0, 1e9), quantum=st.floats(1e-3, 1e6), bystander=st.floats(-1e9, 1e9), weight=st.floats(1e-2, 100)
)
def test_a_refill_makes_its_contender_positive_despite_rounding(
    debt: float, quantum: float, bystander: float, weight: float
) -> None:
    """For any fractions, a refill makes its contender positive, and no counter exceeds one quantum."""
    table: DeficitTable[str] = DeficitTable()
    table.join("contender", quantum, -debt)
    table.join("bystander", quantum * weight, bystander)
    table.refill(["contender"])
    assert 0 < table.deficit("contender") <= quantum * (1 + 1e-6) + debt * 1e-12
    assert table.deficit("bystander") <= max(bystander, quantum * weight * (1 + 1e-6) + abs(bystander) * 1e-12)


def test_nothing_is_refilled_while_a_contender_is_positive() -> None:
    """All waiting clients use up their deficits before a refill, since otherwise deficits bound nothing."""
    table = table_of({"positive": (1, 100), "in debt": (-50, 100), "absent": (-70, 100)})
    assert table.refill(["positive", "in debt"]) == 0
    assert table.refill([]) == 0
    assert [table.deficit(key) for key in table] == [1, -50, -70]


def test_debts_shrink_in_absence() -> None:
    """A client that does not wait is refilled with the others, up to one quantum and no further."""
    table = table_of({"waits": (-250, 100), "small debt": (-20, 100), "large debt": (-900, 100)})
    assert table.refill(["waits"]) == 3
    assert [table.deficit(key) for key in table] == [50, 100, -600]


def test_a_positive_counter_is_topped_up_to_one_quantum() -> None:
    """Without that, a client that uses half of its share would run out in the middle of every second round."""
    table = table_of({"waits": (-20, 100), "used half": (50, 100), "was given more": (300, 100)})
    table.refill(["waits"])
    assert [table.deficit(key) for key in table] == [80, 100, 300]


@pytest.mark.parametrize("debt", [10**9, 10**12])
def test_a_deep_debt_takes_one_step(debt: int) -> None:
    """Rounds are counted and not run, however deep a debt is."""
    table = table_of({"debtor": (-debt, 1)})
    assert table.refill(["debtor"]) == debt + 1
    assert table.deficit("debtor") == 1


def test_joining_again_keeps_the_deficit_and_takes_the_quantum() -> None:
    """A client cannot shed debt by joining again; a new weight counts from the next refill."""
    table = table_of({"a": (-10, 100)})
    table.join("a", 7, deficit=100)
    assert table.deficit("a") == -10
    table.refill(["a"])
    assert table.deficit("a") == 4


def test_a_reset_makes_all_counters_one_quantum() -> None:
    """A reset leaves neither debt nor surplus from before, and refills continue from there."""
    table = table_of({"debtor": (-10, 100), "creditor": (60, 100), "heavy": (-900, 300)})
    table.reset()
    assert [table.deficit(key) for key in table] == [100, 100, 300]
    table.charge("debtor", 250)
    table.refill(["debtor"])
    assert [table.deficit(key) for key in table] == [50, 100, 300]


def test_a_key_that_never_joined_has_no_counter() -> None:
    """Such a key has the deficit 0, a charge to it is ignored, and it affects no other key."""
    table = table_of({"b": (-5, 100)})
    table.charge("a", 5)
    assert ("a" in table, table.deficit("a"), list(table)) == (False, 0.0, ["b"])

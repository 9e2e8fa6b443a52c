"""The debts of forgotten clients are kept, up to a limit."""

from hypothesis import given
from hypothesis import strategies as st

from router.core.clients.debtors import SAMPLE, Debtors


@given(st.lists(st.tuples(st.integers(0, 50), st.floats(-100, 20)), max_size=200), st.integers(1, 12))
def test_the_smallest_debts_are_dropped_first(debts: list[tuple[int, float]], limit: int) -> None:
    """The limit is never exceeded, and at most one debtor with a positive debt is dropped at a time."""
    debtors: Debtors[int] = Debtors(limit)
    owed: dict[int, float] = {}
    for debtor, debt in debts:
        owed[debtor] = debt
        dropped = debtors.add(debtor, lambda key: owed[key])
        assert len(debtors.keys) <= limit
        assert len(dropped) <= SAMPLE
        assert len([each for each in dropped if owed[each] > 0]) <= 1
        for each in dropped:
            del owed[each]
        assert len(debtors.keys) == len(owed)

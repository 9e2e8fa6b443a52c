"""Who holds most of what is short."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from router.core.clients.fair_drop import LongestQueueDrop

STEPS = st.lists(
    st.tuples(st.sampled_from("abcde"), st.integers(-9, 9), st.sampled_from([0.5, 1.0, 3.0])), max_size=200
)


@given(steps=STEPS)
def test_the_most_is_found_whatever_happened(steps: list[tuple[str, int, float]]) -> None:
    """As a search through all holders would find it, of equals the first by name; the total is their sum."""
    holdings: LongestQueueDrop[str] = LongestQueueDrop()
    amounts: Counter[str] = Counter()
    weights: dict[str, float] = {}
    for holder, change, weight in steps:
        if change > 0:
            holdings.add(holder, change, weight)
            amounts[holder] += change
            weights[holder] = weight
        else:
            taken = min(-change, amounts[holder])
            holdings.remove(holder, taken)
            amounts[holder] -= taken
        held = {name: amount / weights[name] for name, amount in amounts.items() if amount}
        assert holdings.largest_holder() == (min(held, key=lambda name: (-held[name], name)) if held else None)
        assert (holdings.total, len(holdings)) == (sum(amounts.values()), len(held))


def test_nothing_is_kept_of_those_who_hold_nothing() -> None:
    """Many that come and go leave no memory behind."""
    holdings: LongestQueueDrop[str] = LongestQueueDrop()
    for number in range(1000):
        holdings.add(str(number), 1)
        holdings.remove(str(number), 1)
    assert len(holdings) == 0
    assert len(holdings._heap) < 32

"""The holder with the most of a scarce resource is found without a search."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from router.core.clients.fair_drop import LongestQueueDrop

STEPS = st.lists(
    st.tuples(st.sampled_from("abcde"), st.integers(-9, 9), st.sampled_from([0.5, 1.0, 3.0])), max_size=200
)


@given(steps=STEPS)
def test_the_largest_holder_matches_a_linear_search(steps: list[tuple[str, int, float]]) -> None:
    """The largest holder matches a linear search, with ties broken by name, and the total is the sum."""
    drop: LongestQueueDrop[str] = LongestQueueDrop()
    amounts: Counter[str] = Counter()
    weights: dict[str, float] = {}
    for holder, change, weight in steps:
        if change > 0:
            drop.add(holder, change, weight)
            amounts[holder] += change
            weights[holder] = weight
        else:
            taken = min(-change, amounts[holder])
            drop.remove(holder, taken)
            amounts[holder] -= taken
        held = {name: amount / weights[name] for name, amount in amounts.items() if amount}
        assert drop.largest_holder() == (min(held, key=lambda name: (-held[name], name)) if held else None)
        assert (drop.total, len(drop)) == (sum(amounts.values()), len(held))


def test_holders_without_an_amount_take_no_memory() -> None:
    """Many holders that come and go leave no memory behind."""
    drop: LongestQueueDrop[str] = LongestQueueDrop()
    for number in range(1000):
        drop.add(str(number), 1)
        drop.remove(str(number), 1)
    assert len(drop) == 0
    assert len(drop._heap) < 32

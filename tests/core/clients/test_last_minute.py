"""Sums and maxima over the last minute equal those of a list of all values."""

from hypothesis import given
from hypothesis import strategies as st

from router.core.clients.turns import MINUTE, MinuteMaximum, MinuteSums

steps = st.lists(st.tuples(st.floats(0, 40), st.integers(-5, 100)), max_size=30)


@given(steps=steps, later=st.floats(0, 80))
def test_sums_are_those_of_the_last_minute(steps: list[tuple[float, int]], later: float) -> None:
    """Both sums match the list, to the second."""
    sums, now, history = MinuteSums(), 0.0, []
    for pause, value in steps:
        now += pause
        sums.add(value, 2 * value, now)
        history.append((now, value))
    now += later
    seen = sum(value for at, value in history if int(at) >= now - MINUTE)
    assert sums.totals(now) == (seen, 2 * seen)


@given(steps=steps, later=st.floats(0, 80))
def test_the_largest_is_that_of_the_last_minute(steps: list[tuple[float, int]], later: float) -> None:
    """The maximum matches the list at every moment, and is 0 without values."""
    maximum, now = MinuteMaximum(), 0.0
    history: list[tuple[float, int]] = []
    for pause, value in [*steps, (later, 0)]:
        now += pause
        assert maximum.largest(now) == max([value for at, value in history if int(at) >= now - MINUTE], default=0)
        maximum.add(value, now)
        history.append((now, value))
    assert len(maximum._falling) <= MINUTE + 2

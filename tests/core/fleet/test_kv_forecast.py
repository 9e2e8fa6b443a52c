"""The forecast is the peak of the KV cache that the requests in flight will use."""

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from router.core.fleet.in_flight import LEAST_MORE, KvPeakForecast


def forecast(*spans: tuple[int, int]) -> KvPeakForecast:
    """Return a forecast of requests with these tokens and growths."""
    made = KvPeakForecast()
    for tokens, growth in spans:
        made.add(tokens, growth)
    return made


def peak_step_by_step(spans: list[tuple[int, int]], growth: int) -> int:
    """Return the peak, with one more request, computed step by step."""
    last = max(max((end for _, end in spans), default=0), growth)
    return max(
        sum(tokens + step for tokens, end in spans if step <= end) + min(step, growth) for step in range(last + 1)
    )


@given(spans=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 12)), max_size=8), growth=st.integers(0, 12))
def test_the_upper_bound_is_not_below_the_peak(spans: list[tuple[int, int]], growth: int) -> None:
    """If the upper bound is low enough, the exact peak need not be searched for."""
    made = forecast(*spans)
    assert made.peak(growth, enough=inf) >= made.peak(growth, enough=0)


def test_a_removed_request_holds_nothing() -> None:
    """After a removal, what the other requests hold is left."""
    made = KvPeakForecast()
    first, second = made.add(10, 5), made.add(20, 5)
    made.remove(first)
    assert made.peak(0, enough=0) == 25
    made.remove(second)
    assert made.peak(0, enough=0) == 0


def test_growth_goes_with_the_engines_steps() -> None:
    """A request that began earlier ends earlier, so that the two are never at their ends together."""
    made = forecast((10, 10))
    made.advance(6.0)
    made.add(10, 10)
    assert made.peak(0, enough=0) == (10 + 10) + (10 + 4)


def test_a_request_that_outlives_its_forecast_grows_as_much_again() -> None:
    """Such a request grows up to its maximum, which the average clock may reach a little early."""
    made = KvPeakForecast()
    made.add(10, 50, most=130)
    peaks = [made.peak(0, enough=0)]
    for _ in range(3):
        made.advance(40.0)
        peaks.append(made.peak(0, enough=0))
    made.advance(40.0)
    assert peaks == [60, 60, 10 + 130, 10 + 130]
    assert made.peak(0, enough=0) == 10 + 160 + LEAST_MORE


@given(
    spans=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 30), st.integers(0, 200)), min_size=1, max_size=6),
    steps=st.lists(st.floats(0.25, 40), max_size=12),
)
def test_the_forecast_is_at_least_what_is_held(spans: list[tuple[int, int, int]], steps: list[float]) -> None:
    """The forecast is at most twice what the requests have grown by, or their predicted growth."""
    made = KvPeakForecast()
    for tokens, growth, most in spans:
        made.add(tokens, growth, most)
    for step in steps:
        made.advance(step)
    clock = sum(steps)
    held = sum(tokens + clock for tokens, _, _ in spans)
    predicted = sum(tokens + max(growth, 2 * clock, clock + LEAST_MORE) for tokens, growth, _ in spans)
    for enough in (0, inf):
        assert held - 1e-6 <= made.peak(0, enough) <= predicted + 1e-6


@given(
    spans=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 40)), max_size=8),
    steps=st.integers(0, 40),
    growth=st.integers(0, 40),
)
def test_what_is_overdue_is_forecast_like_what_has_just_begun(
    spans: list[tuple[int, int]], steps: int, growth: int
) -> None:
    """However many requests go on at once, the peak is that of new ones that hold as much and will grow as much."""
    made = forecast(*spans)
    made.advance(steps)
    left = [(tokens + steps, end - steps if end >= steps else max(int(LEAST_MORE), steps)) for tokens, end in spans]
    assert made.peak(growth, enough=0) == peak_step_by_step(left, growth)


def test_a_request_that_begins_to_grow_is_counted_once() -> None:
    """A request's growth counts from when it begins, not from its dispatch."""
    made = KvPeakForecast()
    hold = made.add(10, 8)
    made.advance(6.0)
    made.start_growth(hold)
    assert made.peak(0, enough=0) == 10 + 8
    made.advance(6.0)
    assert made.peak(0, enough=0) == 10 + 8

"""The percentiles and means of the bench, with and without unfinished durations."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.report.meters import censored_mean, censored_percentile
from router.core.clients.fairness import percentile


@given(st.lists(st.floats(0, 100), min_size=1, max_size=50), st.sampled_from([0.01, 0.5, 0.95, 0.99, 1.0]))
def test_the_percentile_of_finished_durations_is_the_plain_one(spans: list[float], share: float) -> None:
    """The percentile is the smallest value that the share does not exceed."""
    assert censored_percentile([(span, True) for span in spans], share) == percentile(spans, share)


def test_an_unfinished_duration_does_not_count_as_short() -> None:
    """An unfinished duration counts as at least its length, neither as exactly that, nor not at all."""
    spans = [(1.0, True), (1.0, False), (1.0, False), (5.0, True)]
    assert censored_percentile(spans, 0.25) == 1.0
    assert censored_percentile(spans, 0.5) == 5.0
    assert censored_percentile([(1.0, True), (5.0, True)], 0.5) == 1.0


def test_an_undetermined_percentile_is_the_longest_duration() -> None:
    """If nearly nothing has ended, the result is a lower bound; without durations there is none."""
    assert censored_percentile([(1.0, True), (9.0, False), (8.0, False)], 0.95) == 9.0
    assert censored_percentile([], 0.5) is None


@given(st.lists(st.floats(0, 100), min_size=1, max_size=50))
def test_the_mean_of_finished_durations_is_the_plain_one(spans: list[float]) -> None:
    """The mean is the arithmetic one."""
    assert censored_mean([(span, True) for span in spans]) == pytest.approx(sum(spans) / len(spans))


def test_a_mean_does_not_count_unfinished_durations_as_short() -> None:
    """An unfinished duration counts like the longer finished ones; nothing counts beyond the longest."""
    assert censored_mean([(1.0, False), (2.0, True), (4.0, True)]) == 3.0
    assert censored_mean([(1.0, True), (3.0, False)]) == 2.0
    assert censored_mean([(5.0, False)]) == 5.0
    assert censored_mean([]) is None

"""Statistics of simulations."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.report.meters import censored_mean, censored_percentile
from router.core.clients.fairness import percentile


@given(st.lists(st.floats(0, 100), min_size=1, max_size=50), st.sampled_from([0.01, 0.5, 0.95, 0.99, 1.0]))
def test_where_all_has_ended_it_is_the_plain_percentile(spans: list[float], share: float) -> None:
    """Without a span that goes on, the estimate is the smallest value that the share does not exceed."""
    assert censored_percentile([(span, True) for span in spans], share) == percentile(spans, share)


def test_what_goes_on_is_not_taken_for_short() -> None:
    """A span that has not ended counts as at least its length, neither as that length nor not at all."""
    spans = [(1.0, True), (1.0, False), (1.0, False), (5.0, True)]
    assert censored_percentile(spans, 0.25) == 1.0
    assert censored_percentile(spans, 0.5) == 5.0
    assert censored_percentile([(1.0, True), (5.0, True)], 0.5) == 1.0


def test_what_cannot_be_told_is_the_longest_seen() -> None:
    """Where nearly nothing has ended, the answer is a lower bound; without spans there is none."""
    assert censored_percentile([(1.0, True), (9.0, False), (8.0, False)], 0.95) == 9.0
    assert censored_percentile([], 0.5) is None


@given(st.lists(st.floats(0, 100), min_size=1, max_size=50))
def test_where_all_has_ended_it_is_the_plain_mean(spans: list[float]) -> None:
    """Without a span that goes on, the estimate is the arithmetic mean."""
    assert censored_mean([(span, True) for span in spans]) == pytest.approx(sum(spans) / len(spans))


def test_a_mean_does_not_take_what_goes_on_for_short() -> None:
    """A span that has not ended counts as the longer ones do that have; beyond the longest seen nothing counts."""
    assert censored_mean([(1.0, False), (2.0, True), (4.0, True)]) == 3.0
    assert censored_mean([(1.0, True), (3.0, False)]) == 2.0
    assert censored_mean([(5.0, False)]) == 5.0
    assert censored_mean([]) is None

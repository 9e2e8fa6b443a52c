"""Calibration compares predictions with reports and discounts predictions that promise too much."""

import pytest

from router.core.cache.cache_model import ANSWERS_KEPT, MIN_ANSWERS, Calibration


def test_errors_are_counted_by_their_kind() -> None:
    """False hits and missed hits are counted separately."""
    calibration = Calibration()
    assert calibration.error is None
    calibration.record(100, 60, 200)
    calibration.record(50, 80, 300)
    totals = calibration.totals
    assert (totals.answers, totals.prompt, totals.predicted, totals.actual) == (2, 500, 150, 140)
    assert (totals.false_hit, totals.missed_hit) == (40, 30)
    assert calibration.error == pytest.approx((40 / 200 + 30 / 300) / 2)


def test_predictions_are_discounted_while_they_promise_too_much() -> None:
    """Once there are enough answers, the discount is the share that came true, until predictions are right again."""
    calibration = Calibration()
    for _ in range(MIN_ANSWERS - 1):
        calibration.record(1000, 250, 1000)
    assert calibration.discount == 1.0
    calibration.record(1000, 250, 1000)
    suspected = calibration.suspect
    assert suspected
    assert calibration.discount == pytest.approx(0.25)
    for _ in range(ANSWERS_KEPT):
        calibration.record(1000, 1000, 1000)
    assert not calibration.suspect
    assert calibration.discount == 1.0
    assert calibration.error == pytest.approx(0.0, abs=1e-9)


def test_predictions_that_promise_too_little_are_not_raised() -> None:
    """The error of such predictions is reported, but a cache is never assumed to hold more than was sent there."""
    calibration = Calibration()
    for _ in range(MIN_ANSWERS):
        calibration.record(100, 900, 1000)
    assert calibration.suspect
    assert calibration.discount == 1.0


def test_an_engine_that_never_reports_is_silent() -> None:
    """An engine that reported once is not silent, whatever it does later."""
    calibration = Calibration()
    for _ in range(MIN_ANSWERS):
        assert not calibration.silent
        calibration.record_unreported()
    assert calibration.silent
    calibration.record(0, 0, 10)
    assert not calibration.silent


def test_an_emptied_cache_resets_the_discount() -> None:
    """The discount begins again when a cache was emptied, and the totals stay."""
    calibration = Calibration()
    for _ in range(MIN_ANSWERS):
        calibration.record(1000, 0, 1000)
    calibration.reset()
    assert (calibration.error, calibration.discount, calibration.suspect) == (None, 1.0, False)
    assert calibration.totals.answers == MIN_ANSWERS


def test_an_error_is_at_most_the_whole_prompt() -> None:
    """Counters that rise for prompts of an earlier report, or of other callers, are no error of many prompts."""
    calibration = Calibration()
    calibration.record_totals(0, 5_000, 0)
    assert calibration.error == 1.0

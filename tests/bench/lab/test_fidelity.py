"""The figures by which an emulated engine is compared with a real one."""

import pytest

from tests.engine.fidelity.figures import Difference, Run, difference, kendall_tau, verdicts
from tests.engine.fidelity.load import prefix_tokens, recorded
from tests.engine.fidelity.pace import StepTimes
from tests.engine.fidelity.play import Outcome

TIMES = StepTimes(1.0, 0.0, 0.0)


def outcome(number: int, began: float, ended: float, cached: int | None = 0) -> Outcome:
    return Outcome(number, 100, began, ended, cached)


def run(*outcomes: Outcome, evicted: int = 100) -> Run:
    return Run("run", outcomes, evicted, TIMES)


def test_tau_counts_pairs_that_overlapped_in_the_first_run() -> None:
    """Of three calls that overlap one pair is reversed, and a fourth call that began later is in no pair."""
    first = [outcome(0, 0, 5), outcome(1, 0, 6), outcome(2, 0, 7), outcome(3, 8, 9)]
    second = [outcome(0, 0, 6), outcome(1, 0, 5), outcome(2, 0, 7), outcome(3, 0, 1)]
    assert kendall_tau(list(zip(first, first, strict=True))) == 1.0
    assert kendall_tau(list(zip(first, second, strict=True))) == pytest.approx(1 / 3)


def test_a_difference_leaves_out_calls_that_were_cancelled() -> None:
    """Of four calls each run cancelled one, and of the other two one has another count."""
    first = run(outcome(0, 0, 1, 50), outcome(1, 0, 2, 50), outcome(2, 0, 3, None), outcome(3, 0, 4, 80))
    second = run(outcome(0, 0, 1, 50), outcome(1, 0, 2, 60), outcome(2, 0, 3, 10), outcome(3, 0, 4, None), evicted=90)
    seen = difference(first, second)
    assert seen.equal_calls == 0.5
    assert seen.hit_rate == pytest.approx(180 / 300 - 120 / 300)
    assert seen.evictions == pytest.approx(0.1)


def test_bounds_are_what_the_real_engine_differs_from_itself_and_a_margin() -> None:
    """The same difference of an emulation is within the bounds of a noisy engine, and beyond those of a steady one."""
    emulation = Difference(hit_rate=0.03, equal_calls=0.9, tau=0.75, evictions=0.08)
    steady, noisy = Difference(0.0, 1.0, 0.95, 0.0), Difference(0.015, 0.94, 0.84, 0.04)
    assert [verdict.kept for verdict in verdicts([steady, steady], emulation)] == [False] * 4
    assert [verdict.kept for verdict in verdicts([steady, noisy], emulation)] == [True] * 4


def test_the_recorded_load_is_the_same_each_time_and_outgrows_the_cache() -> None:
    """The load has at least 500 calls, some of them cancelled, and prefixes of three times the tokens of the cache."""
    calls = recorded(1000)
    assert calls == recorded(1000)
    assert len(calls) >= 500
    assert 30 < sum(call.cancelled_after is not None for call in calls) < 100
    assert prefix_tokens(calls, 32) > 3 * 599 * 32

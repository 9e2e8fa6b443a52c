"""Admission windows bound what may be in flight at a worker."""

from math import inf

import pytest

from router.core.fleet.service_rate import Turnover
from router.core.fleet.window import FEWEST_REQUESTS, EngineReport, FixedWindow, LearnedWindow, NoWindow
from router.core.model.load import Limits, Load


@pytest.mark.parametrize(
    ("load", "tokens", "admitted"),
    [
        (Load(0, 0, 0), 10**6, True),
        (Load(1, 0, 0), 10**6, True),
        (Load(1, 1, 60), 40, True),
        (Load(1, 1, 60), 41, False),
        (Load(2, 0, 0), 1, False),
    ],
)
def test_a_fixed_window(load: Load, tokens: int, admitted: bool) -> None:
    """A fixed window admits two requests and a hundred unstarted tokens, and a larger request if nothing waits to
    start.
    """
    assert (FixedWindow(requests=2, unstarted_tokens=100).room(load) >= tokens) == admitted


def test_windows_have_limits() -> None:
    """A fixed window has the limits that it was given, and `NoWindow` has none."""
    assert FixedWindow(2, 100).limits == Limits(2, 100)
    assert NoWindow().limits is None


def test_without_a_window_everything_goes() -> None:
    """The engine's own queue takes all requests."""
    assert NoWindow().room(Load(10**6, 10**6, 10**9)) == inf


def report(window: LearnedWindow, load: Load, running: int, waiting: int) -> None:
    """Report these requests of an engine that holds nothing."""
    window.on_report(load, EngineReport(running, waiting, load.requests, load.unstarted, 0, load.guessed, 0, 0))


def test_a_learned_window_lets_a_few_steps_of_prefill_wait() -> None:
    """A learned window admits requests that fit the budget, one of any size if little is ahead, and any if nothing
    waits.
    """
    window = LearnedWindow()
    assert window.limits == Limits(1024, 4096)
    assert window.room(Load(9, 9, 4000, 4000)) >= 96
    assert window.room(Load(9, 9, 4000, 4000)) < 97
    assert window.room(Load(9, 1, 2049, 2049)) < 10**6
    assert window.room(Load(9, 1, 2048, 2048)) >= 10**6
    assert window.room(Load(9, 0, 0, 0)) >= 10**6


def test_computed_tokens_are_no_longer_ahead() -> None:
    """Tokens already computed of a long request do not keep the next request from going."""
    window = LearnedWindow()
    assert window.room(Load(1, 1, 9000, 9000)) < 500
    assert window.room(Load(1, 1, 9000, 1000)) >= 500


def test_a_learned_window_stays_at_what_the_engine_runs_and_one_that_waits() -> None:
    """The engine's reports show how many requests ran while others waited."""
    window = LearnedWindow()
    report(window, Load(20, 12, 100, 100), running=8, waiting=12)
    assert window.limits == Limits(9, 4096)
    assert window.room(Load(8)) >= 1
    assert not window.full(Load(7))
    assert window.full(Load(8))
    assert window.room(Load(9, 1, 10, 10)) < 1


def test_one_may_wait_for_room_in_the_cache() -> None:
    """One request may wait for room and a second one may not; an empty engine takes any request."""
    window = LearnedWindow()
    window.set_kv_capacity(1000)
    assert window.room(Load(3, 0, 0, 0, kv_peak=1000)) >= 1
    assert window.room(Load(3, 0, 0, 0, kv_peak=1001)) < 1
    assert window.room(Load(3, 1, 50, 50, kv_peak=900)) < 101
    assert window.room(Load(0, 0, 0, 0, kv_peak=9000)) >= 9000


def test_without_metrics_few_unstarted_requests_are_admitted() -> None:
    """The limit holds, however short the requests are, until the engine reports again; from then on only
    tokens count.
    """
    window = LearnedWindow()
    many = Load(30, FEWEST_REQUESTS, 20, 20)
    assert window.room(many) >= 1
    window.on_empty_report()
    assert window.room(many) < 1
    assert window.room(Load(30, FEWEST_REQUESTS - 1, 20, 20)) >= 1
    window.on_start(Turnover(20.0, 200.0))
    assert window.room(many) >= 1
    window.on_empty_report()
    assert window.room(Load(120, 80, 90, 90)) < 1
    report(window, Load(120, 80, 90, 90), running=120, waiting=0)
    assert window.room(Load(120, 80, 90, 90)) >= 1


def test_the_operators_limit_is_never_exceeded() -> None:
    """The operator's limit holds whatever was learned."""
    window = LearnedWindow(requests=4)
    assert window.room(Load(4)) < 1
    report(window, Load(4), running=4, waiting=1)
    assert window.limits.requests <= 4


def test_each_worker_learns_for_itself() -> None:
    """A fresh window has the same settings, and nothing that the other window learned."""
    window = LearnedWindow(requests=7)
    assert window.limits == Limits(7, 4096)
    window.on_start(Turnover(3.0, 3000.0))
    assert window.limits == Limits(7, 7500)
    assert window.fresh().limits == Limits(7, 4096)
    assert FixedWindow(3).fresh() == FixedWindow(3)

"""Admission windows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.window import FixedWindow, LearnedWindow, Limits, Load, NoWindow

windows = st.builds(FixedWindow, st.integers(1, 5), st.integers(1, 50))


@st.composite
def loads(draw: st.DrawFn) -> Load:
    requests = draw(st.integers(0, 6))
    unstarted = draw(st.integers(0, requests))
    return Load(requests, unstarted, draw(st.integers(unstarted, 60)) if unstarted else 0)


@given(window=windows, load=loads())
def test_room_is_room_for_the_smallest(window: FixedWindow, load: Load) -> None:
    """There is room exactly if a request of one uncached token would be admitted."""
    assert window.has_room(load) == window.admits(load, 1)


@given(window=windows, load=loads(), sizes=st.lists(st.integers(1, 60), min_size=2, max_size=2))
def test_what_admits_a_larger_request_admits_a_smaller(window: FixedWindow, load: Load, sizes: list[int]) -> None:
    """Size only ever counts against a request."""
    assert window.admits(load, min(sizes)) or not window.admits(load, max(sizes))


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
    """At most two requests and a hundred unstarted tokens; even a larger request goes where nothing waits to start."""
    assert FixedWindow(requests=2, unstarted_tokens=100).admits(load, tokens) == admitted


def test_windows_tell_their_limits() -> None:
    """A fixed window has the limits that it was given, and no window has none."""
    assert FixedWindow(2, 100).limits == Limits(2, 100)
    assert NoWindow().limits is None


@given(load=loads(), tokens=st.integers(0, 10**9))
def test_without_a_window_everything_goes(load: Load, tokens: int) -> None:
    """The engine's own queue takes all."""
    assert NoWindow().has_room(load)
    assert NoWindow().admits(load, tokens)


def learned(*starts: tuple[float, int], requests: int = 1024) -> LearnedWindow:
    """A window that saw first tokens at these times, each of so many tokens of input."""
    window = LearnedWindow(requests)
    for now, tokens in starts:
        window.started(tokens, now)
    return window


def test_until_something_is_learned_two_steps_of_prefill_may_wait() -> None:
    """And two requests, however large, since one must wait while another is computed."""
    window = learned()
    assert window.admits(Load(9, 9, 4000), 96)
    assert not window.admits(Load(9, 9, 4000), 97)
    assert window.admits(Load(1, 1, 100_000), 100_000)
    assert window.limits == Limits(1024, 4096)


def test_the_budget_follows_what_an_engine_starts_at_one_time() -> None:
    """Two of its steps may wait, but never more than the operator allows."""
    assert learned((1.0, 2000), (1.001, 3000)).limits.unstarted_tokens == 10_000
    assert learned((1.0, 2000), (1.5, 3000)).limits.unstarted_tokens == 6000
    assert learned((1.0, 20_000)).limits.unstarted_tokens == 16_384


def test_an_engine_with_requests_waiting_inside_it_runs_all_that_it_can() -> None:
    """The limit is there, and one more for each that starts in a step."""
    window = learned((1.0, 10))
    window.reported(Load(20, 12, 100), running=8, waiting=12)
    assert window.limits.requests == 8 + 1
    assert window.has_room(Load(8, 0, 0))
    assert not window.has_room(Load(9, 1, 10))


def test_a_report_that_is_older_than_what_was_sent_since_is_read_as_a_proportion() -> None:
    """Half of what it knew of ran, so half of what is in flight now is taken to run."""
    window = learned()
    window.reported(Load(40, 0, 0), running=10, waiting=10)
    assert window.limits.requests == 20 + 1


def test_a_limit_that_was_reached_with_nothing_waiting_is_raised() -> None:
    """By one at a time; while it is not reached nothing is learned."""
    window = learned()
    window.reported(Load(8, 0, 0), running=4, waiting=4)
    window.reported(Load(5, 0, 0), running=5, waiting=0)
    assert window.limits.requests == 6 + 1
    window.reported(Load(3, 0, 0), running=3, waiting=0)
    assert window.limits.requests == 7


def test_a_limit_falls_slowly() -> None:
    """One report of a few that wait does not close the window."""
    window = learned()
    window.reported(Load(100, 0, 0), running=80, waiting=20)
    window.reported(Load(80, 0, 0), running=20, waiting=20)
    assert window.limits.requests == 80 - 10 + 1


def test_the_operators_limit_is_never_passed() -> None:
    """Whatever was learned."""
    window = learned(requests=4)
    assert not window.has_room(Load(4, 0, 0))
    window.reported(Load(4, 0, 0), running=4, waiting=1)
    assert window.limits.requests <= 4


def test_each_worker_learns_for_itself() -> None:
    """A fresh window has the limits of the one that it is made from, and nothing of what that learned."""
    window = learned((1.0, 3000), requests=7)
    assert window.fresh().limits == Limits(7, 4096)
    assert FixedWindow(3).fresh() == FixedWindow(3)

"""Admission windows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.window import FixedWindow, Limits, Load, NoWindow

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

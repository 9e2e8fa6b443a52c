"""Occupancy learns how many tokens of an engine's cache a chunk of the prefix tree takes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.cache.cache_model import MAX_RATIO, Occupancy

USUAL = 32.0


def test_before_any_report_a_chunk_has_the_usual_size() -> None:
    """The usual size is the mean of the model's prompts."""
    assert Occupancy().chunk_tokens(USUAL) == USUAL


@pytest.mark.parametrize("tokens", [60, 100, 150])
def test_the_size_converges_to_what_the_engine_stored(tokens: int) -> None:
    """The engine stores these tokens for every four chunks by which the tree grows."""
    occupancy = Occupancy()
    for _ in range(300):
        occupancy.learn(tokens, 4)
    assert occupancy.chunk_tokens(USUAL) == pytest.approx(tokens / 4, rel=0.1)


@given(stored=st.lists(st.tuples(st.integers(-100, 10**6), st.integers(-10, 10**4))), usual=st.floats(0.5, 500.0))
def test_the_size_stays_near_the_usual_size(stored: list[tuple[int, int]], usual: float) -> None:
    """The size stays near the usual one, however wrong the model was by which the tree grew."""
    occupancy = Occupancy()
    for tokens, chunks in stored:
        occupancy.learn(tokens, chunks)
    assert usual / MAX_RATIO <= occupancy.chunk_tokens(usual) <= MAX_RATIO * usual

"""Prompts that an engine has measured teach the size of prompts that share their beginnings."""

from hypothesis import given
from hypothesis import strategies as st

from router.core.model.prompt_key import CHUNK_BYTES
from router.core.predict.token_estimates import MeasuredPrefixes
from tests.core.scenario import key


def test_an_unknown_prompt_has_the_mean_ratio() -> None:
    """An unknown prompt's tokens are spread evenly, and never are all of them cached."""
    measure = MeasuredPrefixes().measure(key("abcd", exact=False), 0.25)
    assert measure.tokens == CHUNK_BYTES
    assert [measure.held(chunks) for chunks in range(5)] == [0, 32, 64, 96, 127]


def test_a_shared_beginning_is_known_exactly() -> None:
    """The rest of the prompt has the mean ratio, and tokens between two known places are spread evenly."""
    measured_prefixes = MeasuredPrefixes()
    measured_prefixes.record_count(key("ab", exact=False), 100, 0.25)
    measured_prefixes.record_count(key("abcd", exact=False), 300, 0.25)
    measure = measured_prefixes.measure(key("abcdef", exact=False), 0.25)
    assert measure.tokens == 300 + 64
    assert [measure.held(chunks) for chunks in range(1, 7)] == [50, 100, 200, 300, 332, 363]
    assert measured_prefixes.measure(key("abxx", exact=False), 0.25).tokens == 164


def test_the_least_recently_recorded_place_is_dropped() -> None:
    """Recording a place again makes it the most recent."""
    measured_prefixes = MeasuredPrefixes(limit=2)
    for text in ("a", "b", "a", "c"):
        measured_prefixes.record_count(key(text, exact=False), 100, 0.25)
    sizes = [measured_prefixes.measure(key(text, exact=False), 0.25).tokens for text in "abc"]
    assert sizes == [100, 32, 100]


def test_a_match_is_the_same_for_the_next_prompt_that_diverges_there() -> None:
    """The match is exact to the token; tokens before that place are spread evenly, and half a chunk after it counts as
    shared.
    """
    measured_prefixes = MeasuredPrefixes()
    measured_prefixes.record_match(key("abcd", exact=False), 3, 150)
    measure = measured_prefixes.measure(key("abcxx", exact=False), 0.25)
    assert [measure.held(chunks) for chunks in (1, 2, 3)] == [50, 100, 150]
    assert measure.tokens == 150 + 2 * 32 - 16
    assert measured_prefixes.measure(key("abxx", exact=False), 0.25).held(2) == 64


def test_a_match_takes_precedence_over_a_count() -> None:
    """A match includes the bytes that prompts share after the end of a chunk."""
    measured_prefixes = MeasuredPrefixes()
    measured_prefixes.record_match(key("ab", exact=False), 2, 80)
    measured_prefixes.record_count(key("ab", exact=False), 64, 0.25)
    assert measured_prefixes.measure(key("abc", exact=False), 0.25).held(2) == 80


@given(
    recorded=st.lists(st.tuples(st.text("xy", max_size=6), st.integers(0, 10**6), st.booleans()), max_size=8),
    asked=st.text("xy", max_size=8),
    ratio=st.floats(0.01, 4.0),
)
def test_more_chunks_are_never_fewer_tokens(recorded: list[tuple[str, int, bool]], asked: str, ratio: float) -> None:
    """Held tokens never decrease for any counts, however inconsistent."""
    measured_prefixes = MeasuredPrefixes()
    for text, tokens, found in recorded:
        if found:
            measured_prefixes.record_match(key(text, exact=False), len(text), tokens)
        else:
            measured_prefixes.record_count(key(text, exact=False), tokens, ratio)
    measure = measured_prefixes.measure(key(asked, exact=False), ratio)
    held = [measure.held(chunks) for chunks in range(len(asked) + 1)]
    assert held == sorted(held)
    assert 0 <= held[0] <= held[-1] < measure.tokens

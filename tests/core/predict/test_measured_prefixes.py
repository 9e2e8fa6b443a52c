"""Prompts whose size an engine has told, and what begins like them."""

from hypothesis import given
from hypothesis import strategies as st

from router.core.model.prompt_key import CHUNK_BYTES
from router.core.predict.measured_prefixes import MeasuredPrefixes
from tests.core.scenario import key


def test_without_any_a_prompt_has_the_usual_ratio() -> None:
    """Evenly spread, and never all of it cached."""
    measure = MeasuredPrefixes().measure(key("abcd", exact=False), 0.25)
    assert measure.tokens == CHUNK_BYTES
    assert [measure.held(chunks) for chunks in range(5)] == [0, 32, 64, 96, 127]


def test_what_begins_like_a_prompt_that_was_counted_is_known_as_far() -> None:
    """What follows has the usual ratio; what is between two measured_prefixes is spread evenly."""
    measured_prefixes = MeasuredPrefixes()
    measured_prefixes.record_count(key("ab", exact=False), 100, 0.25)
    measured_prefixes.record_count(key("abcd", exact=False), 300, 0.25)
    measure = measured_prefixes.measure(key("abcdef", exact=False), 0.25)
    assert measure.tokens == 300 + 64
    assert [measure.held(chunks) for chunks in range(1, 7)] == [50, 100, 200, 300, 332, 363]
    assert measured_prefixes.measure(key("abxx", exact=False), 0.25).tokens == 164


def test_the_oldest_goes_where_there_are_too_many() -> None:
    """One that was told again is not the oldest."""
    measured_prefixes = MeasuredPrefixes(limit=2)
    for text in ("a", "b", "a", "c"):
        measured_prefixes.record_count(key(text, exact=False), 100, 0.25)
    sizes = [measured_prefixes.measure(key(text, exact=False), 0.25).tokens for text in "abc"]
    assert sizes == [100, 32, 100]


def test_what_an_engine_found_where_prompts_part_it_finds_of_the_next_that_parts_there() -> None:
    """To the token, and not in whole chunks; before that place tokens are spread evenly, and behind it a half chunk is
    taken for shared.
    """
    measured_prefixes = MeasuredPrefixes()
    measured_prefixes.record_match(key("abcd", exact=False), 3, 150)
    measure = measured_prefixes.measure(key("abcxx", exact=False), 0.25)
    assert [measure.held(chunks) for chunks in (1, 2, 3)] == [50, 100, 150]
    assert measure.tokens == 150 + 2 * 32 - 16
    assert measured_prefixes.measure(key("abxx", exact=False), 0.25).held(2) == 64


def test_what_was_found_counts_more_than_what_was_counted() -> None:
    """An engine that counted up to a chunk's end finds what prompts share behind it as well."""
    measured_prefixes = MeasuredPrefixes()
    measured_prefixes.record_match(key("ab", exact=False), 2, 80)
    measured_prefixes.record_count(key("ab", exact=False), 64, 0.25)
    assert measured_prefixes.measure(key("abc", exact=False), 0.25).held(2) == 80


@given(
    told=st.lists(st.tuples(st.text("xy", max_size=6), st.integers(0, 10**6), st.booleans()), max_size=8),
    asked=st.text("xy", max_size=8),
    ratio=st.floats(0.01, 4.0),
)
def test_more_chunks_are_never_fewer_tokens(told: list[tuple[str, int, bool]], asked: str, ratio: float) -> None:
    """However little sense there is in what engines told."""
    measured_prefixes = MeasuredPrefixes()
    for text, tokens, found in told:
        if found:
            measured_prefixes.record_match(key(text, exact=False), len(text), tokens)
        else:
            measured_prefixes.record_count(key(text, exact=False), tokens, ratio)
    measure = measured_prefixes.measure(key(asked, exact=False), ratio)
    held = [measure.held(chunks) for chunks in range(len(asked) + 1)]
    assert held == sorted(held)
    assert 0 <= held[0] <= held[-1] < measure.tokens

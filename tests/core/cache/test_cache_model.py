"""A request finds only the part of its match that is computed when it starts; `Occupancy` learns what a chunk of the
prefix tree takes of an engine's cache.
"""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.cache.cache_model import JITTER, MAX_RATIO, NextBatch, Occupancy, PrefillingPrompt
from tests.core.scenario import key


@dataclass
class Flight:
    """Stands for an attempt at the worker."""

    started: bool = False


def send(batch: NextBatch, text: str, held: int, now: float = 0.0, formed: float = 1.0) -> PrefillingPrompt:
    """Add a request that waits for its first token."""
    added, _ = batch.add(key(text).hashes, held, now, formed)
    added.flight = Flight()
    return added


def add(batch: NextBatch, text: str, held: int, now: float = 0.0, formed: float = 1.0) -> int:
    return batch.add(key(text).hashes, held, now, formed)[1]


def would_find(batch: NextBatch, text: str) -> int | None:
    return batch.would_find(key(text).hashes)


def test_prompts_of_the_same_batch_are_not_found() -> None:
    """A prompt finds only what was computed before its own batch."""
    batch = NextBatch()
    assert add(batch, "doc?", 1) == 1
    assert add(batch, "doc!", 3) == 1
    assert add(batch, "dot", 2) == 1
    assert add(batch, "else", 0) == 0


def test_other_prompts_of_the_batch_do_not_matter() -> None:
    """A request of the batch that computes something else does not reduce the match."""
    batch = NextBatch()
    add(batch, "xxa", 2)
    assert add(batch, "xxb", 2) == 2


def test_a_first_token_and_time_form_the_next_batch() -> None:
    """After a first token, or enough time, a new prompt finds what was sent before, since that is computed first."""
    batch = NextBatch()
    add(batch, "doc?", 0)
    batch.on_first_token(None, 0.5)
    assert add(batch, "doc!", 3, formed=1.0) == 3
    add(batch, "else", 0, formed=1.0)
    assert add(batch, "elsa", 3, now=1.0 + 2 * JITTER, formed=2.0) == 3


def test_an_ended_request_no_longer_counts() -> None:
    """A request that was cancelled or refused leaves the batch."""
    batch = NextBatch()
    ended = send(batch, "doc?", 0)
    batch.remove(ended)
    batch.remove(ended)
    assert add(batch, "doc!", 3) == 3


def test_the_last_batch_of_a_long_prompt_is_shared() -> None:
    """Ten chunks in batches of four: eight are found, by as many requests as fit beside the last two chunks."""
    batch = NextBatch()
    batch.batch_chunks = 4
    first = send(batch, "x" * 10, 0)
    assert first.found_chunks == 8
    batch.on_first_token(None, 1.0)
    assert add(batch, "x" * 10, 10, now=9.0) == 8
    assert add(batch, "x" * 10, 10, now=9.0) == 10
    batch.on_first_token(first, 9.0)
    assert add(batch, "x" * 10, 10, now=9.0) == 10


def test_a_batch_takes_waiting_prompts_in_order() -> None:
    """A batch takes prompts first come, first served; the rest waits for the next batch, with what is
    sent meanwhile.
    """
    batch = NextBatch()
    batch.batch_chunks = 4
    for text in ("aa", "bb", "cc"):
        send(batch, text, 0)
    batch.on_first_token(None, 1.0)
    assert [would_find(batch, text) for text in ("aa", "bb", "cc")] == [None, None, 0]
    assert add(batch, "bb", 2) == 2
    assert add(batch, "cc", 2) == 0


def test_simultaneous_first_tokens_end_one_batch() -> None:
    """First tokens that arrive at once, or nearly, end one batch and not several."""
    batch = NextBatch()
    batch.batch_chunks = 3
    first, *_ = [send(batch, text, 0) for text in ("aa", "bb", "cc")]
    batch.on_first_token(None, 1.0)
    batch.on_first_token(None, 1.0 + JITTER)
    assert [would_find(batch, text) for text in ("aa", "bb", "cc")] == [None, 0, 0]
    batch.on_first_token(first, 2.0)
    assert [would_find(batch, text) for text in ("bb", "cc")] == [None, 0]


def test_a_new_request_finds_what_waiting_ones_found() -> None:
    """Of several waiting requests that share its prefix, the one that found least decides."""
    batch = NextBatch()
    send(batch, "doc?", 1)
    send(batch, "doc?!", 3)
    assert would_find(batch, "doc!") == 1
    assert would_find(batch, "dear") is None
    assert would_find(batch, "d") is None


def test_requests_that_no_longer_wait_do_not_matter() -> None:
    """A request that is believed to have started delays no match; for unstreamed answers this is a guess."""
    batch = NextBatch()
    sent, flight = send(batch, "doc?", 1), Flight()
    sent.flight = flight
    assert would_find(batch, "doc!") == 1
    flight.started = True
    assert would_find(batch, "doc!") is None


# What a chunk takes of the cache


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

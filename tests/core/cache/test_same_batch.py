"""How much of a match is computed when a request starts."""

from router.core.cache.cache_model import JITTER, NextBatch
from router.core.model.request import RequestId
from tests.core.scenario import key


def add(batch: NextBatch, name: str, text: str, held: int, now: float = 0.0, formed: float = 1.0) -> int:
    return batch.add(RequestId(name), key(text).hashes, held, now, formed)


def would_find(batch: NextBatch, text: str, waiting: str = "abcdefgh") -> int | None:
    return batch.would_find(key(text).hashes, [RequestId(name) for name in waiting])


def test_prompts_of_the_same_batch_are_not_found() -> None:
    """Only what was computed before either of them is found."""
    batch = NextBatch()
    assert add(batch, "a", "doc?", 1) == 1
    assert add(batch, "b", "doc!", 3) == 1
    assert add(batch, "c", "dot", 2) == 1
    assert add(batch, "d", "else", 0) == 0


def test_other_prompts_of_the_batch_do_not_matter() -> None:
    """A request of the batch that computes something else does not reduce the match."""
    batch = NextBatch()
    add(batch, "a", "xxa", 2)
    assert add(batch, "b", "xxb", 2) == 2


def test_a_first_token_and_time_form_the_next_batch() -> None:
    """After either, what was sent before is computed first."""
    batch = NextBatch()
    add(batch, "a", "doc?", 0)
    batch.on_first_token(RequestId("z"), 0.5)
    assert add(batch, "b", "doc!", 3, formed=1.0) == 3
    add(batch, "c", "else", 0, formed=1.0)
    assert add(batch, "d", "elsa", 3, now=1.0 + 2 * JITTER, formed=2.0) == 3


def test_an_ended_request_no_longer_counts() -> None:
    """It was cancelled or refused."""
    batch = NextBatch()
    add(batch, "a", "doc?", 0)
    batch.remove(RequestId("a"))
    batch.remove(RequestId("a"))
    assert add(batch, "b", "doc!", 3) == 3


def test_the_last_batch_of_a_long_prompt_is_shared() -> None:
    """Ten chunks in batches of four: eight are found, by as many requests as fit beside the last two chunks."""
    batch = NextBatch()
    batch.batch_chunks = 4
    assert add(batch, "a", "x" * 10, 0) == 0
    batch.on_first_token(RequestId("z"), 1.0)
    assert add(batch, "b", "x" * 10, 10, now=9.0) == 8
    assert add(batch, "c", "x" * 10, 10, now=9.0) == 10
    batch.on_first_token(RequestId("a"), 9.0)
    assert add(batch, "d", "x" * 10, 10, now=9.0) == 10


def test_a_batch_takes_waiting_prompts_in_order() -> None:
    """First come, first served: the rest waits for the next batch, with what is sent meanwhile."""
    batch = NextBatch()
    batch.batch_chunks = 4
    for name, text in (("a", "aa"), ("b", "bb"), ("c", "cc")):
        add(batch, name, text, 0)
    batch.on_first_token(RequestId("z"), 1.0)
    assert [would_find(batch, text) for text in ("aa", "bb", "cc")] == [None, None, 0]
    assert add(batch, "d", "bb", 2) == 2
    assert add(batch, "e", "cc", 2) == 0


def test_simultaneous_first_tokens_end_one_batch() -> None:
    """They arrive at once, or nearly."""
    batch = NextBatch()
    batch.batch_chunks = 3
    for name, text in (("a", "aa"), ("b", "bb"), ("c", "cc")):
        add(batch, name, text, 0)
    batch.on_first_token(RequestId("y"), 1.0)
    batch.on_first_token(RequestId("z"), 1.0 + JITTER)
    assert [would_find(batch, text) for text in ("aa", "bb", "cc")] == [None, 0, 0]
    batch.on_first_token(RequestId("a"), 2.0)
    assert [would_find(batch, text) for text in ("bb", "cc")] == [None, 0]


def test_a_new_request_finds_what_waiting_ones_found() -> None:
    """Of several waiting requests that share its prefix, the one that found least decides."""
    batch = NextBatch()
    add(batch, "a", "doc?", 1)
    add(batch, "b", "doc?!", 3)
    assert would_find(batch, "doc!") == 1
    assert would_find(batch, "dear") is None
    assert would_find(batch, "d") is None


def test_requests_that_no_longer_wait_do_not_matter() -> None:
    """For unstreamed answers, the end of the wait is a guess."""
    batch = NextBatch()
    add(batch, "a", "doc?", 1)
    assert would_find(batch, "doc!", waiting="a") == 1
    assert would_find(batch, "doc!", waiting="b") is None

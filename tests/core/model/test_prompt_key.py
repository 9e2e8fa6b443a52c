"""Prompt keys are chained, keyed and resumable, and do not contain the prompt's text."""

import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.model.prompt_key import CHUNK_BYTES, HASH_BYTES, Prompt, PromptHasher

SECRET = b"a secret"
SMALL = 4  # bytes per chunk, so that short examples have many chunks and every kind of cut

texts = st.text("ab", max_size=40).map(str.encode)
counts = st.none() | st.integers(0, 100)


def hashes_of(text: bytes, secret: bytes = SECRET, chunk_bytes: int = SMALL) -> list[bytes]:
    joined = PromptHasher(secret, chunk_bytes).prompt(text).key.hashes
    return [joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES)]


@given(head=texts, more=texts)
def test_extending_a_prompt_gives_the_key_of_the_whole(head: bytes, more: bytes) -> None:
    """Wherever a text is cut in two, hashing the first part and extending by the second gives the same key."""
    hasher = PromptHasher(SECRET, SMALL)
    assert hasher.prompt(head).extend(more) == hasher.prompt(head + more).key


@given(head=texts, one=texts, other=texts)
def test_extending_does_not_change_the_prompt(head: bytes, one: bytes, other: bytes) -> None:
    """Several continuations of one prompt, such as several choices, do not affect each other."""
    prompt = PromptHasher(SECRET, SMALL).prompt(head)
    before = prompt.key
    first = prompt.extend(one)
    prompt.extend(other)
    assert prompt.extend(one) == first
    assert prompt.key == before


@given(one=texts, other=texts)
def test_hashes_are_equal_exactly_where_the_prefixes_are(one: bytes, other: bytes) -> None:
    """Hash i of two prompts is equal if and only if they agree up to the end of chunk i."""
    for index, (left, right) in enumerate(zip(hashes_of(one), hashes_of(other), strict=False), start=1):
        assert (left == right) == (one[: index * SMALL] == other[: index * SMALL])


@given(text=texts)
def test_there_is_a_hash_for_each_full_chunk(text: bytes) -> None:
    """A part shorter than a chunk has no hash, but counts in the size."""
    key = PromptHasher(SECRET, SMALL).prompt(text).key
    assert len(key.hashes) == len(text) // SMALL * HASH_BYTES
    assert key.size == len(text)


@given(text=texts)
def test_all_hashes_of_one_prompt_differ(text: bytes) -> None:
    """Every hash differs although chunks repeat, because each hash covers everything before it."""
    hashes = hashes_of(text)
    assert len(set(hashes)) == len(hashes)


@given(text=texts, secret=st.binary(max_size=100), other=st.binary(max_size=100))
def test_another_secret_gives_other_hashes(text: bytes, secret: bytes, other: bytes) -> None:
    """No hash under one secret appears under another, whatever the secrets' lengths."""
    if secret != other:
        assert not set(hashes_of(text, secret)) & set(hashes_of(text, other))


def test_hashes_do_not_change_between_releases() -> None:
    """The hashes are a format: a saved tree must be readable with a saved secret. This is a sample."""
    key = PromptHasher(b"\x01" * 32).prompt(bytes(range(256))).key
    assert key.hashes.hex() == "f4b3ae15df341bea754aa7e3b16a9fc9"


@given(head=counts, more=counts)
def test_token_counts_add_up_if_both_are_known(head: int | None, more: int | None) -> None:
    """The token count of an extended prompt is the exact sum, or None if one part's is unknown."""
    prompt = PromptHasher(SECRET).prompt(b"x", tokens=head)
    assert prompt.key.tokens == head
    assert prompt.extend(b"y", tokens=more).tokens == (None if head is None or more is None else head + more)


def kept_text(prompt: Prompt) -> int:
    return sum(len(value) for value in gc.get_referents(prompt) if isinstance(value, bytes))


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, 1_000_000])
def test_a_prompt_keeps_less_than_one_chunk_of_its_text(size: int) -> None:
    """However long the prompt, only the part after its last full chunk stays in memory."""
    prompt = PromptHasher(SECRET).prompt(b"t" * size)
    assert kept_text(prompt) == size % CHUNK_BYTES


def test_a_continuation_hashes_only_what_is_new() -> None:
    """Extending a long prompt hashes only the rest of its last chunk and the new text."""
    prompt = PromptHasher(SECRET, SMALL).prompt(b"t" * 10_001)
    fed = CountingDigest()
    prompt._digest = fed
    prompt.extend(b"more")
    assert fed.fed == [b"tmor"]


class CountingDigest:
    """A stand-in for a hashlib object that records what it is fed."""

    def __init__(self) -> None:
        self.fed: list[bytes] = []

    def update(self, data: bytes, /) -> None:
        self.fed.append(data)

    def digest(self) -> bytes:
        return b"\0" * 32

    def copy(self) -> "CountingDigest":
        return self

"""A prompt as the engine will see it, without its text: keyed hashes of fixed-size chunks.

Hash i is the first 8 bytes of SHA-256 over the secret's block and every byte up to the end of chunk i, so equal hashes
mean equal prefixes. This is the cascade of Bellare, Canetti and Krawczyk (FOCS 1996) with truncated output, which is a
pseudorandom function even if one input is a prefix of another (AMAC: Bellare, Bernstein and Tessaro, EUROCRYPT 2016). A
client that does not know the secret cannot construct two prompts that collide. Without a secret, 2^32 offline trials
would suffice. By chance, one new chunk in 10^12 collides in a tree of ten million.

Chunks have 128 bytes, about 32 tokens (`python -m bench chunk-size`). Chunks of half the size take 1.8 times as long to
hash and 1.3 times the memory per token, and lose 8 tokens at the end of a match instead of 16, which is one block of
vLLM. Chunks of twice the size save a third of the time and a fifth of the memory, and lose 32 tokens. Hashing and
matching 4 KB takes about 12 µs, nearly all of it for hashing. Of the sound constructions tried, reading digests off a
running SHA-256 is the fastest on processors with SHA instructions: keyed BLAKE2b takes 1.3 times as long, HMAC 1.9
times, and one hash per chunk that covers the previous hash 1.5 (SHA-256) to 2.3 times (BLAKE2b). On processors without
SHA instructions, BLAKE2b would save a sixth.
"""

import hashlib
from dataclasses import dataclass
from struct import iter_unpack
from typing import Final, Protocol, Self

CHUNK_BYTES: Final = 128
HASH_BYTES: Final = 8


class _Digest(Protocol):
    """The part of a hashlib object that is used here."""

    def update(self, data: bytes, /) -> None: ...
    def digest(self) -> bytes: ...
    def copy(self) -> Self: ...


@dataclass(frozen=True, slots=True)
class PromptKey:
    """A prompt's chained chunk hashes and its size."""

    hashes: bytes
    """8 bytes per full chunk; each hash covers its chunk and everything before it."""
    size: int
    """Length of the canonical bytes, including those after the last full chunk."""
    tokens: int | None = None
    """Exact number of tokens if the prompt came as token ids, else None."""


class Prompt:
    """A hashed prompt that can be continued, for example by its answer. It keeps less than one chunk of its text."""

    __slots__ = ("_chunk_bytes", "_digest", "_rest", "key")

    def __init__(self, key: PromptKey, digest: _Digest, rest: bytes, chunk_bytes: int) -> None:
        self.key = key
        self._digest = digest
        self._rest = rest
        self._chunk_bytes = chunk_bytes

    def extend(self, more: bytes, tokens: int | None = None) -> PromptKey:
        """Return the key of this prompt followed by `more`, which is `tokens` long. The prompt does not change."""
        return self.continued(more, tokens).key

    def continued(self, more: bytes, tokens: int | None = None) -> "Prompt":
        """Return this prompt followed by `more`, as a prompt that can be continued. Hashes only `more`."""
        digest = self._digest.copy()
        hashes, rest = _chain(digest, self._rest + more, self._chunk_bytes)
        known = self.key.tokens
        total = None if known is None or tokens is None else known + tokens
        key = PromptKey(self.key.hashes + hashes, self.key.size + len(more), total)
        return Prompt(key, digest, rest, self._chunk_bytes)


class PromptHasher:
    """Turn rendered prompts into keys, comparable only with keys of the same secret and chunk size."""

    def __init__(self, secret: bytes, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        # Exactly one block of the hash function, so that the digest copied for each prompt is a keyed initial state.
        self._keyed: _Digest = hashlib.sha256(hashlib.sha256(secret).digest().ljust(64, b"\0"))

    def prompt(self, rendered: bytes, tokens: int | None = None) -> Prompt:
        """Hash a prompt's canonical bytes, in time linear in their length. `tokens`: its exact length, if known."""
        digest = self._keyed.copy()
        hashes, rest = _chain(digest, rendered, self._chunk_bytes)
        return Prompt(PromptKey(hashes, len(rendered), tokens), digest, rest, self._chunk_bytes)


def unmatched(tokens: int) -> Prompt:
    """Return a prompt of `tokens` tokens, at least one, that matches no other prompt: it has a size and no hashes."""
    tokens = max(1, tokens)
    return Prompt(PromptKey(b"", tokens, tokens), hashlib.sha256(), b"", CHUNK_BYTES)


def _chain(digest: _Digest, text: bytes, chunk_bytes: int) -> tuple[bytes, bytes]:
    """Feed the full chunks of `text` to `digest`, which is modified. Return their hashes and the remaining text."""
    full = len(text) - len(text) % chunk_bytes
    if not full:
        return b"", text
    digests = []
    for (chunk,) in iter_unpack(f"{chunk_bytes}s", memoryview(text)[:full]):
        digest.update(chunk)
        digests.append(digest.digest())
    # Take the first word of `HASH_BYTES` of each digest: one slice over all digests is cheaper than one slice of each.
    words = memoryview(b"".join(digests)).cast("Q")
    return words[:: len(digests[0]) // HASH_BYTES].tobytes(), text[full:]

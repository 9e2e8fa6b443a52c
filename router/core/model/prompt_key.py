"""A prompt as the engine will see it, without its text: keyed hashes of fixed-size chunks.

Hash i is the first 8 bytes of SHA-256 over the secret's block and every byte up to the end of chunk i, so equal
hashes mean equal prefixes. It is the cascade of Bellare, Canetti and Krawczyk (FOCS 1996) with its output cut, which
is a pseudorandom function even where one input is a prefix of another (AMAC: Bellare, Bernstein and Tessaro,
EUROCRYPT 2016). A client who does not know the secret cannot construct two prompts that collide; without a secret,
2^32 trials at home would do. By chance, one new chunk in 10^12 collides in a tree of ten million.

Chunks are of 128 bytes, about 32 tokens (`python -m bench chunk-size`). Half the size hashes a prompt in 1.8 times the
time and takes 1.3 times the memory for each token, to lose 8 tokens at the end of a match where this loses 16, one
block of vLLM's. Twice the size saves a third of the time and a fifth of the memory, and loses 32. Hashing and matching
4 KB takes about 12 µs, nearly all of it hashing. Of the sound constructions tried, a digest read off a running SHA-256
is the fastest where the processor has SHA instructions: keyed BLAKE2b takes 1.3 times as long, HMAC 1.9 times, and a
hash per chunk, fed with the one before, 1.5 (SHA-256) to 2.3 times (BLAKE2b). Where it has none, BLAKE2b would save a
sixth.
"""

import hashlib
from dataclasses import dataclass
from struct import iter_unpack
from typing import Final, Protocol, Self

CHUNK_BYTES: Final = 128
HASH_BYTES: Final = 8


class _Digest(Protocol):
    """What is used here of a hashlib object."""

    def update(self, data: bytes, /) -> None: ...
    def digest(self) -> bytes: ...
    def copy(self) -> Self: ...


@dataclass(frozen=True, slots=True)
class PromptKey:
    """A prompt's chained chunk hashes and its size."""

    hashes: bytes
    """8 bytes per full chunk; each covers its chunk and everything before it."""
    size: int
    """Length of the canonical bytes, the part after the last full chunk included."""
    tokens: int | None = None
    """The exact number of tokens where the prompt came as token ids."""


class Prompt:
    """A hashed prompt that can be continued, as by its answer; of its text it keeps less than one chunk."""

    __slots__ = ("_chunk_bytes", "_digest", "_rest", "key")

    def __init__(self, key: PromptKey, digest: _Digest, rest: bytes, chunk_bytes: int) -> None:
        self.key = key
        self._digest = digest
        self._rest = rest
        self._chunk_bytes = chunk_bytes

    def extend(self, more: bytes, tokens: int | None = None) -> PromptKey:
        """Return the key of this prompt followed by `more`, which is `tokens` long; the prompt stays as it is."""
        return self.continued(more, tokens).key

    def continued(self, more: bytes, tokens: int | None = None) -> "Prompt":
        """Return this prompt followed by `more`, to be continued in its turn; costs the hashing of `more`."""
        digest = self._digest.copy()
        hashes, rest = _chain(digest, self._rest + more, self._chunk_bytes)
        known = self.key.tokens
        total = None if known is None or tokens is None else known + tokens
        key = PromptKey(self.key.hashes + hashes, self.key.size + len(more), total)
        return Prompt(key, digest, rest, self._chunk_bytes)


class PromptHasher:
    """Turns rendered prompts into keys that can only be compared with others of the same secret and chunk size."""

    def __init__(self, secret: bytes, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        # Exactly one block of the hash function: the digest copied for each prompt is then a keyed initial state.
        self._keyed: _Digest = hashlib.sha256(hashlib.sha256(secret).digest().ljust(64, b"\0"))

    def prompt(self, rendered: bytes, tokens: int | None = None) -> Prompt:
        """Hash a prompt's canonical bytes, `tokens` long if that is known exactly; linear in their length."""
        digest = self._keyed.copy()
        hashes, rest = _chain(digest, rendered, self._chunk_bytes)
        return Prompt(PromptKey(hashes, len(rendered), tokens), digest, rest, self._chunk_bytes)


def unmatched(tokens: int) -> Prompt:
    """A prompt of about so many tokens, at least one, that is like no other: it has a size and no hashes."""
    tokens = max(1, tokens)
    return Prompt(PromptKey(b"", tokens, tokens), hashlib.sha256(), b"", CHUNK_BYTES)


def _chain(digest: _Digest, text: bytes, chunk_bytes: int) -> tuple[bytes, bytes]:
    """Feed `text`'s full chunks to `digest`, which is changed; return their hashes and the text that is left."""
    full = len(text) - len(text) % chunk_bytes
    if not full:
        return b"", text
    digests = []
    for (chunk,) in iter_unpack(f"{chunk_bytes}s", memoryview(text)[:full]):
        digest.update(chunk)
        digests.append(digest.digest())
    # As words of `HASH_BYTES`, the first of each digest: a slice of them all costs less than one of each.
    words = memoryview(b"".join(digests)).cast("Q")
    return words[:: len(digests[0]) // HASH_BYTES].tobytes(), text[full:]

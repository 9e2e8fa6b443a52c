"""A prompt as blocks of token ids: the key space of engines that publish what their caches hold.

An engine caches whole blocks of so many tokens, each under a hash of itself and of all before it. The engine's own
hashes are opaque here. Ours are chained in the same way: the first 8 bytes of SHA-256 over a secret's block, the hash
of the block before and the token ids. So equal hashes mean equal prefixes, the next block's hash needs no more than
the last one's, and of the ids, which are the text, nothing is kept. As with the chunks of `prompt_key`, whoever does
not know the secret cannot make two prompts collide.
"""

import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

HASH_BYTES: Final = 8
ROOT: Final = bytes(HASH_BYTES)
"""Stands before the first block."""
_ID: Final = "Q"
"""Token ids are packed into 8 bytes: no vocabulary needs more than four of them, but emulated ones do."""


@dataclass(frozen=True, slots=True)
class BlockKey:
    """One prompt, tokenised."""

    tokens: int
    """Its exact length."""
    hashes: Mapping[int, bytes]
    """By the number of tokens in a block: 8 bytes per full block, each covering all before it."""


class BlockHasher:
    """Hashes token ids; its hashes can only be compared with others of the same secret."""

    def __init__(self, secret: bytes) -> None:
        # Exactly one block of the hash function, as in `PromptHasher`, and never the same as there.
        self._keyed = hashlib.sha256(hashlib.sha256(b"token blocks" + secret).digest().ljust(64, b"\0"))

    def chain(self, parent: bytes, tokens: Sequence[int], block_tokens: int) -> bytes:
        """Return the hashes of the full blocks of `tokens` that follow a block of hash `parent`.

        Raises ValueError for what is no token id.
        """
        try:
            packed = array(_ID, tokens)
        except (OverflowError, TypeError) as error:
            raise ValueError("not a token id") from error
        ids, size = packed.tobytes(), packed.itemsize * block_tokens
        hashes = []
        for start in range(0, len(ids) - size + 1, size):
            digest = self._keyed.copy()
            digest.update(parent + ids[start : start + size])
            parent = digest.digest()[:HASH_BYTES]
            hashes.append(parent)
        return b"".join(hashes)

    def key(self, tokens: Sequence[int], sizes: Iterable[int]) -> BlockKey:
        """Return the key of a prompt for engines with blocks of these sizes. Raises ValueError as `chain` does."""
        return BlockKey(len(tokens), {size: self.chain(ROOT, tokens, size) for size in sizes})

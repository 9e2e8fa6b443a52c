"""A prompt as blocks of token ids: the key space of engines that publish the contents of their KV caches.

An engine caches whole blocks of a fixed number of tokens, each under a hash of the block and everything before it. The
engine's own hashes are opaque to the router, which computes its own in the same way: the first 8 bytes of SHA-256 over
a block derived from the secret, the previous block's hash and the block's token ids. Equal hashes therefore mean equal
prefixes, the next block's hash needs only the previous one, and the token ids, which are the text, are not kept. As
with the chunks of `prompt_key`, nobody can make two prompts collide without the secret.
"""

import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

HASH_BYTES: Final = 8
ROOT: Final = bytes(HASH_BYTES)
"""Parent hash of the first block."""
_ID: Final = "Q"
"""Array type code: token ids are packed into 8 bytes. Real vocabularies need at most four bytes, emulated ones need
more.
"""


@dataclass(frozen=True, slots=True)
class BlockKey:
    """One tokenised prompt."""

    tokens: int
    """Exact length of the prompt."""
    hashes: Mapping[int, bytes]
    """Chained hashes by block size in tokens: 8 bytes per full block, each covering everything before it."""


class BlockHasher:
    """Hash token ids. Hashes are comparable only with hashes made with the same secret."""

    def __init__(self, secret: bytes) -> None:
        # Exactly one block of the hash function, as in `PromptHasher`, and never equal to the block there.
        self._keyed = hashlib.sha256(hashlib.sha256(b"token blocks" + secret).digest().ljust(64, b"\0"))

    def chain(self, parent: bytes, tokens: Sequence[int], block_tokens: int) -> bytes:
        """Return the hashes of the full blocks of `tokens` that follow a block with hash `parent`.

        Raises ValueError if an element of `tokens` is not a token id.
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
        """Return the key of a prompt for engines with these block sizes. Raises ValueError as `chain` does."""
        return BlockKey(len(tokens), {size: self.chain(ROOT, tokens, size) for size in sizes})

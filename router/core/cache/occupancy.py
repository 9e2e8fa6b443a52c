"""What a chunk of the prefix tree takes of one worker's cache, which is not what it holds of a prompt.

Prompts that part within a chunk have it each in the tree, while the engine keeps what they share of it once. Of each
prompt what is behind its last full chunk is not in the tree, and what is behind its last full block not in the cache.
And answers have more or fewer tokens per byte than prompts. The engine tells of each request what it computed, and so
what it stored; the tree knows by how many chunks it grew for that.
"""

from typing import Final

DECAY: Final = 0.98
"""What a past request still weighs after one more: about the last fifty count."""
PRIOR_CHUNKS: Final = 20.0
"""Chunks of the usual size that count as known before any request."""
MAX_RATIO: Final = 2.0
"""How far it may be from the usual size, up or down: what was believed wrongly of a cache is no matter of size."""


class Occupancy:
    """Of one worker's cache."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._chunks = 0.0
        self._prior = PRIOR_CHUNKS
        """Chunks that are believed to be of the usual size; like the sums, it decays."""

    def learn(self, tokens: int, chunks: int) -> None:
        """The engine stored so many tokens for a request for which the tree grew by so many chunks."""
        self._tokens = self._tokens * DECAY + max(0, tokens)
        self._chunks = self._chunks * DECAY + max(0, chunks)
        self._prior *= DECAY

    def chunk_tokens(self, usual: float) -> float:
        """What a chunk takes of the cache, in tokens; `usual`: what it has of a prompt, on average."""
        chunks = self._chunks + self._prior
        learned = (self._tokens + self._prior * usual) / chunks if chunks else usual
        return min(MAX_RATIO * usual, max(usual / MAX_RATIO, learned))

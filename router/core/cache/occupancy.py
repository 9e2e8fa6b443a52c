"""How many tokens of one worker's cache a chunk of the prefix tree takes, which differs from the tokens of a prompt.

Prompts that part within a chunk have one chunk each in the tree, whereas the engine keeps what they share of it once.
The part of a prompt behind its last full chunk is not in the tree, and the part behind its last full block not in the
cache. And answers have more or fewer tokens per byte than prompts. The engine reports what it computed of each request,
and so what it stored; the tree knows by how many chunks it grew for that request.
"""

from typing import Final

DECAY: Final = 0.98
"""The weight that a past request keeps with each further one: about the last fifty count."""
PRIOR_CHUNKS: Final = 20.0
"""Chunks of the usual size that are assumed before any request."""
MAX_RATIO: Final = 2.0
"""Bound on the ratio of learned and usual size, either way: a wrong model of the cache must not distort the size."""


class Occupancy:
    """Learns the size of a chunk in one worker's cache."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._chunks = 0.0
        self._prior = PRIOR_CHUNKS
        """Chunks assumed to be of the usual size; decays like the sums."""

    def learn(self, tokens: int, chunks: int) -> None:
        """Learn from a request for which the engine stored this many tokens and the tree grew by this many chunks."""
        self._tokens = self._tokens * DECAY + max(0, tokens)
        self._chunks = self._chunks * DECAY + max(0, chunks)
        self._prior *= DECAY

    def chunk_tokens(self, usual: float) -> float:
        """Return how much of the cache a chunk takes, in tokens. `usual`: what a chunk of a prompt has on average."""
        chunks = self._chunks + self._prior
        learned = (self._tokens + self._prior * usual) / chunks if chunks else usual
        return min(MAX_RATIO * usual, max(usual / MAX_RATIO, learned))

"""How many tokens there are up to certain places of prompts, where an engine has told.

A mean of tokens per byte is off by some percent for any one prompt: code, names and other languages take more. But
prompts come back longer, turn by turn, and others begin like them; what an engine counted up to the end of one is known
exactly of all that begin so. Between such places tokens are spread evenly.
"""

from bisect import bisect_right
from collections.abc import Sequence
from math import ceil, inf
from sys import byteorder
from typing import Final, NamedTuple

from router.core.prompt_key import CHUNK_BYTES, HASH_BYTES, PromptKey

LANDMARKS: Final = 50_000
"""Kept, unless told otherwise."""
Place = tuple[float, float]
"""Chunks, and how many tokens there are up to their end."""


class Measure(NamedTuple):
    """A prompt's size."""

    tokens: int
    """Of all of it; at least 1."""
    places: Sequence[Place]
    """In order; the beginning and the end of the prompt among them."""

    def held(self, chunks: int) -> int:
        """Tokens in the first chunks, short of the whole: an engine always computes the last one."""
        if not chunks:
            return 0
        places = self.places
        after = min(bisect_right(places, (chunks, inf)), len(places) - 1)
        (start, before), (end, tokens) = places[after - 1], places[after]
        return min(self.tokens - 1, int(before + (tokens - before) * (chunks - start) / (end - start)))


class Landmarks:
    """Of all models' prompts, by the hash of the last chunk before; the least recently told go first."""

    def __init__(self, limit: int = LANDMARKS) -> None:
        self._limit = limit
        self._tokens: dict[int, float] = {}

    def tell(self, prompt: PromptKey, tokens: int, ratio: float) -> None:
        """An engine counted so many tokens in a prompt; `ratio`: tokens per byte after its last full chunk."""
        if prompt.hashes:
            at = tokens - ratio * (prompt.size - len(prompt.hashes) // HASH_BYTES * CHUNK_BYTES)
            last = int.from_bytes(prompt.hashes[-HASH_BYTES:], byteorder)
            self._tokens.pop(last, None)
            self._tokens[last] = at if at > 0.0 else 0.0
            if len(self._tokens) > self._limit:
                del self._tokens[next(iter(self._tokens))]

    def measure(self, prompt: PromptKey, ratio: float) -> Measure:
        """A prompt's size, with `ratio` tokens per byte where nothing is known; O(its chunks)."""
        places: list[Place] = [(0, 0.0)]
        told = self._tokens
        # One by one, as numbers: looking many of these up takes less than looking up as many pieces of bytes.
        words = memoryview(prompt.hashes).cast("Q").tolist()
        end = 0
        for word in filter(told.__contains__, words):
            end, here = words.index(word, end) + 1, told[word]
            if here >= places[-1][1]:
                places.append((end, here))
        chunk, tokens = places[-1]
        rest = prompt.size - chunk * CHUNK_BYTES
        total = max(1, ceil(tokens + rest * ratio))
        if rest > 0:
            places.append((prompt.size / CHUNK_BYTES, total))
        return Measure(total, places)

"""How many tokens there are up to certain places of prompts, where an engine has known_places.

A mean of tokens per byte is off by some percent for any one prompt: code, names and other languages take more. But
prompts come back longer, turn by turn, and others begin like them; what an engine counted up to the end of one is known
exactly of all that begin so. Between such places tokens are spread evenly.

A match ends where prompts begin to differ, which is seldom the end of a chunk. What an engine found of one prompt there
(`reach`), it finds of the next that shares as many chunks: the questions about a document part from each other within
the same chunk. And the next turn of a conversation goes on from the end of an answer, to the last token of it.
"""

from bisect import bisect_right
from collections.abc import Sequence
from math import ceil, inf
from sys import byteorder
from typing import Final, NamedTuple

from router.core.model.prompt_key import CHUNK_BYTES, HASH_BYTES, PromptKey

PREFIX_LIMIT: Final = 50_000
"""Kept, unless told otherwise."""
SHARED_BEHIND: Final = CHUNK_BYTES / 2
"""Bytes that prompts share behind the last chunk that they have in common, on average."""
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


class MeasuredPrefixes:
    """Of all models' prompts, by the hash of the last chunk before; the least recently told go first."""

    def __init__(self, limit: int = PREFIX_LIMIT) -> None:
        self._limit = limit
        self._places: dict[int, tuple[float, float]] = {}
        """Tokens up to a place, and how many bytes behind the chunk it is."""

    def record_count(self, prompt: PromptKey, tokens: int, ratio: float) -> None:
        """An engine counted so many tokens in a prompt; `ratio`: tokens per byte after its last full chunk.

        What an engine found there says more, and stays.
        """
        chunks = len(prompt.hashes) // HASH_BYTES
        if chunks:
            at = tokens - ratio * (prompt.size - chunks * CHUNK_BYTES)
            last = _last(prompt, chunks)
            known = self._places.get(last)
            self._keep(last, known if known is not None and known[1] else (max(0.0, at), 0.0))

    def record_match(self, prompt: PromptKey, chunks: int, tokens: int) -> None:
        """An engine finds so many tokens of a prompt that begins like this one for so many chunks, and no more."""
        if chunks:
            self._keep(_last(prompt, chunks), (tokens, SHARED_BEHIND))

    def _keep(self, chunk: int, place: tuple[float, float]) -> None:
        known_places = self._places
        known_places.pop(chunk, None)
        known_places[chunk] = place
        if len(known_places) > self._limit:
            del known_places[next(iter(known_places))]

    def measure(self, prompt: PromptKey, ratio: float) -> Measure:
        """A prompt's size, with `ratio` tokens per byte where nothing is known; O(its chunks)."""
        places: list[Place] = [(0, 0.0)]
        known_places = self._places
        # One by one, as numbers: looking many of these up takes less than looking up as many pieces of bytes.
        words = memoryview(prompt.hashes).cast("Q").tolist()
        end, last_behind = 0, 0.0
        for word in filter(known_places.__contains__, words):
            end = words.index(word, end) + 1
            here, behind = known_places[word]
            if here >= places[-1][1]:
                places.append((end, here))
                last_behind = behind
        chunk, tokens = places[-1]
        rest = prompt.size - chunk * CHUNK_BYTES
        total = max(1, ceil(tokens + max(0.0, rest - last_behind) * ratio))
        if rest > 0:
            places.append((prompt.size / CHUNK_BYTES, total))
        return Measure(total, places)


def _last(prompt: PromptKey, chunks: int) -> int:
    """The hash of the last of its first chunks."""
    return int.from_bytes(prompt.hashes[(chunks - 1) * HASH_BYTES : chunks * HASH_BYTES], byteorder)

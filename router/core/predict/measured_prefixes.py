"""Token counts up to certain places in prompts, as engines reported them.

A mean of tokens per byte is off by some percent for any single prompt: code, names and other languages take more. But
prompts come back longer, turn by turn, and other prompts share their beginnings. What an engine counted up to the end
of one prompt is known exactly for all prompts that begin with it. Between such places tokens are spread evenly.

A match ends where prompts begin to differ, which is seldom the end of a chunk. The tokens that an engine found cached
for one prompt (`record_match`) it also finds for the next prompt that shares as many chunks: questions about the same
document diverge within the same chunk. And the next turn of a conversation continues after the end of an answer, up to
its last token.
"""

from bisect import bisect_right
from collections.abc import Sequence
from math import ceil, inf
from sys import byteorder
from typing import Final, NamedTuple

from router.core.model.prompt_key import CHUNK_BYTES, HASH_BYTES, PromptKey

PREFIX_LIMIT: Final = 50_000
"""Default number of places kept."""
SHARED_BEHIND: Final = CHUNK_BYTES / 2
"""Bytes that prompts share, on average, after the last chunk that they have in common."""
Place = tuple[float, float]
"""A number of chunks, and the tokens up to their end."""


class Measure(NamedTuple):
    """A prompt's size."""

    tokens: int
    """Tokens of the whole prompt; at least 1."""
    places: Sequence[Place]
    """In order, including the beginning and the end of the prompt."""

    def held(self, chunks: int) -> int:
        """Return the tokens in the first `chunks`, at least one short of the whole: an engine always computes the last
        token.
        """
        if not chunks:
            return 0
        places = self.places
        after = min(bisect_right(places, (chunks, inf)), len(places) - 1)
        (start, before), (end, tokens) = places[after - 1], places[after]
        return min(self.tokens - 1, int(before + (tokens - before) * (chunks - start) / (end - start)))


class MeasuredPrefixes:
    """Places in prompts of all models, by the hash of the chunk before; the least recently recorded
    are dropped first.
    """

    def __init__(self, limit: int = PREFIX_LIMIT) -> None:
        self._limit = limit
        self._places: dict[int, tuple[float, float]] = {}
        """Tokens up to a place, and its distance in bytes from the chunk's end."""
        self.least_per_chunk = inf
        """The fewest tokens per chunk of all places ever kept."""

    def record_count(self, prompt: PromptKey, tokens: int, ratio: float) -> None:
        """Record how many tokens an engine counted in a prompt. `ratio`: tokens per byte after its last full chunk.

        A place from `record_match` is more precise and is kept.
        """
        chunks = len(prompt.hashes) // HASH_BYTES
        if chunks:
            at = tokens - ratio * (prompt.size - chunks * CHUNK_BYTES)
            last = _last(prompt, chunks)
            known = self._places.get(last)
            self._keep(last, known if known is not None and known[1] else (max(0.0, at), 0.0), chunks)

    def record_match(self, prompt: PromptKey, chunks: int, tokens: int) -> None:
        """Record that an engine finds `tokens` cached of any prompt that shares exactly this many first chunks."""
        if chunks:
            self._keep(_last(prompt, chunks), (tokens, SHARED_BEHIND), chunks)

    def _keep(self, chunk: int, place: tuple[float, float], chunks: int) -> None:
        known_places = self._places
        self.least_per_chunk = min(self.least_per_chunk, place[0] / chunks)
        known_places.pop(chunk, None)
        known_places[chunk] = place
        if len(known_places) > self._limit:
            del known_places[next(iter(known_places))]

    def chunks_with(self, tokens: float, ratio: float) -> float:
        """Return a number of chunks which, if a prompt has that many, have at least these tokens, whatever else it has
        and whatever `measure` finds of it: a chunk counts for as much as the mean chunk of the prompt.

        Up to a place a prompt has at least `least_per_chunk`, and `ratio` per byte of the rest, of which at most
        `SHARED_BEHIND` bytes count to the place.
        """
        per_chunk = min(self.least_per_chunk, CHUNK_BYTES * ratio)
        return (tokens + SHARED_BEHIND * ratio) / per_chunk if per_chunk > 0.0 else inf

    def measure(self, prompt: PromptKey, ratio: float) -> Measure:
        """Return a prompt's size, at `ratio` tokens per byte where nothing is known; O(its chunks)."""
        places: list[Place] = [(0, 0.0)]
        known_places = self._places
        # As integers, because looking up many integers is faster than looking up as many slices of bytes.
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
    """Return the hash of the last of a prompt's first `chunks`."""
    return int.from_bytes(prompt.hashes[(chunks - 1) * HASH_BYTES : chunks * HASH_BYTES], byteorder)

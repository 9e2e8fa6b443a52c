"""Estimates of a request's tokens before the engine reports them, learned from the usage of earlier requests.

Token counts up to certain places in prompts are kept as engines reported them. A mean of tokens per byte is off by some
percent for any single prompt: code, names and other languages take more. But prompts come back longer, turn by turn,
and other prompts share their beginnings. What an engine counted up to the end of one prompt is known exactly for all
prompts that begin with it. Between such places tokens are spread evenly.

A match ends where prompts begin to differ, which is rarely the end of a chunk. The tokens that an engine found cached
for one prompt (`record_match`) it also finds for the next prompt that shares as many chunks: questions about the same
document diverge within the same chunk. And the next turn of a conversation continues after the end of an answer, up to
its last token.
"""

from bisect import bisect_right
from collections.abc import Sequence
from math import ceil, inf
from sys import byteorder
from typing import Final

from router.core.model.prompt_key import CHUNK_BYTES, HASH_BYTES, PromptKey
from router.core.model.request import Request, Usage
from router.core.predict.output_length import OutputPredictions

PREFIX_LIMIT: Final = 50_000
"""Default number of places kept."""
SHARED_BEHIND: Final = CHUNK_BYTES / 2
"""Bytes that prompts share, on average, after the last chunk that they have in common."""
Place = tuple[float, float]
"""A number of chunks, and the tokens up to their end."""


class Measure:
    """A prompt's size. Never changes."""

    __slots__ = ("places", "tokens")

    def __init__(self, tokens: int, places: Sequence[Place]) -> None:
        self.tokens = tokens
        """Tokens of the whole prompt; at least 1."""
        self.places = places
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


FIRST_RATIO: Final = 0.25
"""Tokens per byte before anything was learned: English text under the usual BPE vocabularies."""
RATIO_MEMORY: Final = 0.98
"""Factor by which the weight of past requests in the ratio decays with each new one: about the last fifty count."""
SPREAD: Final = 0.25
"""How far a prompt's tokens per byte may differ from the mean, as a share of the mean."""
ROUNDING: Final = 1e-9
"""More than the relative error of a few floating-point operations."""
MEASURES_KEPT: Final = 64
"""Prompts whose measure is cached."""


class TokenRatio:
    """Tokens per byte of one model's prompts, as a decaying mean weighted by length."""

    def __init__(self) -> None:
        self._bytes = 1024.0
        self._tokens = self._bytes * FIRST_RATIO
        self.value = FIRST_RATIO
        """Tokens per byte; positive."""

    def learn(self, size: int, tokens: int) -> None:
        """Add one prompt of `size` bytes that the engine counted as `tokens`."""
        self._bytes = self._bytes * RATIO_MEMORY + size
        self._tokens = self._tokens * RATIO_MEMORY + tokens
        self.value = self._tokens / self._bytes


class Estimates:
    """Everything that predicts tokens, in one object: those of prompts here, and those of answers in `outputs`.

    Prompts are estimated from their bytes with a ratio per model, and are known exactly up to where an engine counted.
    """

    def __init__(self, measured_prefixes: int = PREFIX_LIMIT) -> None:
        """`measured_prefixes`: places in prompts kept; the least recently learned are dropped first."""
        self._ratios: dict[str, TokenRatio] = {}
        self._measured_prefixes = MeasuredPrefixes(measured_prefixes)
        self._measures: dict[tuple[str, bytes], tuple[PromptKey, Measure]] = {}
        """Cache by model and hashes, cleared with every change of `version`: one decision measures the same prompts
        repeatedly.
        """
        self._chunks_with: dict[tuple[str, int], float] = {}
        """Answers of `chunks_with`, cleared likewise."""
        self.outputs: Final = OutputPredictions()
        self.version = 0
        """Incremented whenever estimates may have changed."""

    def tokens_per_chunk(self, model: str) -> float:
        """Return the mean tokens in one chunk of this model's prompts."""
        ratio = self._ratios.get(model)
        return CHUNK_BYTES * (FIRST_RATIO if ratio is None else ratio.value)

    def measure(self, model: str, prompt: PromptKey) -> Measure:
        """Return one prompt's size in tokens: exact if it came as token ids, and up to where engines counted it."""
        if prompt.tokens is not None:
            total = max(1, prompt.tokens)
            return Measure(total, ((0, 0.0), (max(1, prompt.size) / CHUNK_BYTES, total)))
        known = self._measures.get((model, prompt.hashes))
        if known is None or known[0] is not prompt:
            if len(self._measures) >= MEASURES_KEPT:
                self._measures.clear()
            known = prompt, self._measured_prefixes.measure(prompt, self._ratio(model).value)
            self._measures[model, prompt.hashes] = known
        return known[1]

    def input_tokens(self, request: Request) -> int:
        """Return the tokens of all prompts of a request."""
        if len(request.prompts) == 1:
            return self.measure(request.model, request.prompts[0]).tokens
        return sum([self.measure(request.model, prompt).tokens for prompt in request.prompts])

    def chunks_with(self, model: str, tokens: int) -> float:
        """Return how many chunks of any one prompt of this model surely amount to these tokens, by `input_tokens` and
        the prompt's size; a prompt that came as token ids may have less.
        """
        known = self._chunks_with.get((model, tokens))
        if known is None:
            chunks = self._measured_prefixes.chunks_with(tokens, self._ratio(model).value)
            known = self._chunks_with[model, tokens] = chunks * (1 + ROUNDING)
        return known

    def learn(self, request: Request, usage: Usage, answers: Sequence[PromptKey] = ()) -> None:
        """Learn from the engine's usage of a finished request. `answers`: its prompt followed by each answer."""
        self.version += 1
        self._forget_answers()
        prompts = request.prompts
        sizes = [prompt.size for prompt in prompts if prompt.tokens is None]
        # If a worker stores the request's conversation, its input tokens include more than the bytes of these prompts.
        if usage.input_tokens and len(sizes) == len(prompts) and request.worker is None:
            ratio, size = self._ratio(request.model), sum(sizes)
            # Images have many tokens and count as a short digest. They would spoil the estimates of text, in which a
            # token has a byte at least.
            if usage.input_tokens <= size:
                ratio.learn(size, usage.input_tokens)
            if len(prompts) == 1:
                self._measured_prefixes.record_count(prompts[0], usage.input_tokens, ratio.value)
                if len(answers) == 1:
                    self._record_answer(answers[0], usage.input_tokens + usage.output_tokens, ratio.value)
        self.outputs.answer_ended(request, usage.output_tokens)

    def on_cache_hit(self, model: str, prompt: PromptKey, chunks: int, tokens: int) -> None:
        """Learn from the tokens that an engine found cached of a prompt, when it was believed to hold exactly `chunks`
        of it.

        Ignored if the engine evidently held more or less than believed, since that says nothing about the tokens in
        chunks.
        """
        if prompt.tokens is not None:
            return
        believed = self.measure(model, prompt).held(chunks)
        if (1 - SPREAD) * believed <= tokens <= (1 + SPREAD) * believed + self.tokens_per_chunk(model):
            self.version += 1
            self._forget_answers()
            self._measured_prefixes.record_match(prompt, chunks, tokens)

    def _forget_answers(self) -> None:
        self._measures.clear()
        self._chunks_with.clear()

    def _record_answer(self, answer: PromptKey, tokens: int, ratio: float) -> None:
        """Record the tokens of a prompt with its answer.

        The next turn repeats both and is found cached up to the last token, whose KV entries no engine computes.
        """
        self._measured_prefixes.record_count(answer, tokens, ratio)
        self._measured_prefixes.record_match(answer, len(answer.hashes) // HASH_BYTES, tokens - 1)

    def _ratio(self, model: str) -> TokenRatio:
        ratio = self._ratios.get(model)
        if ratio is None:
            ratio = self._ratios[model] = TokenRatio()
        return ratio

"""What a request will cost before the engine has said so: learned from the usage of those before it."""

from collections.abc import Sequence
from typing import Final

from router.core.model.prompt_key import CHUNK_BYTES, HASH_BYTES, PromptKey
from router.core.model.request import Request, Usage
from router.core.predict.measured_prefixes import PREFIX_LIMIT, Measure, MeasuredPrefixes
from router.core.predict.output_length import OutputLengths

FIRST_RATIO = 0.25
"""Tokens per byte before anything was learned: English text under the usual BPE vocabularies."""
RATIO_MEMORY = 0.98
"""What a past request still weighs in the ratio after one more: about the last fifty count."""
SPREAD = 0.25
"""By how much a prompt's tokens per byte may differ from the mean, as a share of it."""
MEASURES_KEPT = 64
"""Prompts whose measure is remembered."""


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
    """Input by bytes times a ratio per model; output by a running mean per client and model."""

    def __init__(self, client_limit: int = 10_000, measured_prefixes: int = PREFIX_LIMIT) -> None:
        """`client_limit`: how many (client, model) means are kept; `measured_prefixes`: how many places of prompts.

        Of either the least recently learned goes first.
        """
        self._ratios: dict[str, TokenRatio] = {}
        self._measured_prefixes = MeasuredPrefixes(measured_prefixes)
        self._measures: dict[tuple[str, bytes], tuple[PromptKey, Measure]] = {}
        """By model and hashes, since the last lesson: one decision asks several times about what it looks at."""
        self.output_lengths: Final = OutputLengths(client_limit)
        self.version = 0
        """How often `learn` was called: while this stays, the same questions have the same answers."""

    def tokens_per_chunk(self, model: str) -> float:
        """What one chunk of text of this model's prompts is worth in tokens."""
        ratio = self._ratios.get(model)
        return CHUNK_BYTES * (FIRST_RATIO if ratio is None else ratio.value)

    def measure(self, model: str, prompt: PromptKey) -> Measure:
        """One prompt's size in tokens: exact where it came as token ids, and up to where engines counted it."""
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
        """Tokens of all prompts of a request."""
        if len(request.prompts) == 1:
            return self.measure(request.model, request.prompts[0]).tokens
        return sum([self.measure(request.model, prompt).tokens for prompt in request.prompts])

    def expected_output(self, request: Request) -> int:
        """Output tokens to reserve: the client's own limit, or else what it usually gets from this model."""
        return self.output_lengths.expected(request)

    def learn(self, request: Request, usage: Usage, answers: Sequence[PromptKey] = ()) -> None:
        """Take in what the engine counted for a finished request; `answers`: its prompt with each answer to it."""
        self.version += 1
        self._measures.clear()
        prompts = request.prompts
        sizes = [prompt.size for prompt in prompts if prompt.tokens is None]
        # What one worker keeps for a request is read before its prompts, and says nothing of their bytes.
        if usage.input_tokens and len(sizes) == len(prompts) and request.worker is None:
            ratio = self._ratio(request.model)
            ratio.learn(sum(sizes), usage.input_tokens)
            if len(prompts) == 1:
                self._measured_prefixes.record_count(prompts[0], usage.input_tokens, ratio.value)
                if len(answers) == 1:
                    self._record_answer(answers[0], usage.input_tokens + usage.output_tokens, ratio.value)
        self.output_lengths.learn(request, usage.output_tokens)

    def on_cache_hit(self, model: str, prompt: PromptKey, chunks: int, tokens: int) -> None:
        """An engine found so many tokens of a prompt, of which it was believed to hold so many chunks and no more.

        Passed over where it held more, or less, than was believed: that says nothing about what chunks are worth.
        """
        if prompt.tokens is not None:
            return
        believed = self.measure(model, prompt).held(chunks)
        if (1 - SPREAD) * believed <= tokens <= (1 + SPREAD) * believed + self.tokens_per_chunk(model):
            self.version += 1
            self._measures.clear()
            self._measured_prefixes.record_match(prompt, chunks, tokens)

    def _record_answer(self, answer: PromptKey, tokens: int, ratio: float) -> None:
        """The key of a prompt with its answer, and how many tokens both have.

        The next turn repeats both and is found cached up to the last token, which no engine computes.
        """
        self._measured_prefixes.record_count(answer, tokens, ratio)
        self._measured_prefixes.record_match(answer, len(answer.hashes) // HASH_BYTES, tokens - 1)

    def _ratio(self, model: str) -> TokenRatio:
        ratio = self._ratios.get(model)
        if ratio is None:
            ratio = self._ratios[model] = TokenRatio()
        return ratio

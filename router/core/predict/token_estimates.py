"""Estimates of a request's tokens before the engine reports them, learned from the usage of earlier requests."""

from collections.abc import Sequence
from typing import Final

from router.core.model.prompt_key import CHUNK_BYTES, HASH_BYTES, PromptKey
from router.core.model.request import Request, Usage
from router.core.predict.measured_prefixes import PREFIX_LIMIT, Measure, MeasuredPrefixes
from router.core.predict.output_predictions import OutputPredictions

FIRST_RATIO = 0.25
"""Tokens per byte before anything was learned: English text under the usual BPE vocabularies."""
RATIO_MEMORY = 0.98
"""Factor by which the weight of past requests in the ratio decays with each new one: about the last fifty count."""
SPREAD = 0.25
"""How far a prompt's tokens per byte may differ from the mean, as a share of the mean."""
ROUNDING: Final = 1e-9
"""More than the relative error of a few floating-point operations."""
MEASURES_KEPT = 64
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

    def __init__(self, client_limit: int = 10_000, measured_prefixes: int = PREFIX_LIMIT) -> None:
        """`client_limit`: (client, model) means kept. `measured_prefixes`: places in prompts kept.

        Of both the least recently learned are dropped first.
        """
        self._ratios: dict[str, TokenRatio] = {}
        self._measured_prefixes = MeasuredPrefixes(measured_prefixes)
        self._measures: dict[tuple[str, bytes], tuple[PromptKey, Measure]] = {}
        """Cache by model and hashes, cleared with every change of `version`: one decision measures the same prompts
        repeatedly.
        """
        self._chunks_with: dict[tuple[str, int], float] = {}
        """Answers of `chunks_with`, cleared likewise."""
        self.outputs: Final = OutputPredictions(client_limit)
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
            ratio = self._ratio(request.model)
            ratio.learn(sum(sizes), usage.input_tokens)
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

"""What a request will cost before the engine has said so: learned from the usage of those before it."""

from math import ceil

from router.core.model import ClientId, Request, Usage
from router.core.prompt_key import CHUNK_BYTES, PromptKey

FIRST_RATIO = 0.25
"""Tokens per byte before anything was learned: English text under the usual BPE vocabularies."""
RATIO_MEMORY = 0.98
"""What a past request still weighs in the ratio after one more: about the last fifty count."""
FIRST_OUTPUT = 256
"""Output tokens expected of the first request of a model that sets no limit."""
OUTPUT_WEIGHT = 0.2
"""Weight of the newest length in the running mean (VTC's predictor averages over five)."""


class TokenRatio:
    """Tokens per byte of one model's prompts, as a decaying mean weighted by length."""

    def __init__(self) -> None:
        self._bytes = 1024.0
        self._tokens = self._bytes * FIRST_RATIO

    @property
    def value(self) -> float:
        """Tokens per byte; positive."""
        return self._tokens / self._bytes

    def learn(self, size: int, tokens: int) -> None:
        """Add one prompt of `size` bytes that the engine counted as `tokens`."""
        self._bytes = self._bytes * RATIO_MEMORY + size
        self._tokens = self._tokens * RATIO_MEMORY + tokens


class Estimates:
    """Input by bytes times a ratio per model; output by a running mean per client and model."""

    def __init__(self, client_limit: int = 10_000) -> None:
        """`client_limit`: how many (client, model) means are kept; the least recently learned goes first."""
        self._ratios: dict[str, TokenRatio] = {}
        self._outputs: dict[tuple[ClientId | None, str], float] = {}
        self._limit = client_limit
        self.lessons = 0
        """How often `learn` was called: while this stays, the same questions have the same answers."""

    def tokens_per_chunk(self, model: str) -> float:
        """What one chunk of text of this model's prompts is worth in tokens."""
        return CHUNK_BYTES * self._ratio(model).value

    def prompt_tokens(self, model: str, prompt: PromptKey) -> int:
        """Tokens of one prompt: exact where it came as token ids; at least 1."""
        if prompt.tokens is not None:
            return max(1, prompt.tokens)
        return max(1, ceil(prompt.size * self._ratio(model).value))

    def input_tokens(self, request: Request) -> int:
        """Tokens of all prompts of a request."""
        return sum(self.prompt_tokens(request.model, prompt) for prompt in request.prompts)

    def cached_tokens(self, model: str, prompt: PromptKey, chunks: int) -> int:
        """Tokens in a prompt's first `chunks` chunks, short of the whole: an engine always computes the last one."""
        if not chunks:
            return 0
        tokens = self.prompt_tokens(model, prompt)
        return min(tokens - 1, tokens * chunks * CHUNK_BYTES // prompt.size)

    def expected_output(self, request: Request) -> int:
        """Output tokens to reserve: the client's own limit, or else what it usually gets from this model."""
        if request.output_limit is not None:
            return request.output_limit
        mean = self._outputs.get((request.client, request.model), self._outputs.get((None, request.model)))
        return FIRST_OUTPUT if mean is None else ceil(mean)

    def learn(self, request: Request, usage: Usage) -> None:
        """Take in what the engine counted for a finished request."""
        self.lessons += 1
        if usage.input_tokens and all(prompt.tokens is None for prompt in request.prompts):
            self._ratio(request.model).learn(sum(prompt.size for prompt in request.prompts), usage.input_tokens)
        self._average((None, request.model), usage.output_tokens)
        self._average((request.client, request.model), usage.output_tokens)

    def _ratio(self, model: str) -> TokenRatio:
        ratio = self._ratios.get(model)
        if ratio is None:
            ratio = self._ratios[model] = TokenRatio()
        return ratio

    def _average(self, key: tuple[ClientId | None, str], tokens: int) -> None:
        before = self._outputs.pop(key, float(tokens))
        self._outputs[key] = before + OUTPUT_WEIGHT * (tokens - before)
        if len(self._outputs) > self._limit:
            del self._outputs[next(iter(self._outputs))]

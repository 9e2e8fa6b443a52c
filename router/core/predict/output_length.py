"""How long a client's answers are, beside the limits that it states: what the window foresees of the next one.

A limit is the client's word, and costs it nothing. What a call will hold of a worker's KV cache is foreseen from what
its client's answers came to, as a share of their limits: all of it where limits are exact, little where every call
states the same large number. And no answer is foreseen to be longer than a few times the mean of those before it,
whatever it says: one that is grows in the forecast as it streams (`kv_forecast`).
"""

from dataclasses import dataclass
from math import ceil, inf
from typing import Final

from router.core.model.request import ClientId, Request

FIRST_OUTPUT: Final = 256
"""Output tokens expected of the first request of a model that sets no limit."""
OUTPUT_WEIGHT: Final = 0.2
"""Weight of the newest length in the running mean (VTC's predictor averages over five)."""
LIMIT_MEMORY: Final = 0.97
"""What a past answer and its limit still weigh after one more: about the last thirty count."""
MEAN_FACTOR: Final = 4.0
"""An answer is foreseen to have at most so many times as many tokens as its client's have in the mean."""
LEAST_BOUND: Final = 256.0
"""... or this many, if that is more: short answers differ by more times their mean, and hold little."""


@dataclass(slots=True)
class LengthHistory:
    """The answers of one client, or of all, by one model."""

    mean: float
    """Tokens, the newest counting most."""
    tokens: float = 0.0
    limits: float = 0.0
    """Decaying sums over answers that had a limit: what they came to, and what that was."""

    def learn(self, tokens: int, limit: int | None) -> None:
        """One more."""
        self.mean += OUTPUT_WEIGHT * (tokens - self.mean)
        if limit is not None:
            self.tokens = self.tokens * LIMIT_MEMORY + tokens
            self.limits = self.limits * LIMIT_MEMORY + limit

    def forecast(self, limit: int) -> float:
        """Tokens foreseen of the next, with this limit."""
        share = min(1.0, self.tokens / self.limits) if self.limits else 1.0
        return min(limit * share, max(LEAST_BOUND, MEAN_FACTOR * self.mean))


class OutputLengths:
    """The past of every client with every model."""

    def __init__(self, client_limit: int) -> None:
        """`client_limit`: how many are kept; of more, those go that were learned longest ago."""
        self._limit = client_limit
        self._pasts: dict[tuple[ClientId | None, str], LengthHistory] = {}

    def expected(self, request: Request) -> int:
        """Output tokens to reserve: the client's own limit, or else what it usually gets from this model."""
        if request.output_limit is not None:
            return request.output_limit
        past = self._past(request)
        return FIRST_OUTPUT if past is None else ceil(past.mean)

    def forecast(self, request: Request, so_far: int = 0) -> float:
        """Output tokens of which it is about as likely to have more as fewer, beyond those that it has `so_far`.

        Its limit says so only in proportion to what came of its client's limits before, or else of the model's.
        """
        limit, past = request.output_limit, self._past(request)
        if limit is None:
            foreseen = float(FIRST_OUTPUT) if past is None else past.mean
        else:
            foreseen = min(limit, MEAN_FACTOR * FIRST_OUTPUT) if past is None else past.forecast(limit)
        return min(max(foreseen - so_far, so_far), max_remaining_output(request, so_far))

    def learn(self, request: Request, tokens: int) -> None:
        """An answer came to so many tokens."""
        if request.output_limit == 0:
            return  # as for an embedding: it says nothing about the answers that there can be
        for client in (None, request.client):
            key = (client, request.model)
            past = self._pasts.pop(key, None) or LengthHistory(float(tokens))
            past.learn(tokens, request.output_limit)
            self._pasts[key] = past
            if len(self._pasts) > self._limit:
                del self._pasts[next(iter(self._pasts))]

    def _past(self, request: Request) -> LengthHistory | None:
        return self._pasts.get((request.client, request.model)) or self._pasts.get((None, request.model))


def max_remaining_output(request: Request, so_far: int = 0) -> float:
    """Output tokens that a request may have beyond so many; infinite without a limit."""
    return inf if request.output_limit is None else max(0, request.output_limit - so_far)

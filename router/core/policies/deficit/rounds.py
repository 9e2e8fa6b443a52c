"""How much a refill round adds: at most Q^u, and no more than the workers can serve in a given time.

With N eligible clients, a round of DLPM ("Locality-aware Fair Scheduling in LLM Serving", Algorithm 1) lasts until each
has used Q^u, which takes N · Q^u / S seconds at a service rate of S; a client in debt waits that long. So a round adds
to each client, per weight, what the workers serve in a time T, divided by the weights of all active clients. Within a
round the longest match still decides: T, not Q^u, is the time that locality costs others.
"""

from collections.abc import Callable
from math import floor

from router.core.policies.deficit.parameters import DeficitParameters

STEPS = 2**16
"""Fractions of a quantum are multiples of 1 / STEPS, so that sums of them are exact."""
MIN_FRACTION = 0.01
"""The smallest fraction of a quantum that a round adds."""


class Rounds:
    """Computes the fraction of Q^u that a round adds."""

    def __init__(self, parameters: DeficitParameters, rate: Callable[[], float | None]) -> None:
        """`rate` returns the workers' service rate S, in cost units per second; None while it is unknown."""
        self._seconds = parameters.round_seconds
        self._quantum = parameters.quantum
        self._rate = rate

    def fraction(self, weight: float) -> float:
        """The fraction of its quantum that each client receives, in (0, 1], at this total weight of the active
        clients.
        """
        if not self._seconds or weight <= 0 or (rate := self._rate()) is None:
            return 1.0
        fraction = self._seconds * rate / (weight * self._quantum)
        return min(1.0, max(1, floor(STEPS * max(fraction, MIN_FRACTION))) / STEPS)

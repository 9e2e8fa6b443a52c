"""How long a refill round lasts: Q^u is the most that a round grants, and what it grants is what it can serve in time.

With N clients that have credit, a round of DLPM ("Locality-aware Fair Scheduling in LLM Serving", Algorithm 1) lasts
until each has used Q^u, which takes N · Q^u / S seconds at a service rate of S; who has no credit waits that long. So a
round grants each client, per weight, what the workers serve in a time T, divided by the weights of all active clients.
Within a round the longest match may still decide: T, not Q^u, is what locality costs others in time.
"""

from collections.abc import Callable
from math import floor

from router.core.policies.deficit.parameters import DeficitParameters

STEPS = 2**16
"""Parts of a quantum are counted in steps of 1 / STEPS: sums of them are exact."""
MIN_FRACTION = 0.01
"""The least part of a quantum that a round adds."""


class Rounds:
    """What part of Q^u a round grants."""

    def __init__(self, parameters: DeficitParameters, rate: Callable[[], float | None]) -> None:
        """`rate` answers the workers' service rate S, in cost units per second; None while that is not known."""
        self._seconds = parameters.round_seconds
        self._quantum = parameters.quantum
        self._rate = rate

    def fraction(self, weight: float) -> float:
        """What part of its quantum each client is granted, in (0, 1], while the active ones weigh so much together."""
        if not self._seconds or weight <= 0 or (rate := self._rate()) is None:
            return 1.0
        fraction = self._seconds * rate / (weight * self._quantum)
        return min(1.0, max(1, floor(STEPS * max(fraction, MIN_FRACTION))) / STEPS)

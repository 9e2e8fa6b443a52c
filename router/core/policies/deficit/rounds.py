"""How much a refill round adds: at most Q^u, and no more than the workers can serve in a given time; and the active
clients, whose weights divide it.

With N eligible clients, a round of DLPM ("Locality-aware Fair Scheduling in LLM Serving", Algorithm 1) lasts until each
has used Q^u, which takes N · Q^u / S seconds at a service rate of S; a client in debt waits that long. So a round adds
to each client, per weight, what the workers serve in a time T, divided by the weights of all active clients. Within a
round the longest match still decides: T, not Q^u, is the time that locality costs others.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import floor

from router.core.clients.shares import Shares
from router.core.model.request import ClientId, Request
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


@dataclass(slots=True)
class Activity:
    """The activity of one client."""

    requests: int
    weight: float
    """The client's weight when it became active."""


class ActiveClients:
    """The clients with requests that wait in a queue or are in flight from it, and their total weight.

    A client is active from the start of its first request to the end of its last.
    """

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._clients: dict[ClientId, Activity] = {}
        self.weight = 0.0
        """The sum of the active clients' weights; their number if each weighs 1."""

    def __len__(self) -> int:
        return len(self._clients)

    def __contains__(self, client: ClientId) -> bool:
        return client in self._clients

    def weight_with(self, request: Request) -> float:
        """Return what the sum of weights would be if this request's client were active."""
        return self.weight if request.client in self._clients else self.weight + self._shares.effective_weight(request)

    def add_request(self, request: Request) -> None:
        """Count a request that waits or is in flight. The client's weight counts with its first request."""
        activity = self._clients.get(request.client)
        if activity is None:
            weight = self._shares.effective_weight(request)
            self._clients[request.client] = Activity(1, weight)
            self.weight += weight
        else:
            activity.requests += 1

    def remove_request(self, client: ClientId) -> None:
        """Count a request as ended, withdrawn or moved."""
        activity = self._clients[client]
        activity.requests -= 1
        if not activity.requests:
            del self._clients[client]
            self.weight = self.weight - activity.weight if self._clients else 0.0  # 0.0 drops the rounding error

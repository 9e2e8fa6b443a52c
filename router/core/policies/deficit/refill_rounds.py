"""Refill rounds: among whom a round is divided, how much it adds, and who may keep more than that.

A refill round adds at most Q^u, and no more than the workers can serve in a given time, divided by the weights of the
active clients. With N eligible clients, a round of DLPM ("Locality-aware Fair Scheduling in LLM Serving", Algorithm 1)
lasts until each has used Q^u, which takes N · Q^u / S seconds at a service rate of S; a client in debt waits that long.
So a round adds to each client, per weight, what the workers serve in a time T, divided by the weights of all active
clients. Within a round the longest match still decides: T, not Q^u, is the time that locality costs others.

What a client has when it begins to wait is cut to that. A client with one call open begins to wait with each call. One
with several may never cease to wait: if it began while few were active, it would keep a whole quantum, and those that
came later would wait in debt until that is spent. So it is cut again at its second turn, unless it was in debt since it
began: then what it has is what refills have added, and that is not cut.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import floor
from typing import Final

from router.core.clients.shares import Shares
from router.core.model.request import ClientId, Request
from router.core.policies.deficit.deficits import NO_LIMITS, ClientDeficits, WorkerSet
from router.core.policies.deficit.parameters import DeficitParameters

STEPS: Final = 2**16
"""Fractions of a quantum are multiples of 1 / STEPS, so that sums of them are exact."""
MIN_FRACTION: Final = 0.01
"""The smallest fraction of a quantum that a round adds."""


@dataclass(slots=True)
class Activity:
    """The activity of one client."""

    requests: int
    weight: float
    """The client's weight when it became active."""


class ActiveClients:
    """The active clients, and their total weight. A client is active from the start of its first request to the end of
    its last.
    """

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self.clients: Final[dict[ClientId, Activity]] = {}
        self.weight = 0.0
        """The sum of the active clients' weights; their number if each weighs 1."""

    def weight_with(self, request: Request) -> float:
        """Return what the sum of weights would be if this request's client were active."""
        return self.weight if request.client in self.clients else self.weight + self._weight_of(request)

    def add_request(self, request: Request) -> None:
        """Count a request that waits or is in flight. The client's weight counts with its first request."""
        activity = self.clients.get(request.client)
        if activity is None:
            weight = self._weight_of(request)
            self.clients[request.client] = Activity(1, weight)
            self.weight += weight
        else:
            activity.requests += 1

    def _weight_of(self, request: Request) -> float:
        return self._shares.ungrouped.get(request.client) or self._shares.effective_weight(request)

    def remove_request(self, client: ClientId) -> None:
        """Count a request as ended, withdrawn or moved."""
        activity = self.clients[client]
        activity.requests -= 1
        if not activity.requests:
            del self.clients[client]
            self.weight = self.weight - activity.weight if self.clients else 0.0  # 0.0 drops the rounding error


class RefillRounds:
    """Adds refill rounds, each with the fraction of Q^u that its time allows."""

    __slots__ = ("_deficits", "_quantum", "_rate", "_seconds", "active")

    def __init__(
        self, parameters: DeficitParameters, rate: Callable[[], float | None], deficits: ClientDeficits, shares: Shares
    ) -> None:
        """`rate` returns the workers' service rate S, in cost units per second; None while it is unknown."""
        self.active: Final = ActiveClients(shares)
        """The clients among whom a round is divided."""
        self._seconds = parameters.round_seconds
        self._quantum = parameters.quantum
        self._rate = rate
        self._deficits = deficits

    def fraction(self, weight: float) -> float:
        """Return the fraction of its quantum that each client receives, in (0, 1], at this total weight of the active
        clients.
        """
        if not self._seconds or weight <= 0 or (rate := self._rate()) is None:
            return 1.0
        fraction = self._seconds * rate / (weight * self._quantum)
        return min(1.0, max(1, floor(STEPS * max(fraction, MIN_FRACTION))) / STEPS)

    def add_for(self, client: ClientId, weight: float, limits: Mapping[WorkerSet, float] = NO_LIMITS) -> float:
        """Add rounds until this client's deficit is positive; returns how many, in quanta. Rounding may leave it at
        zero; then one more is needed.

        `weight`: of all active clients. `limits`: how many rounds count for clients with these sets of workers.
        """
        added = 0.0
        while self._deficits.deficit(client) <= 0:
            left = {workers: max(0.0, limit - added) for workers, limit in limits.items()} if limits else limits
            added += self._deficits.refill_for(client, self.fraction(weight), left)
        return added


class Cuts:
    """Cuts the deficits of waiting clients to what a round adds now."""

    __slots__ = ("_deficits", "_rounds", "_turns")

    def __init__(self, rounds: RefillRounds, deficits: ClientDeficits) -> None:
        self._rounds = rounds
        self._deficits = deficits
        self._turns: dict[ClientId, int] = {}
        """The turns of each waiting client since it began to, unless it was in debt or cut at a turn since."""

    def join(self, client: ClientId) -> None:
        """Cut a client that begins to wait, and count its turns from now on."""
        self._cut(client)
        self._turns[client] = 0

    def count_turn(self, client: ClientId) -> None:
        """Count a turn of a client that waits on, and cut it at its second."""
        if client in self._turns:
            if not self._turns[client]:
                self._turns[client] = 1
                return
            del self._turns[client]
            self._cut(client)

    def discard(self, client: ClientId) -> None:
        """Count no more turns of a client, because it is in debt or ceases to wait."""
        if client in self._turns:
            del self._turns[client]

    def _cut(self, client: ClientId) -> None:
        self._deficits.cap(client, self._rounds.fraction(self._rounds.active.weight))

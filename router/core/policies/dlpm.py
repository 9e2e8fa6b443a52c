"""DLPM, deficit longest prefix match: longest match first, among the clients that have credit.

"Locality-aware Fair Scheduling in LLM Serving", section 4.1, Algorithm 1. Where this departs from it: credit is
refilled in closed form; a client with nothing in flight at the worker goes before the longest match; a client
seen for the first time starts with one quantum; debt is never shed by leaving and coming back, but forgiven when
nobody waits, since using an idle machine takes nothing from anybody.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from router.core.accounts import Charge
from router.core.deficits import DeficitTable
from router.core.longest_match import LongestMatchQueue
from router.core.model import ClientId, Request, RequestId, WorkerId
from router.core.policy import Fits, Order, Surroundings, Turn


@dataclass(frozen=True, slots=True)
class DlpmParameters:
    """DLPM order (Algorithm 1)."""

    quantum: float = 20_000.0
    """Q^u, in cost units: what a refill adds to a client's credit. More: better locality, looser fairness."""
    sparse_first: bool = True
    """Among clients with credit, those with nothing in flight at the worker go before the longest match."""

    def __post_init__(self) -> None:
        if self.quantum <= 0:
            raise ValueError("quantum must be positive")


class Dlpm(Order):
    """Counters q_i of one worker's queue; longest match among the requests of clients with credit."""

    def __init__(self, surroundings: Surroundings, worker: WorkerId) -> None:
        view = surroundings.view
        self._parameters = surroundings.parameters.of(DlpmParameters)
        self._cost = surroundings.cost
        self._queue = LongestMatchQueue(
            lambda request: view.watch(request, worker), lambda request: view.unwatch(request, worker)
        )
        self._deficits: DeficitTable[ClientId] = DeficitTable()
        self._in_flight: dict[ClientId, set[RequestId]] = {}
        self._unstarted: set[RequestId] = set()

    def __len__(self) -> int:
        return len(self._queue)

    def waiting(self) -> Collection[RequestId]:
        """See `Order`."""
        return self._queue.requests

    def push(self, request: Request) -> None:
        """See `Order`."""
        if not self._queue and not self._unstarted:
            self._deficits.forgive()
        quantum = self._parameters.quantum * request.weight
        self._deficits.join(request.client, quantum, credit=quantum)
        self._queue.push(request)

    def remove(self, request: RequestId) -> Request:
        """See `Order`."""
        return self._queue.remove(request)

    def select(self, fits: Fits, now: float) -> Turn | None:  # noqa: ARG002
        """See `Order`. Refills the counters when no client that waits has credit."""
        credited = self._credited()
        if not credited:
            self._deficits.refill(self._queue.clients)
            credited = self._credited()
        sparse = [c for c in credited if c not in self._in_flight] if self._parameters.sparse_first else []
        request = self._queue.longest(sparse or credited)
        return Turn(request) if request is not None and fits(request) else None

    def match_grew(self, requests: Iterable[RequestId]) -> None:
        """See `Order`."""
        self._queue.match_grew(requests)

    def dispatched(self, request: Request) -> None:
        """See `Order`."""
        self._in_flight.setdefault(request.client, set()).add(request.id)
        if request.streamed:  # others never show their start
            self._unstarted.add(request.id)

    def charged(self, charge: Charge) -> None:
        """See `Order`."""
        self._deficits.charge(charge.client, charge.at(self._cost))

    def started(self, request: Request) -> None:
        """See `Order`."""
        self._unstarted.discard(request.id)

    def ended(self, request: Request) -> None:
        """See `Order`."""
        self._unstarted.discard(request.id)
        requests = self._in_flight.get(request.client, set())
        requests.discard(request.id)
        if not requests:
            self._in_flight.pop(request.client, None)

    def credit(self, client: ClientId) -> float | None:
        """q_i, in cost units; None for a client that this worker never saw."""
        return self._deficits.credit(client) if client in self._deficits else None

    @classmethod
    def gap_quantum(cls, surroundings: Surroundings) -> float | None:
        """See `Properties`."""
        return surroundings.parameters.of(DlpmParameters).quantum

    def _credited(self) -> list[ClientId]:
        return [client for client in self._queue.clients if self._deficits.credit(client) > 0]

"""D²LPM's counters q_{i,w}, which limit how long a client's requests stay with a worker.

"Locality-aware Fair Scheduling in LLM Serving", section 5.2, Algorithm 2, with two rules that it leaves open: a worker
that is new to a client starts with the client's highest deficit at any worker, or it would receive no requests; and Q^w
is scaled with the worker's measured service rate, so that a slow worker holds its clients for the same time as a fast
one, not for the same cost.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator

from router.core.clients.shares import Shares
from router.core.model.request import ClientId, Request, WorkerId
from router.core.model.saved import SavedCounter
from router.core.policies.deficit.deficits import DeficitTable


class WorkerDeficits:
    """For each client, a deficit counter per worker."""

    def __init__(self, quantum: float, speed: Callable[[WorkerId], float], shares: Shares) -> None:
        """`quantum`: Q^w, in cost units, of a client of weight 1 at a worker of mean speed."""
        self._quantum = quantum
        self._speed = speed
        self._shares = shares
        self._tables: defaultdict[ClientId, DeficitTable[WorkerId]] = defaultdict(DeficitTable)

    def refilled_table(self, request: Request, workers: Collection[WorkerId]) -> DeficitTable[WorkerId]:
        """The client's counters, with one for each of these workers, refilled until at least one of these is
        positive.
        """
        table = self.table(request, workers)
        if all(table.deficit(worker) <= 0 for worker in workers):
            for worker in workers:
                table.join(worker, self._quantum_of(request, worker), 0.0)
            table.refill(workers)
        return table

    def table(self, request: Request, workers: Iterable[WorkerId]) -> DeficitTable[WorkerId]:
        """The client's counters, with one for each of these workers."""
        table = self._tables[request.client]
        if missing := table.missing(workers):
            highest = max([table.deficit(known) for known in table], default=0.0)
            for worker in missing:
                table.join(worker, self._quantum_of(request, worker), highest)
        return table

    def _quantum_of(self, request: Request, worker: WorkerId) -> float:
        return self._quantum * self._shares.effective_weight(request) * self._speed(worker)

    def charge(self, client: ClientId, worker: WorkerId, cost: float) -> None:
        """Subtract this cost from a client's deficit at a worker; a negative cost is a refund."""
        self._tables[client].charge(worker, cost)

    def forget(self, client: ClientId) -> None:
        """Discard a client's counters: they are no debt towards other clients."""
        self._tables.pop(client, None)

    def forget_worker(self, worker: WorkerId) -> None:
        """Discard all counters for a worker."""
        for table in self._tables.values():
            table.drop(worker)

    def saved(self) -> Iterator[SavedCounter]:
        """Yield every counter. Counters may change between two items."""
        for client in list(self._tables):
            table = self._tables.get(client)
            for worker, deficit, quantum in table.saved() if table is not None else ():
                yield SavedCounter(client, worker, deficit, quantum)

    def restore(self, rows: Iterable[SavedCounter]) -> None:
        """Load saved counters."""
        for client, worker, deficit, quantum in rows:
            if worker is not None:
                self._tables[client].join(worker, quantum, deficit)

    def deficit(self, client: ClientId, worker: WorkerId) -> float | None:
        """q_{i,w}, in cost units; None for a worker that the client was never placed among."""
        table = self._tables.get(client)
        return None if table is None else table.deficit_or_none(worker)

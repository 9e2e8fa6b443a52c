"""D²LPM's placement: stay where the prefix is cached until the client's deficit at that worker is used up.

"Locality-aware Fair Scheduling in LLM Serving", section 5.2, Algorithm 2. It differs in this:

- The queue is the router's, so a request is charged when it is placed. The actual cost replaces this booking at
  dispatch.
- By default only the extend tokens are charged, as in the local scheduler.
- A request leaves a worker whose load is far above the lightest one's, even if its client's deficit there is positive.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar, NamedTuple

from router.core.model.cost import Charge, LinearCost, Tokens
from router.core.model.request import ClientId, Request, RequestId, WorkerId
from router.core.model.saved import SavedCounter
from router.core.policies.base import Candidate, Placed, Placement
from router.core.policies.context import PolicyContext
from router.core.policies.deficit.deficits import WorkerDeficits
from router.core.policies.dlpm.dlpm_parameters import D2lpmParameters
from router.core.policies.simple.balancers import lightest


class Booking(NamedTuple):
    """The advance charge of a waiting request."""

    client: ClientId
    worker: WorkerId
    cost: float


class D2lpm(Placement):
    """Longest prefix match among the workers where the client's deficit q_{i,w} is positive."""

    locality: ClassVar[bool] = True

    def __init__(self, context: PolicyContext) -> None:
        self._parameters = context.parameters.of(D2lpmParameters)
        cost = context.cost
        self.steal_loss = self._parameters.steal_loss if self._parameters.steal_loss >= 0 else None
        view = context.view
        speed = view.speed if self._parameters.by_service_rate else lambda _worker: 1.0
        self._worker_deficits = WorkerDeficits(self._parameters.quantum, speed, context.shares)
        self._cost: LinearCost = replace(cost, cached=cost.extend) if self._parameters.charge_full_input else cost
        self._bookings: dict[RequestId, Booking] = {}
        self._waiting: Counter[tuple[ClientId, WorkerId]] = Counter()
        """The number of a client's requests that wait for a worker. Zeros are removed."""
        self._turn = 0

    def place(self, request: Request, candidates: Sequence[Candidate]) -> Placed:
        """SELECTWORKER of Algorithm 2, with the escape by load."""
        table = self._worker_deficits.refilled_table(request, [c.worker for c in candidates])
        eligible = [c for c in candidates if table.deficit(c.worker) > 0]
        chosen, why = self._choose(request.client, candidates, eligible)
        return Placed(chosen.worker, why)

    def book(self, request: Request, candidate: Candidate) -> None:
        cost = self._cost(Tokens(candidate.extend_tokens, candidate.cached_tokens))
        self._worker_deficits.table(request, [candidate.worker])
        self._worker_deficits.charge(request.client, candidate.worker, cost)
        self._bookings[request.id] = Booking(request.client, candidate.worker, cost)
        self._waiting[request.client, candidate.worker] += 1

    def _choose(
        self, client: ClientId, candidates: Sequence[Candidate], eligible: Sequence[Candidate]
    ) -> tuple[Candidate, str]:
        self._turn += 1
        longest = max([c.cached_tokens for c in candidates])
        if not longest:
            return self._elsewhere(client, eligible), "no prefix"
        home = [c for c in eligible if c.cached_tokens == longest]
        if not home:
            return self._elsewhere(client, eligible), "deficit used up"
        chosen = lightest(home, self._turn)
        if not self._parameters.charge_full_input and self._overloaded(chosen, lightest(eligible, self._turn)):
            return self._elsewhere(client, eligible), "load"
        return chosen, "prefix"

    def _elsewhere(self, client: ClientId, eligible: Sequence[Candidate]) -> Candidate:
        """Choose, of the workers that are not overloaded, one where the fewest of the client's own requests wait.

        In a fair queue a client waits for its own requests. And a client gets its share of the whole fleet only if it
        is backlogged in every queue: by load alone, one client's requests would gather at one worker and another's at
        the next.
        """
        least = lightest(eligible, self._turn)
        near = [c for c in eligible if not self._overloaded(c, least)]
        fewest = min([self._waiting[client, c.worker] for c in near])
        return lightest([c for c in near if self._waiting[client, c.worker] == fewest], self._turn)

    def _overloaded(self, chosen: Candidate, lightest_one: Candidate) -> bool:
        return chosen.load > self._parameters.load_ratio * lightest_one.load + self._parameters.load_slack

    def unplace(self, request: RequestId) -> None:
        booking = self._bookings.pop(request)
        self._worker_deficits.charge(booking.client, booking.worker, -booking.cost)
        self._waiting[booking.client, booking.worker] -= 1
        if not self._waiting[booking.client, booking.worker]:
            del self._waiting[booking.client, booking.worker]

    def advance(self, now: float) -> None:
        """Do nothing: time does not change the placement."""

    def request_dispatched(self, request: RequestId, now: float) -> None:
        """Do nothing: `unplace` refunds the booking, and `request_charged` charges the actual cost."""

    def resume(self, request: Request, worker: WorkerId) -> None:
        self._worker_deficits.table(request, [worker])

    def request_ended(self, request: RequestId) -> None:
        """Do nothing: the whole cost is charged by then."""

    def request_charged(self, charge: Charge) -> None:
        cost = self._cost.difference(charge.before, charge.after)
        self._worker_deficits.charge(charge.client, charge.worker, cost)

    def worker_left(self, worker: WorkerId) -> None:
        """Do nothing: the counters stay, so that a worker that returns finds the debts that it left."""

    def deficit(self, client: ClientId, worker: WorkerId) -> float | None:
        return self._worker_deficits.deficit(client, worker)

    def forget(self, client: ClientId) -> None:
        self._worker_deficits.forget(client)

    def forget_worker(self, worker: WorkerId) -> None:
        self._worker_deficits.forget_worker(worker)

    def saved(self) -> Iterator[SavedCounter]:
        """Refunds the bookings of waiting requests in what it yields: waiting requests do not survive a restart."""
        booked: defaultdict[tuple[ClientId, WorkerId | None], float] = defaultdict(float)
        for booking in self._bookings.values():
            booked[booking.client, booking.worker] += booking.cost
        for row in self._worker_deficits.saved():
            yield row._replace(value=row.value + booked[row.client, row.worker])

    def restore(self, rows: Iterable[SavedCounter]) -> None:
        self._worker_deficits.restore(rows)

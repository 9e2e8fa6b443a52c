"""Requests that an earlier run of the scheduler has dispatched or charged, and that this run goes on with.

The state that a run saved has the charges of its live requests (`Held`). Then each front reports the requests that it
has: those that workers have (`Resumed`), and those that wait (`Arrived` again). What the restored counters hold for a
reported request is taken back, because its new bill charges it again. What no front reports stays charged.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from router.core.attempts import Attempts
from router.core.clients.fairness import Outstanding
from router.core.fleet.worker_fleet import WorkerFleet
from router.core.handoffs import rest_beside, rest_of, role_of
from router.core.known_clients import KnownClients
from router.core.membership import Membership
from router.core.model.events import ChargedRequest, Resumed, WorkerJoined, WorkerLeft
from router.core.model.request import Leg, Request, RequestId, Worker
from router.core.next_attempts import NextAttempts
from router.core.policies.base import Policy
from router.core.requests import Handoff, RequestState, RequestTable, new_state


class CarriedRequests:
    """Takes over each request of the earlier run that a front reports."""

    def __init__(
        self,
        fleet: WorkerFleet,
        membership: Membership,
        clients: KnownClients,
        policy: Policy,
        attempts: Attempts,
        table: RequestTable,
        next_attempts: NextAttempts,
    ) -> None:
        self._fleet = fleet
        self._membership = membership
        self._clients = clients
        self._policy = policy
        self._attempts = attempts
        self._table = table
        self._next_attempts = next_attempts
        self._charged: dict[RequestId, tuple[ChargedRequest, ...]] = {}
        """By request, what was charged for it and has not been reported yet; one row per attempt that had not ended."""

    def note_charges(self, charged: Iterable[ChargedRequest]) -> None:
        """Note what was charged for requests that will be reported."""
        for row in charged:
            self._charged[row.request] = (*self._charged.get(row.request, ()), row)

    def unreported(self) -> Iterator[ChargedRequest]:
        """Yield what was charged for the requests that have not been reported yet."""
        for rows in self._charged.values():
            yield from rows

    def take(self, request: RequestId) -> tuple[ChargedRequest, ...]:
        """Return what was charged for a request that is reported now as a whole."""
        return self._charged.pop(request, ())

    def forget_charges(self) -> None:
        """Expect no more reports: what is left stays charged."""
        self._charged = {}

    def resume_all(self, request: Request, charged: Sequence[ChargedRequest], now: float) -> None:
        """Take over a request as it was meant for the workers that it was charged for."""
        workers = [row.worker for row in charged if row.worker is not None]
        partners = workers[::-1] if len(workers) > 1 else [None]
        for row, worker, partner in zip(charged, workers, partners, strict=True):
            self._resume(Resumed(request, worker, row.charged.cached, leg=row.leg, partner=partner), row, now)

    def resume(self, event: Resumed, now: float) -> None:
        """Take over a request that a worker has."""
        self._resume(event, self._take_first(event.request.id) if event.saved else None, now)

    def _take_first(self, request: RequestId) -> ChargedRequest | None:
        """Return what was charged for an attempt, or for those before it."""
        rows = self._charged.pop(request, ())
        if len(rows) > 1:  # its partner follows
            self._charged[request] = rows[1:]
        return rows[0] if rows else None

    def _resume(self, event: Resumed, charged: ChargedRequest | None, now: float) -> None:
        """Take over a request that a worker has. A worker that is not present is counted as one that has left."""
        request, worker = event.request, event.worker
        state = self._table.states.get(request.id)
        if state is None:
            self._clients.remember(request.client, request.weight)
            state = new_state(request, now, charged)
            self._table.open_request(state, now)
        else:
            self._end_waiting(state)
        state.handoff = Handoff(worker, now, Outstanding()) if event.leg is Leg.DECODE else None
        present = worker in self._fleet and not self._fleet[worker].left
        if not present:
            role = role_of(event.leg)
            self._membership.apply(WorkerJoined(Worker(worker, frozenset({request.model}), role=role)), now)
        part = self._part(event)
        self._policy.resume(part, worker, now)
        self._attempts.resume(state, part if event.partner is not None else request, event, charged, now)
        if not present:
            self._membership.apply(WorkerLeft(worker), now)

    def _end_waiting(self, state: RequestState) -> None:
        """Take a request that waits for its next attempt from where it waits.

        Raises ValueError if it waits for none, unless this is the second of two attempts at once.
        """
        if state in self._next_attempts:
            self._next_attempts.remove(state)
        elif state.prefill is None or state.attempt is not None:
            raise ValueError(f"request {state.request.id} is live")

    def _part(self, event: Resumed) -> Request:
        """Return the part of a request that its worker has, as the policy chooses workers for it."""
        request = event.request
        if event.leg is Leg.DECODE:
            return rest_of(request) if event.partner is None else rest_beside(request)
        return request if event.worker in self._fleet.candidates(request) else replace(request, whole=True)

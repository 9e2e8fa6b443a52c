"""Early binding: each request is placed in one worker's queue when it arrives, and ordered there."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from router.core.accounts import Charge
from router.core.model import ClientId, Deficit, Request, RequestId, WorkerId
from router.core.policy import Candidate, Choice, Order, Placed, Placement, Policy, Properties, Surroundings


class Ticket(NamedTuple):
    """Where a waiting request waits."""

    request: Request
    placed: Placed


class QueuedPolicy(Policy):
    """A placement and, for every worker, a queue with an order."""

    next_deadline = None

    def __init__(
        self,
        surroundings: Surroundings,
        placement: Placement,
        order: Callable[[WorkerId], Order],
        properties: Properties,
    ) -> None:
        self.properties = properties
        self._view = surroundings.view
        self._backlog = surroundings.backlog
        self._placement = placement
        self._new_order = order
        self._orders: dict[WorkerId, Order] = {}
        self._loads: dict[WorkerId, int] = {}
        """Requests that wait for each worker or run there."""
        self._tickets: dict[RequestId, Ticket] = {}

    def enqueue(self, request: Request, now: float) -> None:
        """See `Policy`."""
        placed = self._placement.place(request, self._candidates(request))
        self._tickets[request.id] = Ticket(request, placed)
        self._orders[placed.worker].push(request)
        self._loads[placed.worker] += 1
        self._backlog.add(placed.worker, request.client, now)

    def withdraw(self, request: RequestId, now: float) -> None:
        """See `Policy`."""
        self._loads[self._tickets[request].placed.worker] -= 1
        self._take_out(request, now)

    def _take_out(self, request: RequestId, now: float) -> None:
        """Let a request wait no more, be it withdrawn or dispatched."""
        ticket = self._tickets.pop(request)
        self._placement.unplace(request)
        self._orders[ticket.placed.worker].remove(request)
        self._backlog.remove(ticket.placed.worker, ticket.request.client, now)

    def next(self, now: float) -> Choice | None:
        """See `Policy`."""
        if not self._tickets:
            return None
        for worker, order in self._orders.items():
            if not len(order) or not self._view.has_room(worker):
                continue
            turn = order.select(partial(self._view.admits, worker), now)
            if turn is not None:
                why = self._tickets[turn.request.id].placed.why
                self._take_out(turn.request.id, now)
                order.dispatched(turn.request)
                return Choice(turn.request, worker, why, turn.passed)
        return None

    def charged(self, charge: Charge) -> None:
        """See `Policy`."""
        self._placement.charged(charge)
        self._orders[charge.worker].charged(charge)

    def started(self, request: Request, worker: WorkerId) -> None:
        """See `Policy`."""
        self._orders[worker].started(request)

    def ended(self, request: Request, worker: WorkerId) -> None:
        """See `Policy`."""
        self._loads[worker] -= 1
        self._orders[worker].ended(request)

    def match_grew(self, worker: WorkerId, requests: Iterable[RequestId]) -> None:
        """See `Policy`."""
        self._orders[worker].match_grew(requests)

    def worker_joined(self, worker: WorkerId, now: float) -> None:  # noqa: ARG002 - the protocol's signature
        """See `Policy`. What waits elsewhere keeps its place; a worker that comes back finds its order as it was."""
        if worker not in self._orders:
            self._orders[worker] = self._new_order(worker)
            self._loads[worker] = 0

    def worker_left(self, worker: WorkerId, now: float) -> list[Request]:
        """See `Policy`. The order stays, with its counters: a worker that flaps must shed no debts."""
        waiting = [self._tickets[request].request for request in self._orders[worker].waiting()]
        for request in waiting:
            self.withdraw(request.id, now)
        self._placement.worker_left(worker)
        orphans = []
        for request in waiting:
            if self._view.serving(request.model):
                self.enqueue(request, now)
            else:
                orphans.append(request)
        return orphans

    def credit(self, client: ClientId, worker: WorkerId) -> Deficit:
        """See `Policy`."""
        return Deficit(self._placement.credit(client, worker), self._orders[worker].credit(client))

    def _candidates(self, request: Request) -> list[Candidate]:
        matched = self._view.match(request)
        size = self._view.input_tokens(request)
        return [
            Candidate(worker, cached := matched.get(worker, 0), size - cached, self._loads[worker])
            for worker in self._view.serving(request.model)
        ]

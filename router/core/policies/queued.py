"""Early binding: each request joins one worker's queue when it arrives, and an order ranks it there."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from math import inf
from typing import NamedTuple

from router.core.model.commands import Deficit
from router.core.model.cost import Charge
from router.core.model.request import ClientId, Request, RequestId, WorkerId
from router.core.model.saved import Counters, Groups, SavedCounter, SavedGroup, in_rows
from router.core.policies.base import Candidate, Choice, Order, Placed, Placement, Policy, Properties
from router.core.policies.context import PolicyContext


class WaitingRequest(NamedTuple):
    """A waiting request, and where it was placed."""

    request: Request
    placed: Placed


class QueuedPolicy(Policy):
    """Combines a placement with an order for each worker's queue.

    Where the placement allows it, a worker with room and an empty queue takes over a request from the longest queue of
    a worker without room. The request and its booking then move to the idle worker.
    """

    next_deadline = inf

    def __init__(
        self,
        context: PolicyContext,
        placement: Placement,
        order: Callable[[WorkerId], Order],
        properties: Properties,
    ) -> None:
        self.properties = properties
        self._view = context.view
        self._backlog = context.backlog
        self._placement = placement
        self._new_order = order
        self._orders: dict[WorkerId, Order] = {}
        """The queue of each worker. Workers that left keep theirs, with the counters: a worker that flaps must not
        erase debts."""
        self._present_orders: dict[WorkerId, Order] = {}
        """The queues of the workers that are present."""
        self._waiting: dict[RequestId, WaitingRequest] = {}
        self._passing_through: Choice | None = None
        """A request that need not wait. The call of `next` that follows its arrival returns it."""
        self._cold: dict[WorkerId, dict[RequestId, None]] = {}
        """By queue, the requests that would have lost little cached prefix on any worker when they were placed."""

    def enqueue(self, request: Request, now: float) -> None:
        candidates = self._candidates(request)
        self._placement.advance(now)
        placed = self._placement.place(request, candidates)
        if self._passing_through is None and self._may_pass_through(request, placed.worker, now):
            self._passing_through = Choice(request, placed.worker, placed.why)
            return
        self._placement.book(request, next(c for c in candidates if c.worker == placed.worker))
        self._add_to_queue(request, placed, now)
        if self._placement.steal_loss is not None:
            longest = max([candidate.cached_tokens for candidate in candidates])
            if longest <= self._placement.steal_loss:
                self._cold[placed.worker][request.id] = None

    def _may_pass_through(self, request: Request, worker: WorkerId, now: float) -> bool:
        """Return whether a request finds the queue empty and room at the worker, so that it need not wait."""
        order = self._orders[worker]
        return not len(order) and self._view.admits(worker, request) and order.pass_through(request, now)

    def resend(self, request: Request, workers: Sequence[WorkerId], now: float) -> WorkerId:
        """Place the request among these workers by the placement's rules; to the order it looks as if it had waited for
        no time.
        """
        candidates = [candidate for candidate in self._candidates(request) if candidate.worker in workers]
        self._placement.advance(now)
        placed = self._placement.place(request, candidates)
        self._orders[placed.worker].push(request)
        self._orders[placed.worker].remove(request.id)
        return self._send(Choice(request, placed.worker, placed.why), now).worker

    def resume(self, request: Request, worker: WorkerId, now: float) -> None:
        self._placement.resume(request, worker)
        self._orders[worker].resume(request, now)

    def _dispatch_passing(self, choice: Choice, now: float) -> Choice:
        self._passing_through = None
        return self._send(choice, now)

    def _send(self, choice: Choice, now: float) -> Choice:
        """Dispatch a request that was placed and did not wait."""
        self._placement.request_dispatched(choice.request.id, now)
        self._orders[choice.worker].request_dispatched(choice.request, now)
        return choice

    def withdraw(self, request: RequestId, now: float) -> None:
        waiting = self._waiting.pop(request)
        worker = waiting.placed.worker
        self._placement.unplace(request)
        self._orders[worker].remove(request)
        self._cold[worker].pop(request, None)
        self._backlog.remove(worker, waiting.request.client, now)

    def next(self, now: float) -> Choice | None:
        if self._passing_through is not None:
            return self._dispatch_passing(self._passing_through, now)
        if not self._waiting:
            return None
        idle: list[WorkerId] = []
        blocked: dict[WorkerId, int] = {}
        has_room = self._view.has_room
        for worker, order in self._present_orders.items():
            waiting = len(order)
            if not has_room(worker):
                if waiting:
                    blocked[worker] = waiting
            elif not waiting:
                idle.append(worker)
            elif choice := self._next_of(worker, now):
                return choice
        if not idle or not blocked or self._placement.steal_loss is None:
            return None
        return self._next_stolen(idle, max(blocked, key=blocked.__getitem__), now)

    def _next_of(self, worker: WorkerId, now: float) -> Choice | None:
        order = self._orders[worker]
        turn = order.select(partial(self._view.admits, worker), now)
        if turn is None:
            return None
        why = self._waiting[turn.request.id].placed.why
        self._placement.request_dispatched(turn.request.id, now)
        self.withdraw(turn.request.id, now)
        order.request_dispatched(turn.request, now)
        return Choice(turn.request, worker, why, turn.passed)

    def _next_stolen(self, idle: Sequence[WorkerId], victim: WorkerId, now: float) -> Choice | None:
        """Let one of these idle workers take over a request from the longest queue of a worker without room."""
        thieves = self._thieves(victim, now)
        for thief in idle:
            if thief in thieves:
                for request in self._stealable(victim, now):
                    if self._steal(request, victim, thief, now) and (choice := self._next_of(thief, now)):
                        return choice
                thieves = self._thieves(victim, now)
        return None

    def _thieves(self, victim: WorkerId, now: float) -> set[WorkerId]:
        """Return the workers that could take a request over, if it fits there. Most often only the victim itself."""
        return {thief for request in self._stealable(victim, now) for thief in self._acceptable_for(request, victim)}

    def _acceptable_for(self, request: Request, victim: WorkerId) -> dict[WorkerId, Candidate]:
        """Return the workers whose cache holds at most `steal_loss` tokens less of a request than the victim's."""
        candidates = self._candidates(request)
        held = next(candidate.cached_tokens for candidate in candidates if candidate.worker == victim)
        loss = self._placement.steal_loss
        return {each.worker: each for each in candidates if loss is not None and held - each.cached_tokens <= loss}

    def _steal(self, request: Request, victim: WorkerId, thief: WorkerId, now: float) -> bool:
        """Move a request to an idle worker's empty queue, if it fits there and loses at most `steal_loss` tokens."""
        here = self._acceptable_for(request, victim).get(thief)
        if here is None or not self._view.admits(thief, request):
            return False
        self.withdraw(request.id, now)
        self._placement.book(request, here)
        self._add_to_queue(request, Placed(thief, "stolen"), now)
        return True

    def _stealable(self, victim: WorkerId, now: float) -> Iterator[Request]:
        """Yield the request whose turn it is at a worker, and its oldest request without a cached prefix anywhere."""
        request = self._orders[victim].next_request(now)
        if request is not None:
            yield request
        cold = self._cold[victim]
        if cold:
            yield self._waiting[next(iter(cold))].request

    def _add_to_queue(self, request: Request, placed: Placed, now: float) -> None:
        """Add a request to the queue that it was placed in."""
        self._waiting[request.id] = WaitingRequest(request, placed)
        self._orders[placed.worker].push(request)
        self._backlog.add(placed.worker, request.client, now)
        if self._placement.locality:
            self._view.promise(request, placed.worker, now)

    def request_charged(self, charge: Charge) -> None:
        self._placement.request_charged(charge)
        self._orders[charge.worker].request_charged(charge)

    def request_started(self, request: Request, worker: WorkerId) -> None:
        self._orders[worker].request_started(request)

    def request_ended(self, request: Request, worker: WorkerId) -> None:
        self._placement.request_ended(request.id)
        self._orders[worker].request_ended(request)

    def match_changed(self, worker: WorkerId, requests: Iterable[RequestId]) -> None:
        self._orders[worker].match_changed(requests)

    def worker_joined(self, worker: WorkerId, now: float) -> None:  # noqa: ARG002 - the protocol's signature
        """Requests that wait elsewhere stay there. A worker that returns finds its order as it was."""
        self._present_orders[worker] = self._order_of(worker)

    def _order_of(self, worker: WorkerId) -> Order:
        if worker not in self._orders:
            self._orders[worker] = self._new_order(worker)
            self._cold[worker] = {}
        return self._orders[worker]

    def worker_left(self, worker: WorkerId, now: float) -> list[Request]:
        del self._present_orders[worker]
        waiting = [self._waiting[request].request for request in self._orders[worker].waiting()]
        for request in waiting:
            self.withdraw(request.id, now)
        self._placement.worker_left(worker)
        orphans = []
        for request in waiting:
            if self._view.able(request):
                self.enqueue(request, now)
            else:
                orphans.append(request)
        return orphans

    def deficit(self, client: ClientId, worker: WorkerId) -> Deficit:
        return Deficit(self._placement.deficit(client, worker), self._orders[worker].deficit(client))

    def grant(self, client: ClientId, cost: float) -> None:
        """Raise the client's counter in each worker's queue, wherever its requests wait."""
        for order in self._orders.values():
            order.grant(client, cost)

    def forget(self, client: ClientId) -> None:
        self._placement.forget(client)
        for order in self._orders.values():
            order.forget(client)

    def forget_worker(self, worker: WorkerId) -> None:
        self._placement.forget_worker(worker)
        for kept in (self._orders, self._cold):
            kept.pop(worker, None)

    def saved(self) -> Iterator[Counters | Groups]:
        for rows in in_rows(self._placement.saved()):
            yield Counters("placement", rows)
        for worker, order in list(self._orders.items()):
            counters = (SavedCounter(client, worker, value, scale) for client, value, scale in order.saved())
            for rows in in_rows(counters):
                yield Counters("order", rows)
            groups = (SavedGroup(group, worker, value, scale) for group, value, scale in order.saved_groups())
            yield from map(Groups, in_rows(groups))

    def restore(self, counters: Counters | Groups) -> None:
        """Restored orders of workers that never join are kept like those of workers that left."""
        if isinstance(counters, Groups):
            for group, worker, value, scale in counters.rows:
                if worker is not None:
                    self._order_of(worker).restore_group(group, value, scale)
        elif counters.kind == "placement":
            self._placement.restore(counters.rows)
        else:
            for client, worker, value, scale in counters.rows:
                if worker is not None:
                    self._order_of(worker).restore(client, value, scale)

    def _candidates(self, request: Request) -> list[Candidate]:
        if not self._waiting:
            self._view.release()
        matched = self._view.expected_match(request)
        size = self._view.input_tokens(request)
        orders, in_flight = self._orders, self._view.in_flight
        return [
            Candidate(worker, cached := matched.get(worker, 0), size - cached, len(orders[worker]) + in_flight(worker))
            for worker in self._view.able(request)
        ]

"""One DLPM queue for the whole fleet, in which every request has a home worker.

A worker with room takes the next request in the order of DLPM ("Locality-aware Fair Scheduling in LLM Serving",
Algorithm 1), but skips requests that would lose more cached prefix there than at home, the worker that holds most of
their prefix. A request leaves home when it has waited for a multiple of the time that its prefix takes to compute, or
when its client's deficit q_{i,w} there is used up (Algorithm 2): then the prefix is copied.

Since there is one queue and one counter per client, the service of two backlogged clients is even over the whole fleet,
not only worker by worker, and a slow worker receives as much as it can take.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from operator import itemgetter

from router.core.model.commands import Deficit, PassedOver
from router.core.model.cost import Charge, Tokens
from router.core.model.request import ClientId, Request, RequestId, WorkerId, own_route
from router.core.model.saved import Counters, Groups, SavedCounter, SavedGroup, in_rows
from router.core.policies.base import Choice, Policy, Properties, Turn
from router.core.policies.context import FleetView, PolicyContext
from router.core.policies.deficit.deficits import WorkerDeficits
from router.core.policies.deficit.eligibility import Eligibility
from router.core.policies.dlpm.dlpm_parameters import DlpmHomeParameters
from router.core.policies.dlpm.fleet_loads import FleetLoads
from router.core.policies.dlpm.home_pool import HomePool, PooledRequest
from router.core.policies.dlpm.longest_match import LongestMatchQueue, longest
from router.core.policies.dlpm.queues_by_client import QueuesByClient
from router.core.policies.dlpm.refill_hold import AwaitingFirstToken, RefillHold

_size = itemgetter(0)


SeenQueue = tuple[LongestMatchQueue, int, int]
"""A queue that a worker may take from, and its changes and pushes when the worker looked at it."""


@dataclass(slots=True)
class FruitlessLook:
    """What was found when none of the requests that a worker looked at fitted."""

    smallest: dict[str, Request]
    """By model, the one with the fewest uncached input tokens."""
    class_changes: int
    """Changes of the clients' priority classes until then."""
    queues: list[SeenQueue]


class Inputs:
    """The size and the match of each request that is looked at during one choice, in which nothing changes: many
    workers look at the same few requests.
    """

    __slots__ = ("_known", "_view")

    def __init__(self, view: FleetView) -> None:
        self._view = view
        self._known: dict[RequestId, tuple[int, Mapping[WorkerId, int]]] = {}

    def uncached_part(self, worker: WorkerId, request: Request) -> int:
        """Return what `FleetView.uncached_tokens` returns."""
        known = self._known.get(request.id)
        if known is None:
            known = self._known[request.id] = self._view.size_and_match(request)
        size, match = known
        matched = match.get(worker)
        return size - self._view.findable(request, worker, matched) if matched else size


class DlpmHome(Policy):
    """Keeps the counters q_i of the fleet and q_{i,w}; longest match among the requests that are at home at a
    worker.
    """

    def __init__(self, context: PolicyContext, parameters: DlpmHomeParameters | None = None) -> None:
        """`parameters`: those of a policy that is built on this one."""
        self._parameters = parameters = parameters or context.parameters.of(DlpmHomeParameters)
        self.properties = Properties(parameters.deficit_range, locality=True, pooled=True, work_conserving=True)
        self._view = context.view
        self._cost = context.cost
        self._backlog = context.backlog
        self._awaiting_first_token: dict[WorkerId, AwaitingFirstToken] = {}
        """By worker of the pool."""
        self._loads = FleetLoads(context.view)
        self._eligibility = Eligibility(
            self._on_priority_change,
            parameters,
            partial(context.view.rate, self._awaiting_first_token.keys()),
            context.shares,
            context.debtors,
            rounds_from=parameters.cached_first_from if parameters.cached_first else None,
            turn_overdraft=parameters.turn_overdraft,
        )
        self._pool = self._new_pool(context.view)
        self._refill_hold = RefillHold(parameters.isolation, self._eligibility, context.view, context.cost)
        self._worker_deficits = WorkerDeficits(parameters.worker_quantum, context.view.speed, context.shares)
        self._fruitless: dict[WorkerId, FruitlessLook] = {}
        """By worker, its last look at the queues in which nothing fitted."""
        self._now = 0.0
        """The time of the last choice, in seconds; what is sent or charged until the next counts as then."""
        self._newcomer: PooledRequest | None = None
        """A request that found no other waiting, until the next call of `next` dispatches it or queues it."""

    @property
    def next_deadline(self) -> float:
        """The earlier of the next deadline of the pool and the end of a delayed refill."""
        if not self._pool.waiting:
            return inf
        return min(self._pool.next_deadline, self._refill_hold.next_deadline)

    def enqueue(self, request: Request, now: float) -> None:
        self._queue_newcomer(now)
        placed = self._pool.choose_homes(request, now)
        if self._pool.waiting:
            self._add_to_pool(placed, now)
            return
        if not self._eligibility.in_flight:
            self._eligibility.reset()
        self._newcomer = placed

    def _add_to_pool(self, placed: PooledRequest, now: float) -> None:
        request = placed.request
        matters = self._eligibility.may_get_head_start(request.client)
        self._eligibility.add_waiting(request, self._input_cost(request) if matters else 0.0)
        self._pool.enter(placed)
        self._backlog.add(request.worker, request.client, now)

    def _queue_newcomer(self, now: float) -> None:
        """Queue the newcomer, because it may not go or because another request or a change of workers comes first."""
        if self._newcomer is not None:
            newcomer, self._newcomer = self._newcomer, None
            self._add_to_pool(newcomer, now)

    def _on_priority_change(self, client: ClientId) -> None:
        self._pool.update_priority(client, self._eligibility.waiting_priority_class(client))

    def queue_newcomer(self, now: float) -> None:
        self._queue_newcomer(now)

    def withdraw(self, request: RequestId, now: float) -> None:
        self._queue_newcomer(now)
        withdrawn = self._pool.remove(request)
        self._eligibility.remove_waiting(withdrawn)
        self._backlog.remove(withdrawn.worker, withdrawn.client, now)

    def next(self, now: float) -> Choice | None:
        self._now = now
        if self._newcomer is not None and (choice := self._pass_through(self._newcomer, now)):
            return choice
        if not self._pool.waiting:
            return None
        self._refill_hold.end_delays(now)
        self._pool.pass_time(now)
        choice = self._choose_next(now)
        return None if choice is None else self._take(choice, now)

    def _choose_next(self, now: float) -> Choice | None:
        """Choose a waiting request and its worker, after a refill if one is due; the request waits on until it is
        taken.
        """
        if not self._view.with_room:  # so after nearly every event, where requests wait
            return None
        inputs = Inputs(self._view)
        for worker, relief in self._with_room():
            if choice := self._next_at(worker, relief, inputs, now):
                return choice
        return self._next_copied()

    def _pass_through(self, newcomer: PooledRequest, now: float) -> Choice | None:
        """Dispatch a newcomer as if it had waited for no time, if it may go; otherwise queue it.

        A newcomer whose client is not eligible is queued, too: whether its client is refilled depends on the worker.
        """
        request = newcomer.request
        if self._eligibility.may_pass_through(request, refill=False):
            choice = self._choose_for(newcomer, now)
            if choice is not None:
                self._newcomer = None
                self._send(request, choice.worker, newcomer.able)
                return choice
        self._queue_newcomer(now)
        return None

    def _choose_for(self, newcomer: PooledRequest, now: float) -> Choice | None:
        """Choose a worker for a request while no other waits; None if none has room for it."""
        takers = newcomer.takers(now) if newcomer.homes else newcomer.able
        for worker, relief in self._with_room():
            if worker in takers and self._view.admits(worker, newcomer.request):
                return self._choose(newcomer, worker, relief)
        return None

    def _with_room(self) -> Iterator[tuple[WorkerId, WorkerId]]:
        """Yield the workers with room, each with a relief worker: the first of them for an overloaded worker, else
        itself.

        The worker with the fewest requests in flight is first, so that requests without a home go there; ties take
        turns.
        """
        loads = [*self._loads.with_room]  # as they are now: they may change while this is iterated
        if loads:
            least, _, first = loads[0]
            most = self._parameters.load_ratio * least + self._parameters.load_slack
            for load, _, worker in loads:
                yield worker, first if load > most else worker

    def resend(self, request: Request, workers: Sequence[WorkerId], now: float) -> WorkerId:
        """Choose the worker that holds most of the request's prefix; of equals, the one with the fewest requests in
        flight.
        """
        matched = self._view.match(request)
        worker = max(workers, key=lambda each: (matched.get(each, 0), -self._view.in_flight(each)))
        self._now = now
        self._send(request, worker, self._view.able(request))
        return worker

    def resume(self, request: Request, worker: WorkerId, now: float) -> None:
        self._eligibility.resume(request)
        if (awaiting := self._awaiting_first_token.get(worker)) is None:
            return  # the worker is ejected, and what runs there counts no more
        self._count_sent(request, worker, self._view.able(request))
        awaiting.add(request, now)
        size, match = self._view.size_and_match(request)
        self._refill_hold.request_sent(request, worker, size - match.get(worker, 0), self._view.output_tokens(request))

    def request_sent(self, request: Request, charge: Charge, uncached: int, output: float) -> Deficit:
        before = self._charge_client(charge)
        before_here = self._worker_deficits.charge(charge.client, charge.worker, charge.cost)
        self._refill_hold.charge(charge.client, charge.cost, self._now)
        self._refill_hold.request_sent(request, charge.worker, uncached, output)
        self._awaiting_first_token[charge.worker].add(request, self._now)
        return Deficit(before_here, before)

    def request_charged(self, charge: Charge) -> None:
        self._charge_client(charge)
        self._worker_deficits.charge(charge.client, charge.worker, charge.cost)
        self._refill_hold.charge(charge.client, charge.cost, self._now)

    def _charge_client(self, charge: Charge) -> float | None:
        """Subtract a charge from its client's deficit q_i. Returns that before it."""
        cost = charge.cost
        before = self._eligibility.charge(charge.client, cost)
        after = 0.0 if before is None else before - cost
        if after <= 0 < after + cost:
            self._refill_hold.invalidate()
        return before

    def request_started(self, request: Request, worker: WorkerId) -> None:
        if (awaiting := self._awaiting_first_token.get(worker)) is not None:
            awaiting.remove(request.id)

    def request_ended(self, request: Request, worker: WorkerId) -> None:
        self.request_started(request, worker)
        self._refill_hold.request_ended(request, worker)
        self._eligibility.request_ended(request)

    def match_changed(self, worker: WorkerId, requests: Iterable[RequestId]) -> None:
        self._pool.match_changed(worker, requests)

    def worker_joined(self, worker: WorkerId, now: float) -> None:
        """The new worker is a home for requests that have none."""
        self._queue_newcomer(now)
        if worker not in self._awaiting_first_token:
            self._awaiting_first_token[worker] = AwaitingFirstToken()
            self._loads.add(worker)
            self._refill_hold.worker_joined(worker)
            self._update_sparse_limit()
        self._divide_refills()
        self._pool.worker_joined(worker)

    def worker_left(self, worker: WorkerId, now: float) -> list[Request]:
        """Requests that were at home there find another home."""
        self._loads.remove(worker)
        self._queue_newcomer(now)
        orphans = self._pool.served_only_by(worker)
        for request in orphans:
            self.withdraw(request.id, now)
        self._pool.worker_left(worker)
        self._refill_hold.worker_left(worker)
        del self._awaiting_first_token[worker]
        self._fruitless.pop(worker, None)
        self._update_sparse_limit()
        self._divide_refills()
        return orphans

    def deficit(self, client: ClientId, worker: WorkerId) -> Deficit:
        return Deficit(self._worker_deficits.deficit(client, worker), self._eligibility.deficit(client))

    def grant(self, client: ClientId, cost: float) -> None:
        self._eligibility.charge(client, -cost)

    def forget(self, client: ClientId) -> None:
        self._eligibility.forget(client)
        self._worker_deficits.forget(client)
        self._refill_hold.forget(client)

    def forget_worker(self, worker: WorkerId) -> None:
        self._worker_deficits.forget_worker(worker)

    def saved(self) -> Iterator[Counters | Groups]:
        for rows in in_rows(self._worker_deficits.saved()):
            yield Counters("placement", rows)
        for rows in in_rows(SavedCounter(client, None, *counter) for client, *counter in self._eligibility.saved()):
            yield Counters("order", rows)
        groups = (SavedGroup(group, None, *counter) for group, *counter in self._eligibility.saved_groups())
        yield from map(Groups, in_rows(groups))

    def restore(self, counters: Counters | Groups) -> None:
        if isinstance(counters, Groups):
            for group, _, deficit, quantum in counters.rows:
                self._eligibility.restore_group(group, deficit, quantum)
        elif counters.kind == "placement":
            self._worker_deficits.restore(counters.rows)
        else:
            for client, _, deficit, quantum in counters.rows:
                self._eligibility.restore(client, deficit, quantum)

    def _new_queue(self, matched: Callable[[Request], int], by_client: QueuesByClient) -> LongestMatchQueue:
        priority_class, parameters = self._eligibility.waiting_priority_class, self._parameters
        patience, oldest_every, turns = parameters.patience, parameters.oldest_every, self._eligibility.turns
        return LongestMatchQueue(matched, lambda _: None, priority_class, patience, oldest_every, turns, by_client)

    def _new_pool(self, view: FleetView) -> HomePool:
        loss, wait_factor = self._parameters.home_loss, self._parameters.home_patience
        return HomePool(view, self._loads, self._new_queue, loss=loss, wait_factor=wait_factor)

    def _update_sparse_limit(self) -> None:
        self._eligibility.set_sparse_limit(len(self._awaiting_first_token) if self._parameters.sparse_first else 0)

    def _divide_refills(self) -> None:
        """Let refills count by sets of workers if some of these serve other models than others."""
        view, workers = self._view, self._awaiting_first_token
        if len({frozenset(view.shared_routes(worker)) for worker in workers}) <= 1:
            self._eligibility.divide_refills(None)
            return
        alone = {own_route(worker): frozenset((worker,)) for worker in workers}
        self._eligibility.divide_refills(lambda route: alone.get(route) or frozenset(view.serving(route)))

    def _input_cost(self, request: Request) -> float:
        """Return the cost of a request's input on the worker that holds most of it."""
        size, match = self._view.size_and_match(request)
        cached = max(match.values(), default=0)
        return self._cost(Tokens(size - cached, cached, 0))

    def _next_at(self, worker: WorkerId, relief: WorkerId, inputs: Inputs, now: float) -> Choice | None:
        """Return the next request that has its home at this worker or may go anywhere; it goes to `relief` if it can.

        Otherwise it goes to the worker that holds most of it, of those with as many requests in flight.
        """
        routes = self._view.routes(worker)
        queues = self._pool.queues_for(worker, routes)
        if not queues:
            return None
        self._refill(worker, routes, now)
        turn = self._first_that_fits(worker, queues, inputs)
        if turn is None:
            return None
        return self._choose(self._pool[turn.request.id], worker, relief, turn.passed)

    def _first_that_fits(self, worker: WorkerId, queues: Sequence[LongestMatchQueue], inputs: Inputs) -> Turn | None:
        """Return the request whose turn it is at a worker, or one that fits in its place; None if none may go now.

        Where room is lacking, nearly all events change nothing of that. So while the queues and the classes of clients
        stay as they are, only a few requests are looked at again: for each model the smallest that did not fit, and a
        new one. Another that became smaller than these, by a better estimate or because more of it is cached, is seen a
        little later: at the latest when all that is in flight there has started.
        """
        view, room = self._view, self._view.room(worker)
        if (last := self._fruitless.get(worker)) is not None and self._is_fruitless(last, worker, room, queues, inputs):
            return None
        misfits: list[tuple[int, Request]] = []

        def fits(request: Request) -> bool:
            needed = inputs.uncached_part(worker, request)
            if needed <= room and view.admits(worker, request):
                return True
            misfits.append((needed, request))
            return False

        turn = longest(queues, fits, unlikely=last is not None)
        if turn is not None:
            self._fruitless.pop(worker, None)  # the request leaves one of these queues
        else:
            self._fruitless[worker] = FruitlessLook(_smallest(misfits), self._pool.class_changes, _seen(queues))
        return turn

    def _is_fruitless(
        self,
        last: FruitlessLook,
        worker: WorkerId,
        room: float,
        queues: Sequence[LongestMatchQueue],
        inputs: Inputs,
    ) -> bool:
        """Return whether another look would find nothing either. Notes in the last one which requests are the smallest
        now.
        """
        if last.class_changes != self._pool.class_changes or len(last.queues) != len(queues):
            return False
        new: list[Request] = []
        for queue, (known, changes, pushes) in zip(queues, last.queues, strict=True):
            if queue is not known or queue.changes != changes or queue.pushes > pushes + 1:
                return False
            if queue.pushes > pushes and queue.newest is not None:
                new.append(queue.newest)
        misfits: list[tuple[int, Request]] = []
        for each in (*last.smallest.values(), *new):
            needed = inputs.uncached_part(worker, each)
            if needed <= room and self._view.admits(worker, each):
                return False
            misfits.append((needed, each))
        if new:
            last.smallest = _smallest(misfits)
            last.queues = _seen(queues)
        return True

    def _choose(
        self, waiting: PooledRequest, worker: WorkerId, relief: WorkerId, passed: tuple[PassedOver, ...] = ()
    ) -> Choice:
        """Return the worker for a request that this worker may take."""
        why = "home" if worker in waiting.homes else "room"
        if relief != worker and relief in waiting.able and self._view.admits(relief, waiting.request):
            worker, why = relief, "load"
        else:
            worker = self._best_equal(worker, waiting)
        return Choice(waiting.request, worker, why, passed)

    def _best_equal(self, worker: WorkerId, waiting: PooledRequest) -> WorkerId:
        """Return the worker that holds most of a request, of those with room and as many requests in flight as this
        one.
        """
        view = self._view
        matched = waiting.matched if waiting is self._newcomer else self._pool.current_match(waiting)
        here = matched.by_worker.get(worker, 0)
        if matched.most <= here:
            return worker
        alike = self._loads.with_room.with_load(view.in_flight(worker))
        equals = [each for each in alike if matched.at(each) > here and view.admits(each, waiting.request)]
        return min(equals, key=lambda each: (-matched.at(each), waiting.able[each])) if equals else worker

    def _refill(self, worker: WorkerId, routes: Collection[str], now: float) -> None:
        """CHECKREFILL among the clients that a worker can serve now. A worker that idles never waits for a delayed
        refill.
        """
        self._eligibility.mark_overdue()
        self._eligibility.pay_owed_rounds()
        if self._eligibility.any_eligible(routes):
            return
        if self._view.reorders(worker):
            since = now - self._parameters.engine_lpm_seconds
            if self._awaiting_first_token[worker].has_eligible_since(since, self._eligibility.priority_class):
                return
        shared = self._view.shared_routes(worker)
        if not self._view.in_flight(worker) or not self._refill_hold.is_held(shared, now):
            self._refill_hold.on_refill(shared, self._eligibility.refill(routes), now)

    def _next_copied(self) -> Choice | None:
        """Return the first request of the longest queue of a worker without room, if its client's deficit there is used
        up, for the first worker with room that may have it.
        """
        loads = [*self._loads.with_room]
        if not loads or (home := self._loads.longest_home_without_room) is None:
            return None
        queue = self._pool.homes[home]
        if (request := queue.next_request) is None:
            return None
        able = self._pool[request.id].able
        for _, _, worker in loads:
            if worker in able and self._view.admits(worker, request) and self._may_copy(request, home, worker):
                queue.longest(lambda _: True)  # counts the turn
                return Choice(request, worker, "copied")
        return None

    def _may_copy(self, request: Request, home: WorkerId, worker: WorkerId) -> bool:
        """Return whether a client's deficit is positive at a worker and not at its home, after a refill if it is
        positive nowhere.
        """
        table = self._worker_deficits.refilled_table(request, self._view.able(request))
        return table.deficit(home) <= 0 < table.deficit(worker)

    def _take(self, choice: Choice, now: float) -> Choice:
        able = self._pool[choice.request.id].able
        if self._eligibility.rounds is not None:
            self._eligibility.take_turn(choice.request.client)
        self.withdraw(choice.request.id, now)
        self._send(choice.request, choice.worker, able)
        return choice

    def _send(self, request: Request, worker: WorkerId, able: Mapping[WorkerId, int]) -> None:
        """Count a request as sent to one of the workers that are able to serve it."""
        self._count_sent(request, worker, able)
        self._eligibility.request_dispatched(request)

    def _count_sent(self, request: Request, worker: WorkerId, able: Mapping[WorkerId, int]) -> None:
        if self._worker_deficits.complete.get(request.client) is not able:
            self._worker_deficits.table(request, able)
        self._loads.dispatched(worker)


def _seen(queues: Iterable[LongestMatchQueue]) -> list[SeenQueue]:
    return [(queue, queue.changes, queue.pushes) for queue in queues]


def _smallest(sizes: Collection[tuple[int, Request]]) -> dict[str, Request]:
    """Return the smallest request of each model, of equals the first: others may not go although they are smaller."""
    found: dict[str, Request] = {}
    for _, request in sorted(sizes, key=_size):
        found.setdefault(request.model, request)
    return found

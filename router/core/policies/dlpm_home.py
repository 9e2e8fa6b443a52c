"""One DLPM queue for the whole fleet, in which every request has a home.

A worker with room takes the next request in the order of DLPM ("Locality-aware Fair Scheduling in LLM Serving",
Algorithm 1), but passes over those that would lose more there than they lose elsewhere: at home, where most of their
prefix is cached. A request leaves home when it has waited for some times as long as its prefix takes to compute
anew, or when its client has used up its credit q_{i,w} there (Algorithm 2): then the prefix is copied.

Since there is one queue and one counter for each client, the service of two backlogged clients is even over the whole
fleet, not worker by worker, and a slow worker is given as much as it takes.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from typing import NamedTuple

from router.core.accounts import Charge
from router.core.longest_match import LongestMatchQueue
from router.core.model import ClientId, Deficit, Request, RequestId, WorkerId
from router.core.policy import Choice, Policy, Properties, Surroundings
from router.core.standings import Standings
from router.core.unstarted import Unstarted
from router.core.worker_credits import WorkerCredits


@dataclass(frozen=True, slots=True)
class DlpmHomeParameters:
    """DLPM from one pool, with homes."""

    quantum: float = 20_000.0
    """Q^u, in cost units: what a refill adds to a client's credit. More: better locality, looser fairness."""
    worker_quantum: float = 100_000.0
    """Q^w, in cost units: what a refill adds to a client's credit at each worker. More: fewer copies of a prefix."""
    home_loss: int = 256
    """A worker that holds this many tokens less of a prefix than the best is as much its home."""
    home_patience: float = 3.0
    """How many times as long as its prefix takes to compute a request waits for its home."""
    sparse_first: bool = True
    """Among clients with credit, those with nothing in flight go before the longest match."""
    patience: int = 32
    """How many may go in the turn of a request that does not fit a worker's window; then room is kept for it."""
    engine_lpm_seconds: float = 10.0
    """At a worker whose engine itself orders by longest match, how long one that it has not begun holds up a refill."""

    def __post_init__(self) -> None:
        if self.quantum <= 0 or self.worker_quantum <= 0:
            raise ValueError("quantum and worker_quantum must be positive")


@dataclass(slots=True)
class Waiting:
    """A request in the pool."""

    request: Request
    arrival: int
    since: float
    matched: dict[WorkerId, int] = field(default_factory=dict)
    """Chunks, by worker."""
    offered: dict[WorkerId, None] = field(default_factory=dict)
    """The workers that may take it."""
    leaves_home: float | None = None
    """When every worker may take it; None when every worker may."""


class Leaving(NamedTuple):
    """A request leaves home at this time, unless its home has changed."""

    at: float
    request: RequestId


class Site:
    """One worker: the requests that it may take, and those that it has not begun."""

    def __init__(self, queue: LongestMatchQueue) -> None:
        self.queue = queue
        self.unstarted = Unstarted()


class DlpmHome(Policy):
    """Counters q_i over the fleet, and q_{i,w}; longest match among the requests that are at home at a worker."""

    def __init__(self, surroundings: Surroundings) -> None:
        self._parameters = parameters = surroundings.parameters.of(DlpmHomeParameters)
        self.properties = Properties(parameters.quantum, locality=True, pooled=True, work_conserving=True)
        self._view = surroundings.view
        self._cost = surroundings.cost
        self._backlog = surroundings.backlog
        self._standings = Standings(self._restand, sparse_first=parameters.sparse_first)
        self._credits = WorkerCredits(parameters.worker_quantum, surroundings.view.speed)
        self._sites: dict[WorkerId, Site] = {}
        self._waiting: dict[RequestId, Waiting] = {}
        self._leaving: list[Leaving] = []
        self._arrivals = 0

    @property
    def next_deadline(self) -> float | None:
        """See `Policy`. The next request that leaves home may find room elsewhere."""
        while self._leaving and not self._is_due(self._leaving[0]):
            heappop(self._leaving)
        return self._leaving[0].at if self._leaving else None

    def enqueue(self, request: Request, now: float) -> None:
        """See `Policy`."""
        if not self._waiting and not any(site.unstarted for site in self._sites.values()):
            self._standings.forgive()
        self._standings.wait(request, self._parameters.quantum * request.weight)
        waiting = self._waiting[request.id] = Waiting(request, self._arrivals, now)
        self._arrivals += 1
        workers = self._view.serving(request.model)
        waiting.matched.update(self._view.watch(request, workers))
        self._settle(waiting)
        self._backlog.add(None, request.client, now)

    def withdraw(self, request: RequestId, now: float) -> None:
        """See `Policy`."""
        waiting = self._waiting.pop(request)
        self._view.unwatch(request, waiting.matched)
        for worker in waiting.offered:
            self._sites[worker].queue.remove(request)
        self._standings.leave(waiting.request)
        self._backlog.remove(None, waiting.request.client, now)

    def next(self, now: float) -> Choice | None:
        """See `Policy`."""
        if not self._waiting:
            return None
        self._let_leave(now)
        # The one with the least in flight first, so that what has no home goes there.
        loads = sorted([(self._view.in_flight(w), w) for w in self._sites if self._view.has_room(w)])
        for _, worker in loads:
            if choice := self._next_at(worker, now):
                return choice
        for _, worker in loads:
            if choice := self._next_copied(worker, now):
                return choice
        return None

    def charged(self, charge: Charge) -> None:
        """See `Policy`."""
        cost = charge.at(self._cost)
        self._standings.charge(charge.client, cost)
        self._credits.charge(charge.client, charge.worker, cost)

    def started(self, request: Request, worker: WorkerId) -> None:
        """See `Policy`."""
        if site := self._sites.get(worker):
            site.unstarted.discard(request.id)

    def ended(self, request: Request, worker: WorkerId) -> None:
        """See `Policy`."""
        self.started(request, worker)
        self._standings.ended(request)

    def match_changed(self, worker: WorkerId, requests: Iterable[RequestId]) -> None:
        """See `Policy`."""
        for name in requests:
            waiting = self._waiting[name]
            waiting.matched.update(self._view.watch(waiting.request, (worker,)))
            if worker in waiting.offered:
                self._sites[worker].queue.match_changed((name,))
            self._settle(waiting)

    def worker_joined(self, worker: WorkerId, now: float) -> None:  # noqa: ARG002 - the protocol's signature
        """See `Policy`. It is home to what has none."""
        if worker not in self._sites:
            self._sites[worker] = Site(self._new_queue(worker))
        for waiting in self._waiting.values():
            if worker in self._view.serving(waiting.request.model):
                waiting.matched.update(self._view.watch(waiting.request, (worker,)))
                self._settle(waiting)

    def worker_left(self, worker: WorkerId, now: float) -> list[Request]:
        """See `Policy`. What was at home there finds another."""
        del self._sites[worker]
        orphans = []
        for waiting in list(self._waiting.values()):
            if waiting.matched.pop(worker, None) is None:
                continue
            self._view.unwatch(waiting.request.id, (worker,))
            waiting.offered.pop(worker, None)
            if waiting.matched:
                self._settle(waiting)
            else:
                orphans.append(waiting.request)
                self.withdraw(waiting.request.id, now)
        return orphans

    def credit(self, client: ClientId, worker: WorkerId) -> Deficit:
        """See `Policy`."""
        return Deficit(self._credits.credit(client, worker), self._standings.credit(client))

    def _new_queue(self, worker: WorkerId) -> LongestMatchQueue:
        return LongestMatchQueue(
            lambda request: self._waiting[request.id].matched[worker],
            lambda _request: None,
            self._standings.of,
            self._parameters.patience,
        )

    def _restand(self, client: ClientId) -> None:
        for site in self._sites.values():
            site.queue.stand(client)

    def _settle(self, waiting: Waiting) -> None:
        """Find out where a request is at home; whoever else was offered it is offered it no more."""
        match = self._view.match(waiting.request)
        best = max([match.get(worker, 0) for worker in waiting.matched])
        enough = best - self._parameters.home_loss
        homes = {worker: None for worker in waiting.matched if match.get(worker, 0) >= enough}
        if len(homes) < len(waiting.matched):
            home = next(worker for worker in homes if match.get(worker, 0) == best)
            patience = self._parameters.home_patience * self._view.prefill_seconds(home, best)
            waiting.leaves_home = waiting.since + patience
            heappush(self._leaving, Leaving(waiting.leaves_home, waiting.request.id))
        else:
            waiting.leaves_home = None
        self._offer(waiting, homes)

    def _offer(self, waiting: Waiting, workers: dict[WorkerId, None]) -> None:
        """Let these workers take a request, and no others."""
        for worker in waiting.offered:
            if worker not in workers:
                self._sites[worker].queue.remove(waiting.request.id)
        for worker in workers:
            if worker not in waiting.offered:
                self._sites[worker].queue.push(waiting.request, waiting.arrival)
        waiting.offered = workers

    def _let_leave(self, now: float) -> None:
        """Offer those that have waited long enough for their home to every worker."""
        while self._leaving and self._leaving[0].at <= now:
            leaving = heappop(self._leaving)
            if self._is_due(leaving):
                waiting = self._waiting[leaving.request]
                self._offer(waiting, dict.fromkeys(waiting.matched))

    def _is_due(self, leaving: Leaving) -> bool:
        """Whether it still waits, and for the same home."""
        waiting = self._waiting.get(leaving.request)
        return waiting is not None and waiting.leaves_home == leaving.at

    def _next_at(self, worker: WorkerId, now: float) -> Choice | None:
        """The next request for which a worker is home, or that has none any more."""
        site = self._sites[worker]
        if not len(site.queue):
            return None
        self._refill(worker, now)
        turn = site.queue.longest(partial(self._view.admits, worker))
        if turn is None:
            return None
        waiting = self._waiting[turn.request.id]
        why = "room" if len(waiting.offered) == len(waiting.matched) else "home"
        return self._take(Choice(turn.request, worker, why, turn.passed), now)

    def _refill(self, worker: WorkerId, now: float) -> None:
        """CHECKREFILL among the clients of the models that a worker serves."""
        if self._view.reorders(worker):
            since = now - self._parameters.engine_lpm_seconds
            if self._sites[worker].unstarted.hold_up(since, self._standings.of):
                return
        self._standings.refill(self._view.models(worker))

    def _next_copied(self, worker: WorkerId, now: float) -> Choice | None:
        """The first request of the longest queue elsewhere, if its client has used up its credit there."""
        blocked = [w for w, site in self._sites.items() if len(site.queue) and not self._view.has_room(w)]
        if not blocked:
            return None
        home = max(blocked, key=lambda each: len(self._sites[each].queue))
        turn = self._sites[home].queue.longest(lambda _: True)
        if turn is None or worker not in self._waiting[turn.request.id].matched:
            return None
        if not self._view.admits(worker, turn.request) or not self._may_copy(turn.request, home, worker):
            return None
        return self._take(Choice(turn.request, worker, "copied"), now)

    def _may_copy(self, request: Request, home: WorkerId, worker: WorkerId) -> bool:
        """Whether a client has credit at a worker and none at its home, after a refill where it has none anywhere."""
        table = self._credits.among(request, self._view.serving(request.model))
        return table.credit(home) <= 0 < table.credit(worker)

    def _take(self, choice: Choice, now: float) -> Choice:
        self.withdraw(choice.request.id, now)
        self._credits.meet(choice.request, self._view.serving(choice.request.model))
        self._standings.dispatched(choice.request)
        self._sites[choice.worker].unstarted.add(choice.request, now)
        return choice

"""One DLPM queue for the whole fleet, in which every request has a home.

A worker with room takes the next request in the order of DLPM ("Locality-aware Fair Scheduling in LLM Serving",
Algorithm 1), but passes over those that would lose more there than they lose elsewhere: at home, where most of their
prefix is cached. A request leaves home when it has waited for some times as long as its prefix takes to compute
anew, or when its client has used up its credit q_{i,w} there (Algorithm 2): then the prefix is copied.

Since there is one queue and one counter for each client, the service of two backlogged clients is even over the whole
fleet, not worker by worker, and a slow worker is given as much as it takes.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from typing import Final, NamedTuple

from router.core.accounts import Charge, Tokens
from router.core.longest_match import LongestMatchQueue, longest
from router.core.model import ClientId, Deficit, Request, RequestId, WorkerId
from router.core.policy import Choice, Policy, Properties, Surroundings
from router.core.prompt_key import CHUNK_BYTES
from router.core.saved import Counters, Groups, SavedCounter, SavedGroup, in_rows
from router.core.standings import Standings
from router.core.unstarted import Unstarted
from router.core.worker_credits import WorkerCredits

MOST_HOMES: Final = 3
"""In how many queues a request waits at most: of more that hold its prefix, those with the least to do."""


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
    load_ratio: float = 2.0
    """A home with more than this many times as many requests in flight as the worker with the fewest is left ..."""
    load_slack: int = 4
    """... if it has this many more besides."""
    sparse_first: bool = True
    """Among clients with credit, those with fewer requests in flight than there are workers go before the longest
    match: each might have nothing at the worker that has room."""
    head_start: float = 2_000.0
    """For how much, in cost units, a client that begins to wait goes before those with credit that waited already; not
    if the input that it begins with costs more. 0: never."""
    patience: int = 32
    """How many may go in the turn of a request that does not fit a worker's window; then room is kept for it."""
    oldest_every: int = 16
    """Every so manieth request of a client that waits is its oldest, whatever its match; 0 for none."""
    engine_lpm_seconds: float = 10.0
    """At a worker whose engine itself orders by longest match, how long one that it has not begun holds up a refill."""

    def __post_init__(self) -> None:
        if self.quantum <= 0 or self.worker_quantum <= 0:
            raise ValueError("quantum and worker_quantum must be positive")
        if self.head_start < 0:
            raise ValueError("head_start must not be negative")
        if self.load_ratio < 1 or self.load_slack < 0:
            raise ValueError("load_ratio must be at least 1, and load_slack not negative")


@dataclass(slots=True)
class Waiting:
    """A request in the pool."""

    request: Request
    arrival: int
    since: float
    chunk_tokens: float
    """Estimated tokens of each of its chunks."""
    matched: Mapping[WorkerId, int] = field(default_factory=dict)
    """Chunks, by worker."""
    homes: dict[WorkerId, None] = field(default_factory=dict)
    """The workers that hold most of its prefix; none where it would lose little anywhere."""
    leaves_home: float | None = float("inf")
    """When any worker may take it; None where any may."""

    @property
    def anywhere(self) -> int:
        """Its match for a worker that is not its home: chunks that all hold, less what it loses away from home.

        So a worker that none is at home at begins with what is new before it computes anew what another holds.
        """
        common = min(self.matched.values())
        return common - max(self.matched.values()) if self.homes else common


class Leaving(NamedTuple):
    """A request leaves home at this time, unless its home has changed."""

    at: float
    request: RequestId


class Site:
    """One worker: the requests that are at home there, and those that it has not begun."""

    def __init__(self, queue: LongestMatchQueue) -> None:
        self.queue = queue
        self.unstarted = Unstarted()
        self.sent = 0
        """The number of the last request that was sent there, counted over all workers."""


class DlpmHome(Policy):
    """Counters q_i over the fleet, and q_{i,w}; longest match among the requests that are at home at a worker."""

    def __init__(self, surroundings: Surroundings) -> None:
        self._parameters = parameters = surroundings.parameters.of(DlpmHomeParameters)
        self.properties = Properties(parameters.quantum, locality=True, pooled=True, work_conserving=True)
        self._view = surroundings.view
        self._cost = surroundings.cost
        self._backlog = surroundings.backlog
        self._standings = Standings(
            self._restand,
            surroundings.shares,
            head_start=parameters.head_start / parameters.quantum,
            debtors=surroundings.debtors,
        )
        self._credits = WorkerCredits(parameters.worker_quantum, surroundings.view.speed, surroundings.shares)
        self._sites: dict[WorkerId, Site] = {}
        self._anywhere: dict[str, LongestMatchQueue] = {}
        """What has no home, or has left it, by model."""
        self._waiting: dict[RequestId, Waiting] = {}
        self._leaving: list[Leaving] = []
        self._arrivals = 0
        self._sent = 0

    @property
    def next_deadline(self) -> float | None:
        """See `Policy`. The next request that leaves home may find room elsewhere."""
        while self._leaving and not self._is_due(self._leaving[0]):
            heappop(self._leaving)
        return self._leaving[0].at if self._leaving else None

    def enqueue(self, request: Request, now: float) -> None:
        """See `Policy`."""
        if not self._waiting and not any(site.unstarted for site in self._sites.values()):
            self._standings.begin_anew()
        tokens = self._view.input_tokens(request)
        self._standings.wait(request, self._parameters.quantum, self._input_cost(request, tokens))
        size = sum([prompt.size for prompt in request.prompts])
        chunk_tokens = tokens * CHUNK_BYTES / max(size, 1)
        waiting = self._waiting[request.id] = Waiting(request, self._arrivals, now, chunk_tokens)
        self._arrivals += 1
        self._watch(waiting)
        self._settle(waiting)
        self._backlog.add(None, request.client, now)

    def withdraw(self, request: RequestId, now: float) -> None:
        """See `Policy`."""
        waiting = self._waiting.pop(request)
        self._view.unwatch(request)
        self._take_out(waiting)
        self._standings.leave(waiting.request)
        self._backlog.remove(None, waiting.request.client, now)

    def next(self, now: float) -> Choice | None:
        """See `Policy`."""
        if not self._waiting:
            return None
        self._let_leave(now)
        # The one with the least in flight first, so that what has no home goes there; of equals each in its turn.
        view, sites = self._view, self._sites.items()
        loads = sorted([(view.in_flight(w), site.sent, w) for w, site in sites if view.has_room(w)])
        for load, _, worker in loads:
            relief = loads[0][2] if self._overloaded(load, loads[0][0]) else worker
            if choice := self._next_at(worker, relief, now):
                return choice
        for _, _, worker in loads:
            if choice := self._next_copied(worker, now):
                return choice
        return None

    def resend(self, request: Request, workers: Sequence[WorkerId], now: float) -> WorkerId:
        """See `Policy`. The one that holds most of its prefix; of equals, that with the fewest requests in flight."""
        matched = self._view.match(request)
        worker = max(workers, key=lambda each: (matched.get(each, 0), -self._view.in_flight(each)))
        self._send(request, worker, now)
        return worker

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
            self._watch(waiting)
            self._settle(waiting)
            if worker in waiting.homes:
                self._sites[worker].queue.match_changed((name,))
            if waiting.leaves_home is None:
                self._anywhere[waiting.request.model].match_changed((name,))

    def worker_joined(self, worker: WorkerId, now: float) -> None:  # noqa: ARG002 - the protocol's signature
        """See `Policy`. It is home to what has none."""
        if worker not in self._sites:
            self._sites[worker] = Site(self._new_queue(lambda request: self._waiting[request.id].matched[worker]))
            self._let_sparse_go_first()
        for waiting in self._waiting.values():
            if worker in self._view.serving(waiting.request.model):
                self._rematch(waiting)

    def worker_left(self, worker: WorkerId, now: float) -> list[Request]:
        """See `Policy`. What was at home there finds another."""
        orphans = []
        for waiting in list(self._waiting.values()):
            if worker not in waiting.matched:
                continue
            if len(waiting.matched) == 1:
                orphans.append(waiting.request)
                self.withdraw(waiting.request.id, now)
            else:
                self._rematch(waiting)
        del self._sites[worker]
        self._let_sparse_go_first()
        return orphans

    def credit(self, client: ClientId, worker: WorkerId) -> Deficit:
        """See `Policy`."""
        return Deficit(self._credits.credit(client, worker), self._standings.credit(client))

    def grant(self, client: ClientId, cost: float) -> None:
        """See `Policy`."""
        self._standings.charge(client, -cost)

    def forget(self, client: ClientId) -> None:
        """See `Policy`."""
        self._standings.forget(client)
        self._credits.forget(client)

    def forget_worker(self, worker: WorkerId) -> None:
        """See `Policy`."""
        self._credits.forget_worker(worker)

    def saved(self) -> Iterator[Counters | Groups]:
        """See `Policy`."""
        for rows in in_rows(self._credits.saved()):
            yield Counters("placement", rows)
        for rows in in_rows(SavedCounter(client, None, *counter) for client, *counter in self._standings.saved()):
            yield Counters("order", rows)
        groups = (SavedGroup(group, None, *counter) for group, *counter in self._standings.saved_groups())
        yield from map(Groups, in_rows(groups))

    def restore(self, counters: Counters | Groups) -> None:
        """See `Policy`."""
        if isinstance(counters, Groups):
            for group, _, credit, quantum in counters.rows:
                self._standings.restore_group(group, credit, quantum)
        elif counters.kind == "placement":
            self._credits.restore(counters.rows)
        else:
            for client, _, credit, quantum in counters.rows:
                self._standings.restore(client, credit, quantum)

    def _new_queue(self, matched: Callable[[Request], int]) -> LongestMatchQueue:
        standing, parameters = self._standings.of_waiting, self._parameters
        return LongestMatchQueue(matched, lambda _: None, standing, parameters.patience, parameters.oldest_every)

    def _let_sparse_go_first(self) -> None:
        self._standings.let_go_first(len(self._sites) if self._parameters.sparse_first else 0)

    def _input_cost(self, request: Request, tokens: int) -> float:
        """Where most of it is cached."""
        cached = max(self._view.match(request).values(), default=0)
        return self._cost(Tokens(tokens - cached, cached, 0))

    def _restand(self, client: ClientId) -> None:
        for site in self._sites.values():
            site.queue.stand(client)
        for queue in self._anywhere.values():
            queue.stand(client)

    def _watch(self, waiting: Waiting) -> None:
        waiting.matched = self._view.watch(waiting.request, self._view.serving(waiting.request.model))

    def _rematch(self, waiting: Waiting) -> None:
        """Let a request wait where it belongs now that the workers are others."""
        self._watch(waiting)
        self._settle(waiting)
        if waiting.leaves_home is None:
            self._anywhere[waiting.request.model].match_changed((waiting.request.id,))

    def _settle(self, waiting: Waiting) -> None:
        """Let a request wait where it is at home now; once it may go anywhere, it may for good."""
        homes = self._find_homes(waiting)
        for worker in waiting.homes:
            if worker not in homes:
                self._sites[worker].queue.remove(waiting.request.id)
        for worker in homes:
            if worker not in waiting.homes:
                self._sites[worker].queue.push(waiting.request, waiting.arrival)
        waiting.homes = homes
        if waiting.leaves_home is not None:
            self._stay(waiting)

    def _find_homes(self, waiting: Waiting) -> dict[WorkerId, None]:
        """The workers that hold most of its prefix, at most a few; none where it would lose little anywhere."""
        matched = waiting.matched
        enough = max(matched.values()) - self._parameters.home_loss / waiting.chunk_tokens
        if not waiting.homes and min(matched.values()) >= enough:
            return {}
        homes = {worker: None for worker in waiting.homes if worker in matched and matched[worker] >= enough}
        if len(homes) == MOST_HOMES:
            return homes
        others = [worker for worker, chunks in matched.items() if chunks >= enough and worker not in homes]
        if len(homes) + len(others) == len(matched):
            return {}
        if len(homes) + len(others) > MOST_HOMES:
            others.sort(key=self._load)
        homes.update(dict.fromkeys(others[: MOST_HOMES - len(homes)]))
        return homes

    def _load(self, worker: WorkerId) -> int:
        return len(self._sites[worker].queue) + self._view.in_flight(worker)

    def _stay(self, waiting: Waiting) -> None:
        """Set the time until which a request waits for its home; without one it may go anywhere at once."""
        if not waiting.homes:
            self._set_free(waiting)
            return
        best = max(waiting.homes, key=waiting.matched.__getitem__)
        prefix = int(waiting.matched[best] * waiting.chunk_tokens)
        patience = self._parameters.home_patience * self._view.prefill_seconds(best, prefix)
        waiting.leaves_home = waiting.since + patience
        heappush(self._leaving, Leaving(waiting.leaves_home, waiting.request.id))

    def _set_free(self, waiting: Waiting) -> None:
        """Let any worker take a request; at home it still comes first."""
        waiting.leaves_home = None
        model = waiting.request.model
        if model not in self._anywhere:
            self._anywhere[model] = self._new_queue(lambda request: self._waiting[request.id].anywhere)
        self._anywhere[model].push(waiting.request, waiting.arrival)

    def _take_out(self, waiting: Waiting) -> None:
        """Let a request wait nowhere."""
        for worker in waiting.homes:
            self._sites[worker].queue.remove(waiting.request.id)
        if waiting.leaves_home is None:
            model = waiting.request.model
            self._anywhere[model].remove(waiting.request.id)
            if not len(self._anywhere[model]):
                del self._anywhere[model]

    def _let_leave(self, now: float) -> None:
        """Free those that have waited long enough for their home."""
        while self._leaving and self._leaving[0].at <= now:
            leaving = heappop(self._leaving)
            if self._is_due(leaving):
                self._set_free(self._waiting[leaving.request])

    def _is_due(self, leaving: Leaving) -> bool:
        """Whether it still waits, and for the same home."""
        waiting = self._waiting.get(leaving.request)
        return waiting is not None and waiting.leaves_home == leaving.at

    def _overloaded(self, load: int, least: int) -> bool:
        return load > self._parameters.load_ratio * least + self._parameters.load_slack

    def _next_at(self, worker: WorkerId, relief: WorkerId, now: float) -> Choice | None:
        """The next request for which a worker is home, or that has none any more; it goes to `relief` if it can.

        And else, of the workers with as much in flight, to that which holds most of it.
        """
        site, models = self._sites[worker], self._view.models(worker)
        queues = [queue for model, queue in self._anywhere.items() if model in models]
        if len(site.queue):
            queues.append(site.queue)
        if not queues:
            return None
        self._refill(worker, models, now)
        turn = longest(queues, partial(self._view.admits, worker))
        if turn is None:
            return None
        waiting = self._waiting[turn.request.id]
        why = "home" if worker in waiting.homes else "room"
        if relief != worker and relief in waiting.matched and self._view.admits(relief, turn.request):
            worker, why = relief, "load"
        else:
            worker = self._best_equal(worker, waiting)
        return self._take(Choice(turn.request, worker, why, turn.passed), now)

    def _best_equal(self, worker: WorkerId, waiting: Waiting) -> WorkerId:
        """The worker that holds most of a request, of those that have room and as much in flight as this one."""
        view, matched, load = self._view, waiting.matched, self._view.in_flight(worker)
        here = matched[worker]
        better = [each for each, chunks in matched.items() if chunks > here and view.in_flight(each) == load]
        equals = [each for each in better if view.admits(each, waiting.request)]
        return max(equals, key=matched.__getitem__) if equals else worker

    def _refill(self, worker: WorkerId, models: Collection[str], now: float) -> None:
        """CHECKREFILL among the clients of the models that a worker serves."""
        if self._view.reorders(worker):
            since = now - self._parameters.engine_lpm_seconds
            if self._sites[worker].unstarted.hold_up(since, self._standings.of):
                return
        self._standings.refill(models)

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
        self._send(choice.request, choice.worker, now)
        return choice

    def _send(self, request: Request, worker: WorkerId, now: float) -> None:
        self._credits.meet(request, self._view.serving(request.model))
        self._standings.dispatched(request)
        site = self._sites[worker]
        site.unstarted.add(request, now)
        self._sent += 1
        site.sent = self._sent

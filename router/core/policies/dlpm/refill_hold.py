"""Delays a refill for the sake of clients whose calls run, or still wait, in the engines.

CHECKREFILL ("Locality-aware Fair Scheduling in LLM Serving", Algorithm 1) adds quanta when no eligible client waits.
But clients with a positive deficit may have calls that run, and the requests that a refill admits slow these: their
prefill takes time from the steps that produce the running calls' tokens. Inside the engine such clients would be
backlogged. So the next refill is delayed for a time in proportion to what the last one admitted.

A second of engine time is worth P to the clients with a positive deficit, and V to those whom the last refill admitted,
in cost units; their weights are k and m. If they share the time so that the sum of w_i · s_i^(1-a) / (1-a) over their
services s_i is greatest (a-fairness: Mo and Walrand, "Fair End-to-End Window-Based Congestion Control", 2000, section
II), clients with a positive deficit have (k / m) · (P / V)^(1/a - 1) seconds for each second of the others. The less
the running calls make of the engines, the shorter the delay for them: few streams would leave most of an engine idle.
With P = V all are served alike. P / V counts as at most 1, so that no client gets less than an equal share of the time
and every delay ends. A delay ends early when the clients with a positive deficit have used it up or have no calls left.

Clients that are all alike have bursts, and to delay these would only make all of them wait. So a refill is delayed only
if the client for whom it is was served more lately than most of those that it would slow.
"""

from collections.abc import Callable, Collection, Mapping
from itertools import chain
from math import inf
from typing import Final

from router.core.model.cost import LinearCost
from router.core.model.request import ClientId, Request, RequestId, WorkerId, own_route
from router.core.policies.context import FleetView
from router.core.policies.deficit.eligibility import Eligibility


class AwaitingFirstToken:
    """Dispatched requests of one queue without a first token, in order of dispatch: those that are streamed, as others
    never show when they start.
    """

    def __init__(self) -> None:
        self._sent: dict[RequestId, tuple[ClientId, float]] = {}
        """By request, its client and the time of its dispatch."""

    def __len__(self) -> int:
        return len(self._sent)

    def add(self, request: Request, now: float) -> None:
        """Add a request that is dispatched now, if it is streamed."""
        if request.streamed:
            self._sent[request.id] = request.client, now

    def remove(self, request: RequestId) -> None:
        """Remove a request that has started or ended, if it is here."""
        self._sent.pop(request, None)

    def has_eligible_since(self, since: float, priority_class: Callable[[ClientId], int | None]) -> bool:
        """Return whether an eligible client has a request here that was dispatched after `since`.

        An engine that orders by longest match would serve every request that a refill admits before that one, for ever.
        So at such an engine CHECKREFILL (DLPM paper, Algorithm 1) waits for it as for a request in the router's queue.
        """
        return any(at > since and priority_class(client) is not None for client, at in self._sent.values())


VALUE_RATIO_HALF_LIFE: Final = 5.0
"""Seconds after which an observation of P / V counts half: both come from few calls, and from a pace that is
learned."""
SERVICE_HALF_LIFE: Final = 30.0
"""Seconds after which a client's service counts half when clients are compared: many times as long as a burst."""
AHEAD: Final = 1.2
"""A client is ahead of another if it was served more than this many times as much, per weight."""
MIN_ISOLATION: Final = 0.05
"""The smallest a other than 0: below it, P / V decides so sharply that its noise does."""
SMALL_SHARE: Final = 0.1
"""If the clients with a positive deficit are to have less than this share of the admitted work's time, that time itself
is waited for only in proportion: it is an estimate, and if it is too long, a late refill leaves slots empty."""
RECHECK_SECONDS: Final = 0.02
"""How long an answer of `is_held` is reused, in seconds, unless a client's deficit is used up or a call ends: while
requests wait, every event asks for it."""


class Work:
    """Work that requests cause in engines. Never changes."""

    __slots__ = ("extend", "output", "requests")

    def __init__(self, requests: float = 0.0, extend: float = 0.0, output: float = 0.0) -> None:
        self.requests = requests
        self.extend = extend
        """Input tokens to compute."""
        self.output = output
        """Predicted output tokens."""

    def plus(self, other: "Work") -> "Work":
        """Add field by field."""
        return Work(self.requests + other.requests, self.extend + other.extend, self.output + other.output)

    def minus(self, other: "Work") -> "Work":
        """Subtract field by field."""
        return Work(self.requests - other.requests, self.extend - other.extend, self.output - other.output)

    @property
    def tokens(self) -> float:
        """All tokens to compute."""
        return self.extend + self.output

    def price(self, cost: LinearCost) -> float:
        """Return the cost of the work, in cost units."""
        return cost.extend * self.extend + cost.output * self.output


NO_WORK: Final = Work()


class RunningCalls:
    """The calls that run on one worker, and their work by client."""

    __slots__ = ("_calls", "clients")

    def __init__(self) -> None:
        self._calls: dict[RequestId, tuple[ClientId, Work]] = {}
        self.clients: dict[ClientId, Work] = {}

    def add(self, request: Request, work: Work) -> None:
        """Count a call that was sent to the worker."""
        self._calls[request.id] = request.client, work
        self.clients[request.client] = self.clients.get(request.client, NO_WORK).plus(work)

    def remove(self, request: RequestId) -> None:
        """Remove a call that ended. A call that was sent before the worker left and returned is unknown."""
        if (call := self._calls.pop(request, None)) is None:
            return
        client, work = call
        left = self.clients[client].minus(work)
        if left.requests:
            self.clients[client] = left
        else:
            del self.clients[client]


class DecayingService:
    """What each client was served lately, in cost units; older service counts less."""

    __slots__ = ("_served",)

    def __init__(self) -> None:
        self._served: dict[ClientId, tuple[float, float]] = {}
        """By client, its service and the time at which it was as much."""

    def add(self, client: ClientId, cost: float, now: float) -> None:
        """Add to a client's service; a negative cost corrects an estimate."""
        self._served[client] = self.of(client, now) + cost, now

    def of(self, client: ClientId, now: float) -> float:
        """Return what a client was served; 0 if it is not known."""
        if (known := self._served.get(client)) is None:
            return 0.0
        cost, at = known
        return float(cost * 0.5 ** ((now - at) / SERVICE_HALF_LIFE))

    def forget(self, client: ClientId) -> None:
        """Forget a client."""
        self._served.pop(client, None)


class Period:
    """The time since the last refill for a set of routes, and the work that the refill admitted."""

    __slots__ = ("admitted", "began", "invalidations", "recheck_at", "until", "value_ratio", "value_ratio_at")

    def __init__(self) -> None:
        self.began = -inf
        self.admitted = NO_WORK
        """The work sent since then by the clients that the refill made eligible."""
        self.until = -inf
        """The time until which the next refill is delayed, as far as is known. It may have to be rechecked before."""
        self.recheck_at = -inf
        self.invalidations = 0
        self.value_ratio = 0.0
        """P / V, averaged."""
        self.value_ratio_at = -inf

    def add_value_ratio(self, value_ratio: float, now: float) -> float:
        """Add an observation of P / V; returns the average, at most 1."""
        weight = 1 - 0.5 ** ((now - self.value_ratio_at) / VALUE_RATIO_HALF_LIFE)
        self.value_ratio += weight * (min(1.0, value_ratio) - self.value_ratio)
        self.value_ratio_at = now
        return self.value_ratio


class RefillHold:
    """Tracks the calls that run on each worker and decides how long they delay the next refill."""

    def __init__(self, strength: float, eligibility: Eligibility, view: FleetView, cost: LinearCost) -> None:
        """`strength`: the exponent a, from 0, which never delays a refill, to 1, which gives all clients equal time."""
        self._exponent = 1 / strength - 1 if strength else inf
        self._eligibility = eligibility
        self._view = view
        self._cost = cost
        self._running: dict[WorkerId, RunningCalls] = {}
        self._periods: dict[frozenset[str], Period] = {}
        """By the set of shared routes of the workers that ask."""
        self._admitted_in: dict[ClientId, Period] = {}
        self._held: set[Period] = set()
        """The periods whose next refill is delayed."""
        self._service = DecayingService()
        self._invalidations = 0
        """The number of calls of `invalidate`."""

    @property
    def next_deadline(self) -> float:
        """The time at which the next delayed refill may come; infinite if none is delayed."""
        return min([period.until for period in self._held]) if self._held else inf

    def end_delays(self, now: float) -> None:
        """Drop the delays that have ended."""
        if self._held:
            self._held = {period for period in self._held if period.until > now}

    def worker_joined(self, worker: WorkerId) -> None:
        """Track the calls of a new worker."""
        self._running.setdefault(worker, RunningCalls())

    def worker_left(self, worker: WorkerId) -> None:
        """Drop the calls of a worker that left."""
        del self._running[worker]
        self._periods.clear()
        self._held.clear()
        self._admitted_in.clear()

    def request_sent(self, request: Request, worker: WorkerId, uncached: int, output: float) -> None:
        """Count a call that was sent to a worker, with its uncached input tokens and predicted output tokens."""
        work = Work(1, uncached, output)
        self._running[worker].add(request, work)
        if (period := self._admitted_in.get(request.client)) is not None:
            period.admitted = period.admitted.plus(work)

    def request_ended(self, request: Request, worker: WorkerId) -> None:
        """Remove a call that ended."""
        if (running := self._running.get(worker)) is not None:
            running.remove(request.id)
            self.invalidate()

    def invalidate(self) -> None:
        """Recompute all delays, because a client's deficit is used up or a call ended."""
        self._invalidations += 1

    def charge(self, client: ClientId, cost: float, now: float) -> None:
        """Count what a client is served, in cost units."""
        self._service.add(client, cost, now)

    def forget(self, client: ClientId) -> None:
        """Forget a client without requests."""
        self._admitted_in.pop(client, None)
        self._service.forget(client)

    def on_refill(self, routes: Collection[str], clients: Collection[ClientId], now: float) -> None:
        """Start a new period: a refill for these routes made these clients eligible."""
        period = self._period(routes)
        period.began, period.admitted, period.until = now, NO_WORK, -inf
        self._held.discard(period)
        for client in clients:
            self._admitted_in[client] = period

    def is_held(self, routes: Collection[str], now: float) -> bool:
        """Return whether a refill for these routes must be delayed now."""
        period = self._period(routes)
        if self._exponent == inf or not period.admitted.requests:
            return False
        if period.recheck_at <= now or period.until <= now or period.invalidations != self._invalidations:
            period.recheck_at, period.invalidations = now + RECHECK_SECONDS, self._invalidations
            period.until = period.began + self._hold_seconds(period, routes, now)
        if period.until <= now:
            self._held.discard(period)
            return False
        self._held.add(period)
        return True

    def _period(self, routes: Collection[str]) -> Period:
        return self._periods.setdefault(frozenset(routes), Period())

    def _hold_seconds(self, period: Period, routes: Collection[str], now: float) -> float:
        """Return how many seconds after a refill the next one may come."""
        view, cost = self._view, self._cost
        workers = list(dict.fromkeys(worker for route in routes for worker in view.serving(route)))
        running, eligible = self._eligible_work(workers)
        every_route = {*routes, *map(own_route, workers)}
        others = self._eligibility.ineligible_weight(every_route)
        price = period.admitted.price(cost)
        if not eligible or not others or price <= 0.0:
            return 0.0
        first = self._eligibility.next_refilled(every_route)
        if first is None or not self._is_ahead_of_most(first, eligible, now):
            return 0.0
        # The mean over the workers, divided by their number because they compute in parallel.
        per_token = sum([view.prefill_seconds(worker, 1.0) for worker in workers]) / len(workers) ** 2
        step = sum([view.decode_seconds(worker) for worker in workers]) / len(workers)
        took = running.output / running.requests * step + running.tokens * per_token
        seconds = period.admitted.tokens * per_token
        value_ratio = running.price(cost) / took * seconds / price if took > 0.0 else 0.0
        times = sum(eligible.values()) / others * period.add_value_ratio(value_ratio, now) ** self._exponent
        return float(seconds * (min(1.0, times / SMALL_SHARE) + times))

    def _is_ahead_of_most(self, client: ClientId, others: Mapping[ClientId, float], now: float) -> bool:
        """Return whether a client was served more lately than others that have half of their weight.

        It is not compared with their mean, which one of them that was served much, its accomplice, could raise.
        """
        weight, service = self._eligibility.weight, self._service.of
        limit = service(client, now) / (AHEAD * weight(client))
        behind = [own for each, own in others.items() if service(each, now) < limit * own]
        return sum(behind) >= sum(others.values()) / 2

    def _eligible_work(self, workers: Collection[WorkerId]) -> tuple[Work, Mapping[ClientId, float]]:
        """Return the running work of clients with a positive deficit, and these clients' weights."""
        calls = [self._running[worker].clients for worker in workers if worker in self._running]
        has_positive_deficit, weight = self._eligibility.has_positive_deficit, self._eligibility.weight
        clients = dict.fromkeys(chain.from_iterable(calls))  # a client has calls on many workers
        eligible = {client: weight(client) for client in clients if has_positive_deficit(client)}
        work = NO_WORK
        for by_client in calls:
            for client, each in by_client.items():
                if client in eligible:
                    work = work.plus(each)
        return work, eligible

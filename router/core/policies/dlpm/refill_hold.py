"""How long a refill is held back for the sake of those whose calls run in the engines.

CHECKREFILL ("Locality-aware Fair Scheduling in LLM Serving", Algorithm 1) adds quanta when nobody with credit waits.
But clients with credit may have calls that run, and what a refill lets in slows these: its prefill takes time from the
steps in which they gain their tokens. Inside the engine such clients would be backlogged. So the next refill is held
back for a time, in proportion to what the last one let in.

A second of the engines is worth P to those with credit, and V to those whom the last refill let in, in cost units; let
them weigh k and m. If they share it so that the sum of w_i · s_i^(1-a) / (1-a) over their services s_i is greatest
(a-fairness: Mo and Walrand, "Fair End-to-End Window-Based Congestion Control", 2000, section II), then those with
credit have (k / m) · (P / V)^(1/a - 1) seconds for each second of the others. The less the running calls make of the
engines, the less is held back for them: few streams would leave most of an engine idle. With P = V all are served the
same. P / V counts for 1 at most, so that nobody gets less than an equal share of the time, and every hold has an end.
It ends before, as soon as those with credit have used it up, or have no calls any more.
"""

from collections.abc import Collection
from math import inf
from typing import Final, NamedTuple

from router.core.model.cost import LinearCost
from router.core.model.request import ClientId, Request, RequestId, WorkerId, own_route
from router.core.policies.context import FleetView
from router.core.policies.deficit.eligibility import Eligibility

VALUE_RATIO_HALF_LIFE: Final = 5.0
"""Seconds after which what was seen of P / V counts half: both are made of few calls, and of a pace that is learned."""
MIN_ISOLATION: Final = 0.05
"""Of a, other than 0: below, P / V decides so sharply that its noise does."""
SMALL_SHARE: Final = 0.1
"""Where those with credit are to have less than this share of the time of what was let in, that time itself is waited
for in part only: it is an estimate, and where it is too long, a refill that is late leaves places empty."""
RECHECK_SECONDS: Final = 0.02
"""How long an answer of `is_held` is used again, unless a client loses its credit or a call ends: while requests wait, it
is asked for at every event."""


class Work(NamedTuple):
    """What requests have engines compute."""

    requests: float = 0.0
    extend: float = 0.0
    """Tokens of input."""
    output: float = 0.0
    """Tokens that are foreseen."""

    def plus(self, other: "Work", sign: int = 1) -> "Work":
        """Add member by member, or take away where `sign` is -1."""
        return Work(
            self.requests + sign * other.requests,
            self.extend + sign * other.extend,
            self.output + sign * other.output,
        )

    @property
    def tokens(self) -> float:
        """All that is computed."""
        return self.extend + self.output

    def price(self, cost: LinearCost) -> float:
        """In cost units."""
        return cost.extend * self.extend + cost.output * self.output


NO_WORK: Final = Work()


class RunningCalls:
    """The calls at one worker, and what they come to for each client."""

    __slots__ = ("_calls", "clients")

    def __init__(self) -> None:
        self._calls: dict[RequestId, tuple[ClientId, Work]] = {}
        self.clients: dict[ClientId, Work] = {}

    def add(self, request: Request, work: Work) -> None:
        """One was sent there."""
        self._calls[request.id] = request.client, work
        self.clients[request.client] = self.clients.get(request.client, NO_WORK).plus(work)

    def remove(self, request: RequestId) -> None:
        """It ended; nothing is known of what was sent before the worker left and came back."""
        if (call := self._calls.pop(request, None)) is None:
            return
        client, work = call
        left = self.clients[client].plus(work, -1)
        if left.requests:
            self.clients[client] = left
        else:
            del self.clients[client]


class Period:
    """The time since the last refill for some models, and what it let in."""

    __slots__ = ("began", "invalidations", "admitted", "recheck_at", "until", "value_ratio", "value_ratio_at")

    def __init__(self) -> None:
        self.began = -inf
        self.admitted = NO_WORK
        """What was sent since then by those to whom it gave credit."""
        self.until = -inf
        """How long the next refill is held back, as far as is known; it may have to be looked at before."""
        self.recheck_at = -inf
        self.invalidations = 0
        self.value_ratio = 0.0
        """P / V, averaged."""
        self.value_ratio_at = -inf

    def add_value_ratio(self, value_ratio: float, now: float) -> float:
        """Take in what P / V seems to be; returns the average, 1 at most."""
        weight = 1 - 0.5 ** ((now - self.value_ratio_at) / VALUE_RATIO_HALF_LIFE)
        self.value_ratio += weight * (min(1.0, value_ratio) - self.value_ratio)
        self.value_ratio_at = now
        return self.value_ratio


class RefillHold:
    """What runs at each worker, and for how long the next refill is held back for it."""

    def __init__(self, strength: float, eligibility: Eligibility, view: FleetView, cost: LinearCost) -> None:
        """`strength`: the exponent a, from 0, which never holds a refill back, to 1, equal time for all."""
        self._exponent = 1 / strength - 1 if strength else inf
        self._eligibility = eligibility
        self._view = view
        self._cost = cost
        self._running: dict[WorkerId, RunningCalls] = {}
        self._periods: dict[frozenset[str], Period] = {}
        """By the models of the workers that ask."""
        self._admitted_in: dict[ClientId, Period] = {}
        self._holding: set[Period] = set()
        self._invalidations = 0
        """How often `invalidate` was called."""

    @property
    def next_deadline(self) -> float:
        """When a refill that is held back may come; infinite if none is."""
        return min([period.until for period in self._holding], default=inf)

    def worker_joined(self, worker: WorkerId) -> None:
        """It is one of the workers."""
        self._running.setdefault(worker, RunningCalls())

    def worker_left(self, worker: WorkerId) -> None:
        """What still runs there counts no more."""
        del self._running[worker]
        self._periods.clear()
        self._holding.clear()
        self._admitted_in.clear()

    def request_dispatched(self, request: Request, worker: WorkerId) -> None:
        """A request is at a worker."""
        view = self._view
        uncached = view.input_tokens(request) - view.match(request).get(worker, 0)
        work = Work(1, uncached, view.output_tokens(request))
        self._running[worker].add(request, work)
        if (period := self._admitted_in.get(request.client)) is not None:
            period.admitted = period.admitted.plus(work)

    def request_ended(self, request: Request, worker: WorkerId) -> None:
        """It ended there."""
        if (running := self._running.get(worker)) is not None:
            running.remove(request.id)
            self.invalidate()

    def invalidate(self) -> None:
        """Somebody has no credit any more, or nothing that runs."""
        self._invalidations += 1

    def advance(self, now: float) -> None:
        """Forget what was held back until now."""
        if self._holding:
            self._holding = {period for period in self._holding if period.until > now}

    def forget(self, client: ClientId) -> None:
        """It has nothing under way."""
        self._admitted_in.pop(client, None)

    def on_refill(self, models: Collection[str], clients: Collection[ClientId], now: float) -> None:
        """A refill for these models gave these clients credit."""
        period = self._period(models)
        period.began, period.admitted, period.until = now, NO_WORK, -inf
        self._holding.discard(period)
        for client in clients:
            self._admitted_in[client] = period

    def is_held(self, models: Collection[str], now: float) -> bool:
        """Whether a refill for these models is to be held back now."""
        period = self._period(models)
        if self._exponent == inf or not period.admitted.requests:
            return False
        if period.recheck_at <= now or period.until <= now or period.invalidations != self._invalidations:
            period.recheck_at, period.invalidations = now + RECHECK_SECONDS, self._invalidations
            period.until = period.began + self._hold_seconds(period, models, now)
        if period.until <= now:
            self._holding.discard(period)
            return False
        self._holding.add(period)
        return True

    def _period(self, models: Collection[str]) -> Period:
        return self._periods.setdefault(frozenset(models), Period())

    def _hold_seconds(self, period: Period, models: Collection[str], now: float) -> float:
        """How long after a refill the next one may come."""
        view, cost = self._view, self._cost
        workers = list(dict.fromkeys(worker for model in models for worker in view.serving(model)))
        running, weight = self._eligible_work(workers)
        others = self._eligibility.ineligible_weight({*models, *map(own_route, workers)})
        price = period.admitted.price(cost)
        if not weight or not others or price <= 0.0:
            return 0.0
        per_token = sum([view.prefill_seconds(worker, 1.0) for worker in workers]) / len(workers) ** 2
        step = sum([view.decode_seconds(worker) for worker in workers]) / len(workers)
        took = running.output / running.requests * step + running.tokens * per_token
        seconds = period.admitted.tokens * per_token
        value_ratio = running.price(cost) / took * seconds / price if took > 0.0 else 0.0
        times = weight / others * period.add_value_ratio(value_ratio, now) ** self._exponent
        return float(seconds * (min(1.0, times / SMALL_SHARE) + times))

    def _eligible_work(self, workers: Collection[WorkerId]) -> tuple[Work, float]:
        """What those run who have credit, and what they weigh."""
        work = NO_WORK
        eligible: dict[ClientId, None] = {}  # in a fixed order, in which their weights are added up
        for worker in workers:
            if (running := self._running.get(worker)) is not None:
                for client, each in running.clients.items():
                    if self._eligibility.has_positive_deficit(client):
                        work = work.plus(each)
                        eligible[client] = None
        return work, sum([self._eligibility.weight(client) for client in eligible])

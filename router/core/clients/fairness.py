"""How evenly the clients are served: by queue, with the theorem's gap and its bound, and as active clients feel it."""

from collections import defaultdict, deque
from collections.abc import Collection, Iterable
from math import ceil
from typing import NamedTuple

from router.core.clients.last_minute import MINUTE, MinuteSums
from router.core.clients.service_gap import BoundMeter, GapMeter, Outstanding
from router.core.clients.shares import Shares
from router.core.clients.turns import Turns
from router.core.model.cost import LinearCost, Tokens
from router.core.model.request import ClientId, Request, WorkerId

WAITS_KEPT = 256
"""How many of a client's last waiting times its percentile looks back on."""


def jain_index(allocations: Collection[float]) -> float | None:
    """(sum x)^2 / (n · sum x^2): 1 when all are equal, 1/n when one has everything; None for nobody or nothing."""
    squares = sum(x * x for x in allocations)
    return sum(allocations) ** 2 / (len(allocations) * squares) if squares else None


class Waits(NamedTuple):
    """Percentiles of a client's last waiting times, in seconds; None before the first."""

    p50: float | None
    p95: float | None


def percentile(values: Iterable[float], share: float) -> float | None:
    """The smallest value that at least this share of the values does not exceed; None without values."""
    ordered = sorted(values)
    return ordered[max(0, ceil(share * len(ordered)) - 1)] if ordered else None


class RecentService:
    """One client's service over the last minute, and whether it was backlogged then."""

    __slots__ = ("_sums", "backlogged_until")

    def __init__(self) -> None:
        self._sums = MinuteSums()
        self.backlogged_until: float | None = None
        """When it was last backlogged; infinite while it is, None if it never was."""

    def add(self, cost: float, weight: float, now: float) -> None:
        """It was served this much while it weighed this, or this much was given back."""
        self._sums.add(cost / weight, cost, now)

    def per_weight(self, now: float) -> float:
        """Its service in cost units, each divided by its weight at that time."""
        return self._sums.totals(now)[0]

    def cost(self, now: float) -> float:
        """Its service in cost units."""
        return self._sums.totals(now)[1]


class Fairness:
    """Watches backlogs and service, by client and by queue; a queue is a worker's, or None for a pool."""

    def __init__(self, cost: LinearCost, shares: Shares, *, pooled: bool) -> None:
        self._pooled = pooled
        self._shares = shares
        self._gaps: defaultdict[WorkerId | None, GapMeter] = defaultdict(GapMeter)
        self._bounds: defaultdict[WorkerId | None, BoundMeter] = defaultdict(lambda: BoundMeter(cost))
        self._recent: defaultdict[ClientId, RecentService] = defaultdict(RecentService)
        self._waits: defaultdict[ClientId, deque[float]] = defaultdict(lambda: deque(maxlen=WAITS_KEPT))
        self._queues: dict[ClientId, int] = {}
        self._granted = 0.0
        self._alike = True
        self.turns = Turns()

    def request_opened(self, request: Request, since: float, now: float, *, begun: bool = False) -> None:
        """A request that has waited since then is there. `begun`: its answer began at a worker that it came back from.

        To be told once it counts among its client's `Shares`.
        """
        weight = self._shares.effective_weight(request)
        if begun:
            self.turns.request_resumed(request.client, weight, now)
        else:
            self.turns.request_opened(request.client, request.id, weight, since, now)

    def request_answered(self, request: Request, now: float) -> None:
        """Its first token is here, or is believed to be computed; only the first time counts."""
        self.turns.request_answered(request.client, request.id, now)

    def request_closed(self, request: Request, now: float) -> None:
        """A request is gone, however it ended."""
        self.turns.request_closed(request.client, request.id, now)

    def backlog_began(self, queue: WorkerId | None, client: ClientId, now: float) -> None:  # noqa: ARG002
        """See `BacklogWatcher`."""
        self._gaps[queue].begin(client)
        self._queues[client] = self._queues.get(client, 0) + 1
        self._recent[client].backlogged_until = float("inf")

    def backlog_ended(self, queue: WorkerId | None, client: ClientId, now: float) -> None:
        """See `BacklogWatcher`."""
        self._gaps[queue].end(client)
        self._queues[client] -= 1
        if not self._queues[client]:
            del self._queues[client]
            self._recent[client].backlogged_until = now

    def passed_through(self, queue: WorkerId | None, client: ClientId, now: float) -> None:  # noqa: ARG002
        """See `BacklogWatcher`. No gap opens in no time."""
        if client not in self._queues:
            self._recent[client].backlogged_until = now

    def request_dispatched(self, request: Request, worker: WorkerId, outstanding: Outstanding, waited: float) -> None:
        """A request left its queue after so many seconds."""
        self._bound(worker).add(request.client, self._shares.effective_weight(request), outstanding)
        self._waits[request.client].append(waited)

    def attempt_ended(self, request: Request, worker: WorkerId, outstanding: Outstanding) -> None:
        """A dispatched request ended."""
        self._bound(worker).remove(request.client, outstanding)

    def add_service(self, request: Request, worker: WorkerId, cost: float, now: float) -> None:
        """A request was served at this cost, or this much was given back."""
        client, weight = request.client, self._shares.effective_weight(request)
        self._gaps[None if self._pooled else worker].add_service(client, cost / weight)
        self._recent[client].add(cost, weight, now)
        self.turns.add_service(client, request.id, cost, weight, now)

    def record_total(self, worker: WorkerId, outstanding: Outstanding, tokens: Tokens) -> None:
        """A dispatched request was served so much, all told."""
        self._bound(worker).record_total(outstanding, tokens)

    def worker_left(self, worker: WorkerId) -> None:
        """A worker is gone, and the last of its requests with it. Its bound stays, for its clients' credit does."""
        self._gaps.pop(worker, None)

    def forget_worker(self, worker: WorkerId) -> None:
        """It left long ago, and its clients' credit is forgotten, too."""
        self._bounds.pop(worker, None)

    def set_alike(self, *, alike: bool) -> None:
        """Whether all workers serve the same models from now on. The gaps that came of other times are no gaps then."""
        if alike and not self._alike and self._pooled:
            for gap in self._gaps.values():
                gap.begin_all_again()
        self._alike = alike

    def credit_granted(self, client: ClientId, cost: float) -> None:
        """An operator gave it so much credit: what it had until then is another interval, and every bound is wider."""
        self._granted += cost
        for gap in self._gaps.values():
            gap.begin_again(client)

    def forget(self, client: ClientId) -> None:
        """A client that has nothing under way is not remembered."""
        self._recent.pop(client, None)
        self._waits.pop(client, None)
        self.turns.forget(client)

    def share(self, client: ClientId, now: float) -> float | None:
        """What of all that was served in the last minute this client got, 0 to 1; None if nothing was served."""
        whole = self.turns.cost_served(now)
        if whole <= 0.0:
            return None
        recent = self._recent.get(client)
        return 0.0 if recent is None else min(1.0, max(0.0, recent.cost(now) / whole))

    def jain(self, now: float) -> float | None:
        """Jain's index over the service per weight of the clients that were backlogged lately."""
        return jain_index(
            [
                max(0.0, recent.per_weight(now))
                for recent in self._recent.values()
                if recent.backlogged_until is not None and recent.backlogged_until >= now - MINUTE
            ]
        )

    def waits(self, client: ClientId) -> Waits:
        """How long the client's last requests waited."""
        ordered = sorted(self._waits.get(client, ()))
        return Waits(percentile(ordered, 0.5), percentile(ordered, 0.95))

    def gap(self, queue: WorkerId | None) -> float:
        """The largest difference in service per weight between two clients backlogged in this queue."""
        meter = self._gaps.get(queue)
        return 0.0 if meter is None else meter.gap()

    def bound(self, queue: WorkerId | None, quantum: float | None) -> float | None:
        """What that difference cannot exceed under an order with this quantum; None where nothing bounds it.

        In a pool whose workers serve different models nothing does: a refill for the sake of one model gives credit to
        clients that wait for another, at workers where others wait with credit left.
        """
        if quantum is None or (self._pooled and not self._alike):
            return None
        return self._bound(queue).bound(quantum, self._granted)

    def _bound(self, worker: WorkerId | None) -> BoundMeter:
        return self._bounds[None if self._pooled else worker]

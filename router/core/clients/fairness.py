"""How evenly clients are served: the service gap of each queue and its bound, and the lag and waits
of active clients.
"""

from collections import defaultdict, deque
from collections.abc import Collection, Iterable
from math import ceil
from typing import NamedTuple

from router.core.clients.last_minute import MINUTE, MinuteSums
from router.core.clients.service_gap import BoundMeter, GapMeter, Outstanding
from router.core.clients.shares import Shares
from router.core.clients.turns import Turns
from router.core.model.cost import Charge, LinearCost
from router.core.model.request import ClientId, Request, WorkerId

WAITS_KEPT = 256
"""Waiting times kept per client for its percentiles."""


def jain_index(allocations: Collection[float]) -> float | None:
    """Return (sum x)^2 / (n · sum x^2): 1 if all are equal, 1/n if one has everything; None if all are 0 or there are
    none.
    """
    squares = sum(x * x for x in allocations)
    return sum(allocations) ** 2 / (len(allocations) * squares) if squares else None


class Waits(NamedTuple):
    """Percentiles of a client's recent waiting times, in seconds; None before the first."""

    p50: float | None
    p95: float | None


def percentile(values: Iterable[float], share: float) -> float | None:
    """Return the smallest value that at least this share of the values does not exceed; None without values."""
    ordered = sorted(values)
    return ordered[max(0, ceil(share * len(ordered)) - 1)] if ordered else None


class RecentService(MinuteSums):
    """One client's service in the last minute, and whether it was backlogged then.

    The sums are of service divided by the client's weight at that time, and of service, in cost units.
    """

    __slots__ = ("backlogged_until",)

    def __init__(self) -> None:
        super().__init__()
        self.backlogged_until: float | None = None
        """When the client was last backlogged; infinite while it is backlogged, None if it never was."""

    def per_weight(self, now: float) -> float:
        """Return the service of the last minute, each part divided by the client's weight at that time."""
        return self.totals(now)[0]

    def cost(self, now: float) -> float:
        """Return the service of the last minute in cost units."""
        return self.totals(now)[1]


class Fairness:
    """Measures backlogs and service by client and by queue. A queue belongs to one worker, or is the pool (None)."""

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
        """Requests are reported to it directly: when they arrive, are answered, and end."""

    def backlog_began(self, queue: WorkerId | None, client: ClientId, now: float) -> None:  # noqa: ARG002
        self._gaps[queue].backlog_began(client)
        self._queues[client] = self._queues.get(client, 0) + 1
        self._recent[client].backlogged_until = float("inf")

    def backlog_ended(self, queue: WorkerId | None, client: ClientId, now: float) -> None:
        self._gaps[queue].backlog_ended(client)
        self._queues[client] -= 1
        if not self._queues[client]:
            del self._queues[client]
            self._recent[client].backlogged_until = now

    def passed_through(self, queue: WorkerId | None, client: ClientId, now: float) -> None:  # noqa: ARG002
        """Record that the client was backlogged, for no time at all: no gap can open in it."""
        if client not in self._queues:
            self._recent[client].backlogged_until = now

    def request_dispatched(self, request: Request, worker: WorkerId, outstanding: Outstanding, waited: float) -> None:
        """Record that a request left its queue after `waited` seconds."""
        self._bound(worker).add(request.client, self._shares.effective_weight(request), outstanding)
        self._waits[request.client].append(waited)

    def request_pooled(self, request: Request, worker: WorkerId, outstanding: Outstanding) -> None:
        """Record that a request was prefilled and waits for a decode worker, until `attempt_ended`: it will be decoded
        without another turn.
        """
        self._bound(worker).add(request.client, self._shares.effective_weight(request), outstanding)

    def attempt_ended(self, request: Request, worker: WorkerId, outstanding: Outstanding) -> None:
        """Record that a dispatched request ended at its worker."""
        self._bound(worker).remove(request.client, outstanding)

    def add_service(
        self,
        request: Request,
        worker: WorkerId,
        cost: float,
        now: float,
        *,
        outstanding: Outstanding | None = None,
        charge: Charge | None = None,
    ) -> None:
        """Add service to a request's client, in cost units; negative for a refund.

        `outstanding` and `charge`: what the dispatch was expected to cost, and the change of its bill that this service
        is; None if it was reserved at the dispatch.
        """
        client, weight = request.client, self._shares.effective_weight(request)
        per_weight, queue = cost / weight, None if self._pooled else worker
        self._gaps[queue].add_service(client, per_weight)
        if outstanding is not None and charge is not None:
            unreported = charge.after.output - charge.before.output if request.streamed else 0
            self._bounds[queue].record_total(outstanding, charge.after, unreported)
        self._recent[client].add(per_weight, cost, now)
        self.turns.add_service(client, request.id, cost, weight, now)

    def worker_left(self, worker: WorkerId) -> None:
        """Drop the gap of a worker that is gone with its last request. Its bound stays, as its clients' deficits do."""
        self._gaps.pop(worker, None)

    def forget_worker(self, worker: WorkerId) -> None:
        """Drop the bound of a worker that left long ago, when its clients' deficits are dropped as well."""
        self._bounds.pop(worker, None)

    def set_alike(self, *, alike: bool) -> None:
        """Set whether all workers serve the same models from now on.

        When they come to do so, gaps from earlier intervals no longer count.
        """
        if alike and not self._alike and self._pooled:
            for gap in self._gaps.values():
                gap.begin_all_again()
        self._alike = alike

    def credit_granted(self, client: ClientId, cost: float) -> None:
        """Record that an operator gave a client credit: its service so far belongs to another interval, and every bound
        widens.
        """
        self._granted += cost
        for gap in self._gaps.values():
            gap.begin_again(client)

    def forget(self, client: ClientId) -> None:
        """Forget a client that has no request waiting or in flight."""
        self._recent.pop(client, None)
        self._waits.pop(client, None)
        self.turns.forget(client)

    def share(self, client: ClientId, now: float) -> float | None:
        """Return the client's share, 0 to 1, of all service in the last minute; None if nothing was served."""
        whole = self.turns.cost_served(now)
        if whole <= 0.0:
            return None
        recent = self._recent.get(client)
        return 0.0 if recent is None else min(1.0, max(0.0, recent.cost(now) / whole))

    def jain(self, now: float) -> float | None:
        """Return Jain's index over the service per weight of clients that were backlogged in the last minute."""
        return jain_index(
            [
                max(0.0, recent.per_weight(now))
                for recent in self._recent.values()
                if recent.backlogged_until is not None and recent.backlogged_until >= now - MINUTE
            ]
        )

    def waits(self, client: ClientId) -> Waits:
        """Return percentiles of the client's recent waiting times."""
        ordered = sorted(self._waits.get(client, ()))
        return Waits(percentile(ordered, 0.5), percentile(ordered, 0.95))

    def gap(self, queue: WorkerId | None) -> float:
        """Return the largest difference in service per weight between two clients backlogged in this queue."""
        meter = self._gaps.get(queue)
        return 0.0 if meter is None else meter.gap()

    def bound(self, queue: WorkerId | None, quantum: float | None) -> float | None:
        """Return the bound on the gap of this queue under an order with this quantum; None if nothing bounds the gap.

        In a pool whose workers serve different models nothing bounds it: a refill for one model also gives deficit to
        clients that wait for another model, at workers where other clients wait with a positive deficit.
        """
        if quantum is None or (self._pooled and not self._alike):
            return None
        return self._bound(queue).bound(quantum, self._granted)

    def _bound(self, worker: WorkerId | None) -> BoundMeter:
        return self._bounds[None if self._pooled else worker]

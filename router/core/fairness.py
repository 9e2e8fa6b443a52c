"""How evenly the clients are served: Jain's index, waiting times, and each queue's gap and bound."""

from collections import defaultdict, deque
from collections.abc import Collection, Iterable
from math import ceil
from typing import NamedTuple

from router.core.accounts import LinearCost, Tokens
from router.core.model import ClientId, Request, WorkerId
from router.core.service_gap import BoundMeter, GapMeter, Outstanding
from router.core.shares import Shares

JAIN_SECONDS = 60.0
"""The time over which Jain's index looks back."""
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
    """A client's service per weight over the last `JAIN_SECONDS`, in steps of a second."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, float]] = deque()
        self.backlogged_until: float | None = None
        """When it was last backlogged; infinite while it is, None if it never was."""

    def add(self, service: float, now: float) -> None:
        """It was served this much, or this much was given back."""
        second = int(now)
        if self._seconds and self._seconds[-1][0] == second:
            self._seconds[-1] = second, self._seconds[-1][1] + service
        else:
            self._seconds.append((second, service))
            self._forget(now)

    def total(self, now: float) -> float:
        """The service in sight."""
        self._forget(now)
        return sum(service for _, service in self._seconds)

    def _forget(self, now: float) -> None:
        while self._seconds and self._seconds[0][0] < now - JAIN_SECONDS:
            self._seconds.popleft()


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

    def dispatched(self, request: Request, worker: WorkerId, outstanding: Outstanding, waited: float) -> None:
        """A request left its queue after so many seconds."""
        self._bound(worker).dispatched(request.client, self._shares.of(request), outstanding)
        self._waits[request.client].append(waited)

    def ended(self, request: Request, worker: WorkerId, outstanding: Outstanding) -> None:
        """A dispatched request ended."""
        self._bound(worker).ended(request.client, outstanding)

    def served(self, request: Request, worker: WorkerId, cost: float, now: float) -> None:
        """A request was served at this cost, or this much was given back."""
        client, service = request.client, cost / self._shares.of(request)
        self._gaps[None if self._pooled else worker].served(client, service)
        self._recent[client].add(service, now)

    def came_to(self, worker: WorkerId, outstanding: Outstanding, tokens: Tokens) -> None:
        """A dispatched request was served so much, all told."""
        self._bound(worker).came_to(outstanding, tokens)

    def worker_left(self, worker: WorkerId) -> None:
        """A worker is gone, and the last of its requests with it. Its bound stays, for its clients' credit does."""
        self._gaps.pop(worker, None)

    def forget_worker(self, worker: WorkerId) -> None:
        """It left long ago, and its clients' credit is forgotten, too."""
        self._bounds.pop(worker, None)

    def granted(self, client: ClientId, cost: float) -> None:
        """An operator gave it so much credit: what it had until then is another interval, and every bound is wider."""
        self._granted += cost
        for gap in self._gaps.values():
            gap.begin_again(client)

    def forget(self, client: ClientId) -> None:
        """A client that has nothing under way is not remembered."""
        self._recent.pop(client, None)
        self._waits.pop(client, None)

    def jain(self, now: float) -> float | None:
        """Jain's index over the service per weight of the clients that were backlogged lately."""
        return jain_index(
            [
                max(0.0, recent.total(now))
                for recent in self._recent.values()
                if recent.backlogged_until is not None and recent.backlogged_until >= now - JAIN_SECONDS
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

    def bound(self, queue: WorkerId | None, quantum: float) -> float:
        """What that difference cannot exceed under an order with this quantum."""
        return self._bound(queue).bound(quantum, self._granted)

    def _bound(self, worker: WorkerId | None) -> BoundMeter:
        return self._bounds[None if self._pooled else worker]

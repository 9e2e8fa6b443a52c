"""How evenly clients are served: the service gap of each queue and its bound, and the lag and waits of active clients.

The service gap is the difference in service between clients that wait in the same queue. It is measured; its bound is
computed from the largest terms seen. Theorem 4.1 of the DLPM paper bounds the gap by 2(U + Q^u) for a scheduler inside
the engine, which knows what is cached and what it has released. This router predicts and reserves, so for two clients
backlogged in the same queue

    |W_f/w_f - W_g/w_g| <= 2(U' + E + X + P + Q^u) + 2R,   U' = w_e · L_input + w_q · M'

where L_input is the largest input, M' a client's largest outstanding output reservation, E = w_e times its predicted
cached tokens in flight and R = w_e times its reserved input in flight, each the largest seen. X is 0 where sizes and
output limits are known. Where they are estimated, X is the largest cost of a request beyond its estimate, times the
most requests that one client had in flight. P is for output that streams have computed and the front has not yet
reported: the charges obey the bound without P, and each client's service is ahead of its charges by at most P, at the
beginning and at the end of an interval. P is w_q times the most new tokens of one stream in one report, times the most
requests that one client had in flight. For an order that lets clients go on in debt, Q^u is the quantum plus the
largest debt (`DeficitParameters.deficit_range`), which is how far apart two deficits may be. The total credit C that an
operator granted to clients is added: a deficit may exceed Q^u by that much from the grant on, which begins a new
interval for its client.
"""

from collections import defaultdict, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from math import ceil, floor
from typing import Final, NamedTuple

from router.core.clients.shares import Shares
from router.core.clients.turns import MINUTE, MinuteSums, Turns
from router.core.model.cost import Charge, LinearCost, Tokens
from router.core.model.request import ClientId, Request, WorkerId

PAIR_LIMIT: Final = 64
"""The most clients compared in one queue, first come first served: the number of pairs grows with the square."""


@dataclass(slots=True)
class Backlogged:
    """A backlogged client's service per weight since its backlog began."""

    service: float = 0.0
    others: dict[ClientId, float] = field(default_factory=dict)
    """Service at that time of the clients that were backlogged before it."""


class GapMeter:
    """The gap between clients of one queue, over the time in which both clients of a pair were backlogged."""

    def __init__(self) -> None:
        self._clients: dict[ClientId, Backlogged] = {}

    def backlog_began(self, client: ClientId) -> None:
        """Begin the interval of a client whose backlog began."""
        if len(self._clients) < PAIR_LIMIT:
            others = {other: entry.service for other, entry in self._clients.items()}
            self._clients[client] = Backlogged(others=others)

    def backlog_ended(self, client: ClientId) -> None:
        """End the interval of a client whose backlog ended. A later backlog is another interval."""
        if self._clients.pop(client, None):
            for entry in self._clients.values():
                entry.others.pop(client, None)

    def begin_again(self, client: ClientId) -> None:
        """Begin a new interval for a client if it is backlogged."""
        if client in self._clients:
            self.backlog_ended(client)
            self.backlog_began(client)

    def begin_all_again(self) -> None:
        """Begin a new interval for all backlogged clients."""
        for client in list(self._clients):
            self.begin_again(client)

    def add_service(self, client: ClientId, service: float) -> None:
        """Add service per weight to a client; ignored if the client is not backlogged."""
        if entry := self._clients.get(client):
            entry.service += service

    def gap(self) -> float:
        """Return the largest difference between two backlogged clients; 0 with fewer than two."""
        return max(
            (
                abs(self._clients[other].service - before - entry.service)
                for entry in self._clients.values()
                for other, before in entry.others.items()
            ),
            default=0.0,
        )


class Outstanding:
    """What one client has in flight in one queue, in tokens and requests."""

    __slots__ = ("cached", "expected_output", "extend", "requests")

    def __init__(self, expected_output: int = 0, cached: int = 0, extend: int = 0, requests: int = 1) -> None:
        self.expected_output = expected_output
        self.cached = cached
        self.extend = extend
        self.requests = requests

    def within(self, most: "Outstanding") -> bool:
        """Return whether no field exceeds that of `most`."""
        return (
            self.expected_output <= most.expected_output
            and self.cached <= most.cached
            and self.extend <= most.extend
            and self.requests <= most.requests
        )


class BoundMeter:
    """The largest terms of the bound seen in one queue."""

    def __init__(self, cost: LinearCost) -> None:
        self._cost = cost
        self._clients: defaultdict[ClientId, Outstanding] = defaultdict(lambda: Outstanding(requests=0))
        self._least_weight = float("inf")
        self._largest_input = 0
        self._largest = Outstanding(requests=0)
        self._excess = 0.0
        self._unreported = 0
        """The most new output tokens of a stream in one report."""

    def add(self, client: ClientId, weight: float, request: Outstanding) -> None:
        """Add a dispatched request."""
        total, largest = self._clients[client], self._largest
        _add(total, request, 1)
        self._least_weight = min(self._least_weight, weight)
        self._largest_input = max(self._largest_input, request.cached + request.extend)
        if not total.within(largest):
            largest.expected_output = max(largest.expected_output, total.expected_output)
            largest.cached = max(largest.cached, total.cached)
            largest.extend = max(largest.extend, total.extend)
            largest.requests = max(largest.requests, total.requests)

    def record_total(self, request: Outstanding, tokens: Tokens, unreported: int) -> None:
        """Record the tokens that a request has been served so far.

        `unreported`: output tokens of a stream that the scheduler did not know of until now.
        """
        cost = self._cost
        self._unreported = max(self._unreported, unreported)
        believed = cost.extend * (request.cached + request.extend) + cost.output * request.expected_output
        self._excess = max(self._excess, cost.extend * tokens.extend + cost.output * tokens.output - believed)

    def remove(self, client: ClientId, request: Outstanding) -> None:
        """Remove a request that is no longer in flight."""
        if (total := self._clients.get(client)) is None:
            return  # the worker was forgotten while the request waited in the pool of prefilled requests
        _add(total, request, -1)
        if not total.requests:
            del self._clients[client]

    def bound(self, quantum: float, granted: float = 0.0) -> float:
        """Return 2(U' + E + X + P + Q^u) + 2R + C in cost units per weight of the lightest client. `granted`: C."""
        cost, most = self._cost, self._largest
        consumed = cost.extend * (self._largest_input + most.cached + most.extend) + cost.output * most.expected_output
        consumed += most.requests * (self._excess + cost.output * self._unreported)
        return 2 * (consumed / self._least_weight + quantum) + granted / self._least_weight


def _add(total: Outstanding, request: Outstanding, sign: int) -> None:
    total.expected_output += sign * request.expected_output
    total.cached += sign * request.cached
    total.extend += sign * request.extend
    total.requests += sign * request.requests


LASTING: Final = 0.5
"""The part of the last minute for which a client must have been backlogged to count in Jain's index. A client that asks
for less than its share waits for moments, is served less than others, and has no right to more.
"""
WAITS_KEPT: Final = 256
"""Waiting times kept per client for its percentiles."""


def jain_index(allocations: Collection[float]) -> float | None:
    """Return (sum x)^2 / (n · sum x^2): 1 if all are equal, 1/n if one has everything; None if all are 0 or there are
    none.
    """
    squares = sum([x * x for x in allocations])
    return sum(allocations) ** 2 / (len(allocations) * squares) if squares else None


class Waits(NamedTuple):
    """Percentiles of a client's recent waiting times, in seconds; None before the first."""

    p50: float | None
    p95: float | None


def percentile(values: Iterable[float], share: float) -> float | None:
    """Return the smallest value that at least this share of the values does not exceed; None without values."""
    ordered = sorted(values)
    return ordered[max(0, ceil(share * len(ordered)) - 1)] if ordered else None


class RecentBacklog:
    """For how long one client was backlogged in the last minute."""

    __slots__ = ("_seconds", "_since")

    def __init__(self) -> None:
        self._since: float | None = None
        """When the present backlog began; None if the client is not backlogged."""
        self._seconds: MinuteSums | None = None
        """Seconds of earlier backlogs, as the first sum; None before the first, as most clients never wait."""

    def began(self, now: float) -> None:
        """Begin a backlog."""
        self._since = now

    def ended(self, now: float) -> None:
        """End the present backlog."""
        since, self._since = self._since, None
        if since is None or since == now:
            return
        seconds = self._seconds = self._seconds or MinuteSums()
        begin = max(since, now - MINUTE)
        while begin < now:
            end = min(now, floor(begin) + 1.0)
            seconds.add(end - begin, 0.0, begin)
            begin = end

    def seconds(self, now: float) -> float:
        """Return for how many seconds of the last minute the client was backlogged."""
        present = 0.0 if self._since is None else min(MINUTE, now - self._since)
        return present if self._seconds is None else present + self._seconds.totals(now)[0]


class RecentService(MinuteSums):
    """One client's service in the last minute, and for how long it was backlogged then.

    The sums are of service divided by the client's weight at that time, and of service, in cost units.
    """

    __slots__ = ("backlog",)

    def __init__(self) -> None:
        super().__init__()
        self.backlog = RecentBacklog()

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
        self._began: float | None = None
        """When the first request came; None before."""
        self.turns = Turns()
        """Requests are reported to it directly: when they arrive, are answered, and end."""

    def backlog_began(self, queue: WorkerId | None, client: ClientId, now: float) -> None:
        self._gaps[queue].backlog_began(client)
        self._began = now if self._began is None else self._began
        queues = self._queues[client] = self._queues.get(client, 0) + 1
        if queues == 1:
            self._recent[client].backlog.began(now)

    def backlog_ended(self, queue: WorkerId | None, client: ClientId, now: float) -> None:
        self._gaps[queue].backlog_ended(client)
        self._queues[client] -= 1
        if not self._queues[client]:
            del self._queues[client]
            self._recent[client].backlog.ended(now)

    def request_dispatched(
        self, request: Request, worker: WorkerId, outstanding: Outstanding, waited: float, now: float
    ) -> None:
        """Record that a request left its queue after `waited` seconds."""
        if self._began is None:
            self._began = now - waited
        self._bound(worker).add(request.client, self._weight_of(request), outstanding)
        self._waits[request.client].append(waited)

    def request_pooled(self, request: Request, worker: WorkerId, outstanding: Outstanding) -> None:
        """Record that a request waits for its prompt to be decoded, in the pool or at a decode worker, until
        `attempt_ended`: it needs no other turn.
        """
        self._bound(worker).add(request.client, self._weight_of(request), outstanding)

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
        client, weight = request.client, self._weight_of(request)
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
        """Return Jain's index over the service per weight of the clients that were backlogged for at least half of the
        last minute (`LASTING`), or of the time since the first request, if that is shorter.

        None without such clients, or if they were served nothing.
        """
        lasting = 0.0 if self._began is None else LASTING * min(MINUTE, now - self._began)
        return jain_index(
            [
                max(0.0, recent.per_weight(now))
                for recent in self._recent.values()
                if (seconds := recent.backlog.seconds(now)) > 0.0 and seconds >= lasting
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

        In a pool whose workers serve different models nothing bounds it: it covers all clients, and a refill counts for
        those that wait for the same set of workers (`WorkerSets`), between which alone there is a bound.
        """
        if quantum is None or (self._pooled and not self._alike):
            return None
        return self._bound(queue).bound(quantum, self._granted)

    def _weight_of(self, request: Request) -> float:
        return self._shares.ungrouped.get(request.client) or self._shares.effective_weight(request)

    def _bound(self, worker: WorkerId | None) -> BoundMeter:
        return self._bounds[None if self._pooled else worker]

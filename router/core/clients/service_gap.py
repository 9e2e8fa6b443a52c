"""The difference in service between clients that wait in the same queue, and its bound.

The gap is measured; the bound is computed from the largest terms seen. Theorem 4.1 of the DLPM paper bounds the gap by
2(U + Q^u) for a scheduler inside the engine, which knows what is cached and what it has released. This router predicts
and reserves, so for two clients backlogged in the same queue

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

from collections import defaultdict
from dataclasses import dataclass, field

from router.core.model.cost import LinearCost, Tokens
from router.core.model.request import ClientId

PAIR_LIMIT = 64
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


@dataclass(slots=True)
class Outstanding:
    """What one client has in flight in one queue, in tokens and requests."""

    expected_output: int = 0
    cached: int = 0
    extend: int = 0
    requests: int = 1

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

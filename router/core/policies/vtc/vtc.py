"""VTC, the virtual token counter: among the waiting clients, the one that was served least goes next.

"Fairness in Serving Large Language Models", section 4.1, Algorithm 2. The whole input is charged at dispatch, cached or
not, and each output token as it streams. At this price and per weight, the service of two clients that are backlogged
in the same queue differs by at most 2 max(w_p · L_input, w_q · M) (Theorem 4.4, for w_p <= w_q), where L_input is the
largest input and M the most tokens, input and output, that one client has in flight at the worker. Until an input's
usage is known, the error of its estimate adds to that. At the price of extend tokens nothing bounds the difference: a
client whose prompts are cached is served far less.

Differences from the paper: counters are per worker, `client_rr` spreads each client over the workers, and the engine's
usage corrects the charges, so that a counter may also fall.

`Lcf`, with which the paper compares (section 5.1), is the same without the lift.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from typing import ClassVar, NamedTuple

from router.core.clients.debtors import DEBTOR_LIMIT, Debtors
from router.core.model.cost import Charge, LinearCost
from router.core.model.request import ClientId, GroupId, Request, RequestId, WorkerId
from router.core.policies.base import Fits, Order, Turn
from router.core.policies.context import PolicyContext


class ClientRank(NamedTuple):
    """The sort key of a waiting client: lower counter first, then longer uninterrupted wait."""

    counter: float
    """At most the client's current counter."""
    joined: int
    client: ClientId


@dataclass(slots=True)
class VirtualCounter:
    """c_i: the service that a client received, per weight, plus its lifts, in cost units."""

    value: float = 0.0
    weight: float = 1.0
    group: GroupId | None = None


@dataclass(slots=True)
class GroupCounter:
    """A group's counter, as if the group were one client. It also lifts members that begin to wait."""

    value: float = 0.0
    weight: float = 1.0
    waiting: int = 0
    """The number of members that wait."""


class VirtualCounters:
    """The counters c_i of all clients, and the waiting clients; each query costs O(log clients), amortised."""

    def __init__(self, *, lifts: bool = True, debtors: int = DEBTOR_LIMIT) -> None:
        """`lifts`: whether a client that begins to wait is lifted. `debtors`: how many counters of forgotten clients
        are kept because they are above the level to which their clients would be lifted.
        """
        self._lifts = lifts
        self._counters: dict[ClientId, VirtualCounter] = {}
        self._groups: dict[GroupId, GroupCounter] = {}
        self._ranks: dict[ClientId, ClientRank] = {}
        """The current rank of each waiting client."""
        self._heap: list[ClientRank] = []
        """All current ranks, and some stale ones."""
        self._joins = 0
        self._last_left: ClientId | None = None
        self._debtors: Debtors[ClientId] = Debtors(debtors)
        """Forgotten clients whose counters are kept because they are in debt."""

    def __len__(self) -> int:
        """Return the number of ranks, stale ones included."""
        return len(self._heap)

    def set_weight(
        self, client: ClientId, weight: float, group: GroupId | None = None, group_weight: float = 1.0
    ) -> None:
        """Set the weights of a client that does not wait and of its group. A new client's counter starts at zero."""
        counter = self._counters.setdefault(client, VirtualCounter())
        counter.weight, counter.group = weight, group
        if group is not None:
            self._groups.setdefault(group, GroupCounter()).weight = group_weight
        self._debtors.discard(client)

    def join(self, client: ClientId) -> None:
        """A client begins to wait. Its counter is lifted, so that time without requests earns nothing.

        It is lifted to the lowest counter of the waiting clients or, if none waits, to that of the last client that
        did.
        """
        counter = self._counters[client]
        level = self.least_served() if self._ranks else self._last_left
        if self._lifts and level is not None:
            counter.value = max(counter.value, self._counters[level].value)
        if counter.group is not None:
            self._join_group(counter, self._groups[counter.group])
        self._joins += 1
        self._rank(ClientRank(counter.value, self._joins, client))

    def leave(self, client: ClientId) -> None:
        """A client stops waiting."""
        del self._ranks[client]
        self._last_left = client
        if (group := self._counters[client].group) is not None:
            self._groups[group].waiting -= 1

    def _join_group(self, counter: VirtualCounter, group_counter: GroupCounter) -> None:
        """Lift a member to its group's counter, so that new client names, or members that take turns, gain nothing over
        it.
        """
        if self._lifts and not group_counter.waiting:
            group_counter.value = max(group_counter.value, counter.value)
        group_counter.waiting += 1
        counter.value = max(counter.value, group_counter.value)

    def charge(self, client: ClientId, cost: float, weight: float) -> None:
        """Add service, in cost units, at this weight of the client; a negative cost is a refund."""
        counter = self._counters[client]
        counter.value += cost / weight
        if counter.group is not None:
            group_counter = self._groups[counter.group]
            group_counter.value += cost / group_counter.weight
        rank = self._ranks.get(client)
        if rank is not None and counter.value < rank.counter:
            self._rank(rank._replace(counter=counter.value))

    def grant(self, client: ClientId, cost: float) -> None:
        """Lower a known client's counter by this cost."""
        if (counter := self._counters.get(client)) is not None:
            self.charge(client, -cost, counter.weight)

    def least_served(self) -> ClientId | None:
        """Return the waiting client with the lowest counter; of equals, the first to wait. None if no client waits."""
        while self._heap:
            rank = self._heap[0]
            if self._ranks.get(rank.client) != rank:
                heappop(self._heap)
            elif rank.counter < (value := self._counters[rank.client].value):
                risen = self._ranks[rank.client] = rank._replace(counter=value)
                heapreplace(self._heap, risen)
            else:
                return rank.client
        return None

    def value(self, client: ClientId) -> float | None:
        """c_i; None for an unknown client."""
        counter = self._counters.get(client)
        return None if counter is None else counter.value

    def forget(self, client: ClientId) -> None:
        """Keep a counter only while it is above the level to which its client would be lifted if it waited again."""
        if client in self._counters:
            for gone in self._debtors.add(client, self._debt):
                del self._counters[gone]

    def _debt(self, client: ClientId) -> float:
        if client == self._last_left:  # the next client to wait may be lifted to this client's level
            return inf
        level = (self.least_served() if self._ranks else self._last_left) if self._lifts else None
        return self._counters[client].value - (0.0 if level is None else self._counters[level].value)

    def saved(self) -> Iterator[tuple[ClientId, float, float]]:
        """Yield each client's counter and weight. The last is the one to whose level the next client to wait is
        lifted.
        """
        for client in [client for client in self._counters if client != self._last_left]:
            yield client, self._counters[client].value, self._counters[client].weight
        if self._last_left is not None:
            counter = self._counters[self._last_left]
            yield self._last_left, counter.value, counter.weight

    def restore(self, client: ClientId, value: float, weight: float) -> None:
        """Load a client's counter."""
        self._counters[client] = VirtualCounter(value, weight)
        self._debtors.keep(client)
        self._last_left = client

    def saved_groups(self) -> Iterator[tuple[GroupId, float, float]]:
        """Yield each group's counter and weight."""
        for group, group_counter in list(self._groups.items()):
            yield group, group_counter.value, group_counter.weight

    def restore_group(self, group: GroupId, value: float, weight: float) -> None:
        """Load a group's counter."""
        self._groups[group] = GroupCounter(value, weight)

    def _rank(self, rank: ClientRank) -> None:
        self._ranks[rank.client] = rank
        if len(self._heap) > 2 * len(self._ranks):
            # Stale ranks below the head would pile up in a queue that never becomes empty.
            self._heap[:] = self._ranks.values()
            heapify(self._heap)
        else:
            heappush(self._heap, rank)


class Vtc(Order):
    """First come, first served within a client; among clients, by the virtual counters of one worker's queue."""

    lifts: ClassVar[bool] = True

    def __init__(self, context: PolicyContext, worker: WorkerId) -> None:  # noqa: ARG002 - the factory's signature
        cost = context.cost
        self._cost: LinearCost = replace(cost, cached=cost.extend)
        self._shares = context.shares
        self._weights: dict[RequestId, float] = {}
        """By request in flight, its client's weight at dispatch, so that refunds use the weight of the charge."""
        self._counters = VirtualCounters(lifts=self.lifts, debtors=context.debtors)
        self._waiting: dict[RequestId, Request] = {}
        # An OrderedDict, because a plain dict finds its first key by walking past all deleted ones.
        self._client_queues: dict[ClientId, OrderedDict[RequestId, Request]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def waiting(self) -> Collection[RequestId]:
        return self._waiting.keys()

    def push(self, request: Request) -> None:
        self._waiting[request.id] = request
        queue = self._client_queues.get(request.client)
        if queue is None:
            self._set_weight(request)
            queue = self._client_queues[request.client] = OrderedDict()
            self._counters.join(request.client)
        queue[request.id] = request

    def _set_weight(self, request: Request) -> None:
        weight = self._shares.effective_weight(request)
        self._counters.set_weight(request.client, weight, request.group, request.group_weight)

    def remove(self, request: RequestId) -> Request:
        removed = self._waiting.pop(request)
        queue = self._client_queues[removed.client]
        del queue[request]
        if not queue:
            del self._client_queues[removed.client]
            self._counters.leave(removed.client)
        return removed

    def select(self, fits: Fits, now: float) -> Turn | None:  # noqa: ARG002 - time does not matter here
        """No request passes the head."""
        client = self._counters.least_served()
        if client is None:
            return None
        head = next(iter(self._client_queues[client].values()))
        return Turn(head) if fits(head) else None

    def request_dispatched(self, request: Request, now: float) -> None:  # noqa: ARG002 - time does not matter here
        self._weights[request.id] = self._shares.effective_weight(request)

    def resume(self, request: Request, now: float) -> None:
        """The client's counter is not lifted: it was when the request began to wait, in the earlier run."""
        if request.client not in self._client_queues:
            self._set_weight(request)
        self.request_dispatched(request, now)

    def request_charged(self, charge: Charge) -> None:
        self._charge(charge.request, charge.client, self._cost.difference(charge.before, charge.after))

    def request_ended(self, request: Request) -> None:
        del self._weights[request.id]

    def _charge(self, request: RequestId, client: ClientId, cost: float) -> None:
        """Charge a client for a dispatched request."""
        self._counters.charge(client, cost, self._weights[request])

    def grant(self, client: ClientId, cost: float) -> None:
        self._counters.grant(client, cost)

    def forget(self, client: ClientId) -> None:
        self._counters.forget(client)

    def saved(self) -> Iterator[tuple[ClientId, float, float]]:
        return self._counters.saved()

    def restore(self, client: ClientId, value: float, scale: float) -> None:
        self._counters.restore(client, value, scale)

    def saved_groups(self) -> Iterator[tuple[GroupId, float, float]]:
        return self._counters.saved_groups()

    def restore_group(self, group: GroupId, value: float, scale: float) -> None:
        self._counters.restore_group(group, value, scale)

    def deficit(self, client: ClientId) -> float | None:
        """-c_i, in cost units per weight: never positive, and only differences matter. None for an unknown client."""
        value = self._counters.value(client)
        return None if value is None else -value


class Lcf(Vtc):
    """Least counter first: a client that used less than its share for a time is served before all others until it has
    caught up.
    """

    lifts: ClassVar[bool] = False

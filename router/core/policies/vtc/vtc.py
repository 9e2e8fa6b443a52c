"""VTC, the virtual token counter: among the clients that wait, the one that was served least goes next.

"Fairness in Serving Large Language Models", section 4.1, Algorithm 2. The whole input is charged at dispatch,
be it cached or not, and each output token as it streams. The service of two clients that are backlogged in the
same queue, at this price and per weight, differs by no more than 2 max(w_p · L_input, w_q · M) (Theorem 4.4, for
w_p <= w_q), where L_input is the largest input and M the most tokens, input and output, that one client has in
flight at the worker; what an input was estimated wrong by comes on top of that until its usage is known. At the
price of extend tokens nothing bounds the difference: a client whose prompts are cached is served far less.

Where this departs from the paper: counters are per worker, `client_rr` spreads each client over the workers, and
the engine's usage corrects what was charged, so that a counter may also fall.

`Lcf` is what the paper compares with (section 5.1): the same without the lift.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from typing import ClassVar, NamedTuple

from router.core.clients.recent_clients import DEBTOR_LIMIT, Debtors
from router.core.model.cost import Charge, LinearCost
from router.core.model.request import ClientId, GroupId, Request, RequestId, WorkerId
from router.core.policies.base import Fits, Order, Turn
from router.core.policies.context import PolicyContext


class ClientRank(NamedTuple):
    """The sort key of a client that waits: lower counter first, then who has waited longer without a break."""

    counter: float
    """At most the client's counter of now."""
    joined: int
    client: ClientId


@dataclass(slots=True)
class VirtualCounter:
    """c_i: what a client was served, per weight, and what it was lifted by; cost units."""

    value: float = 0.0
    weight: float = 1.0
    group: GroupId | None = None


@dataclass(slots=True)
class GroupCounter:
    """A group's counter, as if it was one client, by which members that begin to wait are lifted as well."""

    value: float = 0.0
    weight: float = 1.0
    waiting: int = 0
    """Members that wait."""


class VirtualCounters:
    """The counters c_i of all clients, and which of them wait; each answer costs O(log clients), amortised."""

    def __init__(self, *, lifts: bool = True, debtors: int = DEBTOR_LIMIT) -> None:
        """`lifts`: whether whoever begins to wait is lifted; `debtors`: how many counters are kept of who is forgotten,
        because they are above what their clients would be lifted to.
        """
        self._lifts = lifts
        self._counters: dict[ClientId, VirtualCounter] = {}
        self._groups: dict[GroupId, GroupCounter] = {}
        self._ranks: dict[ClientId, ClientRank] = {}
        """The one rank that counts of each client that waits."""
        self._heap: list[ClientRank] = []
        """All of those, and some that count no more."""
        self._joins = 0
        self._last_left: ClientId | None = None
        self._debtors: Debtors[ClientId] = Debtors(debtors)
        """Those whose counters are kept for their debts alone."""

    def __len__(self) -> int:
        """How many ranks are kept, those that count no more included."""
        return len(self._heap)

    def set_weight(
        self, client: ClientId, weight: float, group: GroupId | None = None, group_weight: float = 1.0
    ) -> None:
        """A client that does not wait has this weight now, and its group that; who is new was served nothing."""
        counter = self._counters.setdefault(client, VirtualCounter())
        counter.weight, counter.group = weight, group
        if group is not None:
            self._groups.setdefault(group, GroupCounter()).weight = group_weight
        self._debtors.discard(client)

    def join(self, client: ClientId) -> None:
        """A client begins to wait; its counter is lifted, for a time in which it wanted nothing gives no credit.

        To the least counter of those that wait; if nobody does, to the counter of the last that did.
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
        """A client waits no more."""
        del self._ranks[client]
        self._last_left = client
        if (group := self._counters[client].group) is not None:
            self._groups[group].waiting -= 1

    def _join_group(self, counter: VirtualCounter, group_counter: GroupCounter) -> None:
        """Names that nobody has seen before, or members that take turns, are not before the group that they are of."""
        if self._lifts and not group_counter.waiting:
            group_counter.value = max(group_counter.value, counter.value)
        group_counter.waiting += 1
        counter.value = max(counter.value, group_counter.value)

    def charge(self, client: ClientId, cost: float, weight: float) -> None:
        """Count service, in cost units, at this weight of the client; negative takes it back."""
        counter = self._counters[client]
        counter.value += cost / weight
        if counter.group is not None:
            group_counter = self._groups[counter.group]
            group_counter.value += cost / group_counter.weight
        rank = self._ranks.get(client)
        if rank is not None and counter.value < rank.counter:
            self._rank(rank._replace(counter=counter.value))

    def grant(self, client: ClientId, cost: float) -> None:
        """Count so much less service of a client that is known."""
        if (counter := self._counters.get(client)) is not None:
            self.charge(client, -cost, counter.weight)

    def least_served(self) -> ClientId | None:
        """The client with the least counter of those that wait; of equals, the first to wait; None if nobody does."""
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
        """c_i; None for a client that never joined."""
        counter = self._counters.get(client)
        return None if counter is None else counter.value

    def forget(self, client: ClientId) -> None:
        """Remember a counter only while it is above what its client would be lifted to, should it wait again."""
        if client in self._counters:
            for gone in self._debtors.add(client, self._debt):
                del self._counters[gone]

    def _debt(self, client: ClientId) -> float:
        if client == self._last_left:  # whose level is still asked for
            return inf
        level = (self.least_served() if self._ranks else self._last_left) if self._lifts else None
        return self._counters[client].value - (0.0 if level is None else self._counters[level].value)

    def saved(self) -> Iterator[tuple[ClientId, float, float]]:
        """Each client's counter and weight; the last is the one to whose level whoever waits next is lifted."""
        for client in [client for client in self._counters if client != self._last_left]:
            yield client, self._counters[client].value, self._counters[client].weight
        if self._last_left is not None:
            counter = self._counters[self._last_left]
            yield self._last_left, counter.value, counter.weight

    def restore(self, client: ClientId, value: float, weight: float) -> None:
        """Begin with this counter."""
        self._counters[client] = VirtualCounter(value, weight)
        self._debtors.keep(client)
        self._last_left = client

    def saved_groups(self) -> Iterator[tuple[GroupId, float, float]]:
        """Each group's counter and weight."""
        for group, group_counter in list(self._groups.items()):
            yield group, group_counter.value, group_counter.weight

    def restore_group(self, group: GroupId, value: float, weight: float) -> None:
        """Begin with this counter of a group."""
        self._groups[group] = GroupCounter(value, weight)

    def _rank(self, rank: ClientRank) -> None:
        self._ranks[rank.client] = rank
        if len(self._heap) > 2 * len(self._ranks):
            # Those below the head outlive their clients' waiting: a queue that never ran dry would heap them up.
            self._heap[:] = self._ranks.values()
            heapify(self._heap)
        else:
            heappush(self._heap, rank)


class Vtc(Order):
    """First come, first served within a client; among clients, by the virtual counters of one worker's queue."""

    lifts: ClassVar[bool] = True

    def __init__(self, context: PolicyContext, worker: WorkerId) -> None:  # noqa: ARG002 - every order is built alike
        cost = context.cost
        self._cost: LinearCost = replace(cost, cached=cost.extend)
        self._shares = context.shares
        self._weights: dict[RequestId, float] = {}
        """Of the clients of those in flight, as they were when these were dispatched: what was charged is given back at
        the same weight."""
        self._counters = VirtualCounters(lifts=self.lifts, debtors=context.debtors)
        self._waiting: dict[RequestId, Request] = {}
        # Ordered by links: the head of a plain dict is found by passing over all that were removed before it.
        self._client_queues: dict[ClientId, OrderedDict[RequestId, Request]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def waiting(self) -> Collection[RequestId]:
        """See `Order`."""
        return self._waiting.keys()

    def push(self, request: Request) -> None:
        """See `Order`."""
        self._waiting[request.id] = request
        queue = self._client_queues.get(request.client)
        if queue is None:
            self._counters.set_weight(
                request.client, self._shares.effective_weight(request), request.group, request.group_weight
            )
            queue = self._client_queues[request.client] = OrderedDict()
            self._counters.join(request.client)
        queue[request.id] = request

    def remove(self, request: RequestId) -> Request:
        """See `Order`."""
        removed = self._waiting.pop(request)
        queue = self._client_queues[removed.client]
        del queue[request]
        if not queue:
            del self._client_queues[removed.client]
            self._counters.leave(removed.client)
        return removed

    def select(self, fits: Fits, now: float) -> Turn | None:  # noqa: ARG002 - time changes nothing here
        """See `Order`. Nobody passes the head."""
        client = self._counters.least_served()
        if client is None:
            return None
        head = next(iter(self._client_queues[client].values()))
        return Turn(head) if fits(head) else None

    def request_dispatched(self, request: Request, now: float) -> None:  # noqa: ARG002 - time changes nothing here
        """See `Order`."""
        self._weights[request.id] = self._shares.effective_weight(request)

    def request_charged(self, charge: Charge) -> None:
        """See `Order`."""
        self._charge(charge.request, charge.client, charge.at(self._cost))

    def request_ended(self, request: Request) -> None:
        """See `Order`."""
        del self._weights[request.id]

    def _charge(self, request: RequestId, client: ClientId, cost: float) -> None:
        """Charge a client for a request that is dispatched."""
        self._counters.charge(client, cost, self._weights[request])

    def grant(self, client: ClientId, cost: float) -> None:
        """See `Order`."""
        self._counters.grant(client, cost)

    def forget(self, client: ClientId) -> None:
        """See `Order`."""
        self._counters.forget(client)

    def saved(self) -> Iterator[tuple[ClientId, float, float]]:
        """See `Order`."""
        return self._counters.saved()

    def restore(self, client: ClientId, value: float, scale: float) -> None:
        """See `Order`."""
        self._counters.restore(client, value, scale)

    def saved_groups(self) -> Iterator[tuple[GroupId, float, float]]:
        """See `Order`."""
        return self._counters.saved_groups()

    def restore_group(self, group: GroupId, value: float, scale: float) -> None:
        """See `Order`."""
        self._counters.restore_group(group, value, scale)

    def deficit(self, client: ClientId) -> float | None:
        """-c_i, in cost units per weight: never above zero, only differences count. None for a client never seen."""
        value = self._counters.value(client)
        return None if value is None else -value


class Lcf(Vtc):
    """Least counter first: who wanted less than its share for a time is served before all others for as long."""

    lifts: ClassVar[bool] = False

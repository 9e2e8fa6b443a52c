"""Whose turn it may be: DLPM's deficit counters, and who of their clients waits or has something in flight.

"Locality-aware Fair Scheduling in LLM Serving", Algorithm 1, CHECKREFILL and line 13, for one queue or for a pool. A
client with credit may go. The theorem leaves the order among those free. Four things decide it, in this order:

1. A client is *overdue* that has nothing in flight while, since it began to wait or last had a turn, so many requests
   went that each active client could have had one. It goes first, and even with a small debt: a client that paid for a
   long prompt at once is not to wait until all others have paid as much.
2. A client is *fresh* if the input that it began to wait with costs no more than a head start, and it was not charged
   more than that since; and *sparse* if it has nothing in flight, or in a pool less than one request for each worker.
   Else a client that seldom asks for anything would wait until the long matches of a heavy one have used up a quantum.
   Clients that are both have their turn one after the other, as new flows in FQ-CoDel (RFC 8290, section 4.2): by
   longest match, some of many clients with one call open each would wait until all others have used up a quantum.
3. Fresh clients go before others, and then sparse ones: of each the longest match first.
4. So does it among all the rest.
"""

from collections.abc import Callable, Collection, Iterator
from typing import Final

from router.core.clients.recent_clients import DEBTOR_LIMIT
from router.core.clients.shares import Shares
from router.core.model.request import ClientId, GroupId, Request, RequestId
from router.core.policies.deficit.active_clients import ActiveClients
from router.core.policies.deficit.client_deficits import ClientDeficits
from router.core.policies.deficit.parameters import DeficitParameters
from router.core.policies.deficit.refill_schedule import RefillSchedule
from router.core.policies.deficit.rounds import Rounds

OVERDUE, FRESH_AND_SPARSE, FRESH, SPARSE, ELIGIBLE = range(5)
"""Where a client that may go stands: lower goes first."""
PRIORITY_CLASSES: Final = ELIGIBLE + 1
ROUND_ROBIN_CLASSES: Final = frozenset((OVERDUE, FRESH_AND_SPARSE))
"""Those of which the client goes first that had its last turn before the others."""


class Eligibility:
    """The counter of every client, and who contends for what is next."""

    def __init__(
        self,
        on_priority_change: Callable[[ClientId], None],
        parameters: DeficitParameters,
        rate: Callable[[], float | None],
        shares: Shares,
        debtors: int = DEBTOR_LIMIT,
    ) -> None:
        """`on_priority_change` is told of each waiting client whose standing is another than before.

        `rate`: see `Rounds`, of the workers that this queue is for. `debtors`: how many debts are kept of who is
        forgotten. Nobody is sparse until `set_sparse_limit`.
        """
        self._on_priority_change = on_priority_change
        self._parameters = parameters
        self._round_fraction = Rounds(parameters, rate).fraction
        self._sparse_limit = 0
        self._shares = shares
        self._deficits = ClientDeficits(shares, debtors)
        self._active = ActiveClients()
        self._waiting: dict[ClientId, dict[str, int]] = {}
        """How many requests of each client wait, by route."""
        self._eligible: dict[ClientId, int] = {}
        """Those of them that have credit, with their standing."""
        self.waiting_priority_class: Final = self._eligible.get
        """The standing of a client that waits; None without credit."""
        self._eligible_by_route: dict[str, int] = {}
        """How many clients with credit wait, by route."""
        self._refill_schedule = RefillSchedule(self._deficits, self._waits_ineligible)
        self._in_flight: dict[ClientId, dict[RequestId, None]] = {}
        self._last_turns: dict[ClientId, int] = {}
        """When each client that waits last had a turn, or began to wait, the latest last; no two have the same."""
        self.last_turn: Final = self._last_turns.__getitem__
        """That of a client that waits."""
        self._clock = 0
        """Turns so far, and beginnings of waits."""
        self._dispatches = 0
        """Requests dispatched so far."""
        self._overdue_checks: dict[ClientId, int] = {}
        """For each client that waits how many had gone when it was last looked at for being overdue, in this order."""
        self._overdue: set[ClientId] = set()
        self._head_starts: dict[ClientId, float] = {}
        """What is left of their head start, in cost units, of those that wait and have some."""
        self._restored = False
        """Whether credit is from before a restart, and nobody has contended since."""

    def deficit(self, client: ClientId) -> float | None:
        """q_i, in cost units; None for a client that was never here."""
        return self._deficits.deficit_or_none(client)

    def priority_class(self, client: ClientId) -> int | None:
        """A client's standing; None if it may not go."""
        return self._class_of(client) if self._is_eligible(client) else None

    def _is_eligible(self, client: ClientId) -> bool:
        return self._deficits.deficit(client) > 0 or client in self._overdue

    def _class_of(self, client: ClientId) -> int:
        if client in self._overdue:
            return OVERDUE
        sparse = len(self._in_flight.get(client, ())) < self._sparse_limit
        if client in self._head_starts:
            return FRESH_AND_SPARSE if sparse else FRESH
        return SPARSE if sparse else ELIGIBLE

    def set_sparse_limit(self, sparse_limit: int) -> None:
        """From now on those with fewer requests in flight than this go before the others."""
        self._sparse_limit = sparse_limit
        for client in self._eligible:
            self._update_priority_class(client)

    def add_waiting(self, request: Request, cost: float = 0.0) -> None:
        """One more request waits; its client has Q^u times its weight, and the first time what a round adds to that.

        `cost`: what its input would cost now, in cost units. A client is not fresh if that is more than a head start.

        In a group, it has no more than its part of what that has when it begins to wait or to have something in flight.
        """
        client = request.client
        quantum_changed = self._deficits.register(request, self._parameters.quantum, active=client in self._active)
        if quantum_changed and client in self._waiting and client not in self._eligible:
            self._schedule_refill(client)
        self._active.add_request(client, self._shares.effective_weight(request))
        if client not in self._waiting:
            self._start_waiting(client, cost)
        routes, route = self._waiting.setdefault(client, {}), request.route
        self._restored = self._restored and len(self._waiting) == 1
        routes[route] = routes.get(route, 0) + 1
        if routes[route] == 1:
            if client in self._eligible:
                self._add_eligible_on(route, 1)
            elif len(routes) == 1:
                self._update_eligibility(client)
                if client not in self._eligible:
                    self._schedule_refill(client)

    def _start_waiting(self, client: ClientId, cost: float) -> None:
        fraction = self._round_fraction(self._active.weight)
        self._deficits.cap(client, fraction)
        head_start = self._parameters.head_start * self.weight(client)
        if head_start > cost:
            self._head_starts[client] = head_start
        self._move_to_back(client)

    def _move_to_back(self, client: ClientId) -> None:
        """A client that waits is behind the others from now on, where they go in turn."""
        self._clock += 1
        self._last_turns.pop(client, None)
        self._last_turns[client] = self._clock
        self._restart_overdue_check(client)
        if client in self._overdue:
            self._overdue.discard(client)
            self._update_eligibility(client)
            if client not in self._eligible:
                self._schedule_refill(client)
            self._update_priority_class(client)

    def may_pass_through(self, request: Request, *, refill: bool) -> bool:
        """Whether a client has credit that comes while nobody waits; after a refill, if that is allowed."""
        self._deficits.register(request, self._parameters.quantum, active=request.client in self._active)
        self._active.add_request(request.client, self._shares.effective_weight(request))
        self._deficits.cap(request.client, self._round_fraction(self._active.weight))
        if refill:
            self._refill_for(request.client)
        self._active.remove_request(request.client)
        return self._deficits.deficit(request.client) > 0

    def remove_waiting(self, request: Request) -> None:
        """One waits no more."""
        client = request.client
        self._active.remove_request(client)
        routes, route = self._waiting[client], request.route
        routes[route] -= 1
        if not routes[route]:
            del routes[route]
            if client in self._eligible:
                self._add_eligible_on(route, -1)
            if not routes:
                del self._waiting[client]
                for each in (self._eligible, self._head_starts, self._last_turns, self._overdue_checks):
                    each.pop(client, None)
                self._overdue.discard(client)

    def request_dispatched(self, request: Request) -> None:
        """It is in flight."""
        client = request.client
        self._active.add_request(client, self._shares.effective_weight(request))
        self._dispatches += 1
        requests = self._in_flight.setdefault(client, {})
        requests[request.id] = None
        if client in self._waiting:
            self._move_to_back(client)
        self._update_priority_class(client)

    def request_ended(self, request: Request) -> None:
        """It is in flight no more."""
        requests = self._in_flight[request.client]
        del requests[request.id]
        if not requests:
            del self._in_flight[request.client]
        self._active.remove_request(request.client)
        self._update_priority_class(request.client)

    def charge(self, client: ClientId, cost: float) -> bool:
        """Take this much from a client's credit, or give it back; returns whether it has none now, and had some."""
        self._deficits.charge(client, cost)
        deficit = self._deficits.deficit(client)
        if client in self._head_starts:
            self._use_up_head_start(client, cost)
        if client in self._waiting:
            had = client in self._eligible
            self._update_eligibility(client)
            if client not in self._eligible and (had or cost < 0):
                self._schedule_refill(client)
        return deficit <= 0 < deficit + cost

    def has_positive_deficit(self, client: ClientId) -> bool:
        """Whether a client has some, whether it waits or not."""
        return self._deficits.deficit(client) > 0

    def weight(self, client: ClientId) -> float:
        """What a client weighs."""
        return self._deficits.quantum(client) / self._parameters.quantum

    def ineligible_weight(self, routes: Collection[str]) -> float:
        """What those weigh together that have a request of one of these routes waiting and have no credit."""
        ineligible = [each for each in self._waiting if each not in self._eligible and self._waits_on(each, routes)]
        return sum([self.weight(client) for client in ineligible])

    @property
    def in_flight(self) -> bool:
        """Whether anything is."""
        return bool(self._in_flight)

    def refill(self, routes: Collection[str] | None = None) -> list[ClientId]:
        """CHECKREFILL: if clients wait and none of them has credit, add quanta until one has; returns who has by that.

        `routes`: only those count that have a request of one of these waiting.
        """
        if self.any_eligible(routes):
            return []
        client = self._refill_schedule.earliest(lambda each: self._waits_on(each, routes))
        if client is None:
            return []
        self._refill_for(client)
        return self._collect_refilled()

    def any_eligible(self, routes: Collection[str] | None = None) -> bool:
        """Whether a client with credit waits, with a request of one of these routes."""
        return bool(self._eligible) if routes is None else not self._eligible_by_route.keys().isdisjoint(routes)

    def reset(self) -> None:
        """Give every client one quantum, as at its first request: whoever used an idle machine owes nothing for it, and
        whoever comes then is not before the others for being new. To be asked while nobody waits.
        """
        if not self._restored:
            self._deficits.reset()

    def forget(self, client: ClientId) -> None:
        """A client that has nothing under way is remembered for what it owes alone."""
        self._deficits.forget(client)

    def saved(self) -> Iterator[tuple[ClientId, float, float]]:
        """Each client's credit and quantum; see `DeficitTable.saved`."""
        return self._deficits.saved()

    def restore(self, client: ClientId, deficit: float, quantum: float) -> None:
        """Begin with this credit. It holds until two clients wait at once: before that, that nobody waits says nothing
        about whether there were others before the restart.
        """
        self._deficits.restore(client, deficit, quantum)
        self._restored = True

    def saved_groups(self) -> Iterator[tuple[GroupId, float, float]]:
        """Each group's; see `ClientDeficits.saved_groups`."""
        return self._deficits.saved_groups()

    def restore_group(self, group: GroupId, deficit: float, quantum: float) -> None:
        """Begin with this of a group; it holds as long as that of clients does."""
        self._deficits.restore_group(group, deficit, quantum)
        self._restored = True

    def _refill_for(self, client: ClientId) -> None:
        """Add quanta until this client has credit: rounding may leave it at the edge, and then one more is needed."""
        while self._deficits.deficit(client) <= 0:
            self._deficits.refill_for(client, self._round_fraction(self._active.weight))

    def mark_overdue(self) -> None:
        """Note who of those that wait is overdue, if all have been looked at that were to be before."""
        if not self._parameters.overdue_after:
            return
        threshold = self._dispatches - self._parameters.overdue_after * len(self._active)
        while self._overdue_checks:
            client, at = next(iter(self._overdue_checks.items()))
            if at > threshold:
                return
            self._restart_overdue_check(client)
            shortfall = self._deficits.quanta_short(client)
            if client not in self._in_flight and shortfall <= self._parameters.overdraft:
                self._overdue.add(client)
                self._update_eligibility(client)
                self._update_priority_class(client)

    def _restart_overdue_check(self, client: ClientId) -> None:
        """Look at a client for being overdue once more, when as many requests as that takes have gone from now on."""
        self._overdue_checks.pop(client, None)
        self._overdue_checks[client] = self._dispatches

    def _waits_ineligible(self, client: ClientId) -> bool:
        return client in self._waiting and client not in self._eligible

    def _waits_on(self, client: ClientId, routes: Collection[str] | None) -> bool:
        return routes is None or not self._waiting[client].keys().isdisjoint(routes)

    def _collect_refilled(self) -> list[ClientId]:
        """Note everybody who has credit by the rounds of now, and return them."""
        refilled = []
        for client in self._refill_schedule.pop_refilled():
            if self._waits_ineligible(client):
                self._update_eligibility(client)
                if client in self._eligible:
                    refilled.append(client)
                else:
                    self._schedule_refill(client)
        return refilled

    def _schedule_refill(self, client: ClientId) -> None:
        """Note when a waiting client without credit will have some."""
        self._refill_schedule.schedule(client, self._waiting, most=2 * len(self._waiting) + 16)

    def _update_eligibility(self, client: ClientId) -> None:
        """Note whether a waiting client has credit, and tell if that changed."""
        eligible = self._is_eligible(client)
        if eligible == (client in self._eligible):
            return
        if eligible:
            self._eligible[client] = self._class_of(client)
        else:
            del self._eligible[client]
        for route in self._waiting[client]:
            self._add_eligible_on(route, 1 if eligible else -1)
        self._on_priority_change(client)

    def _update_priority_class(self, client: ClientId) -> None:
        """Note how much a client has in flight, where that changes its standing."""
        if client in self._eligible and self._eligible[client] != (priority_class := self._class_of(client)):
            self._eligible[client] = priority_class
            self._on_priority_change(client)

    def _use_up_head_start(self, client: ClientId, cost: float) -> None:
        left = self._head_starts[client] = self._head_starts[client] - cost
        if left <= 0:
            del self._head_starts[client]
            self._update_priority_class(client)

    def _add_eligible_on(self, route: str, change: int) -> None:
        count = self._eligible_by_route.get(route, 0) + change
        if count:
            self._eligible_by_route[route] = count
        else:
            del self._eligible_by_route[route]

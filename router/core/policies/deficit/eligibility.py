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

OVERDUE, FRESH_AND_SPARSE, FRESH, SPARSE, CREDITED = range(5)
"""Where a client that may go stands: lower goes first."""
STANDINGS: Final = CREDITED + 1
IN_TURN: Final = frozenset((OVERDUE, FRESH_AND_SPARSE))
"""Those of which the client goes first that had its last turn before the others."""


class Eligibility:
    """The counter of every client, and who contends for what is next."""

    def __init__(
        self,
        changed: Callable[[ClientId], None],
        parameters: DeficitParameters,
        rate: Callable[[], float | None],
        shares: Shares,
        debtors: int = DEBTOR_LIMIT,
    ) -> None:
        """`changed` is told of each waiting client whose standing is another than before.

        `rate`: see `Rounds`, of the workers that this queue is for. `debtors`: how many debts are kept of who is
        forgotten. Nobody is sparse until `let_go_first`.
        """
        self._changed = changed
        self._parameters = parameters
        self._part = Rounds(parameters, rate).part
        self._sparse_below = 0
        self._shares = shares
        self._deficits = ClientDeficits(shares, debtors)
        self._active = ActiveClients()
        self._waiting: dict[ClientId, dict[str, int]] = {}
        """How many requests of each client wait, by route."""
        self._credited: dict[ClientId, int] = {}
        """Those of them that have credit, with their standing."""
        self.of_waiting: Final = self._credited.get
        """The standing of a client that waits; None without credit."""
        self._contenders: dict[str, int] = {}
        """How many clients with credit wait, by route."""
        self._dues = RefillSchedule(self._deficits, self._is_poor)
        self._in_flight: dict[ClientId, dict[RequestId, None]] = {}
        self._turns: dict[ClientId, int] = {}
        """When each client that waits last had a turn, or began to wait, the latest last; no two have the same."""
        self.turn: Final = self._turns.__getitem__
        """That of a client that waits."""
        self._clock = 0
        """Turns so far, and beginnings of waits."""
        self._gone = 0
        """Requests dispatched so far."""
        self._looked_at: dict[ClientId, int] = {}
        """For each client that waits how many had gone when it was last looked at for being overdue, in this order."""
        self._overdue: set[ClientId] = set()
        self._fresh: dict[ClientId, float] = {}
        """What is left of their head start, in cost units, of those that wait and have some."""
        self._restored = False
        """Whether credit is from before a restart, and nobody has contended since."""

    def credit(self, client: ClientId) -> float | None:
        """q_i, in cost units; None for a client that was never here."""
        return self._deficits.known(client)

    def of(self, client: ClientId) -> int | None:
        """A client's standing; None if it may not go."""
        return self._rank(client) if self._may_go(client) else None

    def _may_go(self, client: ClientId) -> bool:
        return self._deficits.credit(client) > 0 or client in self._overdue

    def _rank(self, client: ClientId) -> int:
        if client in self._overdue:
            return OVERDUE
        sparse = len(self._in_flight.get(client, ())) < self._sparse_below
        if client in self._fresh:
            return FRESH_AND_SPARSE if sparse else FRESH
        return SPARSE if sparse else CREDITED

    def let_go_first(self, sparse_below: int) -> None:
        """From now on those with fewer requests in flight than this go before the others."""
        self._sparse_below = sparse_below
        for client in self._credited:
            self._tell(client)

    def wait(self, request: Request, cost: float = 0.0) -> None:
        """One more request waits; its client has Q^u times its weight, and the first time what a round adds to that.

        `cost`: what its input would cost now, in cost units. A client is not fresh if that is more than a head start.

        In a group, it has no more than its part of what that has when it begins to wait or to have something in flight.
        """
        client = request.client
        reweighted = self._deficits.meet(request, self._parameters.quantum, active=client in self._active)
        if reweighted and client in self._waiting and client not in self._credited:
            self._expect(client)
        self._active.begin(client, self._shares.effective_weight(request))
        if client not in self._waiting:
            self._begin_to_wait(client, cost)
        routes, route = self._waiting.setdefault(client, {}), request.route
        self._restored = self._restored and len(self._waiting) == 1
        routes[route] = routes.get(route, 0) + 1
        if routes[route] == 1:
            if client in self._credited:
                self._count(route, 1)
            elif len(routes) == 1:
                self._review(client)
                if client not in self._credited:
                    self._expect(client)

    def _begin_to_wait(self, client: ClientId, cost: float) -> None:
        part = self._part(self._active.weight)
        self._deficits.limit(client, part)
        head_start = self._parameters.head_start * self.weight(client)
        if head_start > cost:
            self._fresh[client] = head_start
        self._take_turn(client)

    def _take_turn(self, client: ClientId) -> None:
        """A client that waits is behind the others from now on, where they go in turn."""
        self._clock += 1
        self._turns.pop(client, None)
        self._turns[client] = self._clock
        self._look_again(client)
        if client in self._overdue:
            self._overdue.discard(client)
            self._review(client)
            if client not in self._credited:
                self._expect(client)
            self._tell(client)

    def visit(self, request: Request, *, refill: bool) -> bool:
        """Whether a client has credit that comes while nobody waits; after a refill, if that is allowed."""
        self._deficits.meet(request, self._parameters.quantum, active=request.client in self._active)
        self._active.begin(request.client, self._shares.effective_weight(request))
        self._deficits.limit(request.client, self._part(self._active.weight))
        if refill:
            self._refill_for(request.client)
        self._active.end(request.client)
        return self._deficits.credit(request.client) > 0

    def leave(self, request: Request) -> None:
        """One waits no more."""
        client = request.client
        self._active.end(client)
        routes, route = self._waiting[client], request.route
        routes[route] -= 1
        if not routes[route]:
            del routes[route]
            if client in self._credited:
                self._count(route, -1)
            if not routes:
                del self._waiting[client]
                for each in (self._credited, self._fresh, self._turns, self._looked_at):
                    each.pop(client, None)
                self._overdue.discard(client)

    def dispatched(self, request: Request) -> None:
        """It is in flight."""
        client = request.client
        self._active.begin(client, self._shares.effective_weight(request))
        self._gone += 1
        requests = self._in_flight.setdefault(client, {})
        requests[request.id] = None
        if client in self._waiting:
            self._take_turn(client)
        self._tell(client)

    def ended(self, request: Request) -> None:
        """It is in flight no more."""
        requests = self._in_flight[request.client]
        del requests[request.id]
        if not requests:
            del self._in_flight[request.client]
        self._active.end(request.client)
        self._tell(request.client)

    def charge(self, client: ClientId, cost: float) -> bool:
        """Take this much from a client's credit, or give it back; returns whether it has none now, and had some."""
        self._deficits.charge(client, cost)
        credit = self._deficits.credit(client)
        if client in self._fresh:
            self._use_up_head_start(client, cost)
        if client in self._waiting:
            had = client in self._credited
            self._review(client)
            if client not in self._credited and (had or cost < 0):
                self._expect(client)
        return credit <= 0 < credit + cost

    def has_credit(self, client: ClientId) -> bool:
        """Whether a client has some, whether it waits or not."""
        return self._deficits.credit(client) > 0

    def weight(self, client: ClientId) -> float:
        """What a client weighs."""
        return self._deficits.quantum(client) / self._parameters.quantum

    def poor_weight(self, routes: Collection[str]) -> float:
        """What those weigh together that have a request of one of these routes waiting and have no credit."""
        poor = [each for each in self._waiting if each not in self._credited and self._counts(each, routes)]
        return sum([self.weight(client) for client in poor])

    @property
    def in_flight(self) -> bool:
        """Whether anything is."""
        return bool(self._in_flight)

    def refill(self, routes: Collection[str] | None = None) -> list[ClientId]:
        """CHECKREFILL: if clients wait and none of them has credit, add quanta until one has; returns who has by that.

        `routes`: only those count that have a request of one of these waiting.
        """
        if self.contended(routes):
            return []
        client = self._dues.first(lambda each: self._counts(each, routes))
        if client is None:
            return []
        self._refill_for(client)
        return self._admit()

    def contended(self, routes: Collection[str] | None = None) -> bool:
        """Whether a client with credit waits, with a request of one of these routes."""
        return bool(self._credited) if routes is None else not self._contenders.keys().isdisjoint(routes)

    def begin_anew(self) -> None:
        """Give every client one quantum, as at its first request: whoever used an idle machine owes nothing for it, and
        whoever comes then is not before the others for being new. To be asked while nobody waits.
        """
        if not self._restored:
            self._deficits.begin_anew()

    def forget(self, client: ClientId) -> None:
        """A client that has nothing under way is remembered for what it owes alone."""
        self._deficits.forget(client)

    def saved(self) -> Iterator[tuple[ClientId, float, float]]:
        """Each client's credit and quantum; see `DeficitTable.saved`."""
        return self._deficits.saved()

    def restore(self, client: ClientId, credit: float, quantum: float) -> None:
        """Begin with this credit. It holds until two clients wait at once: before that, that nobody waits says nothing
        about whether there were others before the restart.
        """
        self._deficits.restore(client, credit, quantum)
        self._restored = True

    def saved_groups(self) -> Iterator[tuple[GroupId, float, float]]:
        """Each group's; see `ClientDeficits.saved_groups`."""
        return self._deficits.saved_groups()

    def restore_group(self, group: GroupId, credit: float, quantum: float) -> None:
        """Begin with this of a group; it holds as long as that of clients does."""
        self._deficits.restore_group(group, credit, quantum)
        self._restored = True

    def _refill_for(self, client: ClientId) -> None:
        """Add quanta until this client has credit: rounding may leave it at the edge, and then one more is needed."""
        while self._deficits.credit(client) <= 0:
            self._deficits.let_pass(client, self._part(self._active.weight))

    def let_overdue_go(self) -> None:
        """Note who of those that wait is overdue, if all have been looked at that were to be before."""
        if not self._parameters.overdue_after:
            return
        due = self._gone - self._parameters.overdue_after * len(self._active)
        while self._looked_at:
            client, at = next(iter(self._looked_at.items()))
            if at > due:
                return
            self._look_again(client)
            lacking = self._deficits.lacks(client)
            if client not in self._in_flight and lacking <= self._parameters.overdraft:
                self._overdue.add(client)
                self._review(client)
                self._tell(client)

    def _look_again(self, client: ClientId) -> None:
        """Look at a client for being overdue once more, when as many requests as that takes have gone from now on."""
        self._looked_at.pop(client, None)
        self._looked_at[client] = self._gone

    def _is_poor(self, client: ClientId) -> bool:
        return client in self._waiting and client not in self._credited

    def _counts(self, client: ClientId, routes: Collection[str] | None) -> bool:
        return routes is None or not self._waiting[client].keys().isdisjoint(routes)

    def _admit(self) -> list[ClientId]:
        """Note everybody who has credit by the rounds of now, and return them."""
        admitted = []
        for client in self._dues.come():
            if self._is_poor(client):
                self._review(client)
                if client in self._credited:
                    admitted.append(client)
                else:
                    self._expect(client)
        return admitted

    def _expect(self, client: ClientId) -> None:
        """Note when a waiting client without credit will have some."""
        self._dues.expect(client, self._waiting, most=2 * len(self._waiting) + 16)

    def _review(self, client: ClientId) -> None:
        """Note whether a waiting client has credit, and tell if that changed."""
        credited = self._may_go(client)
        if credited == (client in self._credited):
            return
        if credited:
            self._credited[client] = self._rank(client)
        else:
            del self._credited[client]
        for route in self._waiting[client]:
            self._count(route, 1 if credited else -1)
        self._changed(client)

    def _tell(self, client: ClientId) -> None:
        """Note how much a client has in flight, where that changes its standing."""
        if client in self._credited and self._credited[client] != (rank := self._rank(client)):
            self._credited[client] = rank
            self._changed(client)

    def _use_up_head_start(self, client: ClientId, cost: float) -> None:
        left = self._fresh[client] = self._fresh[client] - cost
        if left <= 0:
            del self._fresh[client]
            self._tell(client)

    def _count(self, route: str, change: int) -> None:
        count = self._contenders.get(route, 0) + change
        if count:
            self._contenders[route] = count
        else:
            del self._contenders[route]

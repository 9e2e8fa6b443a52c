"""Whose turn it may be: DLPM's deficit counters, and who of their clients waits or has something in flight.

"Locality-aware Fair Scheduling in LLM Serving", Algorithm 1, CHECKREFILL and line 13, for one queue or for a pool. A
client with credit may go. The theorem leaves the order among those free, and two things decide it before the longest
match does. First those go that are *fresh*: what they began to wait with costs no more than a head start, and they were
not charged more than that since. Among these, and then among the rest, those go first that are *sparse*: they have
nothing in flight (in a pool, less than one request for each worker). Else a client that seldom asks for anything would
wait until the long matches of a heavy one have used up a quantum, and before many heavy ones with little in flight
each, until all of them have.
"""

from collections.abc import Callable, Collection, Iterator
from typing import Final

from router.core.client_deficits import ClientDeficits
from router.core.dues import Dues
from router.core.model import ClientId, GroupId, Request, RequestId
from router.core.recent_clients import DEBTORS
from router.core.shares import Shares

FRESH_AND_SPARSE, FRESH, SPARSE, CREDITED = range(4)
"""Where a client with credit stands: lower goes first."""
STANDINGS: Final = CREDITED + 1


class Standings:
    """The counter of every client, and who contends for what is next."""

    def __init__(
        self,
        changed: Callable[[ClientId], None],
        shares: Shares,
        *,
        sparse_below: int = 1,
        head_start: float = 0.0,
        debtors: int = DEBTORS,
    ) -> None:
        """`changed` is told of each waiting client whose standing is another than before.

        `sparse_below`: who has fewer requests in flight is sparse; 0 for nobody. `head_start`: for how many quanta a
        client is fresh. `debtors`: how many debts are kept of who is forgotten.
        """
        self._changed = changed
        self._sparse_below = sparse_below
        self._head_start = head_start
        self._deficits = ClientDeficits(shares, debtors)
        self._waiting: dict[ClientId, dict[str, int]] = {}
        """How many requests of each client wait, by model."""
        self._credited: dict[ClientId, int] = {}
        """Those of them that have credit, with their standing."""
        self.of_waiting: Final = self._credited.get
        """The standing of a client that waits; None without credit."""
        self._contenders: dict[str, int] = {}
        """How many clients with credit wait, by model."""
        self._dues = Dues(self._deficits, self._is_poor)
        self._in_flight: dict[ClientId, dict[RequestId, None]] = {}
        self._fresh: dict[ClientId, float] = {}
        """What is left of their head start, in cost units, of those that wait and have some."""
        self._restored = False
        """Whether credit is from before a restart, and nobody has contended since."""

    def credit(self, client: ClientId) -> float | None:
        """q_i, in cost units; None for a client that was never here."""
        return self._deficits.known(client)

    def of(self, client: ClientId) -> int | None:
        """A client's standing; None without credit."""
        if self._deficits.credit(client) <= 0:
            return None
        return self._rank(client)

    def _rank(self, client: ClientId) -> int:
        sparse = len(self._in_flight.get(client, ())) < self._sparse_below
        if client in self._fresh:
            return FRESH_AND_SPARSE if sparse else FRESH
        return SPARSE if sparse else CREDITED

    def let_go_first(self, sparse_below: int) -> None:
        """From now on those with fewer requests in flight than this go before the others."""
        self._sparse_below = sparse_below
        for client in self._credited:
            self._tell(client)

    def wait(self, request: Request, quantum: float, cost: float = 0.0) -> None:
        """One more request waits; its client has this quantum times its weight, and the first time as much credit.

        `cost`: what its input would cost now, in cost units. A client is not fresh if that is more than a head start.

        In a group, it has no more than its part of what that has when it begins to wait or to have something in flight.
        """
        client = request.client
        reweighted = self._deficits.meet(request, quantum, active=self._is_active(client))
        if reweighted and client in self._waiting and client not in self._credited:
            self._expect(client)
        head_start = self._head_start * self._deficits.quantum(client)
        if head_start > cost and client not in self._waiting:
            self._fresh[client] = head_start
        models = self._waiting.setdefault(client, {})
        self._restored = self._restored and len(self._waiting) == 1
        models[request.model] = models.get(request.model, 0) + 1
        if models[request.model] == 1:
            if client in self._credited:
                self._count(request.model, 1)
            elif len(models) == 1:
                self._review(client)
                if client not in self._credited:
                    self._expect(client)

    def visit(self, request: Request, quantum: float, *, refill: bool) -> bool:
        """Whether a client has credit that comes while nobody waits; after a refill, if that is allowed."""
        self._deficits.meet(request, quantum, active=self._is_active(request.client))
        if refill:
            self._refill_for(request.client)
        return self._deficits.credit(request.client) > 0

    def leave(self, request: Request) -> None:
        """One waits no more."""
        client = request.client
        models = self._waiting[client]
        models[request.model] -= 1
        if not models[request.model]:
            del models[request.model]
            if client in self._credited:
                self._count(request.model, -1)
            if not models:
                del self._waiting[client]
                self._credited.pop(client, None)
                self._fresh.pop(client, None)

    def dispatched(self, request: Request) -> None:
        """It is in flight."""
        requests = self._in_flight.setdefault(request.client, {})
        requests[request.id] = None
        self._tell(request.client)

    def ended(self, request: Request) -> None:
        """It is in flight no more."""
        requests = self._in_flight.get(request.client, {})
        requests.pop(request.id, None)
        if not requests:
            self._in_flight.pop(request.client, None)
        self._tell(request.client)

    def charge(self, client: ClientId, cost: float) -> None:
        """Take this much from a client's credit, or give it back."""
        self._deficits.charge(client, cost)
        if client in self._fresh:
            self._use_up_head_start(client, cost)
        if client in self._waiting:
            had = client in self._credited
            self._review(client)
            if client not in self._credited and (had or cost < 0):
                self._expect(client)

    def refill(self, models: Collection[str] | None = None) -> None:
        """CHECKREFILL: if clients wait and none of them has credit, add quanta until one has.

        `models`: only those count that wait for one of these.
        """
        if (
            not self.contended(models)
            and (client := self._dues.first(lambda each: self._counts(each, models))) is not None
        ):
            self._refill_for(client)
            self._admit()

    def contended(self, models: Collection[str] | None = None) -> bool:
        """Whether a client with credit waits, for one of these models."""
        return bool(self._credited) if models is None else not self._contenders.keys().isdisjoint(models)

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
            self._deficits.let_pass(client)

    def _is_active(self, client: ClientId) -> bool:
        return client in self._waiting or client in self._in_flight

    def _is_poor(self, client: ClientId) -> bool:
        return client in self._waiting and client not in self._credited

    def _counts(self, client: ClientId, models: Collection[str] | None) -> bool:
        return models is None or not self._waiting[client].keys().isdisjoint(models)

    def _admit(self) -> None:
        """Note everybody who has credit by the rounds of now."""
        for client in self._dues.come():
            if self._is_poor(client):
                self._review(client)
                if client not in self._credited:
                    self._expect(client)

    def _expect(self, client: ClientId) -> None:
        """Note when a waiting client without credit will have some."""
        self._dues.expect(client, self._waiting, most=2 * len(self._waiting) + 16)

    def _review(self, client: ClientId) -> None:
        """Note whether a waiting client has credit, and tell if that changed."""
        credited = self._deficits.credit(client) > 0
        if credited == (client in self._credited):
            return
        if credited:
            self._credited[client] = self._rank(client)
        else:
            del self._credited[client]
        for model in self._waiting[client]:
            self._count(model, 1 if credited else -1)
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

    def _count(self, model: str, change: int) -> None:
        count = self._contenders.get(model, 0) + change
        if count:
            self._contenders[model] = count
        else:
            del self._contenders[model]

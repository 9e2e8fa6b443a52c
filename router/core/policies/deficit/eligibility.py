"""Which client may be served next: DLPM's deficit counters, and which clients wait or have requests in flight.

"Locality-aware Fair Scheduling in LLM Serving", Algorithm 1, CHECKREFILL and line 13, for one queue or for a pool. A
client with a positive deficit is eligible. The theorem leaves the order among eligible clients free. Here, clients of a
lower priority class go first:

1. A client is *overdue* if it has nothing in flight and, since it began to wait or last had a turn, so many requests
   were dispatched that each active client could have had one. It goes first, even with a small debt: a client that paid
   for a long prompt at once need not wait until all others have paid as much.
2. A client is *fresh* if it has a head start left (`TurnOrder`). A client is *sparse* if it has nothing in flight or,
   in a pool, fewer requests than there are workers. Without these classes, a client that rarely sends a request would
   wait until the long matches of a heavy client have used up a quantum. Clients that are both take turns.
   In a pool they do so in rounds (`TurnRounds`) while many wait. Then a client is fresh only while it has nothing in
   flight, and each cheap call that arrives then renews its head start. A fresh client with a long prompt, which might
   be evicted if it missed a round, is *admitted* with a small debt to a round in which it has had no turn. It delays no
   refill. A fresh client that has a turn ahead is not overdue.
3. Then fresh clients go, and then sparse ones: in each class the longest match first.
4. All other eligible clients go last, again by longest match.

`refills` decides when deficits are refilled, `refill_rounds` by how much.
"""

from collections.abc import Callable, Collection
from math import inf
from typing import Final

from router.core.clients.debtors import DEBTOR_LIMIT
from router.core.clients.shares import Shares
from router.core.model.request import ClientId, GroupId, Request
from router.core.policies.deficit.deficits import ClientDeficits
from router.core.policies.deficit.parameters import DeficitParameters
from router.core.policies.deficit.refill_rounds import Cuts, RefillRounds
from router.core.policies.deficit.refills import Refills
from router.core.policies.deficit.turn_order import TurnOrder, chunks_of
from router.core.policies.deficit.turn_rounds import LITTLE_CHUNKS, TurnRounds
from router.core.policies.deficit.waiting_index import WaitingIndex

OVERDUE, FRESH_AND_SPARSE, FRESH, SPARSE, ELIGIBLE = range(5)
"""The priority class of an eligible client: lower goes first."""
PRIORITY_CLASSES: Final = ELIGIBLE + 1
ROUND_ROBIN_CLASSES: Final = frozenset((OVERDUE, FRESH_AND_SPARSE))
"""Classes in which the client whose last turn is the longest ago goes first. They go before all others."""


class Eligibility:
    """Keeps every client's deficit counter and decides which clients may be served, and in which order."""

    def __init__(
        self,
        on_priority_change: Callable[[ClientId], None],
        parameters: DeficitParameters,
        rate: Callable[[], float | None],
        shares: Shares,
        debtors: int = DEBTOR_LIMIT,
        *,
        rounds_from: int | None = None,
        turn_overdraft: float = 0.0,
    ) -> None:
        """`on_priority_change` is called with each waiting client whose priority class changes.

        `rate`: the service rate of the workers of this queue; see `RefillRounds`. `debtors`: how many counters of
        forgotten clients are kept because they are in debt. No client is sparse before `set_sparse_limit`.
        `rounds_from`: from how many waiting clients per worker on they take turns in rounds; None: they never do.
        `turn_overdraft`: the most quanta of debt with which a client may have a turn while they do.
        """
        self._on_priority_change = on_priority_change
        self._parameters = parameters
        self._sparse_limit = 0
        self._deficits = ClientDeficits(shares, debtors)
        self.deficit: Final = self._deficits.deficit_or_none
        """q_i, in cost units; None for an unknown client."""
        self.saved: Final = self._deficits.saved
        self.saved_groups: Final = self._deficits.saved_groups
        self._refill_rounds = RefillRounds(parameters, rate, self._deficits, shares)
        self._active = self._refill_rounds.active
        self._cuts = Cuts(self._refill_rounds, self._deficits)
        self._waiting = WaitingIndex(PRIORITY_CLASSES)
        self._eligible = self._waiting.classes
        self.any_eligible: Final = self._waiting.any_eligible
        self._turn_overdraft = turn_overdraft
        self._clients_per_worker = rounds_from
        self._rounds_from = inf
        """How many waiting clients begin to take turns in rounds."""
        self.rounds: TurnRounds | None = None
        """The rounds in which clients take turns, while they do. Read only."""
        self.turns: Final = TurnOrder(parameters.overdue_after)
        """Read only for others."""
        self.last_turn: Final = self.turns.last_turn
        self.waiting_priority_class: Final = self._waiting.ready.get
        """The priority class of a waiting client; None if the client may not go."""
        self._refills = Refills(
            self._deficits,
            self._refill_rounds,
            self._waiting,
            self._update_eligibility,
            self._admit_refilled,
        )
        self._worker_sets = self._refills.sets
        self.refill: Final = self._refills.refill
        self.next_refilled: Final = self._refills.next_client
        self.pay_owed_rounds: Final = self._refills.pay_owed_rounds
        self.divide_refills: Final = self._refills.divide
        self.in_flight: dict[ClientId, int] = {}
        """The number of each client's requests in flight; read-only for others."""
        self._overdue: set[ClientId] = set()
        self._long: set[ClientId] = set()
        """Clients that have had a long prompt waiting since they began to wait."""
        self._restored = False
        """True if deficits are from before a restart and no two clients have waited at once since."""

    def priority_class(self, client: ClientId) -> int | None:
        """A client's priority class; None if the client is not eligible."""
        return self._class_of(client) if self._is_eligible(client) else None

    def _is_eligible(self, client: ClientId) -> bool:
        return self._deficits.deficit(client) > 0 or client in self._overdue

    def _class_of(self, client: ClientId) -> int:
        if client in self._overdue:
            return OVERDUE
        if self.rounds is not None and client in self.rounds.admitted:
            return FRESH_AND_SPARSE
        sparse = self.in_flight.get(client, 0) < self._sparse_limit
        if client in self.turns.head_starts and (self.rounds is None or client not in self.in_flight):
            return FRESH_AND_SPARSE if sparse else FRESH
        return SPARSE if sparse else ELIGIBLE

    @property
    def waiting_classes(self) -> list[int]:
        """The priority classes of the clients that wait and may go, in order."""
        classes = [each for each, clients in enumerate(self._waiting.by_class) if clients]
        if self.rounds is not None and self.rounds.admitted:
            classes = sorted({FRESH_AND_SPARSE, *classes})
        return classes

    def set_sparse_limit(self, sparse_limit: int) -> None:
        """Count clients with fewer requests in flight than this as sparse from now on."""
        self._sparse_limit = sparse_limit
        rounds_from = self._clients_per_worker
        self._rounds_from = rounds_from * sparse_limit if sparse_limit and rounds_from is not None else inf
        for client in self._eligible:
            self._update_priority_class(client)

    def may_get_head_start(self, client: ClientId) -> bool:
        """Return whether the next request of a client may give it a head start, so that `add_waiting` must know what
        the request costs.
        """
        return client not in self._waiting.routes or (self.rounds is not None and client not in self.in_flight)

    def add_waiting(self, request: Request, cost: float = 0.0) -> None:
        """Add a waiting request. A new client starts with one quantum, Q^u times its weight; a client that begins to
        wait keeps at most what a round adds, and likewise at its second turn if its deficit has been positive since.

        `cost`: the cost of the request's input now, in cost units, if the client `may_get_head_start`. If that is more
        than a head start, the client is not fresh.

        A member of a group that becomes active has at most its share of the group's deficit.
        """
        client = request.client
        active = client in self._active.clients
        quantum_changed = self._deficits.register(request, self._parameters.quantum, active=active)
        if quantum_changed and self._waiting.is_ineligible(client):
            self._schedule_refill(client)
        self._active.add_request(request)
        if client not in self._long and chunks_of(request) > LITTLE_CHUNKS:
            self._long.add(client)
        if client not in self._waiting.routes:
            self._cuts.join(client)
            self.turns.join(client, self._parameters.head_start * self.weight(client), cost)
            if self.rounds is not None:
                self.rounds.join(client)
            elif len(self._waiting.routes) >= self._rounds_from:
                self._begin_rounds(client)
        elif self.rounds is not None and client not in self.in_flight:
            self.turns.renew(client, self._parameters.head_start * self.weight(client), cost)
            self._update_priority_class(client)
            self.rounds.admit(client)
        new_route = self._waiting.add(client, request.route)
        self._restored = self._restored and len(self._waiting.routes) == 1
        if new_route:
            routes = self._waiting.routes[client]
            moved = self._worker_sets.assign(client, routes)
            if client not in self._eligible and (len(routes) == 1 or moved):
                self._update_eligibility(client)
                if client not in self._eligible:
                    self._schedule_refill(client)

    def resume(self, request: Request) -> None:
        """Count a request as in flight that an earlier run has dispatched. Its client has been active since then."""
        self._deficits.register(request, self._parameters.quantum, active=True)
        self.request_dispatched(request)

    def _had_turn(self, client: ClientId) -> None:
        """Put a waiting client behind all others, where clients take turns."""
        self._cuts.count_turn(client)
        self.turns.move_to_back(client)
        if client in self._overdue:
            self._overdue.remove(client)
            self._update_eligibility(client)
            if client not in self._eligible:
                self._schedule_refill(client)

    def _begin_rounds(self, newcomer: ClientId) -> None:
        """Let clients take turns in rounds from now on. The newcomer has begun to wait, and is not among them yet."""
        self.rounds = self.turns.rounds = TurnRounds(self._may_be_admitted, self._admission_changed)
        for client in (*self._waiting.routes, newcomer):
            self._update_priority_class(client)  # in rounds it is fresh only with nothing in flight
            self.rounds.join(client)

    def take_turn(self, client: ClientId) -> None:
        """Count a turn of a waiting client, one of whose requests is about to be dispatched. Only while clients take
        turns in rounds.
        """
        assert self.rounds is not None
        self.rounds.take(client, may_begin=self._waiting.ready.get(client) in ROUND_ROBIN_CLASSES)

    def _admit_refilled(self) -> None:
        """Let clients whose debts are small enough after a refill have their turn of this round now."""
        if self.rounds is not None:
            self.rounds.admit_all()

    def _may_be_admitted(self, client: ClientId) -> bool:
        """Return whether a waiting client that has a turn ahead in this round may take it in spite of its debt."""
        return client not in self._eligible and self._deficits.deficit(client) <= 0 and self._may_take_turn(client)

    def _may_take_turn(self, client: ClientId) -> bool:
        """Return whether a client is fresh, has a long prompt, nothing in flight and no more debt than a turn in a
        round allows.
        """
        if client in self.in_flight or client not in self.turns.head_starts or client not in self._long:
            return False
        return self._deficits.quanta_short(client) <= self._turn_overdraft

    def _admission_changed(self, client: ClientId) -> None:
        assert self.rounds is not None
        self._update_priority_class(client)
        self._waiting.set_ready(client, FRESH_AND_SPARSE if client in self.rounds.admitted else None)
        if client in self._waiting.routes:
            self._on_priority_change(client)

    def may_pass_through(self, request: Request, *, refill: bool) -> bool:
        """Return whether a client whose request arrives while no client waits is eligible; after a refill, if that is
        allowed.

        While refills are divided, no client passes: rounds may be owed, and are paid to those that wait.
        """
        if self._worker_sets.divided:
            return False
        client = request.client
        active, weight = client in self._active.clients, self._active.weight_with(request)
        fraction = self._refill_rounds.fraction(weight)
        self._deficits.register(request, self._parameters.quantum, active=active)
        deficit = self._deficits.cap(client, fraction)
        if refill and deficit <= 0:
            self._refill_rounds.add_for(client, weight)
            deficit = self._deficits.deficit(client)
        return deficit > 0

    def remove_waiting(self, request: Request) -> None:
        """Remove a request that no longer waits."""
        client = request.client
        self._active.remove_request(client)
        eligible = client in self._eligible
        if not self._waiting.remove(client, request.route):
            return
        routes = self._waiting.routes.get(client)
        if routes is None:
            self._worker_sets.changed |= eligible
            self.turns.leave(client)
            self._cuts.discard(client)
            self._long.discard(client)
            if client in self._overdue:
                self._overdue.remove(client)
            if self.rounds is not None:
                self.rounds.leave(client)
                if not self._waiting.routes:
                    self.rounds = self.turns.rounds = None
        elif self._worker_sets.assign(client, routes) and not eligible:
            self._schedule_refill(client)

    def request_dispatched(self, request: Request) -> None:
        """Count a request as in flight."""
        client = request.client
        self.turns.dispatches += 1
        self.in_flight[client] = self.in_flight.get(client, 0) + 1
        if client in self._waiting.routes:
            self._had_turn(client)
        self._update_priority_class(client)
        self._active.add_request(request)

    def request_ended(self, request: Request) -> None:
        """Count a request as no longer in flight."""
        self.in_flight[request.client] -= 1
        if not self.in_flight[request.client]:
            del self.in_flight[request.client]
        self._update_priority_class(request.client)
        if self.rounds is not None and request.client in self._waiting.routes:
            self.rounds.admit(request.client)
        self._active.remove_request(request.client)

    def charge(self, client: ClientId, cost: float) -> float | None:
        """Subtract this cost from a client's deficit; a negative cost is a refund. Returns the deficit before that;
        None for an unknown client.
        """
        before = self._deficits.charge(client, cost)
        if client in self.turns.head_starts and self.turns.use_up(client, cost):
            self._update_priority_class(client)
        if client in self._waiting.routes:
            had = client in self._eligible
            self._update_eligibility(client)
            if client not in self._eligible and (had or cost < 0):
                self._schedule_refill(client)
            if self.rounds is not None and client in self.rounds.admitted and not self._may_take_turn(client):
                self.rounds.end_admission(client)
        return before

    def has_positive_deficit(self, client: ClientId) -> bool:
        """Return whether a client's deficit is positive, whether the client waits or not."""
        return self._deficits.deficit(client) > 0

    def weight(self, client: ClientId) -> float:
        """A client's weight."""
        return self._deficits.quantum(client) / self._parameters.quantum

    def ineligible_weight(self, routes: Collection[str]) -> float:
        """Return the total weight of the clients that are not eligible and have a request of one of these routes
        waiting.
        """
        ineligible = [
            each for each in self._waiting.routes if each not in self._eligible and self._waiting.wait_on(each, routes)
        ]
        return sum([self.weight(client) for client in ineligible])

    def reset(self) -> None:
        """Give every client one quantum, as at its first request. Called only while no client waits.

        So use of an idle machine leaves no debt, and a client that is new has no advantage over known ones.
        """
        if not self._restored:
            self._deficits.epoch += 1

    def forget(self, client: ClientId) -> None:
        """Keep the counter of a client without requests only if it is in debt."""
        self._deficits.forget(client)
        if self.rounds is not None:
            self.rounds.forget(client)

    def restore(self, client: ClientId, deficit: float, quantum: float) -> None:
        """Load a client's counter. `reset` leaves it alone until two clients wait at once: before that, an empty queue
        does not show whether other clients waited before the restart.
        """
        self._deficits.restore(client, deficit, quantum)
        self._restored = True

    def restore_group(self, group: GroupId, deficit: float, quantum: float) -> None:
        """Load a group's counter. Like clients' counters, it is not reset until two clients wait at once."""
        self._deficits.restore_group(group, deficit, quantum)
        self._restored = True

    def mark_overdue(self) -> None:
        """Mark the clients as overdue that are late for a turn, have nothing in flight and at most a small debt."""
        if not self._parameters.overdue_after:
            return
        late = self.turns.pop_late(len(self._active.clients))
        if not late:
            return
        overdraft = max(self._parameters.overdraft, self._turn_overdraft if self.rounds is not None else 0.0)
        for client in late:
            if self.rounds is not None and self._has_turn_ahead(client, self.rounds):
                continue
            if client not in self.in_flight and self._deficits.quanta_short(client) <= overdraft:
                self._overdue.add(client)
                self._update_eligibility(client)
                self._update_priority_class(client)

    def _has_turn_ahead(self, client: ClientId, rounds: TurnRounds) -> bool:
        """Return whether a fresh client takes its turn in this round, or in the next one, to which turns of others
        lead.
        """
        eligible = client in self._eligible
        if client not in self.turns.head_starts or not (eligible or self._may_take_turn(client)):
            return False
        if rounds.has_turn(client):
            return self._waiting.ready.get(client) == FRESH_AND_SPARSE
        return FRESH_AND_SPARSE in self.waiting_classes

    def _schedule_refill(self, client: ClientId) -> None:
        """Note when a waiting client that is not eligible will be."""
        self._cuts.discard(client)
        self._refills.schedule(client)

    def _update_eligibility(self, client: ClientId) -> None:
        """Update whether a waiting client is eligible, and report a change."""
        eligible = self._is_eligible(client)
        if eligible == (client in self._eligible):
            return
        self._waiting.set_class(client, self._class_of(client) if eligible else None)
        if not eligible and self.rounds is not None and client in self.rounds.admitted:
            self._waiting.set_ready(client, FRESH_AND_SPARSE)
        self._worker_sets.changed |= not eligible
        self._on_priority_change(client)

    def _update_priority_class(self, client: ClientId) -> None:
        """Update an eligible waiting client's priority class, and report a change."""
        before = self._eligible.get(client)
        if before is not None and before != (priority_class := self._class_of(client)):
            self._waiting.set_class(client, priority_class)
            self._on_priority_change(client)

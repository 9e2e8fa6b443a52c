"""Which client may be served next: DLPM's deficit counters, and which clients wait or have requests in flight.

"Locality-aware Fair Scheduling in LLM Serving", Algorithm 1, CHECKREFILL and line 13, for one queue or for a pool. A
client with a positive deficit is eligible. The theorem leaves the order among eligible clients free. Here, clients of a
lower priority class go first:

1. A client is *overdue* if it has nothing in flight and, since it began to wait or last had a turn, so many requests
   were dispatched that each active client could have had one. It goes first, even with a small debt: a client that paid
   for a long prompt at once need not wait until all others have paid as much.
2. A client is *fresh* if it has a head start left (`TurnOrder`). A client is *sparse* if it has nothing in flight or,
   in a pool, fewer requests than there are workers. Without these classes, a client that seldom sends a request would
   wait until the long matches of a heavy client have used up a quantum. Clients that are both take turns.
   Where they do so in rounds (`TurnRounds`), a fresh client that has had no turn in the current round and has nothing
   in flight is *admitted* to it with a small debt. It delays no refill. A fresh client that has a turn ahead is not
   overdue.
3. Then fresh clients go, and then sparse ones: in each class the longest match first.
4. All other eligible clients go last, again by longest match.

What a refill adds, and who may keep more, is decided in `refill_rounds`.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Final

from router.core.clients.debtors import DEBTOR_LIMIT
from router.core.clients.shares import Shares
from router.core.model.request import ClientId, GroupId, Request
from router.core.policies.deficit.active_clients import ActiveClients
from router.core.policies.deficit.deficits import NO_LIMITS, ClientDeficits, WorkerSet
from router.core.policies.deficit.parameters import DeficitParameters
from router.core.policies.deficit.refill_rounds import Cuts, RefillRounds
from router.core.policies.deficit.refill_schedule import RefillSchedule
from router.core.policies.deficit.turn_order import TurnOrder
from router.core.policies.deficit.turn_rounds import TurnRounds
from router.core.policies.deficit.waiting_index import WaitingIndex
from router.core.policies.deficit.worker_sets import WorkerSets

OVERDUE, FRESH_AND_SPARSE, FRESH, SPARSE, ELIGIBLE = range(5)
"""The priority class of an eligible client: lower goes first."""
PRIORITY_CLASSES: Final = ELIGIBLE + 1
ROUND_ROBIN_CLASSES: Final = frozenset((OVERDUE, FRESH_AND_SPARSE))
"""Classes in which the client whose last turn is the longest ago goes first."""


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
        turn_overdraft: float | None = None,
    ) -> None:
        """`on_priority_change` is called with each waiting client whose priority class changes.

        `rate`: the service rate of the workers of this queue; see `RefillRounds`. `debtors`: how many counters of
        forgotten clients are kept because they are in debt. No client is sparse before `set_sparse_limit`.
        `turn_overdraft`: if given, clients take turns in rounds, and a fresh client may have its turn with a debt of
        this many quanta.
        """
        self._on_priority_change = on_priority_change
        self._parameters = parameters
        self._sparse_limit = 0
        self._deficits = ClientDeficits(shares, debtors)
        self.deficit: Final = self._deficits.deficit_or_none
        """q_i, in cost units; None for an unknown client."""
        self.saved: Final = self._deficits.saved
        self.saved_groups: Final = self._deficits.saved_groups
        self._active = ActiveClients(shares)
        self._refill_rounds = RefillRounds(parameters, rate, self._deficits)
        self._cuts = Cuts(self._refill_rounds, self._deficits, self._active)
        self._waiting = WaitingIndex(PRIORITY_CLASSES)
        self._eligible = self._waiting.classes
        self.any_eligible: Final = self._waiting.any_eligible
        self._turn_overdraft = turn_overdraft or 0.0
        self._rounds = None if turn_overdraft is None else TurnRounds(self._may_be_admitted, self._admission_changed)
        self._turns = TurnOrder(parameters.overdue_after, self._rounds)
        self.turn: Final = self._turns.turn
        self.last_turn: Final = self._turns.last
        self.waiting_priority_class: Final = self._eligible.get if self._rounds is None else self._class_in_round
        """The priority class of a waiting client; None if the client is not eligible."""
        self._worker_sets = WorkerSets(self._deficits)
        self._refill_schedule = RefillSchedule(self._deficits, self._waiting.is_ineligible)
        self.in_flight: dict[ClientId, int] = {}
        """The number of each client's requests in flight; read-only for others."""
        self._overdue: set[ClientId] = set()
        self._restored = False
        """True if deficits are from before a restart and no two clients have waited at once since."""

    def priority_class(self, client: ClientId) -> int | None:
        """A client's priority class; None if the client is not eligible."""
        return self._class_of(client) if self._is_eligible(client) else None

    def _is_eligible(self, client: ClientId) -> bool:
        return self._deficits.deficit(client) > 0 or client in self._overdue

    def _class_in_round(self, client: ClientId) -> int | None:
        assert self._rounds is not None
        priority_class = self._eligible.get(client)
        return FRESH_AND_SPARSE if priority_class is None and client in self._rounds.admitted else priority_class

    def _class_of(self, client: ClientId) -> int:
        if client in self._overdue:
            return OVERDUE
        if self._rounds is not None and client in self._rounds.admitted:
            return FRESH_AND_SPARSE
        sparse = self.in_flight.get(client, 0) < self._sparse_limit
        if client in self._turns.head_starts:
            return FRESH_AND_SPARSE if sparse else FRESH
        return SPARSE if sparse else ELIGIBLE

    def any_in_class(self, priority_class: int) -> bool:
        """Whether a client of this priority class waits, be it one that is only admitted to a round of turns."""
        admitted = priority_class == FRESH_AND_SPARSE and self._rounds is not None and self._rounds.admitted
        return bool(self._waiting.by_class[priority_class] or admitted)

    def set_sparse_limit(self, sparse_limit: int) -> None:
        """Count clients with fewer requests in flight than this as sparse from now on."""
        self._sparse_limit = sparse_limit
        for client in self._eligible:
            self._update_priority_class(client)

    def divide_refills(self, workers_of: Callable[[str], WorkerSet] | None) -> None:
        """Let refills count by the sets of workers that clients wait for, as these are now; see `WorkerSets`.

        `workers_of` returns the workers that serve a route; None if all workers serve the same routes. Takes time in
        proportion to the known clients unless it was and is None.
        """
        if not self._worker_sets.divide(workers_of):
            return
        self._refill_schedule.clear()
        for client, routes in self._waiting.routes.items():
            self._worker_sets.assign(client, routes)
            if client not in self._eligible:
                self._schedule_refill(client)

    def add_waiting(self, request: Request, cost: float = 0.0) -> None:
        """Add a waiting request. A new client starts with one quantum, Q^u times its weight; a client that begins to
        wait keeps at most what a round adds, and likewise at its second turn if it has been in credit since.

        `cost`: the cost of the request's input now, in cost units. If that is more than a head start, the client is not
        fresh.

        A member of a group that becomes active has at most its share of the group's deficit.
        """
        client = request.client
        active = client in self._active.clients
        quantum_changed = self._deficits.register(request, self._parameters.quantum, active=active)
        if quantum_changed and self._waiting.is_ineligible(client):
            self._schedule_refill(client)
        self._active.add_request(request)
        if client not in self._waiting.routes:
            self._cuts.join(client)
            self._turns.join(client, self._parameters.head_start * self.weight(client), cost)
            if self._rounds is not None:
                self._rounds.join(client)
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
        self._turns.move_to_back(client)
        if client in self._overdue:
            self._overdue.remove(client)
            self._update_eligibility(client)
            if client not in self._eligible:
                self._schedule_refill(client)

    def take_turn(self, client: ClientId) -> None:
        """Count a turn of a waiting client, one of whose requests is about to be dispatched. Only where clients take
        turns in rounds.
        """
        assert self._rounds is not None
        self._rounds.take(client, may_begin=self._class_in_round(client) in ROUND_ROBIN_CLASSES)

    def _may_be_admitted(self, client: ClientId) -> bool:
        """Whether a waiting client that has a turn ahead in this round may take it in spite of its debt."""
        return client not in self._eligible and self._deficits.deficit(client) <= 0 and self._may_take_turn(client)

    def _may_take_turn(self, client: ClientId) -> bool:
        """Whether a client is fresh, has nothing in flight and no more debt than a turn in a round allows."""
        if client in self.in_flight or client not in self._turns.head_starts:
            return False
        return self._deficits.quanta_short(client) <= self._turn_overdraft

    def _admission_changed(self, client: ClientId) -> None:
        self._update_priority_class(client)
        if client in self._waiting.routes:
            self._on_priority_change(client)

    def may_pass_through(self, request: Request, *, refill: bool) -> bool:
        """Whether a client whose request arrives while no client waits is eligible; after a refill, if that is
        allowed.

        While refills are divided, no client passes: rounds may be owed, and are paid to those that wait.
        """
        if self._worker_sets.divided:
            return False
        client = request.client
        active, weight = client in self._active, self._active.weight_with(request)
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
            self._turns.leave(client)
            self._cuts.discard(client)
            if client in self._overdue:
                self._overdue.remove(client)
            if self._rounds is not None:
                self._rounds.leave(client)
        elif self._worker_sets.assign(client, routes) and not eligible:
            self._schedule_refill(client)

    def request_dispatched(self, request: Request) -> None:
        """Count a request as in flight."""
        client = request.client
        self._active.add_request(request)
        self._turns.dispatches += 1
        self.in_flight[client] = self.in_flight.get(client, 0) + 1
        if client in self._waiting.routes:
            self._had_turn(client)
        self._update_priority_class(client)

    def request_ended(self, request: Request) -> None:
        """Count a request as no longer in flight."""
        self.in_flight[request.client] -= 1
        if not self.in_flight[request.client]:
            del self.in_flight[request.client]
        self._active.remove_request(request.client)
        self._update_priority_class(request.client)

    def charge(self, client: ClientId, cost: float) -> bool:
        """Subtract this cost from a client's deficit; a negative cost is a refund. Returns whether the deficit ceased
        to be positive.
        """
        deficit = self._deficits.charge(client, cost)
        if client in self._turns.head_starts and self._turns.use_up(client, cost):
            self._update_priority_class(client)
        if client in self._waiting.routes:
            had = client in self._eligible
            self._update_eligibility(client)
            if client not in self._eligible and (had or cost < 0):
                self._schedule_refill(client)
            if self._rounds is not None and client in self._rounds.admitted and not self._may_take_turn(client):
                self._rounds.end_admission(client)
        return deficit <= 0 < deficit + cost

    def has_positive_deficit(self, client: ClientId) -> bool:
        """Whether a client's deficit is positive, whether the client waits or not."""
        return self._deficits.deficit(client) > 0

    def weight(self, client: ClientId) -> float:
        """A client's weight."""
        return self._deficits.quantum(client) / self._parameters.quantum

    def ineligible_weight(self, routes: Collection[str]) -> float:
        """The total weight of the clients that are not eligible and have a request of one of these routes waiting."""
        ineligible = [
            each for each in self._waiting.routes if each not in self._eligible and self._waiting.wait_on(each, routes)
        ]
        return sum([self.weight(client) for client in ineligible])

    def refill(self, routes: Collection[str] | None = None) -> list[ClientId]:
        """CHECKREFILL: if clients wait and none is eligible, add quanta until one is. Returns the clients that became
        eligible.

        `routes`: consider only clients that have a request of one of these routes waiting.
        """
        if self.any_eligible(routes):
            return []
        client = self._refill_schedule.earliest(lambda each: self._waiting.wait_on(each, routes))
        if client is None:
            return []
        limits = self._refill_limits(client) if self._worker_sets.divided else NO_LIMITS
        self._worker_sets.owe(limits, self._refill_rounds.add_for(client, self._active.weight, limits))
        return self._collect_refilled()

    def _refill_limits(self, client: ClientId) -> Mapping[WorkerSet, float]:
        """How many rounds of a refill for this client count for clients that wait for other sets of workers."""
        needy = self._refill_schedule.earliest_by_clock(lambda _: True)
        fraction = self._refill_rounds.fraction(self._active.weight)
        return self._worker_sets.refill_limits(client, self._eligible, needy, fraction)

    def reset(self) -> None:
        """Give every client one quantum, as at its first request. Called only while no client waits.

        So use of an idle machine leaves no debt, and a client that is new has no advantage over known ones.
        """
        if not self._restored:
            self._deficits.reset()

    def forget(self, client: ClientId) -> None:
        """Keep the counter of a client without requests only if it is in debt."""
        self._deficits.forget(client)
        if self._rounds is not None:
            self._rounds.forget(client)

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

    def pay_owed_rounds(self) -> None:
        """Add the rounds of earlier refills that are owed to clients who wait for other workers; see `WorkerSets`."""
        if self._worker_sets.add_owed(self._eligible):
            self._collect_refilled()

    def mark_overdue(self) -> None:
        """Mark the clients as overdue that are late for a turn, have nothing in flight and at most a small debt."""
        if not self._parameters.overdue_after:
            return
        for client in self._turns.pop_late(len(self._active.clients)):
            if self._rounds is not None and self._has_turn_ahead(client, self._rounds):
                continue
            shortfall = self._deficits.quanta_short(client)
            if client not in self.in_flight and shortfall <= self._parameters.overdraft:
                self._overdue.add(client)
                self._update_eligibility(client)
                self._update_priority_class(client)

    def _has_turn_ahead(self, client: ClientId, rounds: TurnRounds) -> bool:
        """Whether a fresh client takes its turn in this round, or in the next one, to which turns of others lead."""
        if client not in self._turns.head_starts:
            return False
        if rounds.has_turn(client):
            return self._class_in_round(client) == FRESH_AND_SPARSE
        return self.any_in_class(FRESH_AND_SPARSE)

    def _collect_refilled(self) -> list[ClientId]:
        """Mark and return all clients that the refill rounds so far have made eligible."""
        refilled = []
        for client in self._refill_schedule.pop_refilled():
            if self._waiting.is_ineligible(client):
                self._update_eligibility(client)
                if client in self._eligible:
                    refilled.append(client)
                else:
                    self._schedule_refill(client)
        return refilled

    def _schedule_refill(self, client: ClientId) -> None:
        """Note when a waiting client that is not eligible will be."""
        self._cuts.discard(client)
        self._refill_schedule.schedule(client, self._waiting.routes, most=2 * len(self._waiting.routes) + 16)

    def _update_eligibility(self, client: ClientId) -> None:
        """Update whether a waiting client is eligible, and report a change."""
        eligible = self._is_eligible(client)
        if eligible == (client in self._eligible):
            return
        self._waiting.set_class(client, self._class_of(client) if eligible else None)
        self._worker_sets.changed |= not eligible
        self._on_priority_change(client)

    def _update_priority_class(self, client: ClientId) -> None:
        """Update an eligible waiting client's priority class, and report a change."""
        before = self._eligible.get(client)
        if before is not None and before != (priority_class := self._class_of(client)):
            self._waiting.set_class(client, priority_class)
            self._on_priority_change(client)

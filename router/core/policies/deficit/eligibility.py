"""Which client may be served next: DLPM's deficit counters, and which clients wait or have requests in flight.

"Locality-aware Fair Scheduling in LLM Serving", Algorithm 1, CHECKREFILL and line 13, for one queue or for a pool. A
client with a positive deficit is eligible. The theorem leaves the order among eligible clients free. Here, clients of a
lower priority class go first:

1. A client is *overdue* if it has nothing in flight and, since it began to wait or last had a turn, so many requests
   were dispatched that each active client could have had one. It goes first, even with a small debt: a client that paid
   for a long prompt at once need not wait until all others have paid as much.
2. A client is *fresh* if the input of the request with which it began to wait costs no more than a head start, and it
   was not charged more than that since. A client is *sparse* if it has nothing in flight or, in a pool, fewer requests
   than there are workers. Without these classes, a client that seldom sends a request would wait until the long matches
   of a heavy client have used up a quantum. Clients that are both take turns, like new flows in FQ-CoDel (RFC 8290,
   section 4.2): by longest match, some of many clients with one call open each would wait until all others have used up
   a quantum.
   In a pool they may do so in rounds, one turn each, first those whose request has little to compute (`TurnRounds`).
   A fresh client that has had no turn in the current round and has nothing in flight is then *admitted* to it with a
   small debt. It delays no refill. A fresh client that has a turn ahead is not overdue.
3. Then fresh clients go, and then sparse ones: in each class the longest match first.
4. All other eligible clients go last, again by longest match.

A refill round adds at most Q^u, and no more than the workers can serve in a given time, divided by the weights of the
active clients. With N eligible clients, a round of DLPM (Algorithm 1) lasts until each has used Q^u, which takes N ·
Q^u / S seconds at a service rate of S; a client in debt waits that long. So a round adds to each client, per weight,
what the workers serve in a time T, divided by the weights of all active clients. Within a round the longest match still
decides: T, not Q^u, is the time that locality costs others.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from math import floor
from typing import Final

from router.core.clients.debtors import DEBTOR_LIMIT
from router.core.clients.shares import Shares
from router.core.model.prompt_key import CHUNK_BYTES
from router.core.model.request import ClientId, GroupId, Request
from router.core.policies.deficit.deficits import NO_LIMITS, ClientDeficits, WorkerSet
from router.core.policies.deficit.parameters import DeficitParameters
from router.core.policies.deficit.refill_schedule import RefillSchedule
from router.core.policies.deficit.turn_rounds import LITTLE_CHUNKS, TurnRounds
from router.core.policies.deficit.worker_sets import WorkerSets

STEPS = 2**16
"""Fractions of a quantum are multiples of 1 / STEPS, so that sums of them are exact."""
MIN_FRACTION = 0.01
"""The smallest fraction of a quantum that a round adds."""


class Rounds:
    """Computes the fraction of Q^u that a round adds."""

    def __init__(self, parameters: DeficitParameters, rate: Callable[[], float | None]) -> None:
        """`rate` returns the workers' service rate S, in cost units per second; None while it is unknown."""
        self._seconds = parameters.round_seconds
        self._quantum = parameters.quantum
        self._rate = rate

    def fraction(self, weight: float) -> float:
        """The fraction of its quantum that each client receives, in (0, 1], at this total weight of the active
        clients.
        """
        if not self._seconds or weight <= 0 or (rate := self._rate()) is None:
            return 1.0
        fraction = self._seconds * rate / (weight * self._quantum)
        return min(1.0, max(1, floor(STEPS * max(fraction, MIN_FRACTION))) / STEPS)


@dataclass(slots=True)
class Activity:
    """The activity of one client."""

    requests: int
    weight: float
    """The client's weight when it became active."""
    turns_in_credit: int | None = None
    """The turns of a client that waits, since it began to; None once it was in debt or cut since."""


class ActiveClients:
    """The clients with requests that wait in a queue or are in flight from it, and their total weight.

    A client is active from the start of its first request to the end of its last.
    """

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self.clients: Final[dict[ClientId, Activity]] = {}
        self.weight = 0.0
        """The sum of the active clients' weights; their number if each weighs 1."""

    def __len__(self) -> int:
        return len(self.clients)

    def __contains__(self, client: ClientId) -> bool:
        return client in self.clients

    def weight_with(self, request: Request) -> float:
        """Return what the sum of weights would be if this request's client were active."""
        return self.weight if request.client in self.clients else self.weight + self._weight_of(request)

    def add_request(self, request: Request) -> None:
        """Count a request that waits or is in flight. The client's weight counts with its first request."""
        activity = self.clients.get(request.client)
        if activity is None:
            weight = self._weight_of(request)
            self.clients[request.client] = Activity(1, weight)
            self.weight += weight
        else:
            activity.requests += 1

    def _weight_of(self, request: Request) -> float:
        return self._shares.ungrouped.get(request.client) or self._shares.effective_weight(request)

    def remove_request(self, client: ClientId) -> None:
        """Count a request as ended, withdrawn or moved."""
        activity = self.clients[client]
        activity.requests -= 1
        if not activity.requests:
            del self.clients[client]
            self.weight = self.weight - activity.weight if self.clients else 0.0  # 0.0 drops the rounding error


OVERDUE, FRESH_AND_SPARSE, FRESH, SPARSE, ELIGIBLE = range(5)
"""The priority class of an eligible client: lower goes first."""
PRIORITY_CLASSES: Final = ELIGIBLE + 1
ROUND_ROBIN_CLASSES: Final = frozenset((OVERDUE, FRESH_AND_SPARSE))
"""Classes in which the client whose last turn is the longest ago goes first."""
CLOCK_BITS: Final = 64
"""Enough for all turns of a fleet."""


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

        `rate`: the service rate of the workers of this queue; see `Rounds`. `debtors`: how many counters of forgotten
        clients are kept because they are in debt. No client is sparse before `set_sparse_limit`.
        `turn_overdraft`: if given, clients take turns in rounds, and a fresh client may have its turn with a debt of
        this many quanta.
        """
        self._on_priority_change = on_priority_change
        self._parameters = parameters
        self._round_fraction = Rounds(parameters, rate).fraction
        self._sparse_limit = 0
        self._deficits = ClientDeficits(shares, debtors)
        self.deficit: Final = self._deficits.deficit_or_none
        """q_i, in cost units; None for an unknown client."""
        self._active = ActiveClients(shares)
        self._waiting: dict[ClientId, dict[str, int]] = {}
        """The number of each client's waiting requests, by route."""
        self._eligible: dict[ClientId, int] = {}
        """The waiting clients that are eligible, with their priority class."""
        self._rounds: Final = None if turn_overdraft is None else TurnRounds()
        self._turn_overdraft: Final = turn_overdraft or 0.0
        self.waiting_priority_class: Final = self._eligible.get if self._rounds is None else self._class_in_round
        """The priority class of a waiting client; None if the client is not eligible."""
        self.clients_by_class: Final = [0] * PRIORITY_CLASSES
        """The number of waiting eligible clients by priority class; read-only for others."""
        self._eligible_by_route: dict[str, int] = {}
        """The number of waiting eligible clients, by route."""
        self._worker_sets = WorkerSets(self._deficits)
        self._refill_schedule = RefillSchedule(self._deficits, self._waits_ineligible)
        self.in_flight: dict[ClientId, int] = {}
        """The number of each client's requests in flight; read-only for others."""
        self._last_turns: dict[ClientId, int] = {}
        """By waiting client, the clock value of its last turn or of the start of its wait, in increasing order. Values
        are unique."""
        self.last_turn: Final = self._last_turns.__getitem__
        """The clock value of a waiting client's last turn."""
        self._clock = 0
        """Counts turns and starts of waits."""
        self._dispatches = 0
        """Requests dispatched so far."""
        self._overdue_checks: dict[ClientId, int] = {}
        """By waiting client, the number of dispatches at its last check for being overdue, in increasing order."""
        self._overdue: set[ClientId] = set()
        self._head_starts: dict[ClientId, float] = {}
        """What is left of the head start of each fresh waiting client, in cost units."""
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
        if client in self._head_starts:
            return FRESH_AND_SPARSE if sparse else FRESH
        return SPARSE if sparse else ELIGIBLE

    def any_in_class(self, priority_class: int) -> bool:
        """Whether a client of this priority class waits, be it one that is only admitted to a round of turns."""
        if self.clients_by_class[priority_class]:
            return True
        return self._rounds is not None and priority_class == FRESH_AND_SPARSE and bool(self._rounds.admitted)

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
        for client, routes in self._waiting.items():
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
        quantum_changed = self._deficits.register(request, self._parameters.quantum, active=client in self._active)
        if quantum_changed and client in self._waiting and client not in self._eligible:
            self._schedule_refill(client)
        self._active.add_request(request)
        if client not in self._waiting:
            self._start_waiting(client, cost)
        routes, route = self._waiting.setdefault(client, {}), request.route
        self._restored = self._restored and len(self._waiting) == 1
        routes[route] = routes.get(route, 0) + 1
        if routes[route] == 1:
            moved = self._worker_sets.assign(client, routes)
            if client in self._eligible:
                self._add_eligible_on(route, 1)
            elif len(routes) == 1 or moved:
                self._update_eligibility(client)
                if client not in self._eligible:
                    self._schedule_refill(client)

    def resume(self, request: Request) -> None:
        """Count a request as in flight that an earlier run has dispatched. Its client has been active since then."""
        self._deficits.register(request, self._parameters.quantum, active=True)
        self.request_dispatched(request)

    def _start_waiting(self, client: ClientId, cost: float) -> None:
        fraction = self._round_fraction(self._active.weight)
        self._deficits.cap(client, fraction)
        self._active.clients[client].turns_in_credit = 0
        head_start = self._parameters.head_start * self.weight(client)
        if head_start > cost:
            self._head_starts[client] = head_start
        self._move_to_back(client)
        if self._rounds is not None:
            self._rounds.join(client)
            self._admit_to_round(client)

    def _move_to_back(self, client: ClientId) -> None:
        """Put a waiting client behind all others, where clients take turns."""
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

    def turn(self, request: Request, unmatched: int) -> int:
        """When a client has its turn with a waiting request; earlier is less. The client whose last turn is the longest
        ago goes first; where clients take turns in rounds, within an earlier round and with little to compute.

        `unmatched`: minus the chunks of the request that are cached.
        """
        last_turn = self._last_turns[request.client]
        if self._rounds is None:
            return last_turn
        much = sum([prompt.size for prompt in request.prompts]) // CHUNK_BYTES + unmatched > LITTLE_CHUNKS
        return (2 * self._rounds.round_of(request.client) + much << CLOCK_BITS) + last_turn

    def take_turn(self, client: ClientId) -> None:
        """Count a turn of a waiting client, one of whose requests is about to be dispatched. Only where clients take
        turns in rounds.

        Takes time in proportion to the waiting clients when a round begins, which is once in as many turns.
        """
        assert self._rounds is not None
        may_begin = self._class_in_round(client) in ROUND_ROBIN_CLASSES
        if self._rounds.take(client, may_begin=may_begin):
            for each in self._waiting:
                if each != client:
                    self._admit_to_round(each)
        if client in self._rounds.admitted:
            self._revoke_admission(client)

    def _admit_to_round(self, client: ClientId) -> None:
        """Let a client with a small debt have its turn of the current round, if it has had none."""
        assert self._rounds is not None
        if client in self._eligible or self._deficits.deficit(client) > 0:
            return
        if self._rounds.has_turn(client) and self._may_take_turn(client):
            self._rounds.admitted.add(client)
            if client in self._waiting:
                self._on_priority_change(client)

    def _may_take_turn(self, client: ClientId) -> bool:
        """Whether a client is fresh, has nothing in flight and no more debt than a turn in a round allows."""
        if client in self.in_flight or client not in self._head_starts:
            return False
        return self._deficits.quanta_short(client) <= self._turn_overdraft

    def _revoke_admission(self, client: ClientId) -> None:
        assert self._rounds is not None
        self._rounds.admitted.remove(client)
        self._update_priority_class(client)
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
        fraction = self._round_fraction(weight)
        self._deficits.register(request, self._parameters.quantum, active=active)
        deficit = self._deficits.cap(client, fraction)
        if refill and deficit <= 0:
            self._refill_for(client, weight)
            deficit = self._deficits.deficit(client)
        return deficit > 0

    def remove_waiting(self, request: Request) -> None:
        """Remove a request that no longer waits."""
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
                if (priority_class := self._eligible.pop(client, None)) is not None:
                    self.clients_by_class[priority_class] -= 1
                    self._worker_sets.changed = True
                for each in (self._head_starts, self._last_turns, self._overdue_checks):
                    each.pop(client, None)
                self._overdue.discard(client)
                if self._rounds is not None:
                    self._rounds.leave(client)
            elif self._worker_sets.assign(client, routes) and client not in self._eligible:
                self._schedule_refill(client)

    def request_dispatched(self, request: Request) -> None:
        """Count a request as in flight."""
        client = request.client
        self._active.add_request(request)
        self._dispatches += 1
        self.in_flight[client] = self.in_flight.get(client, 0) + 1
        if client in self._waiting:
            activity = self._active.clients[client]
            if activity.turns_in_credit is not None:
                self._cut_at_second_turn(client, activity)
            self._move_to_back(client)
        self._update_priority_class(client)

    def _cut_at_second_turn(self, client: ClientId, activity: Activity) -> None:
        """Let a client that waits on after its second turn in credit keep at most what a round adds now.

        A client with one call open begins to wait with each call. One with several may never cease to wait: if it began
        while few were active, it would keep a whole quantum, and those that came later would wait in debt until that is
        spent. What refills have added is not cut.
        """
        if not activity.turns_in_credit:
            activity.turns_in_credit = 1
            return
        activity.turns_in_credit = None
        self._deficits.cap(client, self._round_fraction(self._active.weight))

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
        if client in self._head_starts:
            self._use_up_head_start(client, cost)
        if client in self._waiting:
            had = client in self._eligible
            self._update_eligibility(client)
            if client not in self._eligible and (had or cost < 0):
                self._schedule_refill(client)
            if self._rounds is not None and client in self._rounds.admitted and not self._may_take_turn(client):
                self._revoke_admission(client)
        return deficit <= 0 < deficit + cost

    def has_positive_deficit(self, client: ClientId) -> bool:
        """Whether a client's deficit is positive, whether the client waits or not."""
        return self._deficits.deficit(client) > 0

    def weight(self, client: ClientId) -> float:
        """A client's weight."""
        return self._deficits.quantum(client) / self._parameters.quantum

    def ineligible_weight(self, routes: Collection[str]) -> float:
        """The total weight of the clients that are not eligible and have a request of one of these routes waiting."""
        ineligible = [each for each in self._waiting if each not in self._eligible and self._waits_on(each, routes)]
        return sum([self.weight(client) for client in ineligible])

    def refill(self, routes: Collection[str] | None = None) -> list[ClientId]:
        """CHECKREFILL: if clients wait and none is eligible, add quanta until one is. Returns the clients that became
        eligible.

        `routes`: consider only clients that have a request of one of these routes waiting.
        """
        if self.any_eligible(routes):
            return []
        client = self._refill_schedule.earliest(lambda each: self._waits_on(each, routes))
        if client is None:
            return []
        limits = self._refill_limits(client) if self._worker_sets.divided else NO_LIMITS
        self._worker_sets.owe(limits, self._refill_for(client, self._active.weight, limits))
        return self._collect_refilled()

    def _refill_limits(self, client: ClientId) -> Mapping[WorkerSet, float]:
        """How many rounds of a refill for this client count for clients that wait for other sets of workers."""
        needy = self._refill_schedule.earliest_by_clock(lambda _: True)
        return self._worker_sets.refill_limits(client, self._eligible, needy, self._round_fraction(self._active.weight))

    def any_eligible(self, routes: Collection[str] | None = None) -> bool:
        """Whether an eligible client waits with a request of one of these routes."""
        return bool(self._eligible) if routes is None else not self._eligible_by_route.keys().isdisjoint(routes)

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

    def saved(self) -> Iterator[tuple[ClientId, float, float]]:
        """Yield each client's deficit and quantum; see `DeficitTable.saved`."""
        return self._deficits.saved()

    def restore(self, client: ClientId, deficit: float, quantum: float) -> None:
        """Load a client's counter. `reset` leaves it alone until two clients wait at once: before that, an empty queue
        does not show whether other clients waited before the restart.
        """
        self._deficits.restore(client, deficit, quantum)
        self._restored = True

    def saved_groups(self) -> Iterator[tuple[GroupId, float, float]]:
        """Yield each group's deficit and quantum; see `ClientDeficits.saved_groups`."""
        return self._deficits.saved_groups()

    def restore_group(self, group: GroupId, deficit: float, quantum: float) -> None:
        """Load a group's counter. Like clients' counters, it is not reset until two clients wait at once."""
        self._deficits.restore_group(group, deficit, quantum)
        self._restored = True

    def _refill_for(self, client: ClientId, weight: float, limits: Mapping[WorkerSet, float] = NO_LIMITS) -> float:
        """Add quanta until this client's deficit is positive. Rounding may leave it at zero; then one more round is
        needed. Returns the rounds.

        `weight`: of all active clients. `limits`: how many rounds count for clients with these sets of workers.
        """
        added = 0.0
        while self._deficits.deficit(client) <= 0:
            left = {workers: max(0.0, limit - added) for workers, limit in limits.items()} if limits else limits
            added += self._deficits.refill_for(client, self._round_fraction(weight), left)
        return added

    def pay_owed_rounds(self) -> None:
        """Add the rounds of earlier refills that are owed to clients who wait for other workers; see `WorkerSets`."""
        if self._worker_sets.add_owed(self._eligible):
            self._collect_refilled()

    def mark_overdue(self) -> None:
        """Mark waiting clients as overdue whose last check is enough dispatches ago."""
        if not self._parameters.overdue_after:
            return
        threshold = self._dispatches - self._parameters.overdue_after * len(self._active)
        while self._overdue_checks:
            client, at = next(iter(self._overdue_checks.items()))
            if at > threshold:
                return
            self._restart_overdue_check(client)
            if self._rounds is not None and self._has_turn_ahead(client, self._rounds):
                continue
            shortfall = self._deficits.quanta_short(client)
            if client not in self.in_flight and shortfall <= self._parameters.overdraft:
                self._overdue.add(client)
                self._update_eligibility(client)
                self._update_priority_class(client)

    def _has_turn_ahead(self, client: ClientId, rounds: TurnRounds) -> bool:
        """Whether a fresh client takes its turn in this round, or in the next one, to which turns of others lead."""
        if client not in self._head_starts:
            return False
        if rounds.has_turn(client):
            return self._class_in_round(client) == FRESH_AND_SPARSE
        return self.any_in_class(FRESH_AND_SPARSE)

    def _restart_overdue_check(self, client: ClientId) -> None:
        """Check again whether the client is overdue after as many dispatches from now as that takes."""
        self._overdue_checks.pop(client, None)
        self._overdue_checks[client] = self._dispatches

    def _waits_ineligible(self, client: ClientId) -> bool:
        return client in self._waiting and client not in self._eligible

    def _waits_on(self, client: ClientId, routes: Collection[str] | None) -> bool:
        return routes is None or not self._waiting[client].keys().isdisjoint(routes)

    def _collect_refilled(self) -> list[ClientId]:
        """Mark and return all clients that the refill rounds so far have made eligible."""
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
        """Note when a waiting client that is not eligible will be."""
        self._active.clients[client].turns_in_credit = None
        self._refill_schedule.schedule(client, self._waiting, most=2 * len(self._waiting) + 16)

    def _update_eligibility(self, client: ClientId) -> None:
        """Update whether a waiting client is eligible, and report a change."""
        eligible = self._is_eligible(client)
        if eligible == (client in self._eligible):
            return
        if eligible:
            priority_class = self._eligible[client] = self._class_of(client)
            self.clients_by_class[priority_class] += 1
        else:
            self.clients_by_class[self._eligible.pop(client)] -= 1
            self._worker_sets.changed = True
        for route in self._waiting[client]:
            self._add_eligible_on(route, 1 if eligible else -1)
        self._on_priority_change(client)

    def _update_priority_class(self, client: ClientId) -> None:
        """Update an eligible waiting client's priority class, and report a change."""
        before = self._eligible.get(client)
        if before is not None and before != (priority_class := self._class_of(client)):
            self._eligible[client] = priority_class
            self.clients_by_class[before] -= 1
            self.clients_by_class[priority_class] += 1
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

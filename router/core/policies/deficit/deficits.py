"""Deficit counters with closed-form refill: DLPM's q_i of clients, and D²LPM's q_{i,w} of clients at workers.

A refill adds quanta, or fractions of quanta, to every counter, up to a deficit of one quantum. The table counts refill
rounds in one number, and each counter takes in the rounds that it missed when it is next read; so a refill costs the
same for any number of counters.

The weights of clients in groups may change as members of their groups come and go, and a refill adds to a member's
counter according to its weight at that time. For that, each group has a clock of its own: each refill round of the
table advances it by the group's scale, and a counter receives its own weight's quantum times the advance of the clock.
So a change of scale touches no counter, and costs the same for any number of members.

Members that take turns would each be refilled in their absence, and client names never seen before would each start
with a positive deficit. So a group also has a counter of its own, as if it were one client of its weight, and a member
that becomes active has at most its share of that counter.

Where workers serve different models, each set of workers that a client's requests may go to has a clock of its own, and
so a refill may count for some sets and not for others.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import filterfalse
from math import floor, inf, nextafter
from types import MappingProxyType
from typing import Final, Generic, NamedTuple, TypeVar

from router.core.clients.debtors import DEBTOR_LIMIT, Debtors
from router.core.clients.shares import Shares
from router.core.model.request import ClientId, GroupId, Request, WorkerId
from router.core.model.saved import SavedCounter

K = TypeVar("K", bound=Hashable)
WorkerSet = frozenset[WorkerId]
"""The workers that a client's waiting requests may go to."""
NO_LIMITS: Final[Mapping[WorkerSet, float]] = MappingProxyType({})


@dataclass(slots=True)
class DeficitCounter:
    """A deficit counter q and the quantum that one refill adds to it, both in cost units."""

    deficit: float
    quantum: float
    rounds: float
    """Refill rounds that the counter has taken in, each counted as the fraction of a quantum that it added."""
    epoch: int
    """The epoch of the table in which the counter was last brought up to date."""
    group: GroupId | None = None
    """The group whose clock counts the rounds; None for clients without a group."""
    workers: WorkerSet | None = None
    """The set of workers whose clock counts the rounds; None while all workers serve the same requests."""


class DeficitTable(Generic[K]):
    """Deficit counters q by key. A key with q > 0 may be served; q < 0 is debt.

    DLPM (Alg. 1) keeps one table per worker, by client; D²LPM (Alg. 2) keeps one per client, by worker. For the refill
    of counters in groups see `ClientDeficits`.
    """

    def __init__(self, debtors: int = DEBTOR_LIMIT) -> None:
        """`debtors`: how many counters of forgotten keys are kept because they are in debt."""
        self._counters: dict[K, DeficitCounter] = {}
        self._debtors: Debtors[K] = Debtors(debtors)
        """Forgotten keys whose counters are kept because they are in debt."""
        self.rounds = 0.0
        """Refill rounds so far, each counted as the fraction of a quantum that it added."""
        self.epoch = 0
        """Incremented to set every counter to one quantum."""

    def __contains__(self, key: K) -> bool:
        return key in self._counters

    def __iter__(self) -> Iterator[K]:
        return iter(self._counters)

    def missing(self, keys: Iterable[K]) -> list[K]:
        """Return those of the keys that have no counter."""
        return [*filterfalse(self._counters.__contains__, keys)]

    def join(self, key: K, quantum: float, deficit: float) -> bool:
        """Start a counter at `deficit`; an existing counter keeps its deficit and takes the new quantum.

        Returns whether the quantum of an existing counter changed.
        """
        counter = self._counters.get(key)
        if self._debtors.keys:
            self._debtors.discard(key)
        if counter is None:
            self._counters[key] = DeficitCounter(deficit, quantum, self.rounds, self.epoch)
            return False
        return self._set_quantum(counter, quantum)

    def _set_quantum(self, counter: DeficitCounter, quantum: float) -> bool:
        """Set what a refill adds to a counter from now on; returns whether that changed."""
        if counter.quantum == quantum:
            return False
        self._catch_up(counter)
        counter.quantum = quantum
        return True

    def deficit(self, key: K) -> float:
        """Return the deficit q of a key; 0 if the key has no counter."""
        counter = self._counters.get(key)
        return 0.0 if counter is None else self._catch_up(counter)

    def deficit_or_none(self, key: K) -> float | None:
        """Return the deficit q of a key; None if the key has no counter."""
        counter = self._counters.get(key)
        return None if counter is None else self._catch_up(counter)

    def restore(self, key: K, deficit: float, quantum: float) -> None:
        """Load a saved counter, to be kept for its debt alone until its key joins."""
        self._counters[key] = DeficitCounter(deficit, quantum, self.rounds, self.epoch)
        self._debtors.keep(key)

    def forget(self, key: K) -> None:
        """Keep a counter only while it is below the one quantum with which it would start again."""
        if key in self._counters:
            for gone in self._debtors.add(key, self._debt):
                del self._counters[gone]

    def drop(self, key: K) -> None:
        """Remove a counter."""
        self._counters.pop(key, None)
        self._debtors.discard(key)

    def _debt(self, key: K) -> float:
        counter = self._counters[key]
        return self._refill_amount(counter) - self._catch_up(counter)

    def saved(self) -> Iterator[tuple[K, float, float]]:
        """Yield each key with its deficit and quantum, for `restore`. Changes nothing.

        Keys may join and counters may change between two items.
        """
        for key in list(self._counters):
            counter = self._counters.get(key)
            if counter is not None:
                yield key, self._current(counter), self._refill_amount(counter)

    def charge(self, key: K, cost: float) -> float | None:
        """Subtract `cost` from a counter; a negative cost is a refund. Returns the deficit q before that; None if the
        key has no counter.
        """
        counter = self._counters.get(key)
        if counter is None:
            return None
        before = self._catch_up(counter)
        counter.deficit = before - cost
        return before

    def rounds_to_positive(self, key: K, fraction: float = 1.0) -> int:
        """Return the number of refill rounds after which this counter is positive, unless it is charged before.

        `fraction`: the fraction of a quantum that each round adds, in (0, 1].
        """
        counter = self._counters[key]
        return _rounds_until_positive(self._catch_up(counter), fraction * self._refill_amount(counter))

    def quanta_short(self, key: K) -> float:
        """Return the number of quanta, not rounded, by which a counter is below zero; negative if the counter is
        positive.
        """
        counter = self._counters[key]
        return -self._catch_up(counter) / self._refill_amount(counter)

    def cap(self, key: K, fraction: float) -> float:
        """Reduce a counter to this fraction of its quantum, and return it. A deficit above one quantum, which only an
        operator grants, stays.
        """
        counter = self._counters[key]
        deficit, amount = self._catch_up(counter), self._refill_amount(counter)
        if fraction * amount < deficit <= amount:
            counter.deficit = fraction * amount
        return counter.deficit

    def refill(self, contenders: Iterable[K], fraction: float = 1.0) -> int:
        """Add this fraction of a quantum per round until some contender's deficit is positive; returns the number of
        rounds.

        This is CHECKREFILL of Alg. 1 and the loop of Alg. 2's SELECTWORKER. Each round adds the same fraction of its
        quantum to every counter, contender or not, up to one quantum, so debts also shrink while a client is absent.
        The rounds are counted, not run: a debt may be thousands of quanta deep.

        Alg. 1 does not refill positive counters. Then a client that uses half of its share would run out in the middle
        of every second round and wait for its end. Here such a client starts each round with a whole quantum. The
        bounds of the theorem still hold, because they rest on q <= Q^u and on what waiting clients receive.
        """
        rounds = min([self.rounds_to_positive(key, fraction) for key in contenders], default=0)
        self.rounds += rounds * fraction
        return rounds

    def _clock(self, counter: DeficitCounter) -> float:  # noqa: ARG002 - a group has its own clock
        """Return the refill rounds so far, as counted for this counter."""
        return self.rounds

    def _refill_amount(self, counter: DeficitCounter) -> float:
        """Return what a round adds to this counter now."""
        return counter.quantum

    def _missed_rounds(self, counter: DeficitCounter) -> float:
        """Return the rounds that this counter has not taken in, in rounds of the present size."""
        return self.rounds - counter.rounds

    def _catch_up(self, counter: DeficitCounter) -> float:
        """Apply the reset and the refills that a counter missed; returns its deficit."""
        clock = self.rounds if counter.group is None and counter.workers is None else self._clock(counter)
        if counter.epoch != self.epoch or counter.rounds != clock:
            counter.deficit = self._current(counter)
            counter.epoch = self.epoch
            counter.rounds = clock
        return counter.deficit

    def _current(self, counter: DeficitCounter) -> float:
        """A counter's deficit after the reset and the refills that it missed. Changes nothing.

        Callers that must leave no trace use this: because of rounding, applying two refills one by one differs from
        applying both at once.
        """
        amount = self._refill_amount(counter)
        if counter.epoch != self.epoch:
            return amount  # refills since the reset did not raise it further
        return max(counter.deficit, min(counter.deficit + self._missed_rounds(counter) * amount, amount))


class RefillClock(NamedTuple):
    """Which clock counts the refill rounds of a client."""

    group: GroupId | None = None
    workers: WorkerSet | None = None


WHOLE_TABLE: Final = RefillClock()


class ClientDeficits(DeficitTable[ClientId]):
    """Counters q_i by client, in cost units."""

    def __init__(self, shares: Shares, debtors: int = DEBTOR_LIMIT) -> None:
        """`debtors`: how many counters of forgotten clients are kept because they are in debt."""
        super().__init__(debtors)
        self._shares = shares
        self._clocks: dict[RefillClock, float] = {}
        """The rounds that count for a clock since it was first needed, each times its group's scale at that time. The
        clock of clients with neither a group nor a set of workers is `rounds`."""
        self._group_counters: dict[GroupId, DeficitCounter] = {}
        """The counter that each group would have if it were one client."""

    def register(self, request: Request, quantum: float, *, active: bool) -> bool:
        """Start the counter of the request's client with one quantum, which is `quantum` for weight 1, or update its
        quantum.

        `active`: whether the client was active before this request. Returns whether the quantum of an existing counter
        changed.
        """
        client, group = request.client, request.group
        known = self._counters.get(client)
        if group is not None:
            self._register_group(group, quantum * request.group_weight)
        elif known is not None and known.group is None and not self._debtors.keys:
            return self._set_quantum(known, quantum * request.weight)
        moved = known is not None and known.group != group
        if known is not None and moved:
            self._catch_up(known)
            known.group = group
            known.rounds = self._start_clock(known)
        new = self.join(client, quantum * request.weight, 0.0) or moved
        counter = self._counters[client]
        if known is None:
            counter.group = group
            counter.rounds = self._start_clock(counter)
            counter.deficit = self._refill_amount(counter)
        if group is not None and not active:
            counter.deficit = min(self._catch_up(counter), self._member_part(counter, self._group_counters[group]))
        return new

    def set_workers(self, client: ClientId, workers: WorkerSet) -> bool:
        """Count the rounds of a client from now on by the clock of this set of workers. Returns whether that changed
        anything.
        """
        counter = self._counters[client]
        if counter.workers == workers:
            return False
        self._catch_up(counter)
        counter.workers = workers
        counter.rounds = self._start_clock(counter)
        return True

    def forget_workers(self) -> None:
        """Let no client have a set of workers any more, because these have changed."""
        for counter in self._counters.values():
            if counter.workers is not None:
                self._catch_up(counter)
                counter.workers = None
                counter.rounds = self._start_clock(counter)
        self._clocks = {clock: rounds for clock, rounds in self._clocks.items() if clock.workers is None}

    def workers_of(self, client: ClientId) -> WorkerSet | None:
        """Return the set of workers by whose clock a client's rounds are counted."""
        return self._counters[client].workers

    def clock_of(self, client: ClientId) -> RefillClock:
        """Return the clock that counts the rounds of a known client."""
        counter = self._counters[client]
        return RefillClock(counter.group, counter.workers)

    def quantum(self, client: ClientId) -> float:
        """Return what a refill adds now to a client's deficit, in cost units."""
        return self._refill_amount(self._counters[client])

    def clock(self, clock: RefillClock) -> float:
        """Return the number of refill rounds so far, as counted by this clock."""
        return self.rounds if clock == WHOLE_TABLE else self._clocks[clock]

    def refill_time(self, client: ClientId) -> float:
        """Return the time on its clock at which a client's deficit is positive, or nearly so, unless the client is
        charged before.

        For a client without a positive deficit, that time is always later than now.
        """
        counter = self._counters[client]
        deficit = self._catch_up(counter)
        return max(counter.rounds - deficit / counter.quantum, nextafter(counter.rounds, inf))

    def refill_for(
        self, client: ClientId, fraction: float = 1.0, limits: Mapping[WorkerSet, float] = NO_LIMITS
    ) -> float:
        """Refill until this client's deficit is positive, by this fraction of a quantum per round.

        `limits`: the most rounds that count for clients with these sets of workers. If that leaves rounds out, none
        count for clients whose set is unknown because they have not waited since the workers changed. Returns the
        rounds.
        """
        before = self.rounds
        self.refill((client,), fraction)
        added = self.rounds - before
        limited = bool(limits) and min(limits.values()) < added
        if limited:
            self.rounds = before
            limited_rounds = [
                (clock, min(added, limits.get(clock.workers, added)))
                for clock in self._clocks
                if clock.workers is not None
            ]
            self._advance(limited_rounds)
            self._refill_groups(limited_rounds)
        else:
            self._advance([(clock, added) for clock in self._clocks])
        return added

    def add_rounds(self, workers: WorkerSet, rounds: float) -> None:
        """Add refill rounds to the clients with this set of workers alone."""
        owed = [(clock, rounds) for clock in self._clocks if clock.workers == workers]
        self._advance(owed)
        self._refill_groups(owed)

    def _advance(self, advances: Collection[tuple[RefillClock, float]]) -> None:
        """Let each of these clocks count so many rounds more."""
        for clock, rounds in advances:
            self._clocks[clock] += rounds if clock.group is None else rounds * self._shares.scale(clock.group)

    def _refill_groups(self, advances: Iterable[tuple[RefillClock, float]]) -> None:
        """Add the rounds that count for some sets of workers to the counters of groups, too: to each as many as to that
        of its members which gets most.
        """
        most: dict[GroupId, float] = {}
        for clock, rounds in advances:
            if clock.group is not None:
                most[clock.group] = max(rounds, most.get(clock.group, 0.0))
        for group, rounds in most.items():
            counter = self._group_counters[group]
            deficit = self._catch_up(counter)
            counter.deficit = max(deficit, min(deficit + rounds * counter.quantum, counter.quantum))

    def charge(self, key: ClientId, cost: float) -> float | None:
        """Also charges the client's group."""
        counter = self._counters.get(key)
        if counter is None:
            return None
        before = self._catch_up(counter)
        counter.deficit = before - cost
        if counter.group is not None:
            group_counter = self._group_counters[counter.group]
            group_counter.deficit = self._catch_up(group_counter) - cost
        return before

    def saved_groups(self) -> Iterator[tuple[GroupId, float, float]]:
        """Yield each group with its deficit and quantum, for `restore_group`. Changes nothing.

        Clocks are not saved: a counter receives the advance of its group's clock since the counter started or was
        restored, so clocks that restart at 0 give the same result.
        """
        for group, counter in list(self._group_counters.items()):
            yield group, self._current(counter), counter.quantum

    def restore_group(self, group: GroupId, deficit: float, quantum: float) -> None:
        """Load a group's counter, so that new client names share the group's debt as they did before the restart."""
        self._group_counters[group] = DeficitCounter(deficit, quantum, self.rounds, self.epoch)

    def _register_group(self, group: GroupId, quantum: float) -> None:
        counter = self._group_counters.get(group)
        if counter is None:
            self._group_counters[group] = DeficitCounter(quantum, quantum, self.rounds, self.epoch)
        elif counter.quantum != quantum:
            self._catch_up(counter)
            counter.quantum = quantum

    def _member_part(self, counter: DeficitCounter, group_counter: DeficitCounter) -> float:
        """A member's share of its group's deficit."""
        return self._catch_up(group_counter) * self._refill_amount(counter) / group_counter.quantum

    def _start_clock(self, counter: DeficitCounter) -> float:
        """Return the rounds so far as counted by a counter's clock, which starts if it is new."""
        clock = RefillClock(counter.group, counter.workers)
        return self.rounds if clock == WHOLE_TABLE else self._clocks.setdefault(clock, 0.0)

    def _clock(self, counter: DeficitCounter) -> float:
        return self.clock(RefillClock(counter.group, counter.workers))

    def _refill_amount(self, counter: DeficitCounter) -> float:
        return counter.quantum if counter.group is None else counter.quantum * self._shares.scale(counter.group)

    def _missed_rounds(self, counter: DeficitCounter) -> float:
        missed = self._clock(counter) - counter.rounds
        return missed if counter.group is None else missed / self._shares.scale(counter.group)


class WorkerDeficits:
    """For each client, a deficit counter per worker, which limits how long its requests stay there.

    "Locality-aware Fair Scheduling in LLM Serving", section 5.2, Algorithm 2, with two rules that it leaves open. A
    worker that is new to a client starts with the client's highest deficit at any worker; otherwise it would receive no
    requests. And Q^w is scaled with the worker's measured service rate, so that a slow worker holds its clients for the
    same time as a fast one, not for the same cost.
    """

    def __init__(self, quantum: float, speed: Callable[[WorkerId], float], shares: Shares) -> None:
        """`quantum`: Q^w, in cost units, of a client of weight 1 at a worker of mean speed."""
        self._quantum = quantum
        self._speed = speed
        self._shares = shares
        self._tables: defaultdict[ClientId, DeficitTable[WorkerId]] = defaultdict(DeficitTable)
        self.complete: Final[dict[ClientId, Collection[WorkerId]]] = {}
        """By client, workers of which each has a counter: most often those of the next request are the same ones.
        Read-only for others.
        """

    def refilled_table(self, request: Request, workers: Collection[WorkerId]) -> DeficitTable[WorkerId]:
        """Return the client's counters, with one for each of these workers, refilled until at least one of these is
        positive. `workers`: as in `table`.
        """
        table = self.table(request, workers)
        if all(table.deficit(worker) <= 0 for worker in workers):
            quantum = self._quantum_of(request)
            for worker in workers:
                table.join(worker, quantum * self._speed(worker), 0.0)
            table.refill(workers)
        return table

    def table(self, request: Request, workers: Collection[WorkerId]) -> DeficitTable[WorkerId]:
        """Return the client's counters, with one for each of these workers, which must never change."""
        table = self._tables[request.client]
        if self.complete.get(request.client) is workers:
            return table
        self.complete[request.client] = workers
        if missing := table.missing(workers):
            highest = max([table.deficit(known) for known in table], default=0.0)
            quantum = self._quantum_of(request)
            for worker in missing:
                table.join(worker, quantum * self._speed(worker), highest)
        return table

    def _quantum_of(self, request: Request) -> float:
        """Q^w of the request's client at a worker of mean speed."""
        return self._quantum * self._shares.effective_weight(request)

    def charge(self, client: ClientId, worker: WorkerId, cost: float) -> float | None:
        """Subtract this cost from a client's deficit at a worker; a negative cost is a refund. Returns the deficit
        before that, as `deficit` does.
        """
        return self._tables[client].charge(worker, cost)

    def forget(self, client: ClientId) -> None:
        """Discard a client's counters: they are no debt towards other clients."""
        self._tables.pop(client, None)
        self.complete.pop(client, None)

    def forget_worker(self, worker: WorkerId) -> None:
        """Discard all counters for a worker."""
        self.complete.clear()
        for table in self._tables.values():
            table.drop(worker)

    def saved(self) -> Iterator[SavedCounter]:
        """Yield every counter. Counters may change between two items."""
        for client in list(self._tables):
            table = self._tables.get(client)
            for worker, deficit, quantum in table.saved() if table is not None else ():
                yield SavedCounter(client, worker, deficit, quantum)

    def restore(self, rows: Iterable[SavedCounter]) -> None:
        """Load saved counters."""
        for client, worker, deficit, quantum in rows:
            if worker is not None:
                self._tables[client].join(worker, quantum, deficit)

    def deficit(self, client: ClientId, worker: WorkerId) -> float | None:
        """q_{i,w}, in cost units; None for a worker that the client was never placed among."""
        table = self._tables.get(client)
        return None if table is None else table.deficit_or_none(worker)


def _rounds_until_positive(deficit: float, quantum: float) -> int:
    """Return the number of quanta that makes this deficit positive."""
    if deficit > 0:
        return 0
    rounds = floor(-deficit / quantum) + 1
    # Rounding can leave the sum at or just below zero.
    return rounds if deficit + rounds * quantum > 0 else rounds + 1

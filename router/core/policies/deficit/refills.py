"""CHECKREFILL of DLPM ("Locality-aware Fair Scheduling in LLM Serving", Algorithm 1): when each waiting client will be
refilled, which one is first, and for whom the rounds count.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from heapq import heapify, heappop, heappush, heapreplace
from typing import NamedTuple

from router.core.model.request import ClientId
from router.core.policies.deficit.deficits import NO_LIMITS, ClientDeficits, RefillClock, WorkerSet
from router.core.policies.deficit.refill_rounds import RefillRounds
from router.core.policies.deficit.waiting_index import WaitingIndex
from router.core.policies.deficit.worker_sets import WorkerSets


class Refill(NamedTuple):
    """The time on its clock at which a waiting client becomes eligible. By now it may be later, but not
    earlier.
    """

    time: float
    client: ClientId


class RefillSchedule:
    """Expected refills, in one heap per clock, because a round adds different amounts to different groups, and may not
    count for some sets of workers.

    The cost of finding the first client does not grow with the number of clients that share a clock.
    """

    def __init__(self, deficits: ClientDeficits, ineligible: Callable[[ClientId], bool]) -> None:
        """`ineligible` returns whether a client waits and is not eligible."""
        self._deficits = deficits
        self._is_ineligible = ineligible
        self._heaps: dict[RefillClock, list[Refill]] = {}

    def __len__(self) -> int:
        """Return the number of entries, stale ones included."""
        return sum([len(heap) for heap in self._heaps.values()])

    def schedule(self, client: ClientId, waiting: Iterable[ClientId], most: int) -> None:
        """Note when a client will be eligible. With more than `most` entries in its heap, keep only clients that are
        `waiting`.
        """
        clock = self._deficits.clock_of(client)
        heap = self._heaps.setdefault(clock, [])
        heappush(heap, Refill(self._deficits.refill_time(client), client))
        if len(heap) > most:
            ineligible = [
                each for each in waiting if self._is_ineligible(each) and self._deficits.clock_of(each) == clock
            ]
            heap[:] = [Refill(self._deficits.refill_time(each), each) for each in ineligible]
            heapify(heap)

    def earliest(self, counts: Callable[[ClientId], bool]) -> ClientId | None:
        """Return the client that needs the fewest rounds, of those for which `counts` is true."""
        heads = self.earliest_by_clock(counts)
        if len(heads) < 2:
            return heads[0] if heads else None
        return min(heads, key=self._deficits.quanta_short)

    def earliest_by_clock(self, counts: Callable[[ClientId], bool]) -> list[ClientId]:
        """Return the client of each clock that needs the fewest rounds, of those for which `counts` is true."""
        return [earliest for clock in list(self._heaps) if (earliest := self._earliest_of(clock, counts)) is not None]

    def pop_refilled(self) -> list[ClientId]:
        """Remove and return the clients whose time has come."""
        refilled = []
        for clock, heap in self._heaps.items():
            now = self._deficits.clock(clock)
            while heap and heap[0].time <= now:
                refilled.append(heappop(heap).client)
        return refilled

    def clear(self) -> None:
        """Drop all entries."""
        self._heaps.clear()

    def _earliest_of(self, clock: RefillClock, counts: Callable[[ClientId], bool]) -> ClientId | None:
        heap, deficits = self._heaps[clock], self._deficits
        aside = []
        found = None
        while heap and found is None:
            entry = heap[0]
            if not self._is_ineligible(entry.client) or deficits.clock_of(entry.client) != clock:
                heappop(heap)
            elif (refill_time := deficits.refill_time(entry.client)) > entry.time:
                heapreplace(heap, Refill(refill_time, entry.client))
            elif not counts(entry.client):
                aside.append(heappop(heap))
            else:
                found = entry.client
        for entry in aside:
            heappush(heap, entry)
        if not heap:
            del self._heaps[clock]
        return found


class Refills:
    """Adds rounds to the deficits of all clients once no waiting one is eligible."""

    __slots__ = ("_on_refilled", "_on_rounds", "_rounds", "_schedule", "_waiting", "sets")

    def __init__(
        self,
        deficits: ClientDeficits,
        rounds: RefillRounds,
        waiting: WaitingIndex,
        on_refilled: Callable[[ClientId], None],
        on_rounds: Callable[[], None],
    ) -> None:
        """`on_refilled` is called with each waiting client whose deficit may be positive now, and then `on_rounds`: all
        debts may be smaller now.
        """
        self._rounds = rounds
        self._waiting = waiting
        self._on_refilled = on_refilled
        self._on_rounds = on_rounds
        self.sets = WorkerSets(deficits)
        """The sets of workers that clients wait for."""
        self._schedule = RefillSchedule(deficits, waiting.is_ineligible)

    def schedule(self, client: ClientId) -> None:
        """Note when a waiting client that is not eligible will be."""
        routes = self._waiting.routes
        self._schedule.schedule(client, routes, most=2 * len(routes) + 16)

    def divide(self, workers_of: Callable[[str], WorkerSet] | None) -> None:
        """Let refills count by the sets of workers that clients wait for, as these are now; see `WorkerSets`.

        `workers_of` returns the workers that serve a route; None if all workers serve the same routes. Takes time in
        proportion to the known clients unless it was and is None.
        """
        if not self.sets.divide(workers_of):
            return
        self._schedule.clear()
        for client, routes in self._waiting.routes.items():
            self.sets.assign(client, routes)
            if client not in self._waiting.classes:
                self.schedule(client)

    def refill(self, routes: Collection[str] | None = None) -> list[ClientId]:
        """If clients wait and none is eligible, add quanta until one is. Returns the clients that became eligible.

        `routes`: consider only clients that have a request of one of these routes waiting.
        """
        if self._waiting.any_eligible(routes):
            return []
        client = self.next_client(routes)
        if client is None:
            return []
        limits = self._limits(client) if self.sets.divided else NO_LIMITS
        self.sets.owe(limits, self._rounds.add_for(client, self._rounds.active.weight, limits))
        return self._collect()

    def next_client(self, routes: Collection[str] | None = None) -> ClientId | None:
        """Return the client for whom the next refill is, which needs the fewest rounds; None if no client needs one.

        `routes`: as in `refill`.
        """
        return self._schedule.earliest(lambda each: self._waiting.wait_on(each, routes))

    def pay_owed_rounds(self) -> None:
        """Add the rounds of earlier refills that are owed to clients who wait for other workers; see `WorkerSets`."""
        if self.sets.add_owed(self._waiting.classes):
            self._collect()

    def _limits(self, client: ClientId) -> Mapping[WorkerSet, float]:
        """Return how many rounds of a refill for this client count for clients that wait for other sets of workers."""
        needy = self._schedule.earliest_by_clock(lambda _: True)
        fraction = self._rounds.fraction(self._rounds.active.weight)
        return self.sets.refill_limits(client, self._waiting.classes, needy, fraction)

    def _collect(self) -> list[ClientId]:
        """Report the clients that the rounds so far may have made eligible; returns those that are."""
        refilled = []
        for client in self._schedule.pop_refilled():
            if self._waiting.is_ineligible(client):
                self._on_refilled(client)
                if client in self._waiting.classes:
                    refilled.append(client)
                else:
                    self.schedule(client)
        self._on_rounds()
        return refilled

"""When waiting clients that are not eligible will be."""

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush, heapreplace
from typing import NamedTuple

from router.core.model.request import ClientId
from router.core.policies.deficit.deficits import ClientDeficits, RefillClock


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
        """The number of entries, stale ones included."""
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
        """The client that needs the fewest rounds, of those for which `counts` is true."""
        heads = self.earliest_by_clock(counts)
        if len(heads) < 2:
            return heads[0] if heads else None
        return min(heads, key=self._deficits.quanta_short)

    def earliest_by_clock(self, counts: Callable[[ClientId], bool]) -> list[ClientId]:
        """The client of each clock that needs the fewest rounds, of those for which `counts` is true."""
        return [earliest for clock in list(self._heaps) if (earliest := self._earliest_of(clock, counts)) is not None]

    def pop_refilled(self) -> list[ClientId]:
        """Remove and return the clients whose time has come."""
        pop_refilled = []
        for clock, heap in self._heaps.items():
            now = self._deficits.clock(clock)
            while heap and heap[0].time <= now:
                pop_refilled.append(heappop(heap).client)
        return pop_refilled

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

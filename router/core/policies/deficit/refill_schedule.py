"""When waiting clients that are not eligible will be."""

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush, heapreplace
from typing import NamedTuple

from router.core.model.request import ClientId, GroupId
from router.core.policies.deficit.deficits import ClientDeficits


class Refill(NamedTuple):
    """The time on its group's clock at which a waiting client becomes eligible. By now it may be later, but not
    earlier.
    """

    time: float
    client: ClientId


class RefillSchedule:
    """Expected refills, in one heap per group, because a round adds different amounts to different groups.

    The cost of finding the first client does not grow with the number of members of a group.
    """

    def __init__(self, deficits: ClientDeficits, ineligible: Callable[[ClientId], bool]) -> None:
        """`ineligible` returns whether a client waits and is not eligible."""
        self._deficits = deficits
        self._is_ineligible = ineligible
        self._heaps: dict[GroupId | None, list[Refill]] = {}

    def __len__(self) -> int:
        """The number of entries, stale ones included."""
        return sum([len(heap) for heap in self._heaps.values()])

    def schedule(self, client: ClientId, waiting: Iterable[ClientId], most: int) -> None:
        """Note when a client will be eligible. With more than `most` entries in its heap, keep only clients that are
        `waiting`.
        """
        group = self._deficits.group_of(client)
        heap = self._heaps.setdefault(group, [])
        heappush(heap, Refill(self._deficits.refill_time(client), client))
        if len(heap) > most:
            ineligible = [
                each for each in waiting if self._is_ineligible(each) and self._deficits.group_of(each) == group
            ]
            heap[:] = [Refill(self._deficits.refill_time(each), each) for each in ineligible]
            heapify(heap)

    def earliest(self, counts: Callable[[ClientId], bool]) -> ClientId | None:
        """The client that needs the fewest rounds, of those for which `counts` is true."""
        heads = [earliest for group in list(self._heaps) if (earliest := self._earliest_of(group, counts)) is not None]
        if len(heads) < 2:
            return heads[0] if heads else None
        return min(heads, key=self._deficits.quanta_short)

    def pop_refilled(self) -> list[ClientId]:
        """Remove and return the clients whose time has come."""
        pop_refilled = []
        for group, heap in self._heaps.items():
            clock = self._deficits.clock(group)
            while heap and heap[0].time <= clock:
                pop_refilled.append(heappop(heap).client)
        return pop_refilled

    def _earliest_of(self, group: GroupId | None, counts: Callable[[ClientId], bool]) -> ClientId | None:
        heap, deficits = self._heaps[group], self._deficits
        aside = []
        found = None
        while heap and found is None:
            entry = heap[0]
            if not self._is_ineligible(entry.client) or deficits.group_of(entry.client) != group:
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
            del self._heaps[group]
        return found

"""When waiting clients without credit will have some."""

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush, heapreplace
from typing import NamedTuple

from router.core.model.request import ClientId, GroupId
from router.core.policies.deficit.client_deficits import ClientDeficits


class Refill(NamedTuple):
    """The time on its group's clock by which a waiting client has credit; it may be later by now, but not earlier."""

    time: float
    client: ClientId


class RefillSchedule:
    """What is expected, by group: what a round brings to one is another thing than what it brings to the next.

    To look for who is first costs no more with many members of a group than with few.
    """

    def __init__(self, deficits: ClientDeficits, poor: Callable[[ClientId], bool]) -> None:
        """`poor`: whether a client waits and has no credit."""
        self._deficits = deficits
        self._poor = poor
        self._heaps: dict[GroupId | None, list[Refill]] = {}

    def __len__(self) -> int:
        """How much is noted, what holds no more included."""
        return sum([len(heap) for heap in self._heaps.values()])

    def expect(self, client: ClientId, waiting: Iterable[ClientId], most: int) -> None:
        """Note when a client will have credit. If more than `most` are noted, only those of who is `waiting` stay."""
        group = self._deficits.group_of(client)
        heap = self._heaps.setdefault(group, [])
        heappush(heap, Refill(self._deficits.due(client), client))
        if len(heap) > most:
            poor = [each for each in waiting if self._poor(each) and self._deficits.group_of(each) == group]
            heap[:] = [Refill(self._deficits.due(each), each) for each in poor]
            heapify(heap)

    def first(self, counts: Callable[[ClientId], bool]) -> ClientId | None:
        """Whom the fewest rounds give credit, of those that count."""
        firsts = [first for group in list(self._heaps) if (first := self._first_of(group, counts)) is not None]
        if len(firsts) < 2:
            return firsts[0] if firsts else None
        return min(firsts, key=self._deficits.lacks)

    def come(self) -> list[ClientId]:
        """Take out those whose time has come."""
        come = []
        for group, heap in self._heaps.items():
            clock = self._deficits.clock(group)
            while heap and heap[0].time <= clock:
                come.append(heappop(heap).client)
        return come

    def _first_of(self, group: GroupId | None, counts: Callable[[ClientId], bool]) -> ClientId | None:
        heap, deficits = self._heaps[group], self._deficits
        aside = []
        found = None
        while heap and found is None:
            due = heap[0]
            if not self._poor(due.client) or deficits.group_of(due.client) != group:
                heappop(heap)
            elif (now_due := deficits.due(due.client)) > due.time:
                heapreplace(heap, Refill(now_due, due.client))
            elif not counts(due.client):
                aside.append(heappop(heap))
            else:
                found = due.client
        for due in aside:
            heappush(heap, due)
        if not heap:
            del self._heaps[group]
        return found

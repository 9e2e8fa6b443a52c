"""The workers of a pool in order of their loads, kept from the changes that the fleet reports.

The order of dispatch is by requests in flight, and of equals the worker that was sent nothing for longest. The order in
which homes are chosen also counts the requests that wait at home there, and of equals takes the worker that joined
first.
"""

from bisect import bisect_left, insort
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import nsmallest
from itertools import islice
from operator import itemgetter
from typing import Final

from router.core.model.request import WorkerId
from router.core.policies.context import FleetView

FEW: Final = 16
"""This many workers or fewer are compared one by one."""
_worker = itemgetter(2)
LoadKey = tuple[int, int, WorkerId]
"""The load, what decides between equals, and the worker."""


class LoadOrder:
    """Workers in the order of their keys. A change costs O(log workers), and moving their references."""

    def __init__(self) -> None:
        self._keys: dict[WorkerId, LoadKey] = {}
        self._ordered: list[LoadKey] = []

    def __iter__(self) -> Iterator[LoadKey]:
        """Iterate in order. The order must not change meanwhile."""
        return iter(self._ordered)

    def set(self, load: int, tie: int, worker: WorkerId) -> None:
        """Set a worker's key."""
        key, known = (load, tie, worker), self._keys.get(worker)
        if key != known:
            if known is not None:
                del self._ordered[bisect_left(self._ordered, known)]
            self._keys[worker] = key
            insort(self._ordered, key)

    def remove(self, worker: WorkerId) -> None:
        """Remove a worker, if it is there."""
        if (key := self._keys.pop(worker, None)) is not None:
            del self._ordered[bisect_left(self._ordered, key)]

    def with_load(self, load: int) -> list[WorkerId]:
        """Return the workers with exactly this load."""
        ordered = self._ordered
        start, end = bisect_left(ordered, (load,)), bisect_left(ordered, (load + 1,))
        return [worker for _, _, worker in ordered[start:end]]

    def least(self, wanted: Container[WorkerId], count: int) -> list[WorkerId]:
        """Return the first of the wanted workers, at most `count`."""
        return [*islice(filter(wanted.__contains__, map(_worker, self._ordered)), count)]


@dataclass(slots=True)
class PoolWorker:
    """A worker of the pool."""

    joined: int
    """Its number in the order in which workers joined the fleet."""
    added: int
    """The same for the pool, which a worker leaves when it is ejected."""
    at_home: int = 0
    """The requests that wait at home there."""
    last_dispatch: int = 0
    """The number of the last request dispatched there, counted over all workers."""


class FleetLoads:
    """The loads of a pool's workers."""

    def __init__(self, view: FleetView) -> None:
        self._view = view
        self._workers: dict[WorkerId, PoolWorker] = {}
        self._with_room = LoadOrder()
        self._by_homes = LoadOrder()
        self._longest_homes = LoadOrder()
        self._outdated: dict[WorkerId, None] = {}
        """The workers whose places by homes are not up to date. They change with every request and are rarely read."""
        self._outdated_longest: dict[WorkerId, None] = {}
        """The same of the longest homes, which are read only where nothing else may go."""
        self._dispatches = self._added = 0

    def add(self, worker: WorkerId) -> None:
        """Add a worker, with nothing at home there."""
        self._added += 1
        self._workers[worker] = PoolWorker(self._view.joined(worker), self._added)
        self._update(worker)

    def remove(self, worker: WorkerId) -> None:
        """Remove a worker."""
        del self._workers[worker]
        self._with_room.remove(worker)
        self._by_homes.remove(worker)
        self._longest_homes.remove(worker)
        self._outdated.pop(worker, None)
        self._outdated_longest.pop(worker, None)

    def dispatched(self, worker: WorkerId) -> None:
        """Note that a request is sent to a worker. The fleet then reports its load as changed."""
        self._dispatches += 1
        self._workers[worker].last_dispatch = self._dispatches

    def add_at_home(self, worker: WorkerId, change: int) -> None:
        """Note that this many more requests wait at home at a worker; negative if fewer. Ignored once it is removed."""
        if (entry := self._workers.get(worker)) is None:
            return
        entry.at_home += change
        self._outdated[worker] = self._outdated_longest[worker] = None

    @property
    def with_room(self) -> LoadOrder:
        """The workers with room for any request, by requests in flight; of equals, the one that waited longest."""
        self._take_changes()
        return self._with_room

    @property
    def longest_home_without_room(self) -> WorkerId | None:
        """The worker without room at which most requests wait at home; None if none wait at any."""
        self._order_longest_homes()
        with_room = self._view.with_room
        return next((worker for _, _, worker in self._longest_homes if worker not in with_room), None)

    def least_loaded(
        self, workers: Mapping[WorkerId, object], besides: Mapping[WorkerId, object], count: int
    ) -> Iterable[WorkerId]:
        """Return those of these workers, `besides` others, that have the lowest load with what waits at home there."""
        self._take_changes()
        if len(workers) > FEW:
            self._order_homes()
            found = self._by_homes.least(workers, count + len(besides))
            return [worker for worker in found if worker not in besides][:count]
        keys = [self._homes_key(worker) for worker in workers if worker not in besides]
        return [worker for _, _, worker in nsmallest(count, keys)]

    def _take_changes(self) -> None:
        if changed := self._view.changed_loads:
            for worker in changed:
                if worker in self._workers:
                    self._update(worker)
            changed.clear()

    def _update(self, worker: WorkerId) -> None:
        entry = self._workers[worker]
        in_flight = self._view.with_room.get(worker)
        if in_flight is None:
            self._with_room.remove(worker)
        else:
            self._with_room.set(in_flight, entry.last_dispatch, worker)
        self._outdated[worker] = None

    def _order_homes(self) -> None:
        """Bring the order by loads with what waits at home up to date."""
        for worker in self._outdated:
            self._by_homes.set(*self._homes_key(worker))
        self._outdated.clear()

    def _homes_key(self, worker: WorkerId) -> LoadKey:
        entry = self._workers[worker]
        return entry.at_home + self._view.in_flight(worker), entry.joined, worker

    def _order_longest_homes(self) -> None:
        """Bring the order by what waits at home up to date."""
        for worker in self._outdated_longest:
            entry = self._workers[worker]
            if entry.at_home:
                self._longest_homes.set(-entry.at_home, entry.added, worker)
            else:
                self._longest_homes.remove(worker)
        self._outdated_longest.clear()

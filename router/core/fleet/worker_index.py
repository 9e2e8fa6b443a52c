"""What is asked over all workers at once, kept up to date by each worker, so that no question visits them all."""

from collections.abc import Mapping
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import Final

from router.core.fleet.service_rate import FleetRates
from router.core.model.request import WorkerId


class WorkerIndex:
    """The workers with room, the loads that changed, and the next deadline. Every operation is O(log workers)."""

    def __init__(self) -> None:
        self._with_room: dict[WorkerId, int] = {}
        self.with_room: Final[Mapping[WorkerId, int]] = self._with_room
        """The workers with room for any request, each with its number of requests in flight."""
        self.changed_loads: Final[dict[WorkerId, None]] = {}
        """The workers whose load or room may have changed; whoever reads these removes them."""
        self.rates: Final = FleetRates()
        self._deadlines: dict[WorkerId, float] = {}
        """When time alone changes something at a worker."""
        self._since: dict[WorkerId, int] = {}
        """Of each worker with a deadline, a number that rises with each worker that begins to have one."""
        self._heap: list[tuple[float, WorkerId]] = []
        """All deadlines, and some that hold no longer."""
        self._serial = count()
        self.next_deadline = inf
        """The earliest deadline; infinite if there is none."""

    def set_load(self, worker: WorkerId, in_flight: int, *, has_room: bool) -> None:
        """Note how many requests a worker has in flight, and whether it has room for any."""
        if has_room:
            self._with_room[worker] = in_flight
        else:
            self._with_room.pop(worker, None)
        self.changed_loads[worker] = None

    def set_deadline(self, worker: WorkerId, at: float) -> None:
        """Set a worker's deadline; infinite if it has none."""
        known = self._deadlines.get(worker, inf)
        if at == known:
            return
        if at == inf:
            del self._deadlines[worker], self._since[worker]
        else:
            if known == inf:
                self._since[worker] = next(self._serial)
            self._deadlines[worker] = at
            heappush(self._heap, (at, worker))
            if len(self._heap) > 2 * len(self._deadlines) + 16:
                self._heap = [(deadline, each) for each, deadline in self._deadlines.items()]
                heapify(self._heap)
        if known == self.next_deadline or at < self.next_deadline:  # else the earliest is another one, as before
            self._find_next()

    def _find_next(self) -> None:
        """Find the earliest deadline, and drop what is before it in the heap and holds no longer."""
        heap, deadlines = self._heap, self._deadlines
        while heap:
            at, worker = heap[0]
            if deadlines.get(worker) == at:
                self.next_deadline = at
                return
            heappop(heap)
        self.next_deadline = inf

    def due(self, now: float) -> list[WorkerId]:
        """Return the workers whose deadlines are over, those first that have had one for longest."""
        due: dict[WorkerId, None] = {}
        while self.next_deadline <= now:
            _, worker = heappop(self._heap)
            due[worker] = None
            self._find_next()
        for worker in due:  # a deadline stands until the worker sets another one
            heappush(self._heap, (self._deadlines[worker], worker))
        self._find_next()
        return sorted(due, key=self._since.__getitem__)

    def remove(self, worker: WorkerId) -> None:
        """Forget a worker."""
        self._with_room.pop(worker, None)
        self._deadlines.pop(worker, None)
        self._since.pop(worker, None)
        self.changed_loads.pop(worker, None)
        self.rates.remove(worker)
        self._find_next()

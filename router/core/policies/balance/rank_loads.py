"""The loads of a pool's workers, by the groups that step together.

Workers that wait for no other are balanced among each other, as if they stepped together.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from router.core.fleet.in_flight import InFlightTable
from router.core.model.request import BarrierId, WorkerId
from router.core.policies.context import FleetView


class RankWithRoom(NamedTuple):
    """A worker that has room, at the time of a decision."""

    worker: WorkerId
    places: float
    """How many more requests it may have in flight, at least 1."""
    margin: int
    """How many tokens it may take before it is the fullest of its group."""
    group: Collection[WorkerId]
    """All workers that it steps together with, itself among them."""


class RankLoads:
    """The workers of a pool."""

    def __init__(self, view: FleetView) -> None:
        self._view = view
        self._groups: dict[BarrierId | None, Mapping[WorkerId, InFlightTable]] = {}
        self._barriers: dict[WorkerId, BarrierId | None] = {}
        self._last_dispatches: dict[WorkerId, int] = {}
        """The number of the last request dispatched to each worker, counted over all of them."""
        self._dispatches = 0

    @property
    def any_group(self) -> bool:
        """Whether any of the workers steps together with others."""
        return any(barrier is not None for barrier in self._groups)

    def worker_joined(self, worker: WorkerId) -> None:
        """Add a worker, or note to which group it belongs now."""
        if worker in self._barriers:
            self.worker_left(worker)
        barrier = self._barriers[worker] = self._view.barrier(worker)
        self._groups[barrier] = {**self._groups.get(barrier, {}), worker: self._view.in_flight_table(worker)}

    def worker_left(self, worker: WorkerId) -> None:
        """Remove a worker."""
        barrier = self._barriers.pop(worker)
        self._last_dispatches.pop(worker, None)
        group = {each: table for each, table in self._groups[barrier].items() if each != worker}
        if group:
            self._groups[barrier] = group
        else:
            del self._groups[barrier]

    def note_dispatch(self, worker: WorkerId) -> None:
        """Note that a request is sent to a worker."""
        self._dispatches += 1
        if worker in self._barriers:
            self._last_dispatches[worker] = self._dispatches

    def with_room(self) -> list[list[RankWithRoom]]:
        """Return the workers with room of each group, the lightest first, of equals the one that was sent nothing for
        longest; and the groups in the order of their mean loads.
        """
        view, room, last = self._view, self._view.with_room, self._last_dispatches
        if not room:
            return []
        groups: list[tuple[float, int, list[RankWithRoom]]] = []
        for number, group in enumerate(self._groups.values()):
            with_room = [worker for worker in group if worker in room]
            if not with_room:
                continue
            loads = [table.context_tokens for table in group.values()]
            most = max(loads)
            ranks = [
                RankWithRoom(worker, max(1, view.free_places(worker)), most - group[worker].context_tokens, group)
                for worker in with_room
            ]
            ranks.sort(key=lambda rank: (-rank.margin, last.get(rank.worker, 0)))
            groups.append((sum(loads) / len(loads), number, ranks))
        return [ranks for _, _, ranks in sorted(groups)]

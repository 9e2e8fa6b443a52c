"""The loads of a pool's workers, by the groups that step together.

Workers that wait for no other are balanced among each other, as if they stepped together.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter
from typing import Final, NamedTuple

from router.core.fleet.in_flight import InFlightTable
from router.core.model.request import BarrierId, WorkerId
from router.core.policies.context import FleetView

_context_tokens: Final = attrgetter("context_tokens")


class RankWithRoom(NamedTuple):
    """A worker that has room, at the time of a decision."""

    worker: WorkerId
    margin: int
    """How many tokens it may take before it is the fullest of its group."""
    group: Mapping[WorkerId, "Rank"]
    """All workers that it steps together with, itself among them."""


@dataclass(slots=True)
class Rank:
    """A worker of a group."""

    worker: WorkerId
    joined: int
    """Its number in the order in which they joined the pool."""
    in_flight: InFlightTable
    last_dispatch: int = 0
    """The number of the last request dispatched there, counted over all workers."""


@dataclass(slots=True)
class RankGroup:
    """Workers that step together, in the order in which they joined."""

    ranks: dict[WorkerId, Rank] = field(default_factory=dict)
    in_flight: list[InFlightTable] = field(default_factory=list)
    """Their tables, in a list: every decision reads the loads of all of them."""


class RankLoads:
    """The workers of a pool."""

    def __init__(self, view: FleetView) -> None:
        self._view = view
        self._groups: dict[BarrierId | None, RankGroup] = {}
        self._barriers: dict[WorkerId, BarrierId | None] = {}
        self._joins = count()
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
        group = self._groups.setdefault(barrier, RankGroup())
        rank = group.ranks[worker] = Rank(worker, next(self._joins), self._view.in_flight_table(worker))
        group.in_flight.append(rank.in_flight)

    def worker_left(self, worker: WorkerId) -> None:
        """Remove a worker."""
        barrier = self._barriers.pop(worker)
        group = self._groups[barrier]
        del group.ranks[worker]
        group.in_flight = [rank.in_flight for rank in group.ranks.values()]
        if not group.ranks:
            del self._groups[barrier]

    def note_dispatch(self, worker: WorkerId) -> None:
        """Note that a request is sent to a worker."""
        self._dispatches += 1
        if worker in self._barriers:
            self._groups[self._barriers[worker]].ranks[worker].last_dispatch = self._dispatches

    def with_room(self) -> list[list[RankWithRoom]]:
        """Return the workers with room of each group, the lightest first, of equals the one that was sent nothing for
        longest; and the groups in the order of their mean loads.
        """
        room = self._view.with_room
        if not room:
            return []
        groups: list[tuple[float, int, list[RankWithRoom]]] = []
        for number, group in enumerate(self._groups.values()):
            if ranks := _ranks_in(group, room):
                loads: list[int] = [*map(_context_tokens, group.in_flight)]
                mean = sum(loads) / len(loads) if len(self._groups) > 1 else 0.0  # there is nothing to order else
                groups.append((mean, number, _in_order(ranks, max(loads), group)))
        return [ranks for _, _, ranks in sorted(groups)]


def _ranks_in(group: RankGroup, room: Mapping[WorkerId, object]) -> list[Rank]:
    """Return the ranks of a group that have room. Most often few of many workers have."""
    if len(room) < len(group.ranks):
        return [rank for worker in room if (rank := group.ranks.get(worker)) is not None]
    return [rank for worker, rank in group.ranks.items() if worker in room]


def _in_order(ranks: Iterable[Rank], most: int, group: RankGroup) -> list[RankWithRoom]:
    """These ranks of a group whose fullest rank has `most` tokens, the lightest first."""
    ordered = sorted([(rank.in_flight.context_tokens, rank.last_dispatch, rank.joined, rank.worker) for rank in ranks])
    return [RankWithRoom(worker, most - load, group.ranks) for load, _, _, worker in ordered]

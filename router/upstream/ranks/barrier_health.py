"""One health for all ranks of a barrier group, whichever URL each of them is behind."""

import logging
from collections.abc import Callable

from router.core.model.events import Event, WorkerJoined, WorkerLeft
from router.core.model.request import BarrierId, WorkerId
from router.upstream.directory import WorkerDirectory

log = logging.getLogger(__name__)


class BarrierHealth:
    """Passes events on, but of a group all workers join together, and leave together.

    A step of a rank lasts until the last rank of its group has ended its own, so one that is dead stops all.
    """

    def __init__(self, directory: WorkerDirectory, feed: Callable[[Event], None]) -> None:
        self._directory = directory
        self._feed = feed
        self._groups: dict[WorkerId, BarrierId] = {}
        """Of the workers in a group that are up."""
        self._up: dict[BarrierId, dict[WorkerId, WorkerJoined]] = {}
        """The workers of each group that are up, with their last join events."""
        self._whole: set[BarrierId] = set()
        """The groups of which all workers have joined."""

    def feed(self, event: Event) -> None:
        """Pass an event on, or keep it until its group is whole."""
        match event:
            case WorkerJoined(worker):
                barrier = self._directory[worker.id].health_group
                self.forget(worker.id, unless=barrier)
                if barrier is None:
                    self._feed(event)
                else:
                    self._join(barrier, event)
            case WorkerLeft(worker_id) if worker_id in self._groups:
                self._leave(self._groups[worker_id], worker_id)
            case _:
                self._feed(event)

    def forget(self, worker: WorkerId, unless: BarrierId | None = None) -> None:
        """Take a worker out of its group, unless it is this one, because it has none any more or another."""
        barrier = self._groups.get(worker)
        if barrier is None or barrier == unless:
            return
        del self._groups[worker]
        up = self._up[barrier]
        del up[worker]
        if not up:
            del self._up[barrier]
            self._whole.discard(barrier)

    def complete(self) -> None:
        """Let the groups join that waited for a worker that is no longer part of the fleet."""
        for barrier in self._up.keys() - self._whole:
            self._join_if_whole(barrier)

    def _join(self, barrier: BarrierId, event: WorkerJoined) -> None:
        self._groups[event.worker.id] = barrier
        self._up.setdefault(barrier, {})[event.worker.id] = event
        if barrier in self._whole:
            self._feed(event)
        else:
            self._join_if_whole(barrier)

    def _join_if_whole(self, barrier: BarrierId) -> None:
        up = self._up[barrier]
        if self._members(barrier) <= up.keys():
            self._whole.add(barrier)
            for joined in up.values():
                self._feed(joined)

    def _leave(self, barrier: BarrierId, worker: WorkerId) -> None:
        """Take the group out of service, unless the worker is no longer part of it."""
        if worker not in self._members(barrier):
            self.forget(worker)
            self._feed(WorkerLeft(worker))
            return
        was_whole = barrier in self._whole
        self._whole.discard(barrier)
        others = [each for each in self._up[barrier] if each != worker]
        self.forget(worker)
        if was_whole:
            server = self._directory[worker].url
            if any(self._directory[each].url != server for each in others):
                log.warning("group %s is down, because its worker %s is", barrier, worker)
            for each in (worker, *others):
                self._feed(WorkerLeft(each))

    def _members(self, barrier: BarrierId) -> set[WorkerId]:
        return {endpoint.id for endpoint in self._directory.endpoints if endpoint.health_group == barrier}

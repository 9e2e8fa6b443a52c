"""Taking workers out by hand: what runs there ends, and nothing new goes there until it is put back."""

from collections.abc import Callable
from typing import Final

from router.core.model.events import Event, WorkerJoined, WorkerLeft
from router.core.model.request import WorkerId


class WorkerDrain:
    """Stands between those who watch the workers and the scheduler, for which a worker taken out has left."""

    def __init__(self, feed: Callable[[Event], None]) -> None:
        self._feed = feed
        self._joined: dict[WorkerId, WorkerJoined] = {}
        """Those that are there, taken out or not."""
        self.drained: Final[set[WorkerId]] = set()
        """Those taken out."""

    def feed(self, event: Event) -> None:
        """Pass an event on, unless by it a worker would come back that was taken out."""
        match event:
            case WorkerJoined(worker):
                self._joined[worker.id] = event
                if worker.id in self.drained:
                    return
            case WorkerLeft(gone):
                self._joined.pop(gone, None)
        self._feed(event)

    def drain(self, worker: WorkerId) -> None:
        """Send it nothing more, and place its queue anew; one that is taken out stays so."""
        if worker not in self.drained:
            self.drained.add(worker)
            self._feed(WorkerLeft(worker))

    def resume(self, worker: WorkerId) -> None:
        """Put it back, if it is there; as one that was away, it is trusted little by little."""
        if worker in self.drained:
            self.drained.remove(worker)
            if (joined := self._joined.get(worker)) is not None:
                self._feed(joined)

    def forget(self, worker: WorkerId) -> None:
        """It is no more of the fleet."""
        self.drained.discard(worker)
        self._joined.pop(worker, None)

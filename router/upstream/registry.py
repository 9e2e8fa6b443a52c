"""Which workers there are: listed, discovered, or added by an operator; and which of them are being drained."""

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import ClassVar, Final

from router.config.settings import Settings, WorkerAddress
from router.core.model.commands import Command
from router.core.model.events import Cancelled, Event, Failed, Finished, Returned, WorkerJoined, WorkerLeft
from router.core.model.request import WorkerId
from router.errors import UnknownWorker, WorkerExists
from router.upstream.directory import WorkerDirectory, WorkerEndpoint
from router.upstream.kv_endpoints import KvPublisher
from router.upstream.poller import Poller


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


log = logging.getLogger(__name__)

OPERATOR: Final = "the operator"


def endpoint_of(worker: WorkerAddress, settings: Settings) -> WorkerEndpoint:
    """A worker as it is reached."""
    key = worker.api_key or settings.worker_api_key
    sources: tuple[KvPublisher, ...] = ()
    if worker.kv_events is not None:
        sources = (KvPublisher(worker.kv_events, worker.kv_replay, worker.kv_topic.encode()),)
    return WorkerEndpoint(WorkerId(worker.id), worker.url, key.get_secret_value() if key else None, sources=sources)


class WorkerRegistry:
    """Adds workers to all who must know them, and takes them out again; the only one who does."""

    event_types: ClassVar[Collection[type[Event]]] = (Finished, Failed, Returned, Cancelled, WorkerLeft)

    def __init__(
        self,
        fleet: WorkerDirectory,
        monitor: Poller,
        drain: WorkerDrain,
        runs: Callable[[WorkerId], bool],
        backend: Callable[[WorkerAddress], WorkerEndpoint],
    ) -> None:
        """`runs`: whether a worker may be sent requests or has some under way; `backend`: one as it is reached."""
        self._directory = fleet
        self._poller = monitor
        self._drain = drain
        self._is_in_use = runs
        self._endpoint_of = backend
        self._named: dict[str, dict[str, WorkerAddress]] = {OPERATOR: {}}
        """By source and URL."""
        self._removed_by_operator: set[str] = set()
        """URLs that the operator removed and a source still names."""
        self._known: dict[str, WorkerAddress] = {}
        """By URL, those that are there or leaving."""
        self._leaving: dict[WorkerId, bool] = {}
        """With whether the operator had taken them out before."""

    def set_source_workers(self, source: str, workers: Iterable[WorkerAddress]) -> None:
        """All that a source names now; replaces what it named before."""
        named = {worker.url: worker for worker in workers}
        if named != self._named.get(source):
            self._named[source] = named
            self._reconcile()

    def add(self, worker: WorkerAddress) -> None:
        """The operator names one more. Raises WorkerExists where its URL or id is there."""
        known = self._known.get(worker.url)
        if known is not None and WorkerId(known.id) not in self._leaving:
            raise WorkerExists(known.id)
        if any(other.id == worker.id and other.url != worker.url for other in self._known.values()):
            raise WorkerExists(worker.id)
        self._removed_by_operator.discard(worker.url)
        self._named[OPERATOR][worker.url] = worker
        self._reconcile()

    def remove(self, worker: str) -> None:
        """The operator wants one gone, whoever names it. Raises UnknownWorker."""
        address = next((known for known in self._known.values() if known.id == worker), None)
        if address is None:
            raise UnknownWorker(worker)
        self._named[OPERATOR].pop(address.url, None)
        self._removed_by_operator.add(address.url)
        self._reconcile()

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:  # noqa: ARG002 - see `Observer`
        """Something may have ended at a worker that leaves."""
        if self._leaving:
            self._remove_drained()

    def _reconcile(self) -> None:
        """Have there be what is named. By the events of a worker's leaving this may be called within itself."""
        named: dict[str, WorkerAddress] = {}
        for workers in self._named.values():
            named = workers | named  # who named it first counts
        self._removed_by_operator &= named.keys()
        named = {url: worker for url, worker in named.items() if url not in self._removed_by_operator}
        for url, known in list(self._known.items()):
            if url in self._known:
                self._keep(known) if named.get(url) == known else self._begin_leaving(known)
        for url, worker in named.items():
            if url not in self._known:
                self._join(worker)

    def _join(self, worker: WorkerAddress) -> None:
        backend = self._endpoint_of(worker)
        if any(other.id == backend.id for other in self._directory.endpoints):
            log.warning("worker %s at %s is left out: another one has this id", worker.id, worker.url)
            return
        self._known[worker.url] = worker
        self._directory.add(backend)
        self._poller.add(backend)
        log.info("worker %s at %s is one of the fleet", worker.id, worker.url)

    def _keep(self, worker: WorkerAddress) -> None:
        """It is to be there; if it was leaving, it comes back as it was."""
        was_out = self._leaving.pop(WorkerId(worker.id), None)
        if was_out is False:
            self._drain.resume(WorkerId(worker.id))

    def _begin_leaving(self, worker: WorkerAddress) -> None:
        id_ = WorkerId(worker.id)
        if id_ not in self._leaving:
            log.info("worker %s is drained, and then no more of the fleet", worker.id)
            self._leaving[id_] = id_ in self._drain.drained
            self._drain.drain(id_)
            self._remove_drained()

    def _remove_drained(self) -> None:
        """Forget those that leave and have nothing under way any more."""
        gone = [worker for worker in self._leaving if not self._is_in_use(worker)]
        for worker in gone:
            del self._leaving[worker]
            self._known.pop(self._directory[worker].url)
            self._poller.remove(worker)
            self._directory.remove(worker)
            self._drain.forget(worker)
        if gone:
            self._reconcile()  # it may be named with another key or id by now

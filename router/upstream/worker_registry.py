"""The set of workers, whether listed in the settings, discovered or added by an operator, and which are drained."""

import json
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from router.config.addresses import WorkerAddress
from router.config.settings import Settings, revealed
from router.core.model.commands import Command
from router.core.model.events import (
    Cancelled,
    Event,
    Failed,
    Finished,
    HandoffLost,
    Prefilled,
    Returned,
    WorkerJoined,
    WorkerLeft,
)
from router.core.model.request import Connector, Role, WorkerId
from router.errors import UnknownWorker, WorkerExists
from router.upstream.directory import WorkerDirectory, WorkerEndpoint
from router.upstream.kv_endpoints import KvPublisher
from router.upstream.polling.poller import Poller


class WorkerDrain:
    """Filters the poller's events on their way to the scheduler, for which a drained worker has left."""

    def __init__(self, feed: Callable[[Event], None]) -> None:
        self._feed = feed
        self._joined: dict[WorkerId, WorkerJoined] = {}
        """The last join event of each worker that is up, drained or not."""
        self.drained: Final[set[WorkerId]] = set()
        """The workers that are drained, or being drained."""

    def feed(self, event: Event) -> None:
        """Pass an event on, unless it would bring a drained worker back."""
        match event:
            case WorkerJoined(worker):
                self._joined[worker.id] = event
                if worker.id in self.drained:
                    return
            case WorkerLeft(gone):
                self._joined.pop(gone, None)
        self._feed(event)

    def drain(self, worker: WorkerId) -> None:
        """Take a worker out of scheduling: it is sent no more requests and its queue is reassigned.

        Does nothing if the worker is drained already.
        """
        if worker not in self.drained:
            self.drained.add(worker)
            self._feed(WorkerLeft(worker))

    def resume(self, worker: WorkerId) -> None:
        """Put a drained worker back, if it is up. It starts slowly, like any worker that was down."""
        if worker in self.drained:
            self.drained.remove(worker)
            if (joined := self._joined.get(worker)) is not None:
                self._feed(joined)

    def forget(self, worker: WorkerId) -> None:
        """Drop all state of a worker that is no longer part of the fleet."""
        self.drained.discard(worker)
        self._joined.pop(worker, None)


log = logging.getLogger(__name__)

OPERATOR: Final = "the operator"


def endpoint_of(worker: WorkerAddress, settings: Settings) -> WorkerEndpoint:
    """Return the endpoint of a worker that the settings, a source or the operator names."""
    key = worker.api_key or settings.worker_api_key
    sources: tuple[KvPublisher, ...] = ()
    if worker.kv_events is not None:
        sources = (KvPublisher(worker.kv_events, worker.kv_replay, worker.kv_topic.encode()),)
    return WorkerEndpoint(
        WorkerId(worker.id),
        worker.url,
        key.get_secret_value() if key else None,
        sources=sources,
        group=worker.group,
        rank=worker.rank,
        named_role=Role(worker.role),
        named_connector=Connector(worker.connector or settings.connector),
        role=Role(worker.role),
        bootstrap_port=worker.bootstrap_port,
    )


@dataclass(frozen=True, slots=True)
class OperatorChanges:
    """What an operator changed of the fleet; it outlives a run of the scheduler, but not the router."""

    added: tuple[str, ...] = ()
    """The workers that were added, each as the JSON of a `WorkerAddress` with its key in the clear."""
    removed: tuple[str, ...] = ()
    """URLs of workers that were removed although a source names them."""
    drained: tuple[WorkerId, ...] = ()


class WorkerRegistry:
    """Adds workers to the directory and the poller, and removes them once drained; nothing else does."""

    event_types: ClassVar[Collection[type[Event]]] = (
        Finished,
        Failed,
        Returned,
        Prefilled,
        HandoffLost,
        Cancelled,
        WorkerLeft,
    )

    def __init__(
        self,
        directory: WorkerDirectory,
        poller: Poller,
        drain: WorkerDrain,
        is_in_use: Callable[[WorkerId], bool],
        endpoint_of: Callable[[WorkerAddress], WorkerEndpoint],
    ) -> None:
        """`is_in_use`: whether a worker may be sent requests or has some in flight."""
        self._directory = directory
        self._poller = poller
        self._drain = drain
        self._is_in_use = is_in_use
        self._endpoint_of = endpoint_of
        self._named: dict[str, dict[str, WorkerAddress]] = {OPERATOR: {}}
        """The workers that each source names, by source and URL."""
        self._removed_by_operator: dict[str, bool] = {}
        """URLs that the operator removed and a source still names. False until that is seen, after a restart."""
        self._known: dict[str, WorkerAddress] = {}
        """The workers of the fleet by URL, including those that are leaving."""
        self._leaving: dict[WorkerId, bool] = {}
        """The workers that are leaving, each with whether the operator had drained it before."""

    def set_source_workers(self, source: str, workers: Iterable[WorkerAddress]) -> None:
        """Replace the workers that a source names."""
        named = {worker.url: worker for worker in workers}
        if named != self._named.get(source):
            self._named[source] = named
            self._reconcile()

    def add(self, worker: WorkerAddress) -> None:
        """Add a worker that the operator names. Raises WorkerExists if its URL or id is taken."""
        known = self._known.get(worker.url)
        if known is not None and WorkerId(known.id) not in self._leaving:
            raise WorkerExists(known.id)
        if any(other.id == worker.id and other.url != worker.url for other in self._known.values()):
            raise WorkerExists(worker.id)
        self._removed_by_operator.pop(worker.url, None)
        self._named[OPERATOR][worker.url] = worker
        self._reconcile()

    def remove(self, worker: str) -> None:
        """Remove a worker for the operator, even if a source still names it. Raises UnknownWorker."""
        address = next((known for known in self._known.values() if known.id == worker), None)
        if address is None:
            raise UnknownWorker(worker)
        self._named[OPERATOR].pop(address.url, None)
        self._removed_by_operator[address.url] = True
        self._reconcile()

    def operator_changes(self) -> OperatorChanges:
        """Return what the operator has changed."""
        added = [json.dumps(worker.model_dump(), default=revealed) for worker in self._named[OPERATOR].values()]
        drained = [worker for worker in sorted(self._drain.drained) if self._leaving.get(worker, True)]
        return OperatorChanges(tuple(added), tuple(self._removed_by_operator), tuple(drained))

    def repeat(self, changes: OperatorChanges) -> None:
        """Make the changes that the operator made in an earlier run. Called before anything else."""
        self._drain.drained.update(changes.drained)
        self._removed_by_operator = dict.fromkeys(changes.removed, False)
        added = [WorkerAddress.model_validate_json(worker) for worker in changes.added]
        self._named[OPERATOR] = {worker.url: worker for worker in added}
        self._reconcile()

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:  # noqa: ARG002 - see `Observer`
        """Remove leaving workers whose last request this event may have ended."""
        if self._leaving:
            self._remove_drained()

    def _reconcile(self) -> None:
        """Bring the fleet in line with what the sources name.

        Draining a worker feeds an event to the scheduler, whose observers include this registry, so this method may be
        re-entered through `observe`.
        """
        named: dict[str, WorkerAddress] = {}
        for workers in self._named.values():
            named = workers | named  # the first source that names a worker wins
        removed = self._removed_by_operator.items()
        self._removed_by_operator = {
            url: was_named or url in named for url, was_named in removed if url in named or not was_named
        }
        named = {url: worker for url, worker in named.items() if url not in self._removed_by_operator}
        for url, known in list(self._known.items()):
            if url in self._known:
                self._keep(known) if named.get(url) == known else self._begin_leaving(known)
        for url, worker in named.items():
            if url not in self._known:
                self._join(worker)

    def _join(self, worker: WorkerAddress) -> None:
        endpoint = self._endpoint_of(worker)
        if any(other.id == endpoint.id for other in self._directory.endpoints):
            log.warning("worker %s at %s is ignored: another worker has this id", worker.id, worker.url)
            return
        self._known[worker.url] = worker
        self._directory.add(endpoint)
        self._poller.add(endpoint)
        log.info("worker %s at %s added to the fleet", worker.id, worker.url)

    def _keep(self, worker: WorkerAddress) -> None:
        """Keep a worker; if it was leaving, put it back as it was."""
        was_drained = self._leaving.pop(WorkerId(worker.id), None)
        if was_drained is False:
            for each in self._directory.behind(WorkerId(worker.id)):
                self._drain.resume(each.id)

    def _begin_leaving(self, worker: WorkerAddress) -> None:
        worker_id = WorkerId(worker.id)
        if worker_id not in self._leaving:
            log.info("worker %s is being drained, then removed from the fleet", worker.id)
            self._leaving[worker_id] = worker_id in self._drain.drained
            for each in self._directory.behind(worker_id):
                self._drain.drain(each.id)
            self._remove_drained()

    def _remove_drained(self) -> None:
        """Remove the leaving workers that have no request in flight any more."""
        behind = self._directory.behind
        gone = [each for each in self._leaving if not any(self._is_in_use(rank.id) for rank in behind(each))]
        for worker in gone:
            del self._leaving[worker]
            self._known.pop(self._directory[worker].url)
            self._poller.remove(worker)
            for each in behind(worker):
                self._drain.forget(each.id)
            self._directory.remove(worker)
            self._poller.removed()
        if gone:
            self._reconcile()  # a source may name a removed worker again with another key or id

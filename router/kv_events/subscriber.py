"""Follows the KV events of every worker that publishes any, and tells the scheduler what they say.

Observer: a worker is followed from the time it joins until it leaves. Where its events are, it says itself, unless that
was configured. While a stream cannot be read, or has not been read from its beginning, the mirror stands in for it.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import ClassVar, Final, Self
from urllib.parse import urlsplit

import httpx
import zmq.asyncio

from router.core.kv_blocks.block_names import BlockChange
from router.core.kv_blocks.kv_events import EventsReport
from router.core.model.block_key import BlockHasher
from router.core.model.commands import Command, Dispatch
from router.core.model.events import (
    EVENTS,
    BlocksChanged,
    BlocksFollowed,
    BlocksLost,
    Cancelled,
    Event,
    Evicted,
    Failed,
    Finished,
    WorkerJoined,
    WorkerLeft,
)
from router.core.model.request import RequestId, WorkerId
from router.errors import WorkerBroke
from router.kv_events.stream import EventStream, FaultLog, StreamLimits
from router.upstream.directory import WorkerDirectory, WorkerEndpoint
from router.upstream.kv_endpoints import READERS, KvPublisher
from router.upstream.poll_client import fetch, polling_client

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 60.0
"""After a worker has not told where it publishes."""
TOKENS_THAT_FILL_A_BLOCK: Final = 1024
"""Uncached tokens of a prompt that must have filled a block of any engine's."""


class WorkerFollower:
    """The streams of one worker."""

    def __init__(
        self,
        backend: WorkerEndpoint,
        feed: Callable[[Event], None],
        hasher: BlockHasher,
        limits: StreamLimits,
        publishes: Callable[[], None],
    ) -> None:
        """`publishes`: called when the worker is found to publish any."""
        self.endpoint: Final = backend
        self._feed = feed
        self._hasher = hasher
        self._limits = limits
        self._publishes = publishes
        self._complaints = FaultLog(backend.id, limits.log_seconds)
        self._streams: list[EventStream] = []
        self._told: BlocksFollowed | None = None

    @property
    def block_tokens(self) -> int | None:
        """Tokens in a block of this worker's; None while it is not followed."""
        return None if self._told is None else self._told.block_tokens

    @property
    def report(self) -> EventsReport:
        """Its state at this moment."""
        told = self._told
        faults = dict(self._complaints.counts)
        return EventsReport(len(self._streams), told is not None, told is not None and told.complete, faults)

    def await_news(self) -> None:
        """The worker must have filled blocks."""
        now = asyncio.get_running_loop().time()
        if len(self._streams) == 1:  # of several nobody knows which
            self._streams[0].await_news(now)

    async def run(self, context: zmq.asyncio.Context, client: httpx.AsyncClient) -> None:
        """Follow the worker until cancelled; returns at once where it publishes nothing."""
        sources = self.endpoint.sources or await self._ask(client)
        if not sources:
            log.info(
                "worker %s publishes no KV events: it is believed to hold what is sent there, and nothing at first",
                self.endpoint.id,
            )
            return
        self._streams = [self._stream(source, rank, context) for rank, source in enumerate(sources)]
        self._publishes()
        log.info("worker %s publishes KV events: %s", self.endpoint.id, ", ".join(s.endpoint for s in sources))
        await asyncio.gather(*(stream.run() for stream in self._streams))

    def stop(self) -> None:
        """The worker is gone; what is to be told of that, others tell."""
        self._streams = []
        self._told = None

    def _stream(self, source: KvPublisher, rank: int, context: zmq.asyncio.Context) -> EventStream:
        def tell(change: BlockChange) -> None:
            if self._told is not None and any(change):
                self._feed(BlocksChanged(self.endpoint.id, rank, *change))

        return EventStream(
            source, context, self._hasher, self._complaints, self._limits, tell, self._on_state, self._on_restart
        )

    def _on_state(self) -> None:
        """Tell what is known in general, if that has changed."""
        size = next((stream.block_tokens for stream in self._streams if stream.block_tokens is not None), None)
        if size is None:
            if self._told is not None:
                self._told = None
                self._feed(BlocksLost(self.endpoint.id))
            return
        complete = all(stream.complete for stream in self._streams)
        state = BlocksFollowed(self.endpoint.id, size, len(self._streams), complete)
        if state != self._told:
            self._told = state
            self._feed(state)

    def _on_restart(self) -> None:
        log.info("worker %s has restarted, by its KV events: its cache is empty", self.endpoint.id)
        self._feed(Evicted(self.endpoint.id))

    async def _ask(self, client: httpx.AsyncClient) -> tuple[KvPublisher, ...]:
        """Where the worker publishes; asked again while it does not answer."""
        while True:
            try:
                return await self._sources(client)
            except (httpx.HTTPError, WorkerBroke) as error:
                log.warning("worker %s does not tell whether it publishes KV events: %s", self.endpoint.id, error)
            await asyncio.sleep(RETRY_SECONDS)

    async def _sources(self, client: httpx.AsyncClient) -> tuple[KvPublisher, ...]:
        host = urlsplit(self.endpoint.url).hostname or ""
        for path, read in READERS.items():
            try:
                return read(await fetch(client, self.endpoint.url + path, self.endpoint.authorization), host)
            except httpx.HTTPStatusError as error:
                if error.response.status_code != httpx.codes.NOT_FOUND:
                    raise
        return ()


class BlockFillObserver:
    """Observer: says which worker must have filled blocks, by the requests that it has finished."""

    event_types: ClassVar[Collection[type[Event]]] = EVENTS

    def __init__(self, filled: Callable[[WorkerId], None]) -> None:
        self._filled = filled
        self._at: dict[RequestId, WorkerId] = {}

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:  # noqa: ARG002 - no clock here
        """See `Observer`."""
        match event:
            case Finished(request, usage):
                worker = self._at.pop(request, None)
                if worker and usage and usage.input_tokens - (usage.cached_tokens or 0) >= TOKENS_THAT_FILL_A_BLOCK:
                    self._filled(worker)
            case Failed(request) | Cancelled(request):
                self._at.pop(request, None)
        for command in commands:
            if isinstance(command, Dispatch):
                self._at[command.request] = command.worker


class KvEventSubscriber:
    """All followers, for as long as the context is entered."""

    event_types: ClassVar[Collection[type[Event]]] = (WorkerJoined, WorkerLeft)

    def __init__(
        self,
        fleet: WorkerDirectory,
        feed: Callable[[Event], None],
        hasher: BlockHasher,
        limits: StreamLimits,
        publishes: Callable[[], None],
    ) -> None:
        """`publishes`: called once, when the first worker is found to publish any events."""
        self._fleet = fleet
        self._follower = partial(WorkerFollower, feed=feed, hasher=hasher, limits=limits, publishes=self._found)
        self._publishes = publishes
        self._publishing = False
        self._followers: dict[WorkerId, WorkerFollower] = {}
        self._tasks: dict[WorkerId, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        """Workers that join from now on are followed."""
        self._context = zmq.asyncio.Context()
        self._client = polling_client()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop, and close every socket."""
        tasks = list(self._tasks.values())
        for worker in list(self._tasks):
            self._stop(worker)
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()
        self._context.destroy(linger=0)

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:  # noqa: ARG002 - nothing else counts
        """See `Observer`."""
        match event:
            case WorkerJoined(worker):
                self._start(worker.id)
            case WorkerLeft(worker_id):
                self._stop(worker_id)

    def filled(self, worker: WorkerId) -> None:
        """A worker must have filled blocks."""
        if worker in self._tasks:
            self._followers[worker].await_news()

    def block_sizes(self, model: str) -> Collection[int]:
        """The block sizes of the workers that are followed and serve this model."""
        return {
            follower.block_tokens
            for follower in self._followers.values()
            if follower.block_tokens is not None and model in follower.endpoint.models
        }

    def report(self) -> Mapping[WorkerId, EventsReport]:
        """The state of every worker that publishes anything."""
        reports = {worker: follower.report for worker, follower in self._followers.items()}
        return {worker: report for worker, report in reports.items() if report.publishers}

    def _start(self, worker: WorkerId) -> None:
        if worker not in self._tasks:
            self._meet()
            task = asyncio.create_task(self._followers[worker].run(self._context, self._client))
            task.add_done_callback(_log_failure)
            self._tasks[worker] = task

    def _meet(self) -> None:
        """A follower for each worker that there is now, and none for those that are gone."""
        before = self._followers
        self._followers = {
            backend.id: known
            if (known := before.get(backend.id)) is not None and known.endpoint is backend
            else self._follower(backend)
            for backend in self._fleet.endpoints
        }

    def _stop(self, worker: WorkerId) -> None:
        task = self._tasks.pop(worker, None)
        if task is not None:
            task.cancel()
            self._followers[worker].stop()

    def _found(self) -> None:
        """A worker publishes."""
        if not self._publishing:
            self._publishing = True
            self._publishes()


def _log_failure(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("following a worker's KV events failed inside the router", exc_info=error)

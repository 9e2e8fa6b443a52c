"""Follows the KV events of every worker that publishes them, and feeds them to the scheduler.

A worker is followed from the time it joins until it leaves. It is asked where it publishes, unless that is configured.
While a stream cannot be read, or was not read from its beginning, the cache mirror stands in for it.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import ClassVar, Final, Self
from urllib.parse import urlsplit

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
from router.core.model.request import RequestId, Takes, WorkerId
from router.errors import WorkerBroke
from router.kv_events.stream import EventStream, FaultLog, StreamLimits
from router.upstream.directory import WorkerDirectory, WorkerEndpoint
from router.upstream.kv_endpoints import READERS, KvPublisher
from router.upstream.polling.poll_client import OtherStatus, PollClient

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 60.0
"""Pause before a worker that failed to answer is asked again where it publishes."""
TOKENS_THAT_FILL_A_BLOCK: Final = 1024
"""Uncached prompt tokens that fill at least one block of any engine."""


class WorkerFollower:
    """Follows all streams of one worker."""

    def __init__(
        self,
        endpoint: WorkerEndpoint,
        feed: Callable[[Event], None],
        hasher: BlockHasher,
        limits: StreamLimits,
        on_publishing: Callable[[], None],
        on_block_size: Callable[[WorkerEndpoint], None],
    ) -> None:
        """`on_publishing`: called when the worker is found to publish KV events.

        `on_block_size`: called when `endpoint.block_tokens` has changed.
        """
        self.endpoint: Final = endpoint
        self._on_block_size = on_block_size
        self._feed = feed
        self._hasher = hasher
        self._limits = limits
        self._on_publishing = on_publishing
        self._fault_log = FaultLog(endpoint.id, limits.log_seconds)
        self._streams: list[EventStream] = []
        self._reported: BlocksFollowed | None = None

    @property
    def report(self) -> EventsReport:
        """The worker's present state."""
        reported = self._reported
        faults = dict(self._fault_log.counts)
        return EventsReport(
            len(self._streams), reported is not None, reported is not None and reported.complete, faults
        )

    def await_news(self, within: float) -> None:
        """Expect events, unless some came in the last `within` seconds, in which the worker must have filled blocks."""
        if len(self._streams) == 1:  # of several, it is unknown which one will publish
            self._streams[0].await_news(within)

    async def run(self, context: zmq.asyncio.Context, client: PollClient) -> None:
        """Follow the worker until cancelled; returns at once if it publishes nothing."""
        sources = self.endpoint.sources or self._of_rank(await self._find_sources(client))
        if not sources:
            log.info(
                "worker %s publishes no KV events: its cache is estimated from the requests sent there, empty at first",
                self.endpoint.id,
            )
            return
        self._streams = [self._stream(source, rank, context) for rank, source in enumerate(sources)]
        self._on_publishing()
        log.info("worker %s publishes KV events: %s", self.endpoint.id, ", ".join(s.endpoint for s in sources))
        await asyncio.gather(*(stream.run() for stream in self._streams))

    def stop(self) -> None:
        """Stop following this worker. The poller reports its departure."""
        self._streams = []
        self._set_reported(None)

    def _set_reported(self, state: BlocksFollowed | None) -> None:
        self._reported = state
        self.endpoint.block_tokens = None if state is None else state.block_tokens
        self._on_block_size(self.endpoint)

    def _stream(self, source: KvPublisher, rank: int, context: zmq.asyncio.Context) -> EventStream:
        def on_change(change: BlockChange) -> None:
            if self._reported is not None and any(change):
                self._feed(BlocksChanged(self.endpoint.id, rank, *change))

        return EventStream(
            source, context, self._hasher, self._fault_log, self._limits, on_change, self._on_state, self._on_restart
        )

    def _on_state(self) -> None:
        """Report the block size and completeness, if they have changed."""
        size = next((stream.block_tokens for stream in self._streams if stream.block_tokens is not None), None)
        if size is None:
            if self._reported is not None:
                self._set_reported(None)
                self._feed(BlocksLost(self.endpoint.id))
            return
        complete = all(stream.complete for stream in self._streams)
        state = BlocksFollowed(self.endpoint.id, size, len(self._streams), complete)
        if state != self._reported:
            self._set_reported(state)
            self._feed(state)

    def _on_restart(self) -> None:
        log.info("worker %s has restarted, by its KV events: its cache is empty", self.endpoint.id)
        self._feed(Evicted(self.endpoint.id))

    def _of_rank(self, sources: tuple[KvPublisher, ...]) -> tuple[KvPublisher, ...]:
        """Return the publisher of this rank; all of them if the worker is no rank behind a common URL."""
        if self.endpoint.server is None:
            return sources
        return tuple([source for source in sources if source.rank == self.endpoint.rank])

    async def _find_sources(self, client: PollClient) -> tuple[KvPublisher, ...]:
        """Ask where the worker publishes, until it answers."""
        while True:
            try:
                return await self._request_sources(client)
            except WorkerBroke as error:
                log.warning("worker %s did not answer whether it publishes KV events: %s", self.endpoint.id, error)
            await asyncio.sleep(RETRY_SECONDS)

    async def _request_sources(self, client: PollClient) -> tuple[KvPublisher, ...]:
        host = urlsplit(self.endpoint.url).hostname or ""
        for path, read in READERS.items():
            try:
                return read(await client.fetch(self.endpoint.url + path, self.endpoint.authorization), host)
            except OtherStatus as error:
                if error.answered != HTTPStatus.NOT_FOUND:
                    raise
        return ()


class BlockFillObserver:
    """Observer that reports which worker must have filled blocks, and in how many seconds, judging by the requests it
    has finished.
    """

    event_types: ClassVar[Collection[type[Event]]] = EVENTS

    def __init__(self, on_filled: Callable[[WorkerId, float], None]) -> None:
        self._on_filled = on_filled
        self._sent: dict[RequestId, tuple[WorkerId, float]] = {}
        """Where each running request was sent last, and when."""

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        match event:
            case Finished(request, usage):
                sent = self._sent.pop(request, None)
                if sent and usage and usage.input_tokens - (usage.cached_tokens or 0) >= TOKENS_THAT_FILL_A_BLOCK:
                    worker, since = sent
                    self._on_filled(worker, now - since)
            case Failed(request) | Cancelled(request):
                self._sent.pop(request, None)
        for command in commands:
            if isinstance(command, Dispatch):
                self._sent[command.request] = command.worker, now


class KvEventSubscriber:
    """Observer that follows the workers in the fleet while the context is entered."""

    event_types: ClassVar[Collection[type[Event]]] = (WorkerJoined, WorkerLeft)

    def __init__(
        self,
        directory: WorkerDirectory,
        feed: Callable[[Event], None],
        hasher: BlockHasher,
        limits: StreamLimits,
        on_publishing: Callable[[], None],
    ) -> None:
        """`on_publishing`: called once, when the first worker is found to publish KV events."""
        self._directory = directory
        self._limits = limits
        self._follower = partial(
            WorkerFollower,
            feed=feed,
            hasher=hasher,
            on_publishing=self._on_first_publisher,
            on_block_size=directory.publish,
        )
        self._on_publishing = on_publishing
        self._publishing = False
        self._followers: dict[WorkerId, WorkerFollower] = {}
        self._tasks: dict[WorkerId, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        """Start following the workers that join from now on."""
        self._context = zmq.asyncio.Context()
        self._client = PollClient()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop all followers and close every socket."""
        tasks = list(self._tasks.values())
        for worker in list(self._tasks):
            self._stop(worker)
        await asyncio.gather(*tasks, return_exceptions=True)
        self._client.close()
        self._context.destroy(linger=0)

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:  # noqa: ARG002 - nothing else counts
        match event:
            case WorkerJoined(worker) if worker.takes is not Takes.UNPINNED:
                self._start(worker.id)
            case WorkerLeft(worker_id):
                self._stop(worker_id)

    def filled(self, worker: WorkerId, within: float) -> None:
        """Expect events of a worker, unless some came in the last `within` seconds, in which it must have filled
        blocks.
        """
        if worker in self._tasks:
            self._followers[worker].await_news(within)

    def report(self) -> Mapping[WorkerId, EventsReport]:
        """Return the state of every worker that publishes KV events."""
        reports = {worker: follower.report for worker, follower in self._followers.items()}
        return {worker: report for worker, report in reports.items() if report.publishers}

    def _start(self, worker: WorkerId) -> None:
        if worker not in self._tasks:
            self._update_followers()
            task = asyncio.create_task(self._followers[worker].run(self._context, self._client))
            task.add_done_callback(_log_failure)
            self._tasks[worker] = task

    def _update_followers(self) -> None:
        """Keep one follower per present worker, and drop those of workers that left."""
        previous = self._followers
        self._followers = {
            endpoint.id: follower
            if (follower := previous.get(endpoint.id)) is not None and follower.endpoint is endpoint
            else self._follower(endpoint, limits=self._limits_of(endpoint))
            for endpoint in self._directory.endpoints
        }

    def _limits_of(self, endpoint: WorkerEndpoint) -> StreamLimits:
        """Return the limits of a worker; the ranks of a URL share those of one."""
        ranks = [each for each in self._directory.behind(endpoint.id) if each.server is not None]
        return replace(self._limits, blocks=self._limits.blocks // max(1, len(ranks)))

    def _stop(self, worker: WorkerId) -> None:
        task = self._tasks.pop(worker, None)
        if task is not None:
            task.cancel()
            self._followers[worker].stop()

    def _on_first_publisher(self) -> None:
        """Call `on_publishing` at the first worker that publishes."""
        if not self._publishing:
            self._publishing = True
            self._on_publishing()


def _log_failure(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("following a worker's KV events failed inside the router", exc_info=error)

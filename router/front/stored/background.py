"""Follows responses that engines compute in the background, after their call has been answered.

For the scheduler such a request stays in flight. It keeps its place in the worker's window, its bill, and its place in
the client's limit of requests in flight until the engine has finished it. The router learns this by polling the
response. The client is charged the usage in the finished response; if the response is cancelled, the estimate of what
the engine computed until then.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple, Self
from urllib.parse import quote

from router.api.answer.outline import Outline
from router.api.body.call import Call
from router.api.endpoints.plain import tail_usage
from router.api.endpoints.responses import PATH, ResponseProgress, read_progress
from router.auth.admission import AdmissionTicket
from router.channel.client import SchedulerClient
from router.core.model.events import Cancelled, Failed, Fault, Finished
from router.core.model.request import RequestId, WorkerId
from router.errors import WorkerBroke, WorkerError
from router.upstream.connections import WorkerConnections
from router.upstream.http_client import IdleTimeouts

log = logging.getLogger(__name__)

MIN_PAUSE: Final = 0.1
MAX_PAUSE: Final = 1.0
"""Bounds of the seconds between two polls of a response."""
PAUSE_SHARE: Final = 0.1
"""Pause between two polls as a share of the computing time so far. A finished response can keep its place that long."""
CHECK_TIMEOUT: Final = 10.0
"""Seconds in which a worker must answer a poll."""
MAX_FAILED_CHECKS: Final = 3
"""Polls in a row that fail before the response counts as lost."""

Ending = Finished | Failed | Cancelled


class BackgroundRun(NamedTuple):
    """One response that is computed in the background."""

    response: str
    worker: WorkerId
    request: RequestId
    """The request's id in the scheduler. `BackgroundResponses` settles the request."""
    call: Call
    """The call, without its body."""
    ticket: AdmissionTicket
    timeout: float | None
    """Seconds after which the response is cancelled, the same as for a whole answer; None for never."""


class BackgroundResponses:
    """Polls the responses in the background while the context is entered."""

    def __init__(self, scheduler_client: SchedulerClient, connections: WorkerConnections) -> None:
        self._scheduler_client = scheduler_client
        self._connections = connections
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._wake_events: dict[str, asyncio.Event] = {}
        self._streams: dict[str, Callable[[], None]] = {}
        """Callbacks that end the streams of background responses, by response."""
        self._deleted: set[str] = set()

    def __len__(self) -> int:
        return len(self._tasks) + len(self._streams)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop polling. The engines go on computing; the clients are charged the estimates so far."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def follow(self, run: BackgroundRun) -> None:
        """Poll a response until it ends, then settle its request."""
        self._wake_events[run.response] = asyncio.Event()
        self._tasks[run.response] = asyncio.create_task(self._run(run))

    def add_stream(self, response: str, cut: Callable[[], None]) -> None:
        """Register the stream of a background response. `cut` is called when the client cancels the response.

        vLLM does not end the stream of a cancelled response itself.
        """
        self._streams[response] = cut

    def remove_stream(self, response: str) -> None:
        """Remove a stream that has ended."""
        self._streams.pop(response, None)

    def response_changed(self, response: str, *, deleted: bool) -> None:
        """Poll a response now and cut its stream, because its client cancelled it or had it `deleted`."""
        if deleted and response in self._wake_events:
            self._deleted.add(response)
        if (cut := self._streams.get(response)) is not None:
            cut()
        if (wake := self._wake_events.get(response)) is not None:
            wake.set()

    async def _run(self, run: BackgroundRun) -> None:
        ending: Ending = Cancelled(run.request)
        with run.ticket:
            try:
                ending = await self._wait_for_ending(run, self._wake_events[run.response])
            except Exception:  # nothing above this task would handle it
                log.exception("polling the background response %s failed inside the router", run.response)
            finally:
                del self._wake_events[run.response], self._tasks[run.response]
                self._deleted.discard(run.response)
                usage = ending.usage
                run.ticket.tokens = None if usage is None else usage.input_tokens + usage.output_tokens
                self._scheduler_client.settle(ending)

    async def _wait_for_ending(self, run: BackgroundRun, wake: asyncio.Event) -> Ending:
        """Poll a response until it has ended, and return how."""
        started, failed_checks = self._scheduler_client.clock(), 0
        while True:
            elapsed = self._scheduler_client.clock() - started
            with suppress(TimeoutError):
                async with asyncio.timeout(min(MAX_PAUSE, max(MIN_PAUSE, PAUSE_SHARE * elapsed))):
                    await wake.wait()
            wake.clear()
            try:
                progress = await self._fetch_progress(run)
            except WorkerError:
                failed_checks += 1
                if failed_checks == MAX_FAILED_CHECKS:
                    return Failed(run.request, True, fault=Fault.BROKEN)
                continue
            failed_checks = 0
            if progress.status is None and run.response in self._deleted:
                return Cancelled(run.request)
            if (ending := _ending_of(progress, run)) is not None:
                return ending
            if run.timeout is not None and elapsed > run.timeout:
                with suppress(WorkerError):
                    await self._request(run, "POST", "/cancel")
                return Failed(run.request, True, fault=Fault.BROKEN)

    async def _fetch_progress(self, run: BackgroundRun) -> ResponseProgress:
        """Ask the worker for the state of the response. Raises WorkerError."""
        status, outline = await self._request(run, "GET")
        if status >= 500:
            raise WorkerBroke(f"The worker answered with status {status}.")
        if status != 200:
            return ResponseProgress(None)
        rest = outline.close()
        return (
            ResponseProgress("completed", tail_usage(outline.tail)) if rest is None else read_progress(run.call, rest)
        )

    async def _request(self, run: BackgroundRun, method: str, subpath: str = "") -> tuple[int, Outline]:
        """Send a call about the response to its worker, and return status and body. Raises WorkerError."""
        path = f"{PATH}/{quote(run.response, safe='')}{subpath}"
        outline, idle_timeouts = Outline(), IdleTimeouts(CHECK_TIMEOUT, CHECK_TIMEOUT)
        upstream = await self._connections.by_id[run.worker].forward(
            path, b"", run.request, idle_timeouts, method=method
        )
        try:
            while block := await upstream.read():
                outline.feed(block)
        finally:
            upstream.close()
        return upstream.status, outline


def _ending_of(progress: ResponseProgress, run: BackgroundRun) -> Ending | None:
    """Return how a response with this progress has ended; None while it is running."""
    if progress.running:
        return None
    match progress.status:
        case None:  # the worker does not know the response: it has restarted
            return Failed(run.request, True, fault=Fault.BROKEN)
        case "cancelled":
            return Cancelled(run.request, progress.usage)
        case "failed":
            return Failed(run.request, True, progress.usage, Fault.ERROR)
        case _:
            return Finished(run.request, progress.usage, progress.answer_keys, progress.ended_turn)

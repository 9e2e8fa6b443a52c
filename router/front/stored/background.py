"""Responses that an engine computes in the background: its answer came at once, and the work goes on.

In the scheduler such a request is one whose answer is not here yet. It holds its place in the worker's window, its bill
and its client's place among the requests in flight until the engine has finished it, which the router learns by asking
for the response now and then. It pays for the usage that the finished response tells; one that is cancelled, for what
it should have computed by then.
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
from router.channel.host import SchedulerHost
from router.core.model.events import Cancelled, Failed, Fault, Finished
from router.core.model.request import RequestId, WorkerId
from router.errors import WorkerBroke, WorkerError
from router.upstream.directory import WorkerDirectory
from router.upstream.http_client import IdleTimeouts

log = logging.getLogger(__name__)

MIN_PAUSE: Final = 0.1
MAX_PAUSE: Final = 1.0
"""Seconds between two looks at a response."""
PAUSE_SHARE: Final = 0.1
"""Between these, of the time for which it has been computed: so long a place may be held in vain."""
CHECK_TIMEOUT: Final = 10.0
"""How long a worker may take over a look."""
MAX_FAILED_CHECKS: Final = 3
"""Looks in a row that fail before the worker is taken to have lost the response."""

Ending = Finished | Failed | Cancelled


class BackgroundRun(NamedTuple):
    """One response in the background."""

    response: str
    worker: WorkerId
    request: RequestId
    """As the scheduler knows it; it is settled here."""
    call: Call
    """Without its body."""
    permit: AdmissionTicket
    timeout: float | None
    """Seconds after which it is given up, as a whole answer is; None for never."""


class BackgroundResponses:
    """Follows the responses in the background for as long as the context is entered."""

    def __init__(self, scheduler_host: SchedulerHost, fleet: WorkerDirectory) -> None:
        self._scheduler_host = scheduler_host
        self._fleet = fleet
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._wakes: dict[str, asyncio.Event] = {}
        self._streams: dict[str, Callable[[], None]] = {}
        """How to cut those that stream."""
        self._deleted: set[str] = set()

    def __len__(self) -> int:
        return len(self._tasks) + len(self._streams)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Follow them no more. The engines compute on, and their clients pay for what was estimated until now."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def follow(self, run: BackgroundRun) -> None:
        """See a response to its end, and settle its request then."""
        self._wakes[run.response] = asyncio.Event()
        self._tasks[run.response] = asyncio.create_task(self._follow(run))

    def add_stream(self, response: str, cut: Callable[[], None]) -> None:
        """A response streams to its client, until it is left; `cut` ends that where it is cancelled.

        vLLM ends no such stream itself.
        """
        self._streams[response] = cut

    def remove_stream(self, response: str) -> None:
        """A response streams no more."""
        self._streams.pop(response, None)

    def check_now(self, response: str, *, deleted: bool) -> None:
        """Its client cancelled a response or had it `deleted`, by which it may have ended: look at it now."""
        if deleted and response in self._wakes:
            self._deleted.add(response)
        if (cut := self._streams.get(response)) is not None:
            cut()
        if (wake := self._wakes.get(response)) is not None:
            wake.set()

    async def _follow(self, run: BackgroundRun) -> None:
        ending: Ending = Cancelled(run.request)
        with run.permit:
            try:
                ending = await self._ending(run, self._wakes[run.response])
            except Exception:  # the outermost boundary of this task
                log.exception("the response %s cannot be followed", run.response)
            finally:
                del self._wakes[run.response], self._tasks[run.response]
                self._deleted.discard(run.response)
                usage = ending.usage
                run.permit.tokens = None if usage is None else usage.input_tokens + usage.output_tokens
                self._scheduler_host.settle(ending)

    async def _ending(self, run: BackgroundRun, wake: asyncio.Event) -> Ending:
        """Look at a response until it has come to its end."""
        began, misses = self._scheduler_host.clock(), 0
        while True:
            taken = self._scheduler_host.clock() - began
            with suppress(TimeoutError):
                async with asyncio.timeout(min(MAX_PAUSE, max(MIN_PAUSE, PAUSE_SHARE * taken))):
                    await wake.wait()
            wake.clear()
            try:
                stage = await self._look(run)
            except WorkerError:
                misses += 1
                if misses == MAX_FAILED_CHECKS:
                    return Failed(run.request, True, fault=Fault.BROKEN)
                continue
            misses = 0
            if stage.status is None and run.response in self._deleted:
                return Cancelled(run.request)
            if (ending := _ending_at(stage, run)) is not None:
                return ending
            if run.timeout is not None and taken > run.timeout:
                with suppress(WorkerError):
                    await self._ask(run, "POST", "/cancel")
                return Failed(run.request, True, fault=Fault.BROKEN)

    async def _look(self, run: BackgroundRun) -> ResponseProgress:
        """How far it is. Raises WorkerError."""
        status, outline = await self._ask(run, "GET")
        if status >= 500:
            raise WorkerBroke(f"The worker answered with status {status}.")
        if status != 200:
            return ResponseProgress(None)
        rest = outline.close()
        return (
            ResponseProgress("completed", tail_usage(outline.tail)) if rest is None else read_progress(run.call, rest)
        )

    async def _ask(self, run: BackgroundRun, method: str, about: str = "") -> tuple[int, Outline]:
        """The status and the body of what its worker says of a response. Raises WorkerError."""
        path = f"{PATH}/{quote(run.response, safe='')}{about}"
        outline, silence = Outline(), IdleTimeouts(CHECK_TIMEOUT, CHECK_TIMEOUT)
        upstream = await self._fleet.forward(run.worker, path, b"", run.request, silence, method=method)
        try:
            while block := await upstream.read():
                outline.feed(block)
        finally:
            upstream.close()
        return upstream.status, outline


def _ending_at(stage: ResponseProgress, run: BackgroundRun) -> Ending | None:
    """How a response ended that is at this stage; None while it has not."""
    if stage.running:
        return None
    match stage.status:
        case None:  # its worker has begun anew
            return Failed(run.request, True, fault=Fault.BROKEN)
        case "cancelled":
            return Cancelled(run.request, stage.usage)
        case "failed":
            return Failed(run.request, True, stage.usage, Fault.ERROR)
        case _:
            return Finished(run.request, stage.usage, stage.answer_keys)

"""Feeds events to the scheduler, carries out its commands and owns its timers."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, assert_never

from router.core.model.commands import Command, Dispatch, Refusal, Reject, WakeAt
from router.core.model.events import (
    EVENTS,
    Arrived,
    Cancelled,
    Event,
    Failed,
    Finished,
    Progressed,
    Returned,
    Started,
    Ticked,
)
from router.core.model.request import Request, RequestId, Usage
from router.core.scheduler import Scheduler
from router.errors import NoWorker, Refused, RouterError

PROGRESS_SECONDS = 0.1
"""Seconds between two charges of streamed output. One `Progressed` event charges all running streams."""


class Observer(Protocol):
    """Observes events and the commands that the scheduler answers them with; changes nothing."""

    event_types: ClassVar[Collection[type[Event]]] = EVENTS
    """The event types to observe. An event of any type can cause commands."""

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """Called after the scheduler has handled `event` and returned `commands`; `now` is the time of the event."""


@dataclass(slots=True)
class RunningStream:
    """A running request whose output tokens can be read at any time."""

    output_tokens: Callable[[], int]
    """Returns the output tokens so far."""
    charged: int = 0
    """Output tokens that the scheduler has already charged."""


class SchedulerHost:
    """Connects the scheduler, which never blocks, with the tasks that wait for its decisions."""

    def __init__(self, scheduler: Scheduler, observers: Sequence[Observer], clock: Callable[[], float]) -> None:
        """`clock` returns seconds and never goes backwards."""
        self.scheduler = scheduler
        self.clock = clock
        self._observers: list[Observer] = []
        self._observers_by_type: dict[type[Event], list[Observer]] = {kind: [] for kind in EVENTS}
        """Observers by the event type that they subscribe to."""
        self.attach(*observers)
        self._dispatches: dict[RequestId, asyncio.Future[Dispatch]] = {}
        """One future per submitted request that is not settled."""
        self._streams: dict[RequestId, RunningStream] = {}
        self._progress_timer: asyncio.TimerHandle | None = None
        self._wake_timer: asyncio.TimerHandle | None = None

    def feed(self, event: Event) -> None:
        """Pass an event to the scheduler, notify the observers and carry out the scheduler's commands."""
        now = self.clock()
        commands = self.scheduler.handle(event, now)
        for observer in self._observers_by_type[type(event)]:
            observer.observe(now, event, commands)
        for command in commands:
            self._carry_out(command, now)

    def attach(self, *observers: Observer) -> None:
        """Add observers. They are notified after those that were added earlier."""
        self._observers += observers
        for observer in observers:
            for kind in observer.event_types:
                self._observers_by_type[kind].append(observer)

    def __contains__(self, request: RequestId) -> bool:
        """Return whether a request with this id is submitted and not settled."""
        return request in self._dispatches

    def submit(self, request: Request) -> "asyncio.Future[Dispatch]":
        """Submit a request. The future gives its Dispatch, or raises the RouterError that refuses it."""
        dispatch: asyncio.Future[Dispatch] = asyncio.get_running_loop().create_future()
        self._dispatches[request.id] = dispatch
        self.feed(Arrived(request))
        return dispatch

    def resubmit(self, returned: Returned) -> "asyncio.Future[Dispatch]":
        """Submit a dispatched request again, for another worker. Returns a future as `submit` does."""
        dispatch: asyncio.Future[Dispatch] = asyncio.get_running_loop().create_future()
        self._dispatches[returned.request] = dispatch
        self._charge_last_tokens(returned.request, returned.usage)
        self.feed(returned)
        return dispatch

    def start_stream(self, request: RequestId, output_tokens: Callable[[], int]) -> None:
        """Report the first token of a dispatched request.

        From then until the request is settled, its output is charged every `PROGRESS_SECONDS`, as `output_tokens`
        counts it.
        """
        self._streams[request] = RunningStream(output_tokens)
        if self._progress_timer is None:
            self._progress_timer = asyncio.get_running_loop().call_later(PROGRESS_SECONDS, self._charge_progress)
        self.feed(Started(request))

    def settle(self, ending: Finished | Failed | Cancelled) -> None:
        """Report the end of a submitted request. To be called exactly once per request, whatever happened."""
        # Without cancel(), asyncio would log a refusal that its client left too early to await.
        self._dispatches.pop(ending.request).cancel()
        self._charge_last_tokens(ending.request, ending.usage)
        self.feed(ending)

    def _charge_last_tokens(self, request: RequestId, usage: Usage | None) -> None:
        """Stop following a stream. Charge its last output tokens, unless the engine reported its usage."""
        stream = self._streams.pop(request, None)
        if stream is not None and usage is None:
            self.feed(Progressed({request: stream.output_tokens()}))

    def close(self) -> None:
        """Stop the timers."""
        for timer in (self._wake_timer, self._progress_timer):
            if timer is not None:
                timer.cancel()

    def _charge_progress(self) -> None:
        """Charge the new output tokens of all streams in one event."""
        self._progress_timer = None
        if self._streams:
            self._progress_timer = asyncio.get_running_loop().call_later(PROGRESS_SECONDS, self._charge_progress)
        progressed = {}
        for request, stream in self._streams.items():
            tokens = stream.output_tokens()
            if tokens != stream.charged:
                stream.charged = progressed[request] = tokens
        if progressed:
            self.feed(Progressed(progressed))

    def _carry_out(self, command: Command, now: float) -> None:
        match command:
            case Dispatch(request):
                dispatch = self._dispatches[request]
                if not dispatch.done():
                    dispatch.set_result(command)
            case Reject(request):
                dispatch = self._dispatches[request]
                if not dispatch.done():
                    dispatch.set_exception(refusal_error(command))
            case WakeAt(time):
                if self._wake_timer is not None:
                    self._wake_timer.cancel()
                self._wake_timer = asyncio.get_running_loop().call_later(max(0.0, time - now), self._tick)
            case _:
                assert_never(command)

    def _tick(self) -> None:
        self._wake_timer = None
        self.feed(Ticked())


def refusal_error(command: Reject) -> RouterError:
    """Return the error that a refused client receives."""
    match command.reason:
        case Refusal.QUEUE_FULL:
            message = "All workers are busy and the queue is full; try again later."
        case Refusal.CLIENT_FULL:
            message = "You have reached the limit of waiting requests; try again later."
        case Refusal.DISPLACED:
            message = "The queue is full and you have more requests waiting than others; try again later."
        case Refusal.EXPIRED:
            message = "The request reached its maximum time in the queue; try again later."
        case Refusal.NO_WORKER:
            return NoWorker("No worker that serves this model is available.", reason=command.reason)
        case Refusal.NO_RETRY:
            return NoWorker("The request failed, and no more retries are allowed.", reason=command.reason)
        case _:
            assert_never(command.reason)
    return Refused(message, retry_after=command.retry_after, reason=command.reason)

"""Feeds events to the scheduler and carries out its commands: the one interpreter, and the owner of the one timer."""

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
"""How long output goes uncharged: all streams are asked at once, and charged in one event."""


class Observer(Protocol):
    """Hears of events and what came of them; changes nothing."""

    event_types: ClassVar[Collection[type[Event]]] = EVENTS
    """The types of these events; commands may come of any."""

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """The scheduler took in an event and gave these commands."""


@dataclass(slots=True)
class RunningStream:
    """A running request that can be asked how far it is."""

    output_tokens: Callable[[], int]
    charged: int = 0


class SchedulerHost:
    """Stands between the scheduler, which never waits, and the tasks that wait for it."""

    def __init__(self, scheduler: Scheduler, observers: Sequence[Observer], clock: Callable[[], float]) -> None:
        """`clock` gives seconds and never falls."""
        self.scheduler = scheduler
        self.clock = clock
        self._observers: list[Observer] = []
        self._hearing: dict[type[Event], list[Observer]] = {kind: [] for kind in EVENTS}
        """The same by what they hear of."""
        self.attach(*observers)
        self._turns: dict[RequestId, asyncio.Future[Dispatch]] = {}
        self._streams: dict[RequestId, RunningStream] = {}
        self._gathering: asyncio.TimerHandle | None = None
        self._alarm: asyncio.TimerHandle | None = None

    def feed(self, event: Event) -> None:
        """Tell the scheduler what happened, and do what it says."""
        now = self.clock()
        commands = self.scheduler.handle(event, now)
        for observer in self._hearing[type(event)]:
            observer.observe(now, event, commands)
        for command in commands:
            self._carry_out(command, now)

    def attach(self, *observers: Observer) -> None:
        """From now on these are told, too, after those that were there before."""
        self._observers += observers
        for observer in observers:
            for kind in observer.event_types:
                self._hearing[kind].append(observer)

    def __contains__(self, request: RequestId) -> bool:
        """Whether a request of this id is submitted and not settled."""
        return request in self._turns

    def submit(self, request: Request) -> "asyncio.Future[Dispatch]":
        """Hand in a request. Its turn comes as a Dispatch, or as the RouterError that refuses it."""
        turn: asyncio.Future[Dispatch] = asyncio.get_running_loop().create_future()
        self._turns[request.id] = turn
        self.feed(Arrived(request))
        return turn

    def resubmit(self, returned: Returned) -> "asyncio.Future[Dispatch]":
        """Hand in a dispatched request again, for another worker. Its turn comes as the first one did."""
        turn: asyncio.Future[Dispatch] = asyncio.get_running_loop().create_future()
        self._turns[returned.request] = turn
        self._count_last(returned.request, returned.usage)
        self.feed(returned)
        return turn

    def start_stream(self, request: RequestId, output_tokens: Callable[[], int]) -> None:
        """A dispatched request has its first token; from now on it is asked how far it is, until it is settled."""
        self._streams[request] = RunningStream(output_tokens)
        if self._gathering is None:
            self._gathering = asyncio.get_running_loop().call_later(PROGRESS_SECONDS, self._charge)
        self.feed(Started(request))

    def settle(self, ending: Finished | Failed | Cancelled) -> None:
        """A submitted request is over: the last word about it, to be said once, whatever happened."""
        # A refusal that came too late for its client is no forgotten exception after this.
        self._turns.pop(ending.request).cancel()
        self._count_last(ending.request, ending.usage)
        self.feed(ending)

    def _count_last(self, request: RequestId, usage: Usage | None) -> None:
        """A stream is over: charge what it came to, where no usage tells."""
        stream = self._streams.pop(request, None)
        if stream is not None and usage is None:
            self.feed(Progressed({request: stream.output_tokens()}))

    def close(self) -> None:
        """Stop the timers."""
        for timer in (self._alarm, self._gathering):
            if timer is not None:
                timer.cancel()

    def _charge(self) -> None:
        """Gather how far every stream is, and charge what is new in one event."""
        self._gathering = None
        if self._streams:
            self._gathering = asyncio.get_running_loop().call_later(PROGRESS_SECONDS, self._charge)
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
                turn = self._turns[request]
                if not turn.done():
                    turn.set_result(command)
            case Reject(request):
                turn = self._turns[request]
                if not turn.done():
                    turn.set_exception(refusal_error(command))
            case WakeAt(time):
                if self._alarm is not None:
                    self._alarm.cancel()
                self._alarm = asyncio.get_running_loop().call_later(max(0.0, time - now), self._tick)
            case _:
                assert_never(command)

    def _tick(self) -> None:
        self._alarm = None
        self.feed(Ticked())


def refusal_error(command: Reject) -> RouterError:
    """A refusal as the client is told of it."""
    match command.reason:
        case Refusal.QUEUE_FULL:
            message = "The fleet is busy and as many requests wait as may; try again later."
        case Refusal.CLIENT_FULL:
            message = "As many of your requests wait as may; try again later."
        case Refusal.DISPLACED:
            message = "The fleet is busy and you have more waiting than others; try again later."
        case Refusal.EXPIRED:
            message = "The request waited as long as it may and no worker had room; try again later."
        case Refusal.NO_WORKER:
            return NoWorker("No worker that serves this model is alive.", reason=command.reason)
        case Refusal.NO_RETRY:
            return NoWorker("The request failed at as many workers as it may be tried at.", reason=command.reason)
        case _:
            assert_never(command.reason)
    return Refused(message, retry_after=command.retry_after, reason=command.reason)

"""Feeds events to the scheduler, carries out its commands, owns its wake-up timer, and serves the fronts."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import ClassVar, Final, NamedTuple, Protocol, assert_never

from router.channel.messages import (
    Answered,
    AnswerValue,
    AnyQuestion,
    Ask,
    Assignment,
    CallEnded,
    FieldsRefused,
    FrontMessage,
    ResponseForgotten,
    ResponseStored,
    SchedulerMessage,
    Timeouts,
    UnreachableWorker,
    WorkerChanged,
    WorkerRemoved,
)
from router.core.model.commands import Command, Dispatch, Reject, WakeAt
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
from router.core.model.request import RequestId, WorkerId
from router.core.scheduler import Scheduler

Deliver = Callable[[SchedulerMessage], None]
"""Sends a message to one front."""
Fact = UnreachableWorker | FieldsRefused | CallEnded | ResponseStored | ResponseForgotten


class Observer(Protocol):
    """Observes events and the commands that the scheduler answers them with; changes nothing."""

    event_types: ClassVar[Collection[type[Event]]] = EVENTS
    """The event types to observe. An event of any type can cause commands."""

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """Called after the scheduler has handled `event` and returned `commands`; `now` is the time of the event."""


class FrontServices(Protocol):
    """What the scheduler's process does for fronts besides scheduling."""

    def take(self, front: "FrontLink", fact: Fact) -> None:
        """Take note of a fact that a front reports."""

    def answer(self, front: "FrontLink", question: AnyQuestion) -> AnswerValue:
        """Answer a question of a front."""


class NoServices(FrontServices):
    """For fronts that only schedule."""

    def take(self, front: "FrontLink", fact: Fact) -> None:  # noqa: ARG002
        raise AssertionError(f"nothing takes {fact}")

    def answer(self, front: "FrontLink", question: AnyQuestion) -> AnswerValue:  # noqa: ARG002
        raise AssertionError(f"nothing answers {question}")


class FrontLink:
    """One front as the host sees it."""

    def __init__(self, host: "SchedulerHost", deliver: Deliver) -> None:
        self._host = host
        self.deliver: Final = deliver

    def receive(self, message: FrontMessage) -> None:
        """Handle a message of this front."""
        self._host.receive(self, message)


class OpenRequest(NamedTuple):
    """A request that has not ended."""

    front: FrontLink
    output_limit: int | None


class SchedulerHost:
    """Connects the scheduler, which never blocks, with the fronts that wait for its decisions."""

    def __init__(self, scheduler: Scheduler, observers: Sequence[Observer], clock: Callable[[], float]) -> None:
        """`clock` returns seconds and never goes backwards."""
        self.scheduler = scheduler
        self.clock = clock
        self._services: FrontServices = NoServices()
        self._observers: list[Observer] = []
        self._observers_by_type: dict[type[Event], list[Observer]] = {kind: [] for kind in EVENTS}
        """Observers by the event type that they subscribe to."""
        self.attach(*observers)
        self._links: list[FrontLink] = []
        self._workers: dict[WorkerId, WorkerChanged] = {}
        """What was last announced of each worker."""
        self._open: dict[RequestId, OpenRequest] = {}
        """The requests of all fronts that have not ended."""
        self._wake_timer: asyncio.TimerHandle | None = None

    def set_services(self, services: FrontServices) -> None:
        """Set what takes the facts and answers the questions of fronts."""
        self._services = services

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

    def connect(self, deliver: Deliver) -> FrontLink:
        """Add a front, to which `deliver` sends messages, first of all the present workers."""
        link = FrontLink(self, deliver)
        self._links.append(link)
        for change in self._workers.values():
            deliver(change)
        return link

    def announce(self, change: WorkerChanged | WorkerRemoved) -> None:
        """Report a change of the workers to all fronts, and to those that connect later."""
        if isinstance(change, WorkerChanged):
            self._workers[change.card.id] = change
        else:
            self._workers.pop(change.worker, None)
        for link in self._links:
            link.deliver(change)

    def receive(self, front: FrontLink, message: FrontMessage) -> None:
        """Handle a message of a front."""
        match message:
            case Arrived(request):
                self._open[request.id] = OpenRequest(front, request.output_limit)
                self.feed(message)
            case Finished(ended) | Failed(ended) | Cancelled(ended):
                self.feed(message)
                self._open.pop(ended, None)
            case Started() | Progressed() | Returned():
                self.feed(message)
            case Ask(number, question):
                front.deliver(Answered(number, self._services.answer(front, question)))
            case _:
                self._services.take(front, message)

    @property
    def at_rest(self) -> bool:
        """Whether no request of any front is left."""
        return not self._open

    def close(self) -> None:
        """Stop the timer."""
        if self._wake_timer is not None:
            self._wake_timer.cancel()

    def _carry_out(self, command: Command, now: float) -> None:
        match command:
            case Dispatch(request, worker, cached_tokens):
                if (open_request := self._open.get(request)) is not None:
                    timeouts = self._timeouts(worker, open_request.output_limit)
                    open_request.front.deliver(Assignment(request, worker, cached_tokens, timeouts))
            case Reject(request):
                if (open_request := self._open.get(request)) is not None:
                    open_request.front.deliver(command)
            case WakeAt(time):
                if self._wake_timer is not None:
                    self._wake_timer.cancel()
                self._wake_timer = asyncio.get_running_loop().call_later(max(0.0, time - now), self._tick)
            case _:
                assert_never(command)

    def _timeouts(self, worker: WorkerId, output_limit: int | None) -> Timeouts:
        """Return how long the worker may be silent with a request for at most this many output tokens."""
        silence = self.scheduler.cluster[worker].silence_timeout
        return Timeouts(silence.first_token, silence.between_tokens, silence.whole(output_limit))

    def _tick(self) -> None:
        self._wake_timer = None
        self.feed(Ticked())

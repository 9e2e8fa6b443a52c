"""Feeds events to the scheduler, carries out its commands, owns its wake-up timer, and serves the fronts."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final, Protocol, assert_never

from router.channel.messages import (
    REPEATED,
    AllReported,
    Answered,
    AnswerValue,
    AnyQuestion,
    Ask,
    Assignment,
    CallEnded,
    FieldsRefused,
    FrontMeasured,
    FrontMessage,
    RanBefore,
    ResponseForgotten,
    ResponseStored,
    Saved,
    SchedulerMessage,
    Timeouts,
    UnreachableWorker,
    WaitedBefore,
    Withdrawn,
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
    Resumed,
    Returned,
    Started,
    Ticked,
)
from router.core.model.request import Request, RequestId, WorkerId
from router.core.scheduler import Scheduler

Deliver = Callable[[SchedulerMessage], None]
"""Sends a message to one front."""
LaterEvent = Started | Progressed | Finished | Failed | Returned | Cancelled
Fact = UnreachableWorker | FieldsRefused | CallEnded | ResponseStored | ResponseForgotten | FrontMeasured
LaterMessage = LaterEvent | Fact | Ask
"""All messages of a front but a new request."""


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

    def count_again(self, front: "FrontLink", question: AnyQuestion) -> None:
        """Count what an earlier run has granted."""

    def front_closed(self, front: "FrontLink") -> None:
        """Forget a front. Its requests have ended."""


class NoServices(FrontServices):
    """For fronts that only schedule."""

    def take(self, front: "FrontLink", fact: Fact) -> None:  # noqa: ARG002
        raise AssertionError(f"nothing takes {fact}")

    def answer(self, front: "FrontLink", question: AnyQuestion) -> AnswerValue:  # noqa: ARG002
        raise AssertionError(f"nothing answers {question}")

    def count_again(self, front: "FrontLink", question: AnyQuestion) -> None:
        """There is nothing to count."""

    def front_closed(self, front: "FrontLink") -> None:
        """There is nothing to forget."""


class FrontLink:
    """One front as the host sees it.

    Clients choose the ids of their requests, so two fronts may have requests with the same id in flight. The later one
    gets another id here, which its front learns from its assignment.
    """

    def __init__(self, host: "SchedulerHost", deliver: Deliver, number: int, session: str) -> None:
        """`number`: of this front, for logs and metrics; `session`: as in `Hello`."""
        self.number: Final = number
        self.session: Final = session
        self.deliver: Final = deliver
        self.messages: int | None = None
        """How many messages the front has sent, to earlier runs too; None until it has reported what these had."""
        self._host = host
        self._renamed: dict[RequestId, RequestId] = {}
        """The scheduler's ids of live requests, by the front's own id where it differs."""

    def receive(self, message: FrontMessage) -> None:
        """Handle a message of this front."""
        if self.messages is not None:
            self.messages += 1
        match message:
            case Arrived(request):
                self._open(request.id, message)
            case WaitedBefore(own, request):
                self._open(own, Arrived(request, again=True))
            case RanBefore(own, resumed):
                self._resume(own, resumed)
            case AllReported(messages):
                self.messages = messages
                self._host.on_reported(self)
            case _ if self._renamed:
                self._host.receive(self, self._renamed_in(message))
                if isinstance(message, Finished | Failed | Cancelled):
                    self._renamed.pop(message.request, None)
            case _:
                self._host.receive(self, message)

    def close(self) -> None:
        """End the front: its requests are cancelled, and its calls no longer count. Needless if it was closed."""
        self._host.disconnect(self)

    def _open(self, own: RequestId, event: Arrived | Resumed) -> None:
        """Take a request that is new to this run."""
        request = self._named_apart(own, event.request)
        self._host.open(self, event if request is event.request else replace(event, request=request), own)

    def _resume(self, own: RequestId, event: Resumed) -> None:
        """Take an attempt of an earlier run: the first of a request that this run learns of, or a retry."""
        name = event.request.id
        if self._renamed.get(own, own) == name and self._host.is_open_of(self, name):
            self._host.resume(event)
        else:
            self._open(own, event)

    def _named_apart(self, own: RequestId, request: Request) -> Request:
        """Give a request another id if its id is that of a live request. `own`: its id in its front."""
        name = request.id
        suffix = 0
        while self._host.is_open(name):
            suffix += 1
            name = RequestId(f"{own}.{self.number}.{suffix}")
        if name != own:
            self._renamed[own] = name
        return request if name == request.id else replace(request, id=name)

    def _renamed_in(self, message: LaterMessage) -> LaterMessage:
        """Return a message with the scheduler's ids instead of the front's."""
        match message:
            case Progressed(output_tokens):
                return Progressed({self._renamed.get(own, own): tokens for own, tokens in output_tokens.items()})
            case Started(own) | Finished(own) | Failed(own) | Returned(own) | Cancelled(own) if own in self._renamed:
                return replace(message, request=self._renamed[own])
            case _:
                return message


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request that has not ended."""

    front: FrontLink
    own_name: RequestId
    """Its id in its front."""
    output_limit: int | None
    replied: bool = False
    """Whether the front has its reply to the last submission."""


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
        self._saved_before: Mapping[str, int] = {}
        self.on_reported: Callable[[FrontLink], None] = lambda _: None
        """Called when a front has reported all that an earlier run had of it."""

    def all_reported(self) -> None:
        """All fronts of the earlier run that are left have reported: forget what its state covers of others."""
        self._saved_before = {}

    def begin_with(self, saved: Mapping[str, int]) -> None:
        """Begin with a saved state that covers so many messages of each front, by session."""
        self._saved_before = saved

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

    def connect(self, deliver: Deliver, number: int = 0, session: str = "") -> FrontLink:
        """Add a front, to which `deliver` sends messages, first of all the present workers.

        A front with a session is told first what the restored state covers, and reports the rest.
        """
        link = FrontLink(self, deliver, number, session)
        self._links.append(link)
        if session:
            deliver(Saved(self._saved_before.get(session, 0)))
        for change in self._workers.values():
            deliver(change)
        return link

    def disconnect(self, front: FrontLink) -> None:
        """Remove a front, whose clients are gone: cancel its requests and end its calls. Needless if it was removed."""
        if front not in self._links:
            return
        self._links.remove(front)
        running = self.scheduler.attempts
        left = [request for request, opened in self._open.items() if opened.front is front]
        for request in left:
            del self._open[request]
        for request in sorted(left, key=running.__contains__):  # the waiting ones first, so that none is dispatched
            self.feed(Cancelled(request))
        self._services.front_closed(front)

    def handled(self) -> dict[str, int]:
        """Return how many messages of each front have been handled, by session: what a state that is saved now covers.

        For fronts that have not reported what earlier runs had, that is what the restored state covers.
        """
        known = {link.session: link.messages for link in self._links if link.messages is not None}
        return {**self._saved_before, **known}

    def announce_saved(self, handled: Mapping[str, int]) -> None:
        """Tell the fronts that a state is saved which covers so many of their messages."""
        for link in self._links:
            if link.session in handled:
                link.deliver(Saved(handled[link.session]))

    def announce(self, change: WorkerChanged | WorkerRemoved) -> None:
        """Report a change of the workers to all fronts, and to those that connect later."""
        if isinstance(change, WorkerChanged):
            self._workers[change.card.id] = change
        else:
            self._workers.pop(change.worker, None)
        for link in self._links:
            link.deliver(change)

    def is_open(self, request: RequestId) -> bool:
        """Return whether a request with this id has not ended."""
        return request in self._open

    def is_open_of(self, front: FrontLink, request: RequestId) -> bool:
        """Return whether this front has a request with this id that has not ended."""
        opened = self._open.get(request)
        return opened is not None and opened.front is front

    def open(self, front: FrontLink, event: Arrived | Resumed, own_name: RequestId) -> None:
        """Take a request whose id no open request has. `own_name`: its id in its front."""
        request = event.request
        self._open[request.id] = OpenRequest(front, own_name, request.output_limit, isinstance(event, Resumed))
        self.feed(event)

    def resume(self, event: Resumed) -> None:
        """Take a later attempt of an open request."""
        self._open[event.request.id].replied = True
        self.feed(event)

    def receive(self, front: FrontLink, message: LaterMessage) -> None:
        """Handle a message of a front other than a new request."""
        match message:
            case Finished(ended) | Failed(ended) | Cancelled(ended):
                self.feed(message)
                opened = self._open.pop(ended, None)
                if opened is not None and not opened.replied:
                    front.deliver(Withdrawn(opened.own_name))
            case Returned(request):
                if (opened := self._open.get(request)) is not None:
                    opened.replied = False
                self.feed(message)
            case Started() | Progressed():
                self.feed(message)
            case Ask(number, question) if number == REPEATED:
                self._services.count_again(front, question)
            case Ask(number, question):
                front.deliver(Answered(number, self._services.answer(front, question)))
            case _:
                self._services.take(front, message)

    @property
    def at_rest(self) -> bool:
        """Whether no request of any front is left."""
        return not self._open

    @property
    def open_requests(self) -> int:
        """How many requests of all fronts have not ended."""
        return len(self._open)

    def close(self) -> None:
        """Stop the timer."""
        if self._wake_timer is not None:
            self._wake_timer.cancel()

    def _carry_out(self, command: Command, now: float) -> None:
        match command:
            case Dispatch(request, worker, cached_tokens):
                if (open_request := self._open.get(request)) is not None:
                    open_request.replied = True
                    timeouts = self._timeouts(worker, open_request.output_limit)
                    own = open_request.own_name
                    known_as = None if own == request else request
                    open_request.front.deliver(Assignment(own, worker, cached_tokens, timeouts, known_as))
            case Reject(request):
                if (open_request := self._open.get(request)) is not None:
                    open_request.replied = True
                    open_request.front.deliver(Reject(open_request.own_name, command.reason, command.retry_after))
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

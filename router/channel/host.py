"""Feeds events to the scheduler, carries out its commands, owns its wake-up timer, and serves the fronts."""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Final, Protocol, assert_never

from router.channel.earlier_run import CoveredFront, EarlierRun
from router.channel.messages import (
    REPEATED,
    AllReported,
    Answered,
    AnswerValue,
    AnyQuestion,
    Ask,
    Assignment,
    Fact,
    FrontMessage,
    PlacementRecord,
    PrefillBeside,
    RanBefore,
    ResponseChanged,
    Saved,
    SchedulerMessage,
    Timeouts,
    WaitedBefore,
    Withdrawn,
    WorkerChanged,
    WorkerRemoved,
)
from router.channel.renamed_requests import LaterMessage, RenamedRequests
from router.core.model.commands import Command, Dispatch, Reject, WakeAt
from router.core.model.events import (
    EVENTS,
    Arrived,
    Cancelled,
    DayBegan,
    Event,
    Failed,
    Finished,
    FrontAway,
    FrontBack,
    HandoffLost,
    Held,
    Prefilled,
    Progressed,
    Released,
    Resumed,
    Returned,
    Started,
    Ticked,
    WorkerJoined,
    WorkerLeft,
)
from router.core.model.request import Leg, Request, RequestId, WorkerId
from router.core.scheduler import Scheduler

log = logging.getLogger(__name__)

DAY_SECONDS: Final = 86400

Deliver = Callable[[SchedulerMessage], None]
"""Sends a message to one front."""


class Observer(Protocol):
    """Observes events and the commands that the scheduler answers them with; changes nothing."""

    @property
    def event_types(self) -> Collection[type[Event]]:
        """The event types to observe, looked at again whenever a worker has joined or left. An event of any type can
        cause commands.
        """
        return EVENTS

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """Called after the scheduler has handled `event` and returned `commands`; `now` is the time of the event."""


class FrontServices(Protocol):
    """What the scheduler's process does for fronts besides scheduling."""

    def take(self, front: "FrontLink", fact: Fact) -> None:
        """Note a fact that a front reports."""

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
    """One front as the host sees it."""

    def __init__(self, host: "SchedulerHost", deliver: Deliver, number: int, session: str, replica: str) -> None:
        """`number`: of this front in its replica, for logs and metrics; `session` and `replica`: as in `Hello`."""
        self.number: Final = number
        self.session: Final = session
        self.replica: Final = replica
        self.deliver: Final = deliver
        self.messages: int | None = None
        """How many messages the front has sent, to earlier runs too; None until it has reported what these had."""
        self.is_away = False
        """Whether its connection is lost and it may come back."""
        self.seems_dead = False
        """Whether it is away and has closed the connection itself, as the end of a process does."""
        self.is_set_aside = False
        """Whether it is away for so long that its requests hold no room at workers."""
        self._host = host
        self._report: list[FrontMessage] = []
        """What the front has reported so far of what earlier runs had."""
        self._renamed = RenamedRequests(number)

    @property
    def name(self) -> str:
        """The name of the front in metrics."""
        own = f"front-{self.number}"
        return f"{self.replica}/{own}" if self.replica else own

    @property
    def covered(self) -> CoveredFront:
        """What a state that is saved now covers of this front, which has reported."""
        assert self.messages is not None
        return CoveredFront(self.session, self.messages, tuple(self._renamed.ids.items()), self.name)

    def receive(self, message: FrontMessage) -> None:
        """Handle a message of this front."""
        if self.session and self.messages is None:
            self._receive_report(message)
            return
        if self.messages is not None:
            self.messages += 1
        self._handle(message)

    def _receive_report(self, message: FrontMessage) -> None:
        """Collect the report, and handle it once it is complete: a state that is saved holds all of it or nothing."""
        if not isinstance(message, AllReported):
            self._report.append(message)
            return
        report, self._report = self._report, []
        with self._host.holding() if report else nullcontext():
            for each in report:
                try:
                    self._handle(each)
                except Exception:  # as in `socket`: it must not lose the rest of the report
                    log.exception("a report of front %d failed inside the scheduler: %s", self.number, type(each))
        self.messages = message.messages
        self._host.reported(self)

    def _handle(self, message: FrontMessage) -> None:
        match message:
            case Arrived(request):
                self._open(request.id, message)
            case WaitedBefore(own_id, request):
                claimed = self._host.earlier.claim(self.session, own_id)
                self._open(own_id, Arrived(replace(request, id=claimed), again=True))
            case RanBefore(own_id, resumed):
                self._resume(own_id, resumed)
            case AllReported():
                """Only the first one counts."""
            case _ if self._renamed.ids:
                self._host.receive(self, self._renamed.translated(message))
                if isinstance(message, Finished | Failed | Cancelled):
                    self._renamed.forget(message.request)
            case _:
                self._host.receive(self, message)

    def close(self) -> None:
        """End the front: cancel its requests, and no longer count its calls. Does nothing if it was closed before."""
        self._host.disconnect(self)

    def _open(self, own_id: RequestId, event: Arrived | Resumed) -> None:
        """Take a request that is new to this run. `own_id`: its id in its front."""
        request, is_taken = event.request, self._host.is_taken
        if request.id != own_id or is_taken(own_id):
            event = replace(event, request=self._renamed.renamed(own_id, request, is_taken))
        self._host.open(self, event, own_id)

    def _resume(self, own_id: RequestId, event: Resumed) -> None:
        """Take an attempt of an earlier run: the first of a request that this run learns of, or a retry."""
        known = self._renamed.ids.get(own_id, own_id)
        if self._host.is_open_of(self, known):
            self._host.resume(replace(event, request=replace(event.request, id=known)))
        elif event.saved:
            claimed = self._host.earlier.claim(self.session, own_id)
            self._open(own_id, replace(event, request=replace(event.request, id=claimed)))
        else:
            self._open(own_id, event)


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request that has not ended."""

    front: FrontLink
    own_id: RequestId
    """Its id in its front."""
    request: Request
    replied: bool = False
    """Whether the front has its reply to the last submission."""
    prefill: PrefillBeside | None = None
    """The prefill worker that its next dispatch is together with."""
    withdrawn: bool = False
    """Whether the scheduler does not know it, because it waited and its front is away, or because of `repeats`."""
    repeats: bool = False
    """Whether it repeats a call of a front that seems dead: it waits until that is known, to be charged accordingly."""


class SchedulerHost:
    """Connects the scheduler, which never blocks, with the fronts that wait for its decisions."""

    def __init__(
        self,
        scheduler: Scheduler,
        observers: Sequence[Observer],
        clock: Callable[[], float],
        wall_clock: Callable[[], float] = lambda: 0.0,
        *,
        traced: bool = False,
    ) -> None:
        """`clock`: returns seconds and never goes backwards; `wall_clock`: the seconds since 1970-01-01 (UTC).

        `traced`: whether fronts learn why workers are chosen.
        """
        self.scheduler = scheduler
        self._traced = traced
        self.clock = clock
        self._wall_clock = wall_clock
        self._services: FrontServices = NoServices()
        self._observers: list[Observer] = []
        self._observers_by_type: dict[type[Event], list[Observer]] = {}
        """Observers by the event type that they subscribe to."""
        self.attach(*observers)
        self._links: list[FrontLink] = []
        self._workers: dict[WorkerId, WorkerChanged] = {}
        """What was last announced of each worker."""
        self._requests: dict[RequestId, OpenRequest] = {}
        """The requests of all fronts that have not ended."""
        self._wake_timer: asyncio.TimerHandle | None = None
        self.earlier = EarlierRun()
        """What the restored state says of fronts that have not reported."""
        self.on_reported: Callable[[FrontLink], None] = lambda _: None
        """Called when a front has reported all that an earlier run had of it."""

    def reported(self, front: FrontLink) -> None:
        """Note that a front has reported all that an earlier run had of it."""
        self.earlier.has_reported(front.session, front.name if front.replica else "")
        self.on_reported(front)

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Hold the scheduler, if it is not held already: what a late front reports is dispatched nowhere in between."""
        if self.scheduler.fleet.held:
            yield
            return
        self.feed(Held())
        try:
            yield
        finally:
            self.feed(Released(complete=False))

    def all_reported(self) -> None:
        """Forget what the restored state says: all fronts that are left of the earlier run have reported."""
        self.earlier = EarlierRun()

    def set_services(self, services: FrontServices) -> None:
        """Set what takes the facts and answers the questions of fronts."""
        self._services = services

    def feed(self, event: Event) -> None:
        """Pass an event to the scheduler, notify the observers and carry out the scheduler's commands.

        The first event of a day is preceded by one that says which day it is.
        """
        if (day := int(self._wall_clock() // DAY_SECONDS)) != self.scheduler.ledger.usage.day:
            self._feed(DayBegan(day))
        self._feed(event)

    def _feed(self, event: Event) -> None:
        now = self.clock()
        commands = self.scheduler.handle(event, now)
        for observer in self._observers_by_type[type(event)]:
            observer.observe(now, event, commands)
        if type(event) in (WorkerJoined, WorkerLeft):
            self._subscribe()
        for command in commands:
            self._carry_out(command, now)

    def attach(self, *observers: Observer) -> None:
        """Add observers. They are notified after those that were added earlier."""
        self._observers += observers
        self._subscribe()

    def _subscribe(self) -> None:
        self._observers_by_type = {
            kind: [observer for observer in self._observers if kind in observer.event_types] for kind in EVENTS
        }

    def connect(self, deliver: Deliver, number: int = 0, session: str = "", replica: str = "") -> FrontLink:
        """Add a front, to which `deliver` sends messages, first of all the present workers.

        A front with a session is told first what the restored state covers, and reports the rest.
        """
        link = FrontLink(self, deliver, number, session, replica)
        self._links.append(link)
        if session:
            deliver(Saved(self.earlier.messages_of(session)))
        for change in self._workers.values():
            deliver(change)
        return link

    def disconnect(self, front: FrontLink) -> None:
        """Remove a front, whose clients are gone: cancel its requests and end its calls. Does nothing if it was removed
        before.
        """
        if front not in self._links:
            return
        self._links.remove(front)
        running = self.scheduler.attempts
        left = {request: self._requests[request] for request, opened in self._requests.items() if opened.front is front}
        for request in left:
            del self._requests[request]
        for request in sorted(left, key=running.__contains__):  # the waiting ones first, so that none is dispatched
            if not left[request].withdrawn:
                self.feed(Cancelled(request, front_died=True))
        self._services.front_closed(front)
        self._admit_repeated()

    def withdraw_waiting(self, front: FrontLink) -> None:
        """Take the waiting requests of a front that is away from the scheduler: what it sends to a worker, the front
        could not send there.
        """
        front.is_away = True
        for request, opened in list(self._requests.items()):
            if opened.front is front and not opened.withdrawn and self.scheduler.is_untouched(request):
                opened.withdrawn = True
                self.feed(Cancelled(request))

    def set_aside(self, front: FrontLink) -> None:
        """Let workers have room as if they did not have the requests of a front that is away for long."""
        front.is_set_aside = True
        self.feed(FrontAway(self._running(front)))

    def _set_aside_again(self, front: FrontLink) -> None:
        if front.is_set_aside:
            self.set_aside(front)

    def _running(self, front: FrontLink) -> tuple[RequestId, ...]:
        """Return the requests of a front that workers have."""
        attempts = self.scheduler.attempts
        mine = (request for request, opened in self._requests.items() if opened.front is front)
        return tuple(request for request in mine if request in attempts)

    def queue_again(self, front: FrontLink) -> None:
        """Give the scheduler back what was taken from it while a front was away."""
        front.is_away = front.seems_dead = False
        if front.is_set_aside:
            front.is_set_aside = False
            self.feed(FrontBack(self._running(front)))
        for opened in list(self._requests.values()):
            if opened.front is front and opened.withdrawn and not opened.repeats:
                opened.withdrawn = False
                self.feed(Arrived(opened.request, again=True))
        self._admit_repeated()

    def _repeats(self, event: Arrived | Resumed) -> bool:
        """Return whether a request repeats a call of a front that seems dead."""
        request = event.request
        if isinstance(event, Resumed) or request.retry_key is None or not any(link.seems_dead for link in self._links):
            return False
        same = (request.client, request.retry_key)
        opened = [opened for opened in self._requests.values() if opened.front.seems_dead]
        return any((each.request.client, each.request.retry_key) == same for each in opened)

    def _admit_repeated(self) -> None:
        """Give the scheduler the repeated calls of fronts of which it is known now whether they are dead."""
        for opened in [opened for opened in self._requests.values() if opened.repeats]:
            arrived = Arrived(opened.request)
            if not self._repeats(arrived):
                opened.repeats, opened.withdrawn = False, opened.front.is_away
                if not opened.withdrawn:
                    self.feed(arrived)

    def covered(self) -> list[CoveredFront]:
        """Return what a state that is saved now covers of each front.

        For fronts that have not reported what earlier runs had, that is what the restored state covers.
        """
        return [*self.earlier.fronts, *[link.covered for link in self._links if link.messages is not None]]

    def announce_saved(self, covered: Iterable[CoveredFront]) -> None:
        """Tell the fronts that a state is saved which covers this."""
        messages = {front.session: front.messages for front in covered}
        for link in self._links:
            if link.session in messages:
                link.deliver(Saved(messages[link.session]))

    def announce(self, change: WorkerChanged | WorkerRemoved) -> None:
        """Report a change of the workers to all fronts, and to those that connect later."""
        if isinstance(change, WorkerChanged):
            self._workers[change.card.id] = change
        else:
            self._workers.pop(change.worker, None)
        self.tell_fronts(change)

    def tell_fronts(self, message: WorkerChanged | WorkerRemoved | ResponseChanged) -> None:
        """Send a message to all fronts that are connected."""
        for link in self._links:
            link.deliver(message)

    def is_taken(self, request: RequestId) -> bool:
        """Return whether a request with this id has not ended, or is to be reported."""
        return request in self._requests or request in self.earlier.unclaimed

    def is_open_of(self, front: FrontLink, request: RequestId) -> bool:
        """Return whether this front has a request with this id that has not ended."""
        opened = self._requests.get(request)
        return opened is not None and opened.front is front

    def open(self, front: FrontLink, event: Arrived | Resumed, own_id: RequestId) -> None:
        """Take a request whose id no open request has. `own_id`: its id in its front."""
        request = event.request
        repeats = self._repeats(event)
        replied = isinstance(event, Resumed)
        self._requests[request.id] = OpenRequest(front, own_id, request, replied, withdrawn=repeats, repeats=repeats)
        if not repeats:
            self.feed(event)

    def resume(self, event: Resumed) -> None:
        """Take a later attempt of an open request."""
        self._requests[event.request.id].replied = True
        self.feed(event)

    def receive(self, front: FrontLink, message: LaterMessage) -> None:
        """Handle a message about an open request, a fact or a question of a front."""
        match message:
            case Finished(ended) | Failed(ended) | Cancelled(ended):
                self.feed(message)
                opened = self._requests.pop(ended, None)
                if opened is not None and not opened.replied:
                    front.deliver(Withdrawn(opened.own_id))
            case Started() | Progressed() | Prefilled(decoding=True):
                self.feed(message)
            case Returned(request) | Prefilled(request) | HandoffLost(request):
                if (opened := self._requests.get(request)) is not None:
                    opened.replied = False
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
        return not self._requests

    @property
    def open_requests(self) -> int:
        """How many requests of all fronts have not ended."""
        return len(self._requests)

    def close(self) -> None:
        """Stop the timer."""
        if self._wake_timer is not None:
            self._wake_timer.cancel()

    def _carry_out(self, command: Command, now: float) -> None:
        match command:
            case Dispatch(request):
                if (opened := self._requests.get(request)) is not None:
                    self._assign(opened, command, now)
            case Reject(request):
                if (opened := self._requests.get(request)) is not None:
                    opened.replied = True
                    opened.front.deliver(Reject(opened.own_id, command.reason, command.retry_after))
            case WakeAt(time):
                if self._wake_timer is not None:
                    self._wake_timer.cancel()
                self._wake_timer = asyncio.get_running_loop().call_later(max(0.0, time - now), self._tick)
            case _:
                assert_never(command)

    def _assign(self, opened: OpenRequest, dispatch: Dispatch, now: float) -> None:
        """Tell a front where to send a request. Two dispatches of one request at once make one assignment."""
        request, worker, cached_tokens, leg = dispatch.request, dispatch.worker, dispatch.cached_tokens, dispatch.leg
        timeouts = self._timeouts(worker, opened.request.output_limit)
        placement = _placement(dispatch, now) if self._traced else None
        if leg is Leg.PREFILL and dispatch.partner is not None:
            opened.prefill = PrefillBeside(worker, cached_tokens, timeouts, placement)
            return
        prefill, opened.prefill = opened.prefill, None
        if prefill is not None:
            cached_tokens, timeouts = prefill.cached_tokens, _one_after_the_other(prefill.timeouts, timeouts)
        opened.replied = True
        if opened.front.is_set_aside:  # a retry, which nobody can begin before the front is back
            asyncio.get_running_loop().call_soon(self._set_aside_again, opened.front)
        own_id = opened.own_id
        known_as = None if own_id == request else request
        opened.front.deliver(Assignment(own_id, worker, cached_tokens, timeouts, known_as, leg, prefill, placement))

    def _timeouts(self, worker: WorkerId, output_limit: int | None) -> Timeouts:
        """Return how long the worker may be silent with a request for at most this many output tokens."""
        silence = self.scheduler.fleet.states[worker].silence_timeout
        return Timeouts(silence.first_token, silence.between_tokens, silence.whole(output_limit))

    def _tick(self) -> None:
        self._wake_timer = None
        self.feed(Ticked())


def _placement(dispatch: Dispatch, now: float) -> PlacementRecord:
    decision = dispatch.decision
    return PlacementRecord(
        now,
        dispatch.why,
        decision.match.get(dispatch.worker, 0),
        max(decision.match.values(), default=0),
        decision.deficit,
        decision.load.requests,
        len(decision.passed_over),
    )


def _one_after_the_other(prefill: Timeouts, decode: Timeouts) -> Timeouts:
    """Return the timeouts of a decode worker that first waits for a prefill worker."""

    def total(seconds: float | None) -> float | None:
        return None if seconds is None or prefill.first_token is None else prefill.first_token + seconds

    return Timeouts(total(decode.first_token), decode.between_tokens, total(decode.whole))

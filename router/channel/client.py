"""What a front asks of the scheduler: it submits requests, reports what becomes of them, and asks questions."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import ClassVar, Final, Protocol, TypeVar, assert_never, cast

from router.channel.messages import (
    Answered,
    AnswerValue,
    AnyQuestion,
    Ask,
    Assignment,
    Continued,
    FrontEvent,
    FrontMessage,
    Question,
    ResponseChanged,
    Saved,
    SchedulerMessage,
    Settled,
    Withdrawn,
    WorkerChanged,
    WorkerRemoved,
)
from router.core.model.commands import Refusal, Reject
from router.core.model.events import (
    Arrived,
    Cancelled,
    Failed,
    Finished,
    HandoffLost,
    Prefilled,
    Progressed,
    Returned,
    Started,
)
from router.core.model.request import Request, RequestId, Usage
from router.errors import NoWorker, Refused, RouterError

A = TypeVar("A")

STEP_SECONDS: Final = 0.1
"""Seconds between two looks at the output of all running streams."""
REPORT_STEPS: Final = 5
"""Every fifth look, that is every 0.5 s, reports the new output tokens of all streams. A report costs the scheduler
time in proportion to its streams (`make bench`)."""
REPORT_TOKENS: Final = 64
"""A stream with at least this many unreported tokens is reported at any look."""
LAG_RETRY_SECONDS: Final = 2.0
"""Seconds after which a call may be repeated that was refused because the scheduler lags."""


class WorkerObserver(Protocol):
    """Learns of the workers of the fleet as they change."""

    def apply(self, change: WorkerChanged | WorkerRemoved) -> None:
        """Note a change."""


class ResponseObserver(Protocol):
    """Learns that stored responses have changed, through this front or another one."""

    def response_changed(self, response: str, *, deleted: bool) -> None:
        """Note a change."""


class EventObserver(Protocol):
    """Observes the events that this front sends; changes nothing."""

    sent_types: ClassVar[Collection[type[FrontEvent]]]
    """The event types to observe."""

    def observe_sent(self, event: FrontEvent) -> None:
        """Called after the event was sent."""


@dataclass(slots=True)
class RunningStream:
    """A running request whose output tokens can be read at any time."""

    output_tokens: Callable[[], int]
    """Returns the output tokens so far."""
    reported: int = 0
    """Output tokens that the scheduler knows of."""


class SchedulerClient:
    """A front's side of the channel. Holds one future for each request and each question that has no answer yet."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns seconds and never goes backwards. `connect` must be called before anything is sent."""
        self.clock = clock
        self._send: Callable[[FrontMessage], None] = _not_connected
        self.behind: Callable[[], bool] | None = None
        """Whether the scheduler lags too far to be sent new calls; None for never. To be asked by `check_lag`."""
        self.lag_refusals = 0
        """Calls refused because the scheduler lags."""
        self._assignments: dict[RequestId, asyncio.Future[Assignment]] = {}
        """One future per submitted request that is not settled."""
        self._unanswered: set[RequestId] = set()
        """The requests to whose last submission there is no reply yet, settled ones too: the reply may be on its way,
        and would be taken for that to a later request with the same id."""
        self._streams: dict[RequestId, RunningStream] = {}
        self._answers: dict[int, asyncio.Future[AnswerValue]] = {}
        self._questions = 0
        self._workers: list[WorkerObserver] = []
        self._responses: list[ResponseObserver] = []
        self._observers: defaultdict[type[FrontEvent], list[EventObserver]] = defaultdict(list)
        self._report_timer: asyncio.TimerHandle | None = None
        self._steps = 0

    def connect(self, send: Callable[[FrontMessage], None], behind: Callable[[], bool] | None = None) -> None:
        """Set where messages go. The scheduler's messages come back by `receive`.

        `behind`: whether the scheduler lags too far to be sent new calls; None for never.
        """
        self._send = send
        self.behind = behind

    def check_lag(self) -> None:
        """Raise Refused if the scheduler lags too far to be sent a new call."""
        if self.behind is not None and self.behind():
            self.lag_refusals += 1
            message = "The router is overloaded; try again later."
            raise Refused(message, retry_after=LAG_RETRY_SECONDS, reason="rejected-scheduler-lag")

    def follow_workers(self, observer: WorkerObserver) -> None:
        """Tell an observer of every later change of the workers."""
        self._workers.append(observer)

    def follow_responses(self, observer: ResponseObserver) -> None:
        """Tell an observer of every later change of a stored response."""
        self._responses.append(observer)

    def attach(self, observer: EventObserver) -> None:
        """Add an observer of this front's events."""
        for kind in observer.sent_types:
            self._observers[kind].append(observer)

    def __contains__(self, request: RequestId) -> bool:
        """Return whether this id is in use: its request is not settled, or the reply to it may still come."""
        return request in self._assignments or request in self._unanswered

    @property
    def at_rest(self) -> bool:
        """Whether nothing is submitted, running or asked."""
        return not (self._assignments or self._unanswered or self._streams or self._answers)

    def submit(self, request: Request) -> "asyncio.Future[Assignment]":
        """Submit a request. The future gives its assignment, or raises the RouterError that refuses it."""
        try:
            return self._expect_assignment(request.id, Arrived(request))
        except BaseException:
            self._assignments.pop(request.id)  # nothing was submitted, so nothing will be settled
            raise

    def resubmit(self, event: Returned | Prefilled | HandoffLost) -> "asyncio.Future[Assignment]":
        """Submit a placed request again, for another worker. Returns a future as `submit` does."""
        if isinstance(event, Returned):
            self._report_last_tokens(event.request, event.usage)
        return self._expect_assignment(event.request, event)

    def report_prefilled(self, event: Prefilled) -> None:
        """Report that the prompt of a placed request is computed, which its decode worker waits for."""
        self._send_event(event)

    def _expect_assignment(
        self, request: RequestId, event: Arrived | Returned | Prefilled | HandoffLost
    ) -> "asyncio.Future[Assignment]":
        assignment: asyncio.Future[Assignment] = asyncio.get_running_loop().create_future()
        self._assignments[request] = assignment
        self._unanswered.add(request)
        self._send_event(event)
        return assignment

    def start_stream(self, request: RequestId, output_tokens: Callable[[], int]) -> None:
        """Report the first token of a placed request.

        From then until the request is settled, its output is reported as `output_tokens` counts it: together with that
        of all other streams in every `REPORT_STEPS`-th look, and in any look once it has `REPORT_TOKENS` new tokens.
        """
        self._streams[request] = RunningStream(output_tokens)
        if self._report_timer is None:
            self._set_timer()
        self._send_event(Started(request))

    def settle(self, ending: Finished | Failed | Cancelled) -> None:
        """Report the end of a submitted request. To be called exactly once per request, whatever happened."""
        # Without cancel(), asyncio would log a refusal that its client left too early to await.
        self._assignments.pop(ending.request).cancel()
        self._report_last_tokens(ending.request, ending.usage)
        self._send_event(ending)

    def ask(self, question: Question[A]) -> "asyncio.Future[A]":
        """Ask a question. The future gives its answer."""
        answer: asyncio.Future[AnswerValue] = asyncio.get_running_loop().create_future()
        self._questions += 1
        self._answers[self._questions] = answer
        self._send(Ask(self._questions, cast("AnyQuestion", question)))
        return cast("asyncio.Future[A]", answer)

    def report(self, fact: FrontMessage) -> None:
        """Report something other than an event of a request."""
        self._send(fact)

    def receive(self, message: SchedulerMessage) -> None:
        """Take a message of the scheduler. Messages about requests that have been settled meanwhile are ignored."""
        match message:
            case Assignment(request):
                self._unanswered.discard(request)
                _resolve(self._assignments.get(request), message)
            case Withdrawn(request):
                self._unanswered.discard(request)
            case Reject(request):
                self._unanswered.discard(request)
                _fail(self._assignments.get(request), refusal_error(message))
            case Answered(number, answer):
                _resolve(self._answers.pop(number, None), answer)
            case WorkerChanged() | WorkerRemoved():
                for observer in self._workers:
                    observer.apply(message)
            case ResponseChanged(response, deleted):
                for follower in self._responses:
                    follower.response_changed(response, deleted=deleted)
            case Saved() | Continued() | Settled():
                """Its channel keeps what a saved state does not cover, if the two can part."""
            case _:
                assert_never(message)

    def close(self) -> None:
        """Stop reporting."""
        if self._report_timer is not None:
            self._report_timer.cancel()

    def _send_event(self, event: FrontEvent) -> None:
        self._send(event)
        for observer in self._observers.get(type(event), ()):
            observer.observe_sent(event)

    def _report_last_tokens(self, request: RequestId, usage: Usage | None) -> None:
        """Stop following a stream. Report its last output tokens, unless the engine reported its usage."""
        stream = self._streams.pop(request, None)
        if stream is not None and usage is None:
            self._send_event(Progressed({request: stream.output_tokens()}))

    def _set_timer(self) -> None:
        self._report_timer = asyncio.get_running_loop().call_later(STEP_SECONDS, self._report_progress)

    def _report_progress(self) -> None:
        """Report the new output tokens of the streams that are due, in one event."""
        self._report_timer = None
        if self._streams:
            self._set_timer()
        self._steps = (self._steps + 1) % REPORT_STEPS
        least = REPORT_TOKENS if self._steps else 1
        progressed = {}
        for request, stream in self._streams.items():
            tokens = stream.output_tokens()
            if tokens - stream.reported >= least:
                stream.reported = progressed[request] = tokens
        if progressed:
            self._send_event(Progressed(progressed))


def _not_connected(message: FrontMessage) -> None:
    raise AssertionError(f"{message} is sent over a channel that is not connected")


def _resolve(future: "asyncio.Future[A] | None", result: A) -> None:
    if future is not None and not future.done():
        future.set_result(result)


def _fail(future: "asyncio.Future[Assignment] | None", error: RouterError) -> None:
    if future is not None and not future.done():
        future.set_exception(error)


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

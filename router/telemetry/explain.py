"""Why a request was sent to its worker, and when: the content of /explain for the most recent requests."""

from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import ClassVar, Final

from pydantic import with_config

from router.core.model.commands import Command, Decision, Deficit, Dispatch, Refusal, Reject
from router.core.model.events import (
    EVENTS,
    Arrived,
    Cancelled,
    Event,
    Failed,
    Finished,
    HandoffLost,
    Prefilled,
    Progressed,
    Resumed,
    Returned,
    Started,
)
from router.core.model.load import Limits
from router.core.model.request import ClientId, Leg, Request, RequestId, Usage, WorkerId
from router.errors import UnknownRequest
from router.telemetry.session_report import SessionEntry

REQUEST_LIMIT: Final = 10_000
"""Requests remembered, the most recent arrivals; about 15 MB."""
TRIED_LIMIT: Final = 3
"""Workers listed that failed a request, the most recent ones."""
OVERTAKERS_LIMIT: Final = 20
"""Clients counted that were sent ahead of a request."""
DECISION_LIMIT: Final = 30
"""The latest decisions kept, to be shown as they happen."""
NOT_BEGUN: Final = "before the worker had begun"
BEGUN: Final = "when the worker may have begun"


class RequestOutcome(StrEnum):
    """The state of a request, or how it ended."""

    WAITING = "waiting"
    IN_FLIGHT = "in flight"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REJECTED = "rejected"


@with_config(use_attribute_docstrings=True)
@dataclass(frozen=True, slots=True)
class RequestTimes:
    """When a request was dispatched, started and ended; None for what has not happened."""

    arrived: datetime
    """Time of arrival, UTC; the other times are seconds after it."""
    dispatched_s: float | None
    """When it was last sent to a worker."""
    prefilled_s: float | None
    """When a prefill worker last had computed its prompt; None if its fleet has none."""
    started_s: float | None
    """When its first token came; also None for an answer that was not streamed."""
    ended_s: float | None
    """When it finished, failed, was cancelled or was refused."""
    waited_s: float
    """Seconds in the router's queue so far."""


@with_config(use_attribute_docstrings=True)
@dataclass(frozen=True, slots=True)
class WindowLoad:
    """What was in flight at the worker before this request."""

    requests: int
    """Requests in flight."""
    unstarted: int
    """Streamed requests that had no first token yet."""
    unstarted_tokens: int
    """Uncached input tokens of the requests without a first token."""


@with_config(use_attribute_docstrings=True)
@dataclass(frozen=True, slots=True)
class PassedOverReport:
    """A request that was ahead in the queue and could not be sent."""

    request: RequestId
    """Its id."""
    reason: str
    """What kept it from being sent."""


@with_config(use_attribute_docstrings=True)
@dataclass(frozen=True, slots=True)
class DispatchRecord:
    """The decision to send a request to a worker, and what the scheduler knew at that time."""

    worker: WorkerId
    """The worker chosen."""
    leg: Leg
    """What the worker computes of it: all, the prompt for a decode worker, or the answer to a prefilled prompt."""
    why: str
    """What decided the choice, in a word or two."""
    predicted_cached_tokens: int
    """Input tokens predicted to be in the worker's prefix cache; compare with `usage`."""
    match: dict[WorkerId, int]
    """Input tokens predicted to be cached, for each worker that has any."""
    home: list[WorkerId]
    """The workers with the longest match; empty where no worker has one."""
    deficit: Deficit
    """The client's deficits at the worker before the charge, in cost units; None where the policy keeps none."""
    load: WindowLoad
    """What was in flight at the worker before this request."""
    limits: Limits | None
    """The limits of the worker's window at that time; None without a window."""
    passed_over: list[PassedOverReport]
    """Requests that were ahead in the queue and could not be sent."""


@with_config(use_attribute_docstrings=True)
@dataclass(frozen=True, slots=True)
class Explanation:
    """One request; if several had the same id, the last of them."""

    request: RequestId
    """Its id, as in `x-request-id`."""
    client: ClientId
    """The client it is charged to."""
    model: str
    """The model it asked for."""
    policy: str
    """The scheduling policy."""
    state: RequestOutcome
    """Its state, or how it ended."""
    reason: str | None
    """Why it was refused, or at what point it failed."""
    retry_after_s: float | None
    """Seconds after which a refused request may be repeated, as sent in `retry-after`."""
    times: RequestTimes
    """When it arrived, was sent, started and ended."""
    tried: list[WorkerId]
    """Workers that failed it before."""
    held_back: dict[str, int]
    """How often another request was sent ahead of it, by reason."""
    sent_ahead: dict[ClientId, int]
    """The same by the client of that request, for the first 20 clients."""
    dispatch: DispatchRecord | None
    """Its last dispatch; None if it has never been sent to a worker."""
    prefill: DispatchRecord | None
    """Its last dispatch to a prefill worker; None if there was none."""
    handoffs_lost: int
    """How often a prefilled prompt was given up, and computed again at no cost to the client."""
    usage: Usage | None
    """Tokens used, as reported by the engine."""
    session: SessionEntry | None = None
    """Its agent session as it is now; None if it belongs to none, or has ended."""


@with_config(use_attribute_docstrings=True)
@dataclass(frozen=True, slots=True)
class RecentDecision:
    """A decision to send a request to a worker, or to refuse it."""

    number: int
    """Counts the decisions since the start, from 1."""
    time: float
    """Seconds since 1970."""
    request: RequestId
    """The request."""
    client: ClientId
    """Its client."""
    worker: WorkerId | None
    """The worker chosen; None if the request was refused."""
    why: str
    """What decided the choice, in a word or two, or why the request was refused."""
    waited_s: float
    """Seconds that the request has waited since it arrived."""
    cached_tokens: int
    """Input tokens predicted to be in the worker's prefix cache."""
    passed_over: int
    """Requests that were ahead in the queue and could not be sent."""


@dataclass(slots=True)
class RequestRecord:
    """What is remembered of a request. Its prompts are not, because their hashes may be long."""

    client: ClientId
    model: str
    arrived: float
    tried: tuple[WorkerId, ...] = ()
    state: RequestOutcome = RequestOutcome.WAITING
    dispatch: Dispatch | None = None
    dispatched: float | None = None
    prefill: Dispatch | None = None
    prefilled: float | None = None
    handoffs_lost: int = 0
    started: float | None = None
    ended: float | None = None
    reason: str | None = None
    retry_after: float | None = None
    usage: Usage | None = None
    held_back: dict[str, int] = field(default_factory=dict)
    sent_ahead: dict[ClientId, int] = field(default_factory=dict)


class Explanations:
    """Observer that remembers the most recent requests by the id that their clients got in `x-request-id`."""

    event_types: ClassVar[Collection[type[Event]]] = EVENTS

    def __init__(self, policy: str, limit: int = REQUEST_LIMIT) -> None:
        """`policy`: the name of the policy; `limit`: requests remembered."""
        self._policy = policy
        self._limit = limit
        self._records: OrderedDict[RequestId, RequestRecord] = OrderedDict()
        """In order of arrival. An OrderedDict, because removing the first entry of a plain dict is slow."""
        self._decided = 0
        self._decisions: deque[tuple[int, float, RequestRecord, Dispatch | Reject]] = deque(maxlen=DECISION_LIMIT)
        """The latest decisions with their number and time."""

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        match event:
            case Progressed():
                pass
            case Arrived(request):
                self._remember(request, now)
            case Resumed(request):
                self._remember(request, now)
                self._records[request.id].state = RequestOutcome.IN_FLIGHT
            case Started(request_id):
                if (record := self._records.get(request_id)) and record.started is None:
                    record.started = now
            case Finished(request_id, usage):
                self._end(request_id, now, RequestOutcome.FINISHED, usage=usage)
            case Returned() | Prefilled() | HandoffLost():
                self._note_end_of_try(event, now)
            case Failed(request_id, accepted, usage):
                self._end(request_id, now, RequestOutcome.FAILED, BEGUN if accepted else NOT_BEGUN, usage)
            case Cancelled(request_id, usage):
                self._end(request_id, now, RequestOutcome.CANCELLED, usage=usage)
        for command in commands:
            match command:
                case Dispatch():
                    self._dispatch(command, now)
                    self._note_decision(command, now)
                case Reject(request_id, refusal, retry_after):
                    self._refuse(request_id, refusal, retry_after, now)
                    self._note_decision(command, now)

    def explain(self, request: str, now: float, wall: float) -> Explanation:
        """Explain a request. Raises UnknownRequest if it is not remembered.

        `now`: the current time on the clock of the events; `wall`: the same moment in seconds since 1970.
        """
        record = self._records.get(RequestId(request))
        if record is None:
            raise UnknownRequest(request)
        return Explanation(
            request=RequestId(request),
            client=record.client,
            model=record.model,
            policy=self._policy,
            state=record.state,
            reason=record.reason,
            retry_after_s=record.retry_after,
            times=_times(record, now, wall),
            tried=list(record.tried),
            held_back=record.held_back,
            sent_ahead=record.sent_ahead,
            dispatch=None if record.dispatch is None else _dispatched(record.dispatch),
            prefill=None if record.prefill is None else _dispatched(record.prefill),
            handoffs_lost=record.handoffs_lost,
            usage=record.usage,
        )

    def latest_decisions(self, now: float, wall: float) -> list[RecentDecision]:
        """Return the latest decisions, oldest first. `now` and `wall` are as in `explain`."""
        return [_recent(*decision, wall - now) for decision in self._decisions]

    def _note_decision(self, command: Dispatch | Reject, now: float) -> None:
        if record := self._records.get(command.request):
            self._decided += 1
            self._decisions.append((self._decided, now, record, command))

    def _remember(self, request: Request, now: float) -> None:
        self._records.pop(request.id, None)
        self._records[request.id] = RequestRecord(request.client, request.model, now)
        if len(self._records) > self._limit:
            self._records.popitem(last=False)

    def _refuse(self, request: RequestId, refusal: Refusal, retry_after: float | None, now: float) -> None:
        """Note that a request was refused. One refused a retry has failed, for the reason of its last failure."""
        record = self._records.get(request)
        if refusal is Refusal.NO_RETRY and record is not None:
            self._end(request, now, RequestOutcome.FAILED, record.reason)
        else:
            self._end(request, now, RequestOutcome.REJECTED, refusal, retry_after=retry_after)

    def _note_end_of_try(self, event: Returned | Prefilled | HandoffLost, now: float) -> None:
        """Note that a worker is done with a request, or lost it, so that it waits for another worker."""
        record = self._records.get(event.request)
        if record is None or record.dispatch is None:
            return
        if not (isinstance(event, Prefilled) and event.decoding):
            record.state = RequestOutcome.WAITING
        if isinstance(event, Prefilled):
            record.prefilled = now
        elif isinstance(event, Returned):
            record.reason = BEGUN if event.accepted else NOT_BEGUN
            failed = record.prefill if event.leg is Leg.PREFILL and record.prefill is not None else record.dispatch
            record.tried = (*record.tried, failed.worker)[-TRIED_LIMIT:]

    def _dispatch(self, command: Dispatch, now: float) -> None:
        for request, reason in command.decision.passed_over:
            if passed := self._records.get(request):
                passed.held_back[reason] = passed.held_back.get(reason, 0) + 1
                ahead, client = passed.sent_ahead, command.decision.client
                if client in ahead or len(ahead) < OVERTAKERS_LIMIT:
                    ahead[client] = ahead.get(client, 0) + 1
        if record := self._records.get(command.request):
            record.state, record.reason = RequestOutcome.IN_FLIGHT, None
            record.dispatch = command
            record.dispatched = now
            if command.leg is Leg.PREFILL:
                record.handoffs_lost += record.prefilled is not None
                record.prefill = command

    def _end(
        self,
        request: RequestId,
        now: float,
        state: RequestOutcome,
        reason: str | None = None,
        usage: Usage | None = None,
        retry_after: float | None = None,
    ) -> None:
        """Note how a request ended. Only the first end counts: a refused request is settled again by its front."""
        record = self._records.get(request)
        if record is not None and record.ended is None:
            record.ended = now
            record.state = state
            record.reason = reason
            record.usage = usage
            record.retry_after = retry_after


def _times(record: RequestRecord, now: float, wall: float) -> RequestTimes:
    def after(time: float | None) -> float | None:
        return None if time is None else time - record.arrived

    waited_until = next(time for time in (record.dispatched, record.ended, now) if time is not None)
    return RequestTimes(
        datetime.fromtimestamp(wall - (now - record.arrived), UTC),
        after(record.dispatched),
        after(record.prefilled),
        after(record.started),
        after(record.ended),
        waited_until - record.arrived,
    )


def _recent(
    number: int, time: float, record: RequestRecord, command: Dispatch | Reject, to_wall: float
) -> RecentDecision:
    """`to_wall`: what the wall clock is ahead of the clock of the events, in seconds."""
    worker, why, cached, passed_over = None, "", 0, 0
    if isinstance(command, Dispatch):
        worker, why, cached = command.worker, command.why, command.cached_tokens
        passed_over = len(command.decision.passed_over)
    else:
        why = command.reason
    waited = time - record.arrived
    return RecentDecision(
        number, time + to_wall, command.request, record.client, worker, why, waited, cached, passed_over
    )


def _dispatched(command: Dispatch) -> DispatchRecord:
    decision: Decision = command.decision
    longest = max(decision.match.values(), default=0)
    return DispatchRecord(
        worker=command.worker,
        leg=command.leg,
        why=command.why,
        predicted_cached_tokens=command.cached_tokens,
        match=dict(decision.match),
        home=[worker for worker, tokens in decision.match.items() if tokens == longest],
        deficit=decision.deficit,
        load=WindowLoad(*decision.load[:3]),
        limits=decision.limits,
        passed_over=[PassedOverReport(*passed) for passed in decision.passed_over],
    )

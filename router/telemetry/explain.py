"""Why a request went where and when it did: the content of /explain, for the last requests that there were."""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import ClassVar, Final

from pydantic import with_config

from router.core.model.commands import Command, Decision, Deficit, Dispatch, Refusal, Reject
from router.core.model.events import EVENTS, Arrived, Cancelled, Event, Failed, Finished, Progressed, Returned, Started
from router.core.model.load import Limits
from router.core.model.request import ClientId, Request, RequestId, Usage, WorkerId
from router.errors import UnknownRequest

REQUEST_LIMIT: Final = 10_000
"""Requests, the last that arrived; about 15 MB of them."""
TRIED_LIMIT: Final = 3
"""Workers told that lost a request, the last ones."""
NOT_BEGUN: Final = "before the worker had begun"
BEGUN: Final = "when the worker may have begun"


class RequestOutcome(StrEnum):
    """Where a request is in its life, or how that ended."""

    WAITING = "waiting"
    IN_FLIGHT = "in flight"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REJECTED = "rejected"


@with_config(use_attribute_docstrings=True)
@dataclass(frozen=True, slots=True)
class RequestTimes:
    """When things happened to a request; None for what did not, or not yet."""

    arrived: datetime
    """UTC; the others are seconds after it."""
    dispatched_s: float | None
    started_s: float | None
    """Its first token; None too for an answer that was not streamed."""
    ended_s: float | None
    waited_s: float
    """In the router's queue, so far."""


@with_config(use_attribute_docstrings=True)
@dataclass(frozen=True, slots=True)
class WindowLoad:
    """What was in flight at a worker before this request."""

    requests: int
    unstarted: int
    """Streamed requests without a first token."""
    unstarted_tokens: int
    """The uncached input tokens of those."""


@with_config(use_attribute_docstrings=True)
@dataclass(frozen=True, slots=True)
class PassedOver:
    """A request whose turn it was before, and why it could not go."""

    request: RequestId
    reason: str


@with_config(use_attribute_docstrings=True)
@dataclass(frozen=True, slots=True)
class DispatchRecord:
    """The choice of a worker and a turn, and what the scheduler knew when it made it."""

    worker: WorkerId
    why: str
    """What decided the worker and the turn."""
    predicted_cached_tokens: int
    """How much of the input the worker was believed to hold, to compare with `usage`."""
    match: dict[WorkerId, int]
    """Input tokens that each worker was believed to hold; workers that held none are left out."""
    home: list[WorkerId]
    """The workers with the longest match; none where nobody held anything."""
    credit: Deficit
    """The client's deficit counters in cost units, before it was charged; None where the policy has none."""
    load: WindowLoad
    limits: Limits | None
    """Of the worker's window then; None without any."""
    passed_over: list[PassedOver]
    """Those whose turn it was before."""


@with_config(use_attribute_docstrings=True)
@dataclass(frozen=True, slots=True)
class Explanation:
    """One request; of an id that came several times, the last."""

    request: RequestId
    client: ClientId
    model: str
    policy: str
    state: RequestOutcome
    reason: str | None
    """Why it was rejected, or at what point it failed."""
    retry_after_s: float | None
    """What a rejected one was told."""
    times: RequestTimes
    tried: list[WorkerId]
    """Workers that it was sent to before, and that lost it."""
    held_back: dict[str, int]
    """How often another went in its turn, by the reason."""
    dispatch: DispatchRecord | None
    """None while it waits, and for one that ended waiting."""
    usage: Usage | None
    """What the engine said that it used, in tokens."""


@dataclass(slots=True)
class RequestRecord:
    """What is kept of a request; not its prompts, whose hashes may be long."""

    client: ClientId
    model: str
    arrived: float
    tried: tuple[WorkerId, ...] = ()
    state: RequestOutcome = RequestOutcome.WAITING
    dispatch: Dispatch | None = None
    dispatched: float | None = None
    started: float | None = None
    ended: float | None = None
    reason: str | None = None
    retry_after: float | None = None
    usage: Usage | None = None
    held_back: dict[str, int] = field(default_factory=dict)


class Explanations:
    """Observer: remembers the last requests, by the id that their clients were told in `x-request-id`."""

    event_types: ClassVar[Collection[type[Event]]] = EVENTS

    def __init__(self, policy: str, limit: int = REQUEST_LIMIT) -> None:
        """`policy`: its name."""
        self._policy = policy
        self._limit = limit
        self._records: OrderedDict[RequestId, RequestRecord] = OrderedDict()
        """In the order of arrival; ordered, because a plain dict is slow to give out its first."""

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """See `Observer`."""
        match event:
            case Progressed():
                pass
            case Arrived(request):
                self._remember(request, now)
            case Started(request_id):
                if (record := self._records.get(request_id)) and record.started is None:
                    record.started = now
            case Finished(request_id, usage):
                self._end(request_id, now, RequestOutcome.FINISHED, usage=usage)
            case Returned(request_id, accepted):
                self._requeue(request_id, BEGUN if accepted else NOT_BEGUN)
            case Failed(request_id, accepted, usage):
                self._end(request_id, now, RequestOutcome.FAILED, BEGUN if accepted else NOT_BEGUN, usage)
            case Cancelled(request_id, usage):
                self._end(request_id, now, RequestOutcome.CANCELLED, usage=usage)
        for command in commands:
            match command:
                case Dispatch():
                    self._dispatch(command, now)
                case Reject(request_id, refusal, retry_after):
                    self._refuse(request_id, refusal, retry_after, now)

    def explain(self, request: str, now: float, wall: float) -> Explanation:
        """Explain a request. Raises UnknownRequest.

        `now`: the time of the events' clock; `wall`: the same in seconds since 1970.
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
            dispatch=None if record.dispatch is None else _dispatched(record.dispatch),
            usage=record.usage,
        )

    def _remember(self, request: Request, now: float) -> None:
        self._records.pop(request.id, None)
        self._records[request.id] = RequestRecord(request.client, request.model, now)
        if len(self._records) > self._limit:
            self._records.popitem(last=False)

    def _refuse(self, request: RequestId, refusal: Refusal, retry_after: float | None, now: float) -> None:
        """It is turned away; one that may not be tried again has failed as it did the last time."""
        record = self._records.get(request)
        if refusal is Refusal.NO_RETRY and record is not None:
            self._end(request, now, RequestOutcome.FAILED, record.reason)
        else:
            self._end(request, now, RequestOutcome.REJECTED, refusal, retry_after=retry_after)

    def _requeue(self, request: RequestId, reason: str) -> None:
        """A worker lost it; another may do it."""
        if (record := self._records.get(request)) and record.dispatch is not None:
            record.state, record.reason = RequestOutcome.WAITING, reason
            record.tried = (*record.tried, record.dispatch.worker)[-TRIED_LIMIT:]

    def _dispatch(self, command: Dispatch, now: float) -> None:
        for request, reason in command.decision.passed_over:
            if passed := self._records.get(request):
                passed.held_back[reason] = passed.held_back.get(reason, 0) + 1
        if record := self._records.get(command.request):
            record.state, record.reason = RequestOutcome.IN_FLIGHT, None
            record.dispatch = command
            record.dispatched = now

    def _end(
        self,
        request: RequestId,
        now: float,
        state: RequestOutcome,
        reason: str | None = None,
        usage: Usage | None = None,
        retry_after: float | None = None,
    ) -> None:
        """Note the first ending of a request; what is said of it after a refusal is no second one."""
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
        after(record.started),
        after(record.ended),
        waited_until - record.arrived,
    )


def _dispatched(command: Dispatch) -> DispatchRecord:
    decision: Decision = command.decision
    longest = max(decision.match.values(), default=0)
    return DispatchRecord(
        worker=command.worker,
        why=command.why,
        predicted_cached_tokens=command.cached_tokens,
        match=dict(decision.match),
        home=[worker for worker, tokens in decision.match.items() if tokens == longest],
        credit=decision.credit,
        load=WindowLoad(*decision.load[:3]),
        limits=decision.limits,
        passed_over=[PassedOver(*passed) for passed in decision.passed_over],
    )

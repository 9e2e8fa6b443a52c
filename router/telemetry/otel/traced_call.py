"""The spans of one call: the call itself, and in it each wait, each placement and each attempt.

Spans name workers, clients and models and count tokens. They hold no text of prompts or answers, and no key.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import Scope

from router.api.families import without_azure
from router.channel.messages import Assignment, PlacementRecord, WorkerCard
from router.core.model.events import Cancelled, Failed, Fault, Finished, HandoffLost, Prefilled, Returned
from router.core.model.request import Leg, Usage, WorkerId
from router.telemetry.calls.recorded_call import GOOD, RecordedCall
from router.telemetry.otel.conventions import (
    ERROR_TYPE,
    FIRST_CHUNK,
    MODEL,
    OPERATION,
    OWN,
    PROVIDER,
    STATUS,
    operation_of,
    provider_of,
    route_of,
    usage_attributes,
)
from router.upstream.connections import WorkerConnections

PROPAGATOR: Final = TraceContextTextMapPropagator()
TRACE_HEADERS: Final = ("traceparent", "tracestate")
"""The headers in which W3C's trace context comes and goes."""
NANOSECONDS: Final = 10**9


class AttemptOutcome(StrEnum):
    """How an attempt ended."""

    FINISHED = "finished"
    PREFILLED = "prefilled"
    """It computed the prompt, for a decode worker."""
    FAILED = "failed"
    ABORTED = "aborted"
    """The other of two workers that had the call at once failed."""
    LOST = "lost"
    """The prompt that it was to decode was too old."""
    CANCELLED = "cancelled"
    """The client left."""


class Tracing(NamedTuple):
    """What the spans of all calls of a front are made with."""

    tracer: Tracer
    connections: WorkerConnections
    policy: str
    """The policy's name."""
    clock: Callable[[], float]
    """Returns seconds and never goes backwards."""
    wall_clock: Callable[[], int]
    """Returns nanoseconds since 1970."""
    measure: Callable[["TracedCall"], None]
    """Called with each call that has ended."""

    def card_of(self, worker: WorkerId | None) -> WorkerCard | None:
        """Return what is known of a worker; None if it has left."""
        return self.connections.by_id[worker].card if worker is not None and worker in self.connections.by_id else None


@dataclass(frozen=True, slots=True)
class TracedAttempt:
    """An attempt that has not ended."""

    span: Span
    leg: Leg
    began: float
    """In seconds of the call's clock."""


class TracedCall(RecordedCall):
    """Makes spans of what is noted of a call. The span of an attempt is the parent in the context its worker gets."""

    def __init__(self, scope: Scope, tracing: Tracing) -> None:
        """Begin the span of a call that has arrived, in the context that its client sent, if any."""
        super().__init__(tracing.clock)
        self._tracing = tracing
        self._clock_to_wall = tracing.wall_clock() - int(self._arrived * NANOSECONDS)
        """What the wall clock was ahead of the other one at the arrival, in nanoseconds."""
        path = without_azure(scope["path"])[0]
        route = route_of(path)
        self.operation: Final = operation_of(route)
        self._attempts: dict[WorkerId, TracedAttempt] = {}
        self._waits_since: float | None = None
        """Since when it waits for a worker; None while it does not."""
        self._fault: Fault | None = None
        """Why its last failed attempt failed."""
        attributes = {
            "http.request.method": scope["method"],
            "url.scheme": scope.get("scheme", "http"),
            "url.path": path,
            **({} if route is None else {"http.route": route}),
            **({"client.address": scope["client"][0]} if scope.get("client") else {}),
        }
        name = scope["method"] if route is None else f"{scope['method']} {route}"
        parent = PROPAGATOR.extract(_trace_headers(scope["headers"]), Context())
        self._span: Final = self._begin(name, self._arrived, attributes, parent, SpanKind.SERVER)
        self._context: Final = set_span_in_context(self._span, Context())

    def note_queued(self) -> None:
        super().note_queued()
        self._waits_since = self._clock()

    def note_sent(self, assignment: Assignment) -> None:
        super().note_sent(assignment)
        now, beside = self._clock(), assignment.prefill
        placement = assignment.placement
        self._end_wait(now if placement is None else placement.decided)
        if beside is not None:
            self._begin_attempt(beside.worker, Leg.PREFILL, beside.cached_tokens, beside.placement, now)
        self._begin_attempt(assignment.worker, assignment.leg, assignment.cached_tokens, placement, now)

    def headers_for(self, worker: WorkerId, headers: dict[str, str]) -> dict[str, str]:
        attempt = self._attempts.get(worker)
        own = {name: value for name, value in headers.items() if name not in TRACE_HEADERS}
        PROPAGATOR.inject(own, self._context if attempt is None else set_span_in_context(attempt.span, Context()))
        return own

    def note_first_token(self) -> None:
        super().note_first_token()
        for attempt in self._attempts.values():
            if attempt.leg is not Leg.PREFILL:
                attempt.span.set_attribute(FIRST_CHUNK, self._clock() - attempt.began)

    def note_prefilled(self, usage: Usage | None) -> None:
        for worker, attempt in [*self._attempts.items()]:
            if attempt.leg is Leg.PREFILL:
                self._end_attempt(worker, AttemptOutcome.PREFILLED, usage)

    def note_waiting(self, event: Returned | Prefilled | HandoffLost) -> None:
        match event:
            case Returned(_, _, fault, usage, begun):
                # Of a stream that another worker continues, the last attempt has the usage of the whole answer.
                self._fail_attempts(event.leg, fault, None if begun else usage)
            case Prefilled(_, usage):
                self._end_attempts(AttemptOutcome.PREFILLED, usage)
            case HandoffLost():
                self._end_attempts(AttemptOutcome.LOST)
        self._waits_since = self._clock()

    def note_end(self, ending: Finished | Failed | Cancelled) -> None:
        super().note_end(ending)
        match ending:
            case Finished(_, usage):
                self.note_prefilled(None)  # what a prefill worker has still to say is read when this call has ended
                self._end_attempts(AttemptOutcome.FINISHED, usage)
            case Failed(_, _, usage, fault, leg):
                self._fail_attempts(leg, fault, usage)
            case Cancelled(_, usage):
                self._end_attempts(AttemptOutcome.CANCELLED, usage)

    def end(self) -> None:
        self._end_wait(self._clock())
        self._end_attempts(AttemptOutcome.FINISHED)  # a response that its engine computes in the background
        outcome = self.outcome
        known = {
            STATUS: self.status,
            MODEL: self.model,
            OWN + "request": self.request,
            OWN + "client": self.client,
            OWN + "worker": self.worker,
            OWN + "tries": self.tries,
            OWN + "outcome": outcome.value,
            OWN + "queue_seconds": self.queue_seconds,
            OWN + "time_to_first_token_seconds": self.first_token_seconds,
        }
        self._span.set_attributes({name: value for name, value in known.items() if value is not None})
        if (error := self.error_type) is not None:
            self._span.set_attribute(ERROR_TYPE, error)
            if outcome not in GOOD and not (self.status is not None and 400 <= self.status < 500):
                self._span.set_status(StatusCode.ERROR, error)  # by the conventions of HTTP, 4xx is no server's error
        super().end()
        self._span.end(self._wall(self._arrived + self.seconds))
        self._tracing.measure(self)

    @property
    def provider(self) -> str:
        """The kind of engine that had the call last."""
        return provider_of(self._tracing.card_of(self.worker))

    @property
    def error_type(self) -> str | None:
        """Why the call went wrong, in a word; None if it did not."""
        if self.outcome in GOOD:
            return None
        status = None if self.status is None or self.status < 400 else str(self.status)
        return self.error or status or self._fault or self.outcome

    def _wall(self, time: float) -> int:
        """Return a time of the call's clock in nanoseconds since 1970."""
        return self._clock_to_wall + int(time * NANOSECONDS)

    def _begin(
        self,
        name: str,
        since: float,
        attributes: Mapping[str, str | int | float],
        parent: Context,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> Span:
        return self._tracing.tracer.start_span(name, parent, kind, attributes, start_time=self._wall(since))

    def _end_wait(self, until: float) -> None:
        """Make a span of a wait that has ended, if there was one."""
        since, self._waits_since = self._waits_since, None
        if since is not None:
            self._begin("queue", since, {}, self._context).end(self._wall(max(since, until)))

    def _begin_attempt(
        self, worker: WorkerId, leg: Leg, cached_tokens: int, placement: PlacementRecord | None, now: float
    ) -> None:
        """Begin the span of an attempt, after that of its placement: from the scheduler's decision until now."""
        where = {OWN + "worker": worker, OWN + "leg": leg.value}
        if placement is not None:
            known = where | _placement_attributes(placement, self._tracing.policy)
            decided = min(placement.decided, now)
            self._begin("placement", decided, known, self._context).end(self._wall(now))
        card = self._tracing.card_of(worker)
        attributes: dict[str, str | int | float] = {
            OPERATION: self.operation,
            PROVIDER: provider_of(card),
            MODEL: self.model or "",
            **where,
            OWN + "attempt": self.tries,
            OWN + "predicted_cached_tokens": cached_tokens,
        }
        if card is not None:
            url = urlsplit(card.url)
            attributes["server.address"] = url.hostname or ""
            attributes["server.port"] = url.port or (443 if url.scheme == "https" else 80)
        span = self._begin(f"{self.operation} {self.model}", now, attributes, self._context, SpanKind.CLIENT)
        self._attempts[worker] = TracedAttempt(span, leg, now)

    def _end_attempt(
        self, worker: WorkerId, outcome: AttemptOutcome, usage: Usage | None = None, fault: Fault | None = None
    ) -> None:
        span = self._attempts.pop(worker).span
        span.set_attribute(OWN + "outcome", outcome.value)
        if usage is not None:
            span.set_attributes(usage_attributes(usage))
        if fault is not None:
            span.set_attribute(ERROR_TYPE, fault.value)
            span.set_status(StatusCode.ERROR, fault.value)
        span.end(self._wall(self._clock()))

    def _end_attempts(self, outcome: AttemptOutcome, usage: Usage | None = None) -> None:
        for worker in [*self._attempts]:
            self._end_attempt(worker, outcome, usage)

    def _fail_attempts(self, leg: Leg, fault: Fault, usage: Usage | None) -> None:
        """End the attempt that failed and, if two workers had the call at once, the other one. `leg`: which of two."""
        self._fault, alone = fault, len(self._attempts) == 1
        for worker, attempt in [*self._attempts.items()]:
            if alone or attempt.leg is leg:
                self._end_attempt(worker, AttemptOutcome.FAILED, usage, fault)
            else:
                self._end_attempt(worker, AttemptOutcome.ABORTED)


def _placement_attributes(placement: PlacementRecord, policy: str) -> dict[str, str | int | float]:
    known: dict[str, str | int | float | None] = {
        "policy": policy,
        "why": placement.why,
        "match_tokens": placement.match_tokens,
        "longest_match_tokens": placement.longest_match_tokens,
        "deficit.placement": placement.deficit.placement,
        "deficit.order": placement.deficit.order,
        "in_flight": placement.in_flight,
        "passed_over": placement.passed_over,
    }
    return {OWN + name: value for name, value in known.items() if value is not None}


def _trace_headers(headers: Iterable[tuple[bytes, bytes]]) -> Mapping[str, str]:
    """Return the trace context of a client. A `tracestate` in several headers is one list, by W3C's rules."""
    found: dict[str, str] = {}
    for raw, value in headers:
        if (name := raw.decode("latin-1")) in TRACE_HEADERS:
            text = value.decode("latin-1")
            found[name] = f"{found[name]},{text}" if name in found else text
    return found

"""What the gate for agent sessions has admitted and holds back: the report of /sessions, and its metrics."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import with_config

from router.core.clients.sessions.session import Session
from router.core.model.request import ClientId, RequestId, SessionId, WorkerId
from router.core.policies.base import Policy
from router.core.policies.sessions.places import Loss
from router.core.policies.sessions.session_gate import SessionGate

SHOWN: Final = 1000
"""Sessions in a report at most, the paused ones first."""


class SessionState(StrEnum):
    """What a session does."""

    PAUSED = "paused"
    """It has a call that is held back."""
    ACTIVE = "active"
    """It has calls, none of which is held back."""
    IDLE = "idle"
    """It has no call, for less than the idle limit."""
    COLD = "cold"
    """It has had no call for longer."""


@with_config(use_attribute_docstrings=True)
@dataclass(frozen=True, slots=True)
class SessionEntry:
    """One session."""

    client: ClientId
    """The client it belongs to."""
    session: SessionId | None
    """Its label; None if it is recognized by its prompts."""
    parent: SessionId | None
    """The session that began it, as its client says."""
    model: str
    """The model that it calls."""
    state: SessionState
    """What it does."""
    worker: WorkerId | None
    """The worker in whose KV cache it has a place; None without a place."""
    context_tokens: int
    """Its latest prompt and answer."""
    reserved_tokens: int
    """What it has reserved at its worker, or needs to get a place."""
    turn_left: float
    """What is left of its turn, in cost units."""
    calls: int
    """Its calls that have not ended."""
    idle_s: float | None
    """Seconds since its last call ended; None while it has one."""
    paused_s: float | None
    """Seconds for which its call has been held back; None if none is."""
    ahead: int | None
    """If it is paused, how many sessions are considered for a place before it."""
    behind: ClientId | None
    """If it is paused, the client of the session that is considered just before it."""


@with_config(use_attribute_docstrings=True)
@dataclass(frozen=True, slots=True)
class GateReport:
    """All sessions, and what they have of the KV caches."""

    open: dict[str, bool]
    """For each model, whether its calls go to the policy as they arrive."""
    reserved_tokens: dict[WorkerId, int]
    """Tokens reserved for sessions, by worker."""
    states: dict[SessionState, int]
    """Sessions by state."""
    places_lost: dict[Loss, int]
    """Places lost so far, by reason."""
    pauses: int
    """Calls that were held back and are not any more."""
    pause_s: float
    """Seconds for which calls were held back, in total."""
    recomputed_tokens: int
    """Tokens of contexts that were to be computed again when their sessions got a place again."""
    sessions: list[SessionEntry]
    """Up to 1,000 of them: those with paused calls in the order in which they are considered, then the others."""


def gate_of(policy: Policy) -> SessionGate | None:
    """Return the gate before a policy; None if there is none."""
    return policy if isinstance(policy, SessionGate) else None


def gate_report(gate: SessionGate | None, now: float, shown: int = SHOWN) -> GateReport:
    """Return the report of a gate, with at most `shown` sessions; an empty one without a gate."""
    if gate is None:
        return GateReport({}, {}, dict.fromkeys(SessionState, 0), dict.fromkeys(Loss, 0), 0, 0.0, 0, [])
    waiting = list(gate.paused.sessions)
    rest = [session for session in gate.table if not session.paused]
    states = dict.fromkeys(SessionState, 0)
    for session in (*waiting, *rest):
        states[state_of(session)] += 1
    entries = [
        entry_of(session, now, position, waiting[position - 1] if position else None)
        for position, session in enumerate(waiting[:shown])
    ]
    entries += [entry_of(session, now) for session in rest[: shown - len(entries)]]
    models = sorted({session.model for session in (*waiting, *rest)})
    return GateReport(
        {model: gate.is_open(model, now) for model in models},
        dict(gate.places),
        states,
        dict(gate.places.losses),
        gate.paused.ended,
        gate.paused.seconds,
        gate.recomputed_tokens,
        entries,
    )


def session_entry(gate: SessionGate | None, request: RequestId, now: float) -> SessionEntry | None:
    """Return the session of a request that has not ended; None if it belongs to none."""
    session = None if gate is None else gate.session_of(request)
    if gate is None or session is None:
        return None
    if not session.paused:
        return entry_of(session, now)
    waiting = list(gate.paused.sessions)
    position = waiting.index(session)
    return entry_of(session, now, position, waiting[position - 1] if position else None)


def state_of(session: Session) -> SessionState:
    """Return what a session does."""
    if session.paused:
        return SessionState.PAUSED
    if session.calls:
        return SessionState.ACTIVE
    return SessionState.IDLE if session.hot else SessionState.COLD


def entry_of(session: Session, now: float, ahead: int | None = None, before: Session | None = None) -> SessionEntry:
    """Return the entry of a session. `ahead` and `before`: of a paused one, its position, and who is just before it."""
    return SessionEntry(
        session.client.name,
        session.label,
        session.parent,
        session.model,
        state_of(session),
        session.worker,
        session.context,
        session.reserved,
        round(session.turn_left, 1),
        len(session.calls),
        None if session.calls else now - session.idle_since,
        now - session.paused_since if session.paused else None,
        ahead,
        None if before is None else before.client.name,
    )


class GateMetrics(Collector):
    """Shows what the gate does. Sessions and clients are no labels: there are too many of them."""

    def __init__(self, report: Callable[[], GateReport]) -> None:
        """`report`: returns the report at a scrape, without sessions."""
        self._report = report

    def collect(self) -> Iterator[Metric]:
        report = self._report()
        sessions = GaugeMetricFamily("d2lpm_sessions", "Remembered agent sessions by state.", labels=("state",))
        for state, count in report.states.items():
            sessions.add_metric((state,), count)
        reserved = GaugeMetricFamily(
            "d2lpm_session_reserved_tokens", "Tokens of a KV cache reserved for sessions.", labels=("worker",)
        )
        for worker, tokens in report.reserved_tokens.items():
            reserved.add_metric((worker,), tokens)
        gates = GaugeMetricFamily(
            "d2lpm_session_gate_open", "1 while calls of the model's sessions go as they arrive.", labels=("model",)
        )
        for model, is_open in report.open.items():
            gates.add_metric((model,), is_open)
        lost = CounterMetricFamily(
            "d2lpm_session_places_lost", "Places in a KV cache that sessions lost, by reason.", labels=("reason",)
        )
        for reason, count in report.places_lost.items():
            lost.add_metric((reason,), count)
        yield from (sessions, reserved, gates, lost)
        yield from _totals(report)


def _totals(report: GateReport) -> Sequence[Metric]:
    return [
        CounterMetricFamily("d2lpm_session_pauses", "Calls held back by the gate, once they go or end.", report.pauses),
        CounterMetricFamily(
            "d2lpm_session_pause_seconds", "Seconds for which the gate held calls back.", report.pause_s
        ),
        CounterMetricFamily(
            "d2lpm_session_recomputed_tokens",
            "Tokens of contexts to be computed again when their sessions got a place again.",
            report.recomputed_tokens,
        ),
    ]

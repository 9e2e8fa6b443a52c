"""Prometheus metrics of hand-offs: what became of prompts that one worker computed for another one to decode."""

import logging
from collections.abc import Collection, Iterator, Sequence, Sized
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.core.model.commands import Command, Dispatch, Reject
from router.core.model.events import (
    EVENTS,
    Arrived,
    Cancelled,
    Event,
    Failed,
    Finished,
    HandoffLost,
    Prefilled,
    Resumed,
    Returned,
    WorkerJoined,
    WorkerLeft,
)
from router.core.model.request import Leg, RequestId, Role, Worker, WorkerId
from router.telemetry.metrics.counts import DurationHistogram, LabeledCounter

log = logging.getLogger(__name__)

FLEET_CHANGES: Final = (WorkerJoined, WorkerLeft)


@dataclass(slots=True)
class HandedOff:
    """A request that was prefilled at least once, or is being prefilled for a decode worker that has it already."""

    since: float
    """When it was prefilled last, in seconds; before that, when it was sent."""
    state: Literal["beside", "pooled", "decoding", "lost"] = "pooled"
    """`beside`: it is being prefilled, and a decode worker has it."""
    prefilled: bool = True
    """Whether it ever was."""


class HandoffOutcome(StrEnum):
    """How a prefilled prompt ended."""

    DECODED = "decoded"
    """A decode worker answered to the end, or until its client left."""
    FAILED = "failed"
    """The prefill failed, and a decode worker waited for it."""
    EXPIRED = "expired"
    """No decode worker had room before it was too old, or its prefill worker left."""
    LOST = "lost"
    """It was too old when its front was to send it."""
    RETURNED = "returned"
    """The decode worker refused it or broke off."""
    CANCELLED = "cancelled"
    """Its client left before it could be decoded."""


class HandoffMetrics(Collector):
    """Observer that follows prompts from their prefill worker to their decode worker, and logs where there is none."""

    def __init__(self, registry: CollectorRegistry, pool: Sized) -> None:
        """Register with `registry`. `pool`: the requests that are prefilled and wait for a decode worker."""
        self._pool = pool
        self._apart: dict[WorkerId, Worker] = {}
        """The workers that compute prompts or answers only. Without any, nothing is followed."""
        self._requests: dict[RequestId, tuple[str, bool]] = {}
        """Model and whether one engine must compute it all, of each open request that arrived beside such workers."""
        self._handed: dict[RequestId, HandedOff] = {}
        self._outcomes = LabeledCounter("d2lpm_handoffs", "Prefilled prompts by what became of them.", "outcome")
        for outcome in HandoffOutcome:
            self._outcomes[outcome,] = 0
        self._age = DurationHistogram(
            "d2lpm_handoff_age_seconds", "Seconds from the prefill of a prompt until it is sent to a decode worker."
        )
        self._again = LabeledCounter("d2lpm_prefills_again", "Prompts that were prefilled once more.")
        self._alone = LabeledCounter(
            "d2lpm_decoded_alone",
            "Whole requests sent to decode workers, by reason.",
            "reason",
        )
        for reason in ("one engine", "no prefill worker"):
            self._alone[reason,] = 0
        self._again[()] = 0
        self._warned: set[str] = set()
        """The models of which it was logged that decode workers serve them alone."""
        self._undecodable: set[str] = set()
        """The models of which it was logged that they have no decode worker."""
        registry.register(self)

    @property
    def event_types(self) -> Collection[type[Event]]:
        """All, as long as there is something to follow."""
        return EVENTS if self._apart or self._requests or self._handed else FLEET_CHANGES

    def collect(self) -> Iterator[Metric]:
        yield from self._outcomes.families()
        yield from self._age.families()
        yield from self._again.families()
        yield from self._alone.families()
        what = "Prefilled requests that wait for a decode worker."
        yield GaugeMetricFamily("d2lpm_handoff_pool_requests", what, value=len(self._pool))

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        if isinstance(event, WorkerJoined | WorkerLeft):
            self._change_fleet(event)
        if self._apart or self._requests or self._handed:
            self._follow(event, now)
            for command in commands:
                match command:
                    case Dispatch():
                        self._dispatch(command, now)
                    case Reject(request):
                        self._end(request)

    def _change_fleet(self, event: WorkerJoined | WorkerLeft) -> None:
        if isinstance(event, WorkerJoined) and event.worker.role is not Role.BOTH:
            self._apart[event.worker.id] = event.worker
        else:
            self._apart.pop(event.worker if isinstance(event, WorkerLeft) else event.worker.id, None)

    def _follow(self, event: Event, now: float) -> None:
        match event:
            case Arrived(request) | Resumed(request):
                self._requests[request.id] = request.model, request.whole or request.worker is not None
                self._check_tiers(request.model)
            case Prefilled(request, decoding=True):
                if (handed := self._handed.get(request)) is not None:
                    handed.state, handed.prefilled = "decoding", True
            case Prefilled(request):
                self._handed[request] = HandedOff(now)
            case HandoffLost(request):
                self._lose(request, HandoffOutcome.LOST)
            case Returned(request) | Failed(request):
                self._lose(request, self._outcome_of(event))
                if isinstance(event, Failed):
                    self._end(request)
            case Finished() | Cancelled():
                self._end(event.request, answered=isinstance(event, Finished))

    def _role_of(self, worker: WorkerId) -> Role:
        return self._apart[worker].role if worker in self._apart else Role.BOTH

    def _check_tiers(self, model: str) -> None:
        """Log once that prompts of a model cannot be decoded; again after it was possible."""
        roles = {worker.role for worker in self._apart.values() if model in worker.models}
        if roles != {Role.PREFILL}:
            self._undecodable.discard(model)
        elif model not in self._undecodable:
            self._undecodable.add(model)
            log.warning("no decode worker serves %s: its prefill workers wait for one", model)

    def _outcome_of(self, event: Returned | Failed) -> HandoffOutcome:
        handed = self._handed.get(event.request)
        waited = event.leg is Leg.PREFILL and handed is not None and handed.state == "beside"
        return HandoffOutcome.FAILED if waited else HandoffOutcome.RETURNED

    def _lose(self, request: RequestId, outcome: HandoffOutcome) -> None:
        handed = self._handed.get(request)
        if handed is not None and handed.state != "lost":
            self._outcomes[outcome,] += 1
            handed.state = "lost"

    def _dispatch(self, command: Dispatch, now: float) -> None:
        model, whole = self._requests.get(command.request, ("", False))
        handed = self._handed.get(command.request)
        if command.leg is Leg.DECODE and command.partner is not None:
            prefilled = handed is not None and handed.prefilled
            self._handed[command.request] = HandedOff(now, "beside", prefilled)
        elif command.leg is Leg.DECODE and handed is not None:
            handed.state = "decoding"
            self._age.observe(model, now - handed.since)
        elif handed is not None:
            self._lose(command.request, HandoffOutcome.EXPIRED)
            self._again[()] += command.leg is Leg.PREFILL and handed.prefilled
        if command.leg is Leg.PREFILL:
            self._warned.discard(model)
        elif command.leg is Leg.WHOLE and self._role_of(command.worker) is Role.DECODE:
            self._alone["one engine" if whole else "no prefill worker",] += 1
            if not whole and model not in self._warned:
                self._warned.add(model)
                log.warning("no prefill worker serves %s: decode workers compute its prompts, too", model)

    def _end(self, request: RequestId, *, answered: bool = False) -> None:
        self._requests.pop(request, None)
        handed = self._handed.pop(request, None)
        if handed is not None and handed.state != "lost":
            decoded = answered or handed.state == "decoding"
            self._outcomes[HandoffOutcome.DECODED if decoded else HandoffOutcome.CANCELLED,] += 1

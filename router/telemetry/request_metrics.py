"""Prometheus metrics of requests, counted as their events are observed.

Counts are plain numbers that become metrics at a scrape: incrementing a counter of the client library costs 20 times as
much, for locks and exemplars that nothing here needs.
"""

import logging
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence, Sized
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import ClassVar, Final, Literal

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from router.core.model.commands import Command, Dispatch, Refusal, Reject
from router.core.model.cost import LinearCost, Tokens
from router.core.model.events import (
    EVENTS,
    Arrived,
    Cancelled,
    Event,
    Failed,
    Fault,
    Finished,
    HandoffLost,
    Prefilled,
    Resumed,
    Returned,
    Started,
    WorkerJoined,
    WorkerLeft,
)
from router.core.model.request import ClientId, Leg, Request, RequestId, Role, Usage, Worker, WorkerId
from router.telemetry.exposition import TextFamily

log = logging.getLogger(__name__)

QUEUED_OF_MODEL: Final = TextFamily(
    GaugeMetricFamily,
    "d2lpm_model_queued_requests",
    "Requests that wait in the router, by client and model.",
    ("client", "model"),
)

CLIENT_LIMIT: Final = 1000
"""Distinct client labels; further clients share the label `other`."""
WORKER_LIMIT: Final = 256
"""Workers that left and keep their own label; the counts of those that left before them move to `other`."""
MODEL_LIMIT: Final = 200
"""Distinct model labels; further models share the label `other`."""
OTHER: Final = "other"
BUCKET_SECONDS: Final = (
    0.001,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
)
TOKEN_BUCKET_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
GROUP_LIMIT: Final = 200
"""Distinct labels of groups of clients; further groups share the label `other`."""
NO_GROUP: Final = "none"
"""The label of clients without a group."""
OUTCOMES: Final = {Finished: "finished", Failed: "failed", Cancelled: "cancelled"}


class ClientLabels:
    """Maps any number of clients to a bounded set of labels."""

    def __init__(self, limit: int = CLIENT_LIMIT) -> None:
        self._limit = limit
        self._known: dict[ClientId, str] = {}

    def label(self, client: ClientId) -> str:
        """Return the client's label: its name for the first clients seen, else `other`."""
        if client not in self._known and len(self._known) < self._limit:
            self._known[client] = client
        return self._known.get(client, OTHER)


class ModelLabels:
    """Maps models to a bounded set of labels, only those that some worker serves: clients may ask for any name."""

    def __init__(self, limit: int = MODEL_LIMIT) -> None:
        self._limit = limit
        self._known: set[str] = set()

    def add(self, models: Collection[str]) -> None:
        """Add models that some worker serves."""
        for model in sorted(models):
            if len(self._known) < self._limit:
                self._known.add(model)

    def label(self, model: str) -> str:
        """Return the model's label."""
        return model if model in self._known else OTHER


class LabeledCounter(defaultdict[tuple[str, ...], float]):
    """A counter with labels: the count by label values."""

    def __init__(self, name: str, text: str, *labels: str) -> None:
        super().__init__(int)
        self._name = name
        self._text = text
        self._labels = labels

    def families(self) -> Iterator[Metric]:
        """Yield the metric family in parts."""
        return TextFamily(CounterMetricFamily, self._name, self._text, self._labels).parts(list(self.items()))


class WorkerCounter(LabeledCounter):
    """A counter whose first label is a worker."""

    def fold_into_other(self, worker: WorkerId) -> None:
        """Move the worker's counts to the label `other`."""
        for labels in [labels for labels in self if labels[0] == worker]:
            self[OTHER, *labels[1:]] += self.pop(labels)


class DurationHistogram:
    """A histogram of seconds by one label."""

    def __init__(self, name: str, text: str, label: str = "model", bounds: Sequence[float] = BUCKET_SECONDS) -> None:
        """`bounds`: upper bounds of the buckets but the last, in seconds."""
        self._name = name
        self._text = text
        self._label = label
        self._bounds = bounds
        self._counts: defaultdict[str, list[int]] = defaultdict(lambda: [0] * (len(bounds) + 1))
        """By label value, observations per bucket (not cumulative); the last bucket has no upper bound."""
        self._sums: defaultdict[str, float] = defaultdict(float)

    def observe(self, value: str, seconds: float) -> None:
        """`value`: of the label."""
        self._counts[value][bisect_left(self._bounds, seconds)] += 1
        self._sums[value] += seconds

    def families(self) -> Iterator[Metric]:
        """Yield the metric family, one label value at a time."""
        bounds = [*map(str, self._bounds), "+Inf"]
        if not self._counts:
            yield HistogramMetricFamily(self._name, self._text, labels=(self._label,))
        for value, counts in list(self._counts.items()):
            family = HistogramMetricFamily(self._name, self._text, labels=(self._label,))
            buckets = list(zip(bounds, accumulate(counts), strict=True))
            family.add_metric((value,), buckets, self._sums[value])
            yield family


@dataclass(slots=True)
class MeasuredRequest:
    """What is counted of a request when something becomes of it."""

    client: ClientId
    model: str
    """The label of its model."""
    group: str
    """The label of its client's group."""
    arrived: float
    waiting: bool = True
    """Whether it waits in the router."""
    begun: bool = False
    """Whether its first token came from an earlier worker than the present one."""
    started: float | None = None
    """When its first token came; None before, and for an answer that does not stream."""
    fault: Fault = Fault.CALL
    """Why its last attempt failed."""


class RequestMetrics(Collector):
    """Observer that counts requests by outcome and measures their times."""

    event_types: ClassVar[Collection[type[Event]]] = EVENTS

    def __init__(
        self,
        registry: CollectorRegistry,
        labels: ClientLabels,
        cost: LinearCost = LinearCost(),  # noqa: B008 - frozen
        workers: int = WORKER_LIMIT,
    ) -> None:
        """Register with `registry`. `workers`: workers that left and keep their own label."""
        self._labels = labels
        self._cost = cost
        self._worker_limit = workers
        self._left: dict[WorkerId, None] = {}
        """Workers that left and keep their label, in the order in which they left."""
        self._models = ModelLabels()
        self._groups = ClientLabels(GROUP_LIMIT)
        self._open: dict[RequestId, MeasuredRequest] = {}
        self._requests = LabeledCounter("d2lpm_requests", "Requests by outcome.", "client", "model", "outcome")
        self._dispatches = WorkerCounter(
            "d2lpm_dispatches", "Requests sent to a worker, by what decided the choice.", "worker", "why"
        )
        self._returned = LabeledCounter(
            "d2lpm_lost_tries", "Attempts that a worker did not complete, by fault.", "fault"
        )
        for fault in Fault:
            self._returned[fault,] = 0
        self._failed = LabeledCounter("d2lpm_failed_requests", "Requests that failed, by fault.", "model", "fault")
        self._service = LabeledCounter(
            "d2lpm_model_service_cost_units",
            "Cost of ended requests by the engine's usage, by client and model.",
            "client",
            "model",
        )
        self._predicted = WorkerCounter(
            "d2lpm_predicted_cached_tokens",
            "Input tokens predicted to be cached, of requests sent to the worker.",
            "worker",
        )
        self._queue = DurationHistogram("d2lpm_queue_seconds", "Seconds in the router's queue.")
        self._first = DurationHistogram("d2lpm_time_to_first_token_seconds", "Seconds from arrival to the first token.")
        self._whole = DurationHistogram("d2lpm_request_seconds", "Seconds from arrival to the end of the answer.")
        self._between = DurationHistogram(
            "d2lpm_inter_token_seconds",
            "Mean seconds between two output tokens of a streamed answer.",
            bounds=TOKEN_BUCKET_SECONDS,
        )
        self._group_queue = DurationHistogram(
            "d2lpm_group_queue_seconds", "Seconds in the router's queue, by group of clients.", "client_group"
        )
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        for metric in (
            self._requests,
            self._dispatches,
            self._returned,
            self._failed,
            self._predicted,
            self._queue,
            self._group_queue,
            self._first,
            self._between,
            self._whole,
        ):
            yield from metric.families()
        waiting = self._waiting()
        for pair in waiting:
            self._service[pair] += 0  # so that a client that is served nothing has a rate, too
        yield from self._service.families()
        yield from QUEUED_OF_MODEL.parts(list(waiting.items()))

    def _waiting(self) -> Counter[tuple[str, ...]]:
        """Count the waiting requests by client and model."""
        waiting = [request for request in self._open.values() if request.waiting]
        return Counter([(self._labels.label(request.client), request.model) for request in waiting])

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        match event:
            case Arrived(request):
                self._add(request, now)
            case Resumed(request):
                # Its times are those of this run, so only how it ends is counted, not how long it took to begin.
                opened = self._add(request, now)
                opened.begun, opened.waiting = True, False
            case Started() | Returned() | Prefilled() | HandoffLost():
                if (known := self._open.get(event.request)) is not None:
                    self._note_progress(known, event, now)
            case Failed():
                self._end(event.request, OUTCOMES[Failed], now, event.usage, event.fault)
            case Finished() | Cancelled():
                self._end(event.request, OUTCOMES[type(event)], now, event.usage)
            case WorkerJoined():
                self._models.add(event.worker.models)
                self._left.pop(event.worker.id, None)
            case WorkerLeft(worker):
                self._leave(worker)
        for command in commands:
            match command:
                case Dispatch():
                    self._dispatch(command, now)
                case Reject(refused, reason):
                    self._reject(refused, reason, now)

    def _note_progress(
        self, request: MeasuredRequest, event: Started | Returned | Prefilled | HandoffLost, now: float
    ) -> None:
        if isinstance(event, Started):
            if not request.begun:
                request.started = now
                self._first.observe(request.model, now - request.arrived)
            return
        request.waiting = True
        if isinstance(event, Returned):
            self._returned[event.fault,] += 1
            request.fault = event.fault
            request.begun = request.begun or event.begun

    def _reject(self, request: RequestId, reason: Refusal, now: float) -> None:
        """Count a refusal. A request that is refused a retry has failed, by the fault of its last attempt."""
        opened = self._open.get(request)
        if reason is Refusal.NO_RETRY and opened is not None:
            self._end(request, OUTCOMES[Failed], now, fault=opened.fault)
        else:
            self._end(request, reason, now)

    def _add(self, request: Request, now: float) -> MeasuredRequest:
        group = NO_GROUP if request.group is None else self._groups.label(ClientId(request.group))
        opened = MeasuredRequest(request.client, self._models.label(request.model), group, now)
        self._open[request.id] = opened
        return opened

    def _leave(self, worker: WorkerId) -> None:
        """Note that a worker left. If too many have left, the counts of the earliest move to `other`."""
        self._left.pop(worker, None)
        self._left[worker] = None
        if len(self._left) > self._worker_limit:
            oldest = next(iter(self._left))
            del self._left[oldest]
            self._dispatches.fold_into_other(oldest)
            self._predicted.fold_into_other(oldest)

    def _dispatch(self, command: Dispatch, now: float) -> None:
        request = self._open[command.request]
        request.waiting = False
        if command.partner is None or command.leg is Leg.PREFILL:  # of two at once, only one waited in the queue
            waited = now - request.arrived
            self._queue.observe(request.model, waited)
            self._group_queue.observe(request.group, waited)
        self._dispatches[command.worker, command.why] += 1
        self._predicted[command.worker,] += command.cached_tokens

    def _end(
        self, request: RequestId, outcome: str, now: float, usage: Usage | None = None, fault: Fault | None = None
    ) -> None:
        """Count how a request ended. Only the first end counts: a refused request is settled again by its front.

        `fault`: why it failed, if it did.
        """
        if (ended := self._open.pop(request, None)) is None:
            return
        client = self._labels.label(ended.client)
        self._requests[client, ended.model, outcome] += 1
        if fault is not None:
            self._failed[ended.model, fault] += 1
        if usage is not None:
            cached = usage.cached_tokens or 0
            cost = self._cost(Tokens(usage.input_tokens - cached, cached, usage.output_tokens))
            self._service[client, ended.model] += cost
        if outcome == OUTCOMES[Finished]:
            self._whole.observe(ended.model, now - ended.arrived)
            if ended.started is not None and usage is not None and usage.output_tokens > 1:
                self._between.observe(ended.model, (now - ended.started) / (usage.output_tokens - 1))


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

    event_types: ClassVar[Collection[type[Event]]] = EVENTS

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

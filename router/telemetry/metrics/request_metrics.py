"""Prometheus metrics of requests, counted as their events are observed."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
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
from router.core.model.request import ClientId, Leg, Request, RequestId, Usage, WorkerId
from router.telemetry.metrics.counts import ClientLabels, DurationHistogram, LabeledCounter, ModelLabels, WorkerCounter
from router.telemetry.metrics.exposition import TextFamily

QUEUED_OF_MODEL: Final = TextFamily(
    GaugeMetricFamily,
    "d2lpm_model_queued_requests",
    "Requests that wait in the router, by client and model.",
    ("client", "model"),
)

WORKER_LIMIT: Final = 256
"""Workers that left and keep their own label; the counts of those that left before them move to `other`."""
TOKEN_BUCKET_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
GROUP_LIMIT: Final = 200
"""Distinct labels of groups of clients; further groups share the label `other`."""
NO_GROUP: Final = "none"
"""The label of clients without a group."""
OUTCOMES: Final = {Finished: "finished", Failed: "failed", Cancelled: "cancelled"}


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
        return Counter([(self._labels[request.client], request.model) for request in waiting])

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
        group = NO_GROUP if request.group is None else self._groups[ClientId(request.group)]
        opened = MeasuredRequest(request.client, self._models[request.model], group, now)
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
        client = self._labels[ended.client]
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

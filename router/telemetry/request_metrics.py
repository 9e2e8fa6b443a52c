"""Prometheus metrics of what happened to requests, counted as it is observed.

Counts are plain numbers, made into metrics at a scrape: a counter of the library's costs 20 times as much to raise, for
locks and exemplars that nothing here needs.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate
from typing import ClassVar, Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from router.core.model.commands import Command, Dispatch, Refusal, Reject
from router.core.model.events import (
    EVENTS,
    Arrived,
    Cancelled,
    Event,
    Failed,
    Fault,
    Finished,
    Returned,
    Started,
    WorkerJoined,
    WorkerLeft,
)
from router.core.model.request import ClientId, RequestId, WorkerId
from router.telemetry.exposition import Family

CLIENT_LIMIT: Final = 1000
"""Distinct client labels; the others share the label `other`."""
WORKER_LIMIT: Final = 256
"""Of workers that left, how many keep the label of their own; what was counted of others is told under `other`."""
MODEL_LIMIT: Final = 200
"""Distinct model labels; likewise."""
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
OUTCOMES: Final = {Finished: "finished", Failed: "failed", Cancelled: "cancelled"}


class ClientLabels:
    """A bounded set of labels for any number of clients."""

    def __init__(self, limit: int = CLIENT_LIMIT) -> None:
        self._limit = limit
        self._known: dict[ClientId, str] = {}

    def label(self, client: ClientId) -> str:
        """The client's label; the first ones keep their own."""
        if client not in self._known and len(self._known) < self._limit:
            self._known[client] = client
        return self._known.get(client, OTHER)


class ModelLabels:
    """A bounded set of labels for models: of those alone that some worker serves, since clients may ask for any."""

    def __init__(self, limit: int = MODEL_LIMIT) -> None:
        self._limit = limit
        self._known: set[str] = set()

    def add(self, models: Collection[str]) -> None:
        """Some worker serves these."""
        for model in sorted(models):
            if len(self._known) < self._limit:
                self._known.add(model)

    def label(self, model: str) -> str:
        """The model's label."""
        return model if model in self._known else OTHER


class LabeledCounter(defaultdict[tuple[str, ...], int]):
    """A counter by the values of its labels."""

    def __init__(self, name: str, text: str, *labels: str) -> None:
        super().__init__(int)
        self._name = name
        self._text = text
        self._labels = labels

    def families(self) -> Iterator[Metric]:
        """As Prometheus reads it, in parts."""
        return Family(CounterMetricFamily, self._name, self._text, self._labels).parts(list(self.items()))


class WorkerCounter(LabeledCounter):
    """A counter whose first label is a worker's."""

    def fold_into_other(self, worker: WorkerId) -> None:
        """Count what was counted of this one as that of another."""
        for labels in [labels for labels in self if labels[0] == worker]:
            self[OTHER, *labels[1:]] += self.pop(labels)


class DurationHistogram:
    """A histogram of seconds by model."""

    def __init__(self, name: str, text: str) -> None:
        self._name = name
        self._text = text
        self._counts: defaultdict[str, list[int]] = defaultdict(lambda: [0] * (len(BUCKET_SECONDS) + 1))
        """How many were at most each of `BUCKET_SECONDS` and more than the one before; the last, how many were longer."""
        self._sums: defaultdict[str, float] = defaultdict(float)

    def observe(self, model: str, seconds: float) -> None:
        """Count one."""
        self._counts[model][bisect_left(BUCKET_SECONDS, seconds)] += 1
        self._sums[model] += seconds

    def families(self) -> Iterator[Metric]:
        """As Prometheus reads it, a model at a time."""
        bounds = [*map(str, BUCKET_SECONDS), "+Inf"]
        if not self._counts:
            yield HistogramMetricFamily(self._name, self._text, labels=("model",))
        for model, counts in list(self._counts.items()):
            family = HistogramMetricFamily(self._name, self._text, labels=("model",))
            buckets = list(zip(bounds, accumulate(counts), strict=True))
            family.add_metric((model,), buckets, self._sums[model])
            yield family


class RequestMetrics(Collector):
    """Observer: requests by their ending, and the times on the way there."""

    event_types: ClassVar[Collection[type[Event]]] = EVENTS

    def __init__(self, registry: CollectorRegistry, labels: ClientLabels, workers: int = WORKER_LIMIT) -> None:
        """`workers`: of those that left, how many keep a label of their own."""
        self._labels = labels
        self._worker_limit = workers
        self._left: dict[WorkerId, None] = {}
        """Those that left and have such a label, the last of them last."""
        self._models = ModelLabels()
        self._seen: dict[RequestId, tuple[ClientId, str, float]] = {}
        """Of requests on their way, the client, the model's label and the time of their arrival."""
        self._begun: set[RequestId] = set()
        """Those of them whose first token came from a worker before the one that they are at."""
        self._requests = LabeledCounter("d2lpm_requests", "Requests by how they ended.", "client", "model", "outcome")
        self._dispatches = WorkerCounter(
            "d2lpm_dispatches", "Requests sent to a worker, by what decided it.", "worker", "why"
        )
        self._returned = LabeledCounter(
            "d2lpm_lost_tries", "Tries that did not come to their end, by the fault.", "fault"
        )
        for fault in Fault:
            self._returned[fault,] = 0
        self._predicted = WorkerCounter(
            "d2lpm_predicted_cached_tokens", "Input tokens predicted to be cached, of requests sent.", "worker"
        )
        self._queue = DurationHistogram("d2lpm_queue_seconds", "Time in the router's queue.")
        self._first = DurationHistogram("d2lpm_time_to_first_token_seconds", "Arrival to first token.")
        self._whole = DurationHistogram("d2lpm_request_seconds", "Arrival to the end of the answer.")
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """All that was counted."""
        for counted in (
            self._requests,
            self._dispatches,
            self._returned,
            self._predicted,
            self._queue,
            self._first,
            self._whole,
        ):
            yield from counted.families()

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """See `Observer`."""
        match event:
            case Arrived(request):
                self._seen[request.id] = request.client, self._models.label(request.model), now
            case Started(started):
                if (seen := self._seen.get(started)) and started not in self._begun:
                    _, model, arrived = seen
                    self._first.observe(model, now - arrived)
            case Returned():
                self._returned[event.fault,] += 1
                if event.begun:
                    self._begun.add(event.request)
            case Finished() | Failed() | Cancelled():
                self._end(event.request, OUTCOMES[type(event)], now)
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
                    self._end(refused, OUTCOMES[Failed] if reason is Refusal.NO_RETRY else reason, now)

    def _leave(self, worker: WorkerId) -> None:
        """It left; fold what was counted of the one that left longest ago, if those are too many."""
        self._left.pop(worker, None)
        self._left[worker] = None
        if len(self._left) > self._worker_limit:
            oldest = next(iter(self._left))
            del self._left[oldest]
            self._dispatches.fold_into_other(oldest)
            self._predicted.fold_into_other(oldest)

    def _dispatch(self, command: Dispatch, now: float) -> None:
        _, model, arrived = self._seen[command.request]
        self._queue.observe(model, now - arrived)
        self._dispatches[command.worker, command.why] += 1
        self._predicted[command.worker,] += command.cached_tokens

    def _end(self, request: RequestId, outcome: str, now: float) -> None:
        """Count the first ending of a request; what is said of it after a refusal is no second one."""
        self._begun.discard(request)
        if seen := self._seen.pop(request, None):
            client, model, arrived = seen
            self._requests[self._labels.label(client), model, outcome] += 1
            if outcome == OUTCOMES[Finished]:
                self._whole.observe(model, now - arrived)

"""Prometheus metrics: what happened is counted as it is observed, what is so is read off when it is asked for.

Counts are plain numbers, made into metrics at a scrape: a counter of the library's costs 20 times as much to raise, for
locks and exemplars that nothing here needs.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import add
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from router.core.model import (
    Arrived,
    Cancelled,
    ClientId,
    Command,
    Dispatch,
    Event,
    Failed,
    Fault,
    Finished,
    Refusal,
    Reject,
    Request,
    RequestId,
    Returned,
    Started,
    WorkerId,
    WorkerJoined,
    WorkerLeft,
)
from router.exposition import Family, Row
from router.report import BREAKER_STATES, CacheCard, ClientReport, FairnessReport, Service, WorkerReport

CLIENT_LIMIT: Final = 1000
"""Distinct client labels; the others share the label `other`."""
WORKER_LIMIT: Final = 256
"""Of workers that left, how many keep the label of their own; what was counted of others is told under `other`."""
MODEL_LIMIT: Final = 200
"""Distinct model labels; likewise."""
OTHER: Final = "other"
SECONDS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
ENDINGS: Final = {Finished: "finished", Failed: "failed", Cancelled: "cancelled"}

SERVICE: Final = Family(
    CounterMetricFamily,
    "d2lpm_service_tokens",
    "Tokens served; extend is input computed, cached is input found in a cache.",
    ("client", "kind"),
)
COST: Final = Family(CounterMetricFamily, "d2lpm_service_cost_units", "What the tokens served cost.", ("client",))
WEIGHT: Final = Family(GaugeMetricFamily, "d2lpm_client_weight", "The client's share relative to others.", ("client",))
WAIT: Final = Family(
    GaugeMetricFamily,
    "d2lpm_client_wait_seconds",
    "Time in the router's queue, of the client's last 256 requests.",
    ("client", "percentile"),
)
DEFICIT: Final = Family(
    GaugeMetricFamily,
    "d2lpm_deficit_cost_units",
    "Deficit counters; negative is debt.",
    ("client", "worker", "counter"),
)
QUEUED: Final = Family(
    GaugeMetricFamily, "d2lpm_client_queued_requests", "Requests of the client that wait here.", ("client",)
)
RUNNING: Final = Family(
    GaugeMetricFamily, "d2lpm_client_running_requests", "Requests of the client at workers.", ("client",)
)
BREAKER: Final = Family(
    GaugeMetricFamily,
    "d2lpm_worker_breaker",
    "1 for the state that its breaker is in, or for silent.",
    ("worker", "state"),
)


class ClientLabels:
    """A bounded set of labels for any number of clients."""

    def __init__(self, limit: int = CLIENT_LIMIT) -> None:
        self._limit = limit
        self._known: dict[ClientId, str] = {}

    def of(self, client: ClientId) -> str:
        """The client's label; the first ones keep their own."""
        if client not in self._known and len(self._known) < self._limit:
            self._known[client] = client
        return self._known.get(client, OTHER)


class ModelLabels:
    """A bounded set of labels for models: of those alone that some worker serves, since clients may ask for any."""

    def __init__(self, limit: int = MODEL_LIMIT) -> None:
        self._limit = limit
        self._known: set[str] = set()

    def served(self, models: Collection[str]) -> None:
        """Some worker serves these."""
        for model in sorted(models):
            if len(self._known) < self._limit:
                self._known.add(model)

    def of(self, model: str) -> str:
        """The model's label."""
        return model if model in self._known else OTHER


class Totals(defaultdict[tuple[str, ...], int]):
    """A counter by the values of its labels."""

    def __init__(self, name: str, text: str, *labels: str) -> None:
        super().__init__(int)
        self._name = name
        self._text = text
        self._labels = labels

    def families(self) -> Iterator[Metric]:
        """As Prometheus reads it, in parts."""
        return Family(CounterMetricFamily, self._name, self._text, self._labels).parts(list(self.items()))


class ByWorker(Totals):
    """A counter whose first label is a worker's."""

    def fold(self, worker: WorkerId) -> None:
        """Count what was counted of this one as that of another."""
        for labels in [labels for labels in self if labels[0] == worker]:
            self[OTHER, *labels[1:]] += self.pop(labels)


class Durations:
    """A histogram of seconds by model."""

    def __init__(self, name: str, text: str) -> None:
        self._name = name
        self._text = text
        self._counts: defaultdict[str, list[int]] = defaultdict(lambda: [0] * (len(SECONDS) + 1))
        """How many were at most each of `SECONDS` and more than the one before; the last, how many were longer."""
        self._sums: defaultdict[str, float] = defaultdict(float)

    def add(self, model: str, seconds: float) -> None:
        """Count one."""
        self._counts[model][bisect_left(SECONDS, seconds)] += 1
        self._sums[model] += seconds

    def families(self) -> Iterator[Metric]:
        """As Prometheus reads it, a model at a time."""
        bounds = [*map(str, SECONDS), "+Inf"]
        if not self._counts:
            yield HistogramMetricFamily(self._name, self._text, labels=("model",))
        for model, counts in list(self._counts.items()):
            family = HistogramMetricFamily(self._name, self._text, labels=("model",))
            buckets = list(zip(bounds, accumulate(counts), strict=True))
            family.add_metric((model,), buckets, self._sums[model])
            yield family


class RequestMetrics(Collector):
    """Observer: requests by their ending, and the times on the way there."""

    def __init__(self, registry: CollectorRegistry, labels: ClientLabels, workers: int = WORKER_LIMIT) -> None:
        """`workers`: of those that left, how many keep a label of their own."""
        self._labels = labels
        self._worker_limit = workers
        self._left: dict[WorkerId, None] = {}
        """Those that left and have such a label, the last of them last."""
        self._models = ModelLabels()
        self._seen: dict[RequestId, tuple[Request, float]] = {}
        """Requests on their way, with the time of their arrival."""
        self._begun: set[RequestId] = set()
        """Those of them whose first token came from a worker before the one that they are at."""
        self._requests = Totals("d2lpm_requests", "Requests by how they ended.", "client", "model", "outcome")
        self._dispatches = ByWorker(
            "d2lpm_dispatches", "Requests sent to a worker, by what decided it.", "worker", "why"
        )
        self._returned = Totals("d2lpm_lost_tries", "Tries that did not come to their end, by the fault.", "fault")
        for fault in Fault:
            self._returned[fault,] = 0
        self._predicted = ByWorker(
            "d2lpm_predicted_cached_tokens", "Input tokens predicted to be cached, of requests sent.", "worker"
        )
        self._queue = Durations("d2lpm_queue_seconds", "Time in the router's queue.")
        self._first = Durations("d2lpm_time_to_first_token_seconds", "Arrival to first token.")
        self._whole = Durations("d2lpm_request_seconds", "Arrival to the end of the answer.")
        registry.register(self)

    def describe(self) -> list[Metric]:
        """Nothing in advance, as of the state."""
        return []

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
            case Arrived():
                self._seen[event.request.id] = event.request, now
            case Started():
                if (seen := self._seen.get(event.request)) and event.request not in self._begun:
                    request, arrived = seen
                    self._first.add(self._models.of(request.model), now - arrived)
            case Returned():
                self._returned[event.fault,] += 1
                if event.begun:
                    self._begun.add(event.request)
            case Finished() | Failed() | Cancelled():
                self._end(event.request, ENDINGS[type(event)], now)
            case WorkerJoined():
                self._models.served(event.worker.models)
                self._left.pop(event.worker.id, None)
            case WorkerLeft(worker):
                self._leave(worker)
        for command in commands:
            match command:
                case Dispatch():
                    self._dispatch(command, now)
                case Reject(refused, reason):
                    self._end(refused, ENDINGS[Failed] if reason is Refusal.NO_RETRY else reason, now)

    def _leave(self, worker: WorkerId) -> None:
        """It left; fold what was counted of the one that left longest ago, if those are too many."""
        self._left.pop(worker, None)
        self._left[worker] = None
        if len(self._left) > self._worker_limit:
            oldest = next(iter(self._left))
            del self._left[oldest]
            self._dispatches.fold(oldest)
            self._predicted.fold(oldest)

    def _dispatch(self, command: Dispatch, now: float) -> None:
        request, arrived = self._seen[command.request]
        self._queue.add(self._models.of(request.model), now - arrived)
        self._dispatches[command.worker, command.why] += 1
        self._predicted[command.worker,] += command.cached_tokens

    def _end(self, request_id: RequestId, outcome: str, now: float) -> None:
        """Count the first ending of a request; what is said of it after a refusal is no second one."""
        self._begun.discard(request_id)
        if seen := self._seen.pop(request_id, None):
            request, arrived = seen
            model = self._models.of(request.model)
            self._requests[self._labels.of(request.client), model, outcome] += 1
            if outcome == ENDINGS[Finished]:
                self._whole.add(model, now - arrived)


class StateCollector(Collector):
    """Tells what a fairness report holds."""

    def __init__(self, labels: ClientLabels) -> None:
        self.report: FairnessReport | None = None
        """What is told at the next scrape; nothing before the first."""
        self._labels = labels
        self._told: dict[str, list[float]] = {}
        """Tokens of each kind and their cost, as told at the last scrape."""

    def describe(self) -> list[Metric]:
        """Nothing in advance: the registry need not read the state to register this."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics of the state."""
        report = self.report
        if report is None:
            return
        jain = GaugeMetricFamily("d2lpm_jain_index", "Jain's index of service by weight, of the backlogged clients.")
        if report.jain is not None:
            jain.add_metric((), report.jain)
        yield jain
        yield from self._clients(report)
        yield from _workers(report)
        yield from _caches(report)

    def _clients(self, report: FairnessReport) -> Iterator[Metric]:
        shown = {c: entry for c, entry in report.clients.items() if self._labels.of(c) != OTHER}
        totals = self._totals(report)
        yield from SERVICE.parts(
            ((label, kind), tokens)
            for label, total in totals.items()
            for kind, tokens in zip(("extend", "cached", "output"), total, strict=False)
        )
        yield from COST.parts(((label,), total[3]) for label, total in totals.items())
        yield from WEIGHT.parts(((client,), entry.weight) for client, entry in shown.items())
        yield from WAIT.parts(_waits(shown))
        yield from DEFICIT.parts(_deficits(shown))
        yield from QUEUED.parts(((label,), total[4]) for label, total in totals.items())
        yield from RUNNING.parts(((label,), total[5]) for label, total in totals.items())

    def _totals(self, report: FairnessReport) -> dict[str, list[float]]:
        """Tokens of each kind, their cost, requests that wait and that run, by label."""
        gone = report.forgotten
        totals: dict[str, list[float]] = {}
        # Theirs are among the others from now on: a count that fell would be taken for one that began anew.
        if gone != Service(0, 0, 0, 0.0):
            totals[OTHER] = [gone.extend, gone.cached, gone.output, gone.cost, 0, 0]
        for client, entry in report.clients.items():
            s = entry.service
            row = (s.extend, s.cached, s.output, s.cost, entry.queued, entry.running)
            label = self._labels.of(client)
            totals[label] = [*map(add, totals[label], row)] if label in totals else [*row]
        told, self._told = self._told, {}
        for label, total in totals.items():
            # Service is estimated until the engine tells, and may turn out less: a counter waits until it is more.
            total[:4] = self._told[label] = [*map(max, total[:4], told.get(label, total[:4]))]
        return totals


def _waits(clients: Mapping[ClientId, ClientReport]) -> Iterator[Row]:
    for client, entry in clients.items():
        if entry.wait_p50_s is not None and entry.wait_p95_s is not None:
            yield (client, "50"), entry.wait_p50_s
            yield (client, "95"), entry.wait_p95_s


def _deficits(clients: Mapping[ClientId, ClientReport]) -> Iterator[Row]:
    for client, entry in clients.items():
        for worker, credit in entry.deficit.items():
            for counter, value in (("placement", credit.placement), ("order", credit.order)):
                if value is not None:
                    yield (client, worker, counter), value


def _caches(report: FairnessReport) -> Iterator[Metric]:
    counts: tuple[tuple[str, str, Callable[[CacheCard], int]], ...] = (
        ("d2lpm_cache_answers", "Answers that told what was cached of their prompt.", lambda c: c.answers),
        ("d2lpm_cache_prompt_tokens", "Input tokens of answers that told what was cached.", lambda c: c.prompt),
        (
            "d2lpm_cache_predicted_tokens",
            "Input tokens predicted to be cached, of answers that told.",
            lambda c: c.predicted,
        ),
        ("d2lpm_cache_actual_tokens", "Input tokens found cached, of answers that told.", lambda c: c.actual),
        ("d2lpm_cache_false_hit_tokens", "Input tokens predicted to be cached that were not.", lambda c: c.false_hit),
        ("d2lpm_cache_missed_hit_tokens", "Input tokens cached that were not predicted to be.", lambda c: c.missed_hit),
    )
    gauges: tuple[tuple[str, str, Callable[[CacheCard], float | None]], ...] = (
        ("d2lpm_cache_believed_tokens", "Tokens believed to be in the prefix cache now.", lambda c: c.believed),
        (
            "d2lpm_cache_error_ratio",
            "Mean absolute error of the last 200 predictions, as a share of the prompt.",
            lambda c: c.error,
        ),
        (
            "d2lpm_cache_discount_ratio",
            "Factor on predictions of cached tokens; 1 while they are right.",
            lambda c: c.discount,
        ),
    )
    cards = {worker: entry.cache for worker, entry in report.workers.items() if entry.cache is not None}
    for name, text, count in counts:
        counter = CounterMetricFamily(name, text, labels=("worker",))
        for worker, card in cards.items():
            counter.add_metric((worker,), count(card))
        yield counter
    for name, text, value in gauges:
        gauge = GaugeMetricFamily(name, text, labels=("worker",))
        for worker, card in cards.items():
            if (number := value(card)) is not None:
                gauge.add_metric((worker,), number)
        yield gauge
    evicted = CounterMetricFamily(
        "d2lpm_cache_evicted_tokens",
        "Tokens believed evicted from the prefix cache, by what told of it.",
        labels=("worker", "source"),
    )
    for worker, card in cards.items():
        for source, tokens in card.evicted.items():
            evicted.add_metric((worker, source), tokens)
    yield evicted
    unread = CounterMetricFamily(
        "d2lpm_worker_reports_ignored", "Answers to polls of load and cache that were of no use.", labels=("worker",)
    )
    for worker, entry in report.workers.items():
        unread.add_metric((worker,), entry.unread)
    yield unread


def _workers(report: FairnessReport) -> Iterator[Metric]:
    columns: tuple[tuple[str, str, Callable[[WorkerReport], float | None]], ...] = (
        ("d2lpm_worker_healthy", "1 while it answers polls.", lambda w: float(w.healthy)),
        ("d2lpm_worker_queued_requests", "Requests that wait for it in the router.", lambda w: w.queued),
        ("d2lpm_worker_running_requests", "Requests sent there and not ended.", lambda w: w.running),
        ("d2lpm_worker_unstarted_tokens", "Uncached input without a first token.", lambda w: w.unstarted_tokens),
        (
            "d2lpm_worker_window_requests",
            "Requests that its window lets be in flight.",
            lambda w: w.window.requests if w.window else None,
        ),
        (
            "d2lpm_worker_window_unstarted_tokens",
            "Uncached input without a first token that its window lets be in flight.",
            lambda w: w.window.unstarted_tokens if w.window else None,
        ),
        ("d2lpm_worker_kv_tokens", "Capacity of its KV cache in tokens.", lambda w: w.kv_tokens),
        (
            "d2lpm_service_gap_cost_units",
            "Largest difference in service per weight of two clients that wait in one queue.",
            lambda w: w.service_gap,
        ),
        (
            "d2lpm_service_gap_bound_cost_units",
            "What the largest difference in service per weight cannot exceed.",
            lambda w: w.service_gap_bound,
        ),
    )
    for name, text, value in columns:
        gauge = GaugeMetricFamily(name, text, labels=("worker",))
        for worker, entry in report.workers.items():
            if (number := value(entry)) is not None:
                gauge.add_metric((worker,), number)
        yield gauge
    yield from BREAKER.parts(
        ((worker, state), float(entry.breaker == state))
        for worker, entry in report.workers.items()
        if entry.breaker is not None
        for state in BREAKER_STATES
    )

"""Prometheus metrics: what happened is counted as it is observed, what is so is read off when it is asked for.

Counts are plain numbers, made into metrics at a scrape: a counter of the library's costs 20 times as much to raise, for
locks and exemplars that nothing here needs.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
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
)
from router.report import CacheCard, FairnessReport, Service, WorkerReport

CLIENT_LIMIT: Final = 1000
"""Distinct client labels; the others share the label `other`."""
OTHER: Final = "other"
SECONDS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
ENDINGS: Final = {Finished: "finished", Failed: "failed", Cancelled: "cancelled"}


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


class Totals(defaultdict[tuple[str, ...], int]):
    """A counter by the values of its labels."""

    def __init__(self, name: str, text: str, *labels: str) -> None:
        super().__init__(int)
        self._name = name
        self._text = text
        self._labels = labels

    def family(self) -> Metric:
        """As Prometheus reads it."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, total in self.items():
            family.add_metric(values, total)
        return family


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

    def family(self) -> Metric:
        """As Prometheus reads it."""
        family = HistogramMetricFamily(self._name, self._text, labels=("model",))
        bounds = [*map(str, SECONDS), "+Inf"]
        for model, counts in self._counts.items():
            buckets = list(zip(bounds, accumulate(counts), strict=True))
            family.add_metric((model,), buckets, self._sums[model])
        return family


class RequestMetrics(Collector):
    """Observer: requests by their ending, and the times on the way there."""

    def __init__(self, registry: CollectorRegistry, labels: ClientLabels) -> None:
        self._labels = labels
        self._seen: dict[RequestId, tuple[Request, float]] = {}
        """Requests on their way, with the time of their arrival."""
        self._begun: set[RequestId] = set()
        """Those of them whose first token came from a worker before the one that they are at."""
        self._requests = Totals("d2lpm_requests", "Requests by how they ended.", "client", "model", "outcome")
        self._dispatches = Totals("d2lpm_dispatches", "Requests sent to a worker, by what decided it.", "worker", "why")
        self._returned = Totals("d2lpm_lost_tries", "Tries that did not come to their end, by the fault.", "fault")
        for fault in Fault:
            self._returned[fault,] = 0
        self._predicted = Totals("d2lpm_predicted_cached_tokens", "Input tokens predicted to be cached.", "worker")
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
            yield counted.family()

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """See `Observer`."""
        match event:
            case Arrived():
                self._seen[event.request.id] = event.request, now
            case Started():
                if (seen := self._seen.get(event.request)) and event.request not in self._begun:
                    request, arrived = seen
                    self._first.add(request.model, now - arrived)
            case Returned():
                self._returned[event.fault,] += 1
                if event.begun:
                    self._begun.add(event.request)
            case Finished() | Failed() | Cancelled():
                self._end(event.request, ENDINGS[type(event)], now)
        for command in commands:
            match command:
                case Dispatch():
                    self._dispatch(command, now)
                case Reject(refused, reason):
                    self._end(refused, ENDINGS[Failed] if reason is Refusal.NO_RETRY else reason, now)

    def _dispatch(self, command: Dispatch, now: float) -> None:
        request, arrived = self._seen[command.request]
        self._queue.add(request.model, now - arrived)
        self._dispatches[command.worker, command.why] += 1
        self._predicted[command.worker,] += command.cached_tokens

    def _end(self, request_id: RequestId, outcome: str, now: float) -> None:
        """Count the first ending of a request; what is said of it after a refusal is no second one."""
        self._begun.discard(request_id)
        if seen := self._seen.pop(request_id, None):
            request, arrived = seen
            self._requests[self._labels.of(request.client), request.model, outcome] += 1
            if outcome == ENDINGS[Finished]:
                self._whole.add(request.model, now - arrived)


class StateCollector(Collector):
    """Reads the fairness report at each scrape."""

    def __init__(self, report: Callable[[], FairnessReport], labels: ClientLabels) -> None:
        self._report = report
        self._labels = labels
        self._told: dict[str, list[float]] = {}
        """Tokens of each kind and their cost, as told at the last scrape."""

    def describe(self) -> list[Metric]:
        """Nothing in advance: the registry need not read the state to register this."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics of the state."""
        report = self._report()
        jain = GaugeMetricFamily("d2lpm_jain_index", "Jain's index of service by weight, of the backlogged clients.")
        if report.jain is not None:
            jain.add_metric((), report.jain)
        yield jain
        yield from self._clients(report)
        yield from _workers(report)
        yield from _caches(report)

    def _clients(self, report: FairnessReport) -> Iterator[Metric]:
        service = CounterMetricFamily("d2lpm_service_tokens", "Tokens served.", labels=("client", "kind"))
        cost = CounterMetricFamily("d2lpm_service_cost_units", "What these tokens cost.", labels=("client",))
        deficit = GaugeMetricFamily(
            "d2lpm_deficit_cost_units", "Deficit counters; negative is debt.", labels=("client", "worker", "counter")
        )
        weight = GaugeMetricFamily("d2lpm_client_weight", "Share relative to others.", labels=("client",))
        wait = GaugeMetricFamily(
            "d2lpm_client_wait_seconds", "Time in the queue, of the last 256 requests.", labels=("client", "quantile")
        )
        queued = GaugeMetricFamily("d2lpm_client_queued_requests", "Requests that wait.", labels=("client",))
        running = GaugeMetricFamily("d2lpm_client_running_requests", "Requests at workers.", labels=("client",))
        gone = report.forgotten
        # Theirs are among the others from now on: a count that fell would be taken for one that began anew.
        totals: dict[str, list[float]] = {}
        if gone != Service(0, 0, 0, 0.0):
            totals[OTHER] = [gone.extend, gone.cached, gone.output, gone.cost, 0, 0]
        for client, entry in report.clients.items():
            label = self._labels.of(client)
            s = entry.service
            row = totals.setdefault(label, [0, 0, 0, 0, 0, 0])
            for position, value in enumerate((s.extend, s.cached, s.output, s.cost, entry.queued, entry.running)):
                row[position] += value
            if label != OTHER:
                weight.add_metric((label,), entry.weight)
                if entry.wait_p50_s is not None and entry.wait_p95_s is not None:
                    wait.add_metric((label, "0.5"), entry.wait_p50_s)
                    wait.add_metric((label, "0.95"), entry.wait_p95_s)
                for worker, credit in entry.deficit.items():
                    for counter, value_or_none in (("placement", credit.placement), ("order", credit.order)):
                        if value_or_none is not None:
                            deficit.add_metric((label, worker, counter), value_or_none)
        told, self._told = self._told, {}
        for label, (*served, waiting, at_work) in totals.items():
            # Service is estimated until the engine tells, and may turn out less: a counter waits until it is more.
            counted = self._told[label] = [*map(max, served, told.get(label, served))]
            for kind, tokens in zip(("extend", "cached", "output"), counted, strict=False):
                service.add_metric((label, kind), tokens)
            cost.add_metric((label,), counted[-1])
            queued.add_metric((label,), waiting)
            running.add_metric((label,), at_work)
        return iter((service, cost, weight, wait, deficit, queued, running))


def _caches(report: FairnessReport) -> Iterator[Metric]:
    counts: tuple[tuple[str, str, Callable[[CacheCard], int]], ...] = (
        ("d2lpm_cache_answers", "Answers that told what was cached of their prompt.", lambda c: c.answers),
        ("d2lpm_cache_prompt_tokens", "Of those prompts.", lambda c: c.prompt),
        ("d2lpm_cache_predicted_tokens", "Predicted to be cached, of those prompts.", lambda c: c.predicted),
        ("d2lpm_cache_actual_tokens", "Found cached by the engine, of those prompts.", lambda c: c.actual),
        ("d2lpm_cache_false_hit_tokens", "Predicted and not there.", lambda c: c.false_hit),
        ("d2lpm_cache_missed_hit_tokens", "There and not predicted.", lambda c: c.missed_hit),
    )
    gauges: tuple[tuple[str, str, Callable[[CacheCard], float | None]], ...] = (
        ("d2lpm_cache_believed_tokens", "Believed to be cached now.", lambda c: c.believed),
        ("d2lpm_cache_error_ratio", "Mean absolute error of the last 200 predictions, by prompt.", lambda c: c.error),
        ("d2lpm_cache_discount_ratio", "What predictions are multiplied with.", lambda c: c.discount),
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
        "d2lpm_cache_evicted_tokens", "Believed evicted, by what told of it.", labels=("worker", "source")
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
        ("d2lpm_worker_healthy", "1 while requests may be sent there.", lambda w: float(w.healthy)),
        ("d2lpm_worker_breaker_open", "1 while its failures keep it from its full share of requests.", _breaker_open),
        ("d2lpm_worker_queued_requests", "Requests that wait for it in the router.", lambda w: w.queued),
        ("d2lpm_worker_running_requests", "Requests sent there and not ended.", lambda w: w.running),
        ("d2lpm_worker_unstarted_tokens", "Uncached input without a first token.", lambda w: w.unstarted_tokens),
        (
            "d2lpm_worker_window_requests",
            "How many its window lets run.",
            lambda w: w.window.requests if w.window else None,
        ),
        (
            "d2lpm_worker_window_unstarted_tokens",
            "How much uncached input without a first token its window lets be there.",
            lambda w: w.window.unstarted_tokens if w.window else None,
        ),
        ("d2lpm_worker_kv_tokens", "Capacity of its KV cache in tokens.", lambda w: w.kv_tokens),
        ("d2lpm_service_gap_cost_units", "Largest difference in service of two that wait.", lambda w: w.service_gap),
        ("d2lpm_service_gap_bound_cost_units", "What that cannot exceed.", lambda w: w.service_gap_bound),
    )
    for name, text, value in columns:
        gauge = GaugeMetricFamily(name, text, labels=("worker",))
        for worker, entry in report.workers.items():
            if (number := value(entry)) is not None:
                gauge.add_metric((worker,), number)
        yield gauge


def _breaker_open(worker: WorkerReport) -> float | None:
    return None if worker.breaker is None else float(worker.breaker != "closed")

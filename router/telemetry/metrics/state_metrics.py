"""Prometheus metrics of the current state: converts a fairness report to metric families at a scrape."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import add
from typing import Final, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.core.model.request import ClientId, WorkerId
from router.telemetry.metrics.counts import OTHER, ClientLabels
from router.telemetry.metrics.exposition import Row, TextFamily
from router.telemetry.report import (
    BREAKER_STATES,
    BarrierReport,
    ClientReport,
    FairnessReport,
    Service,
    WorkerCacheReport,
    WorkerReport,
)

T = TypeVar("T")

WorkerMetrics = Sequence[tuple[str, str, Callable[[T], float | None]]]
"""Name, help text and value of metrics whose only label is the worker; a value of None is left out."""

SERVICE: Final = TextFamily(
    CounterMetricFamily,
    "d2lpm_service_tokens",
    "Tokens served; extend is input computed, cached is input found in a cache.",
    ("client", "kind"),
)
COST: Final = TextFamily(CounterMetricFamily, "d2lpm_service_cost_units", "Cost of the tokens served.", ("client",))
WEIGHT: Final = TextFamily(
    GaugeMetricFamily, "d2lpm_client_weight", "Share of the client relative to other clients.", ("client",)
)
WAIT: Final = TextFamily(
    GaugeMetricFamily,
    "d2lpm_client_wait_seconds",
    "Seconds in the router's queue, of the client's last 256 requests.",
    ("client", "percentile"),
)
DEFICIT: Final = TextFamily(
    GaugeMetricFamily,
    "d2lpm_deficit_cost_units",
    "Deficits of the client; a negative one is debt.",
    ("client", "worker", "counter"),
)
QUEUED: Final = TextFamily(
    GaugeMetricFamily, "d2lpm_client_queued_requests", "Requests of the client that wait in the router.", ("client",)
)
RUNNING: Final = TextFamily(
    GaugeMetricFamily, "d2lpm_client_running_requests", "Requests of the client in flight at workers.", ("client",)
)
BREAKER: Final = TextFamily(
    GaugeMetricFamily,
    "d2lpm_worker_breaker",
    "1 for the state of the worker's circuit breaker; silent: the worker sends nothing.",
    ("worker", "state"),
)
EVICTED: Final = TextFamily(
    CounterMetricFamily,
    "d2lpm_cache_evicted_tokens",
    "Tokens believed evicted from the prefix cache, by the signal that revealed the eviction.",
    ("worker", "source"),
)
CLIENT_LAG: Final = TextFamily(
    GaugeMetricFamily,
    "d2lpm_client_service_lag_cost_units",
    "Service per weight of an even share while the client waited, less the service that it got.",
    ("client",),
)
UNSERVED: Final = TextFamily(
    GaugeMetricFamily,
    "d2lpm_client_unserved_seconds",
    "Seconds for which the client has had a waiting call and been served nothing.",
    ("client",),
)
SHARE: Final = TextFamily(
    GaugeMetricFamily,
    "d2lpm_client_service_share_ratio",
    "Share of the client in the cost of all service in the last minute.",
    ("client",),
)
LAG: Final = TextFamily(
    GaugeMetricFamily, "d2lpm_service_lag_cost_units", "Largest service lag of a client with an open call.", ()
)
ROUND: Final = TextFamily(
    GaugeMetricFamily,
    "d2lpm_round_seconds",
    "Seconds until each client with an open call is served: one mean call each at full rate (fair), and as measured"
    " (current, last).",
    ("round",),
)
ROUND_CLIENTS: Final = TextFamily(
    GaugeMetricFamily,
    "d2lpm_round_clients",
    "Clients with an open call (open), and those not yet served in the current round (unserved).",
    ("clients",),
)
WAIT_SECONDS: Final = TextFamily(
    GaugeMetricFamily,
    "d2lpm_longest_wait_seconds",
    "Longest wait for a first token, of calls that wait now (waiting) or stopped waiting in the last minute (lately).",
    ("calls",),
)
WAIT_ROUNDS: Final = TextFamily(
    GaugeMetricFamily,
    "d2lpm_longest_wait_rounds",
    "Longest wait in fair rounds, divided by the calls of the same client that were answered meanwhile.",
    ("calls",),
)
LONGEST_UNSERVED: Final = TextFamily(
    GaugeMetricFamily,
    "d2lpm_longest_unserved_rounds",
    "Longest time for which a client with a waiting call has been served nothing, in fair rounds.",
    (),
)
UNSERVED_CLIENTS: Final = TextFamily(
    GaugeMetricFamily,
    "d2lpm_unserved_clients",
    "Clients with a waiting call that have been served nothing for longer than a fair round.",
    (),
)
UNREAD: Final = TextFamily(
    CounterMetricFamily,
    "d2lpm_worker_reports_ignored",
    "Answers to polls of load and cache that could not be read.",
    ("worker",),
)
CHARGED: Final = TextFamily(
    CounterMetricFamily,
    "d2lpm_worker_charged_tokens",
    "Tokens charged for the worker's work; extend is input computed.",
    ("worker", "kind"),
)
COMPUTED: Final = TextFamily(
    CounterMetricFamily,
    "d2lpm_worker_computed_tokens",
    "Tokens that the worker computed by its own counters, for anyone; extend is input computed.",
    ("worker", "kind"),
)
CACHE_COUNTERS: Final[WorkerMetrics[WorkerCacheReport]] = (
    ("d2lpm_cache_answers", "Answers that reported how much of their prompt was cached.", lambda c: c.answers),
    ("d2lpm_cache_prompt_tokens", "Input tokens of answers that reported how much was cached.", lambda c: c.prompt),
    (
        "d2lpm_cache_predicted_tokens",
        "Input tokens predicted to be cached, of answers that reported how much was.",
        lambda c: c.predicted,
    ),
    ("d2lpm_cache_actual_tokens", "Input tokens reported as cached.", lambda c: c.actual),
    ("d2lpm_cache_false_hit_tokens", "Input tokens predicted to be cached that were not.", lambda c: c.false_hit),
    ("d2lpm_cache_missed_hit_tokens", "Input tokens that were cached and not predicted to be.", lambda c: c.missed_hit),
)
CACHE_GAUGES: Final[WorkerMetrics[WorkerCacheReport]] = (
    ("d2lpm_cache_believed_tokens", "Tokens believed to be in the prefix cache now.", lambda c: c.believed),
    (
        "d2lpm_cache_error_ratio",
        "Mean absolute error of the last 200 predictions, as a share of the prompt.",
        lambda c: c.error,
    ),
    (
        "d2lpm_cache_discount_ratio",
        "Factor on predictions of cached tokens; below 1 while they promise too much.",
        lambda c: c.discount,
    ),
)
WORKER_GAUGES: Final[WorkerMetrics[WorkerReport]] = (
    ("d2lpm_worker_healthy", "1 while the worker answers polls.", lambda w: float(w.healthy)),
    ("d2lpm_worker_queued_requests", "Requests that wait for the worker in the router.", lambda w: w.queued),
    ("d2lpm_worker_running_requests", "Requests in flight at the worker.", lambda w: w.running),
    (
        "d2lpm_worker_unstarted_tokens",
        "Uncached input tokens of requests without a first token.",
        lambda w: w.unstarted_tokens,
    ),
    (
        "d2lpm_worker_window_requests",
        "Requests that the worker's window allows in flight.",
        lambda w: w.window.requests if w.window else None,
    ),
    (
        "d2lpm_worker_window_unstarted_tokens",
        "Uncached input tokens without a first token that the worker's window allows in flight.",
        lambda w: w.window.unstarted_tokens if w.window else None,
    ),
    (
        "d2lpm_worker_context_tokens",
        "Context tokens in flight at a data-parallel rank: prompts, cached or not, and output so far.",
        lambda w: w.context_tokens if w.rank is not None or w.barrier is not None else None,
    ),
    ("d2lpm_worker_kv_tokens", "Capacity of the worker's KV cache in tokens.", lambda w: w.kv_tokens),
    (
        "d2lpm_service_gap_cost_units",
        "Largest difference in service per weight between two clients that wait in the same queue.",
        lambda w: w.service_gap,
    ),
    (
        "d2lpm_service_gap_bound_cost_units",
        "Bound on the service gap.",
        lambda w: w.service_gap_bound,
    ),
    (
        "d2lpm_worker_charged_of_computed_ratio",
        "Tokens charged since the worker joined, divided by those that it computed by its own counters.",
        lambda w: w.work.charged_of_computed if w.work else None,
    ),
)
BARRIER_GAUGES: Final[Sequence[tuple[TextFamily, Callable[[BarrierReport], float | None]]]] = (
    (
        TextFamily(
            GaugeMetricFamily,
            "d2lpm_group_imbalance_tokens",
            "Context tokens of the fullest rank of a group that steps together, less those of the lightest.",
            ("group",),
        ),
        lambda b: b.imbalance_tokens,
    ),
    (
        TextFamily(
            GaugeMetricFamily,
            "d2lpm_group_imbalance_sum_tokens",
            "Context tokens that the ranks of a group lack to its fullest, summed over the ranks.",
            ("group",),
        ),
        lambda b: b.imbalance_sum_tokens,
    ),
    (
        TextFamily(
            GaugeMetricFamily,
            "d2lpm_group_idle_ratio",
            "Share of the attention time of a group's ranks in which they wait for the fullest.",
            ("group",),
        ),
        lambda b: b.idle_share,
    ),
)
"""Groups of ranks that step together."""


class StateCollector(Collector):
    """Collector of the metrics of one fairness report, which is set before each scrape."""

    def __init__(self, labels: ClientLabels) -> None:
        self.report: FairnessReport | None = None
        """The report for the next scrape; None before the first."""
        self._labels = labels
        self._last_totals: dict[str, list[float]] = {}
        """Tokens of each kind and their cost at the last scrape, by client label."""
        self._last_charged: dict[tuple[str, str], float] = {}
        """Tokens charged at the last scrape, by worker and kind."""

    def collect(self) -> Iterator[Metric]:
        report = self.report
        if report is None:
            return
        jain = GaugeMetricFamily(
            "d2lpm_jain_index",
            "Jain's index of service per weight, of clients that waited for half of the last minute or longer.",
        )
        if report.jain is not None:
            jain.add_metric((), report.jain)
        yield jain
        yield from _turns(report)
        yield from self._clients(report)
        yield from _workers(report)
        yield from _barriers(report)
        yield from self._work(report)
        yield from _caches(report)

    def _clients(self, report: FairnessReport) -> Iterator[Metric]:
        shown = {c: entry for c, entry in report.clients.items() if self._labels[c] != OTHER}
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
        yield from CLIENT_LAG.parts(((client,), entry.service_lag) for client, entry in shown.items())
        yield from UNSERVED.parts(
            ((client,), entry.unserved_s) for client, entry in shown.items() if entry.unserved_s is not None
        )
        yield from SHARE.parts(((label,), total[6]) for label, total in totals.items())
        yield from QUEUED.parts(((label,), total[4]) for label, total in totals.items())
        yield from RUNNING.parts(((label,), total[5]) for label, total in totals.items())

    def _work(self, report: FairnessReport) -> Iterator[Metric]:
        """Yield the tokens charged and computed. A counter does not fall when a charge is corrected downwards."""
        works = {worker: entry.work for worker, entry in report.workers.items() if entry.work is not None}
        charged = {
            (worker, kind): float(tokens)
            for worker, work in works.items()
            for kind, tokens in (("extend", work.charged_input), ("output", work.charged_output))
        }
        self._last_charged = {key: max(tokens, self._last_charged.get(key, tokens)) for key, tokens in charged.items()}
        yield from CHARGED.parts(self._last_charged.items())
        yield from COMPUTED.parts(
            ((worker, kind), tokens)
            for worker, work in works.items()
            for kind, tokens in (("extend", work.computed_input), ("output", work.computed_output))
            if tokens is not None
        )

    def _totals(self, report: FairnessReport) -> dict[str, list[float]]:
        """By client label: tokens of each kind, cost, waiting and running requests, share of the last minute."""
        forgotten = report.forgotten
        totals: dict[str, list[float]] = {}
        # Forgotten clients count under `other`: Prometheus would take a counter that falls for one that restarted.
        if forgotten != Service(0, 0, 0, 0.0):
            totals[OTHER] = [forgotten.extend, forgotten.cached, forgotten.output, forgotten.cost, 0, 0, 0.0]
        for client, entry in report.clients.items():
            s = entry.service
            row = (s.extend, s.cached, s.output, s.cost, entry.queued, entry.running, entry.share or 0.0)
            label = self._labels[client]
            totals[label] = [*map(add, totals[label], row)] if label in totals else [*row]
        last, self._last_totals = self._last_totals, {}
        for label, total in totals.items():
            # Service is an estimate until the engine reports it, and may then be less: the counter must not fall.
            total[:4] = self._last_totals[label] = [*map(max, total[:4], last.get(label, total[:4]))]
        return totals


def _turns(report: FairnessReport) -> Iterator[Metric]:
    """Yield the metrics of lags, rounds and waits over all clients."""
    rounds, waits = report.rounds, report.waits
    yield from LAG.parts([((), report.service_lag)])
    seconds = {"fair": rounds.fair_s, "current": rounds.current_s, "last": rounds.last_s}
    yield from ROUND.parts(_known(seconds))
    yield from ROUND_CLIENTS.parts(_known({"open": rounds.clients, "unserved": rounds.unserved}))
    yield from WAIT_SECONDS.parts(_known({"waiting": waits.waiting_s, "lately": waits.lately_s}))
    yield from WAIT_ROUNDS.parts(_known({"waiting": waits.waiting_rounds, "lately": waits.lately_rounds}))
    for family, value in ((LONGEST_UNSERVED, waits.unserved_rounds), (UNSERVED_CLIENTS, waits.unserved_clients)):
        yield from family.parts([] if value is None else [((), value)])


def _known(values: Mapping[str, float | None]) -> Iterator[Row]:
    return (((label,), value) for label, value in values.items() if value is not None)


def _waits(clients: Mapping[ClientId, ClientReport]) -> Iterator[Row]:
    for client, entry in clients.items():
        if entry.wait_p50_s is not None and entry.wait_p95_s is not None:
            yield (client, "50"), entry.wait_p50_s
            yield (client, "95"), entry.wait_p95_s


def _deficits(clients: Mapping[ClientId, ClientReport]) -> Iterator[Row]:
    for client, entry in clients.items():
        for worker, deficit in entry.deficit.items():
            for counter, value in (("placement", deficit.placement), ("order", deficit.order)):
                if value is not None:
                    yield (client, worker, counter), value


def _caches(report: FairnessReport) -> Iterator[Metric]:
    caches = {worker: entry.cache for worker, entry in report.workers.items() if entry.cache is not None}
    yield from _by_worker(CounterMetricFamily, CACHE_COUNTERS, caches)
    yield from _by_worker(GaugeMetricFamily, CACHE_GAUGES, caches)
    yield from EVICTED.parts(
        ((worker, source), tokens) for worker, cache in caches.items() for source, tokens in cache.evicted.items()
    )
    yield from UNREAD.parts(((worker,), entry.unread) for worker, entry in report.workers.items())


def _workers(report: FairnessReport) -> Iterator[Metric]:
    yield from _by_worker(GaugeMetricFamily, WORKER_GAUGES, report.workers)
    yield from BREAKER.parts(
        ((worker, state), float(entry.breaker == state))
        for worker, entry in report.workers.items()
        if entry.breaker is not None
        for state in BREAKER_STATES
    )


def _barriers(report: FairnessReport) -> Iterator[Metric]:
    for family, value in BARRIER_GAUGES:
        values = [(group, value(each)) for group, each in (report.barriers or {}).items()]
        yield from family.parts(((group,), amount) for group, amount in values if amount is not None)


def _by_worker(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily], metrics: WorkerMetrics[T], reports: Mapping[WorkerId, T]
) -> Iterator[Metric]:
    for name, text, value_of in metrics:
        values = ((worker, value_of(report)) for worker, report in reports.items())
        yield from TextFamily(kind, name, text, ("worker",)).parts(
            ((worker,), value) for worker, value in values if value is not None
        )

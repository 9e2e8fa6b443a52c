"""Prometheus metrics of what is so: a fairness report as families, read off when it is asked for."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import add
from typing import Final, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.core.model.request import ClientId, WorkerId
from router.telemetry.exposition import Family, Row
from router.telemetry.report import BREAKER_STATES, CacheReport, ClientReport, FairnessReport, Service, WorkerReport
from router.telemetry.request_metrics import OTHER, ClientLabels

T = TypeVar("T")

WorkerMetrics = Sequence[tuple[str, str, Callable[[T], float | None]]]
"""Name, text and value of metrics that are labelled by the worker alone; None where it has none."""

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
EVICTED: Final = Family(
    CounterMetricFamily,
    "d2lpm_cache_evicted_tokens",
    "Tokens believed evicted from the prefix cache, by what told of it.",
    ("worker", "source"),
)
CLIENT_LAG: Final = Family(
    GaugeMetricFamily,
    "d2lpm_client_service_lag_cost_units",
    "What the client would have been served by an even share while it waited, less what it was, per weight.",
    ("client",),
)
UNSERVED: Final = Family(
    GaugeMetricFamily,
    "d2lpm_client_unserved_seconds",
    "Time for which a call of the client has waited while it was served nothing.",
    ("client",),
)
SHARE: Final = Family(
    GaugeMetricFamily,
    "d2lpm_client_service_share_ratio",
    "Share of the client in the cost of all that was served in the last minute.",
    ("client",),
)
LAG: Final = Family(
    GaugeMetricFamily, "d2lpm_service_lag_cost_units", "Largest service lag of a client with a call open.", ()
)
ROUND: Final = Family(
    GaugeMetricFamily,
    "d2lpm_round_seconds",
    "Time until each client with a call open is served: a mean call each at full rate (fair), and as it goes (current,"
    " last).",
    ("round",),
)
ROUND_CLIENTS: Final = Family(
    GaugeMetricFamily,
    "d2lpm_round_clients",
    "Clients with a call open (open), and of the current round those not served yet (unserved).",
    ("clients",),
)
WAIT_SECONDS: Final = Family(
    GaugeMetricFamily,
    "d2lpm_longest_wait_seconds",
    "Longest time to the first token, of calls that wait now (waiting) or waited in the last minute (lately).",
    ("calls",),
)
WAIT_ROUNDS: Final = Family(
    GaugeMetricFamily,
    "d2lpm_longest_wait_rounds",
    "The same in fair rounds, one for each of the client's calls that were answered meanwhile.",
    ("calls",),
)
LONGEST_UNSERVED: Final = Family(
    GaugeMetricFamily,
    "d2lpm_longest_unserved_rounds",
    "Longest time in fair rounds for which a client with a waiting call was served nothing.",
    (),
)
UNSERVED_CLIENTS: Final = Family(
    GaugeMetricFamily,
    "d2lpm_unserved_clients",
    "Clients with a waiting call that were served nothing for longer than a fair round.",
    (),
)
UNREAD: Final = Family(
    CounterMetricFamily,
    "d2lpm_worker_reports_ignored",
    "Answers to polls of load and cache that were of no use.",
    ("worker",),
)
CHARGED: Final = Family(
    CounterMetricFamily,
    "d2lpm_worker_charged_tokens",
    "Tokens charged for what the worker did; extend is input computed.",
    ("worker", "kind"),
)
COMPUTED: Final = Family(
    CounterMetricFamily,
    "d2lpm_worker_computed_tokens",
    "Tokens that the worker computed by its own counters, for whomever; extend is input computed.",
    ("worker", "kind"),
)
CACHE_COUNTERS: Final[WorkerMetrics[CacheReport]] = (
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
CACHE_GAUGES: Final[WorkerMetrics[CacheReport]] = (
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
WORKER_GAUGES: Final[WorkerMetrics[WorkerReport]] = (
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
    (
        "d2lpm_worker_charged_of_computed_ratio",
        "Tokens charged since it joined over those that it computed by its own counters.",
        lambda w: w.work.charged_of_computed if w.work else None,
    ),
)


class StateCollector(Collector):
    """Tells what a fairness report holds."""

    def __init__(self, labels: ClientLabels) -> None:
        self.report: FairnessReport | None = None
        """What is told at the next scrape; nothing before the first."""
        self._labels = labels
        self._last_totals: dict[str, list[float]] = {}
        """Tokens of each kind and their cost, as told at the last scrape."""
        self._last_charged: dict[tuple[str, str], float] = {}
        """Tokens of each worker and kind, likewise."""

    def collect(self) -> Iterator[Metric]:
        """All metrics of the state."""
        report = self.report
        if report is None:
            return
        jain = GaugeMetricFamily("d2lpm_jain_index", "Jain's index of service by weight, of the backlogged clients.")
        if report.jain is not None:
            jain.add_metric((), report.jain)
        yield jain
        yield from _turns(report)
        yield from self._clients(report)
        yield from _workers(report)
        yield from self._work(report)
        yield from _caches(report)

    def _clients(self, report: FairnessReport) -> Iterator[Metric]:
        shown = {c: entry for c, entry in report.clients.items() if self._labels.label(c) != OTHER}
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
        """What was charged and what was computed; where a charge turns out less, its counter waits for more."""
        cards = {worker: entry.work for worker, entry in report.workers.items() if entry.work is not None}
        charged = {
            (worker, kind): float(tokens)
            for worker, card in cards.items()
            for kind, tokens in (("extend", card.charged_input), ("output", card.charged_output))
        }
        self._last_charged = {key: max(tokens, self._last_charged.get(key, tokens)) for key, tokens in charged.items()}
        yield from CHARGED.parts(self._last_charged.items())
        yield from COMPUTED.parts(
            ((worker, kind), tokens)
            for worker, card in cards.items()
            for kind, tokens in (("extend", card.computed_input), ("output", card.computed_output))
            if tokens is not None
        )

    def _totals(self, report: FairnessReport) -> dict[str, list[float]]:
        """Tokens of each kind, their cost, requests that wait and that run, share of late, by label."""
        gone = report.forgotten
        totals: dict[str, list[float]] = {}
        # Theirs are among the others from now on: a count that fell would be taken for one that began anew.
        if gone != Service(0, 0, 0, 0.0):
            totals[OTHER] = [gone.extend, gone.cached, gone.output, gone.cost, 0, 0, 0.0]
        for client, entry in report.clients.items():
            s = entry.service
            row = (s.extend, s.cached, s.output, s.cost, entry.queued, entry.running, entry.share or 0.0)
            label = self._labels.label(client)
            totals[label] = [*map(add, totals[label], row)] if label in totals else [*row]
        told, self._last_totals = self._last_totals, {}
        for label, total in totals.items():
            # Service is estimated until the engine tells, and may turn out less: a counter waits until it is more.
            total[:4] = self._last_totals[label] = [*map(max, total[:4], told.get(label, total[:4]))]
        return totals


def _turns(report: FairnessReport) -> Iterator[Metric]:
    """Lags, rounds and waits of all clients together."""
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
        for worker, credit in entry.deficit.items():
            for counter, value in (("placement", credit.placement), ("order", credit.order)):
                if value is not None:
                    yield (client, worker, counter), value


def _caches(report: FairnessReport) -> Iterator[Metric]:
    cards = {worker: entry.cache for worker, entry in report.workers.items() if entry.cache is not None}
    yield from _by_worker(CounterMetricFamily, CACHE_COUNTERS, cards)
    yield from _by_worker(GaugeMetricFamily, CACHE_GAUGES, cards)
    yield from EVICTED.parts(
        ((worker, source), tokens) for worker, card in cards.items() for source, tokens in card.evicted.items()
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


def _by_worker(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily], figures: WorkerMetrics[T], told: Mapping[WorkerId, T]
) -> Iterator[Metric]:
    for name, text, figure in figures:
        values = ((worker, figure(each)) for worker, each in told.items())
        yield from Family(kind, name, text, ("worker",)).parts(
            ((worker,), value) for worker, value in values if value is not None
        )

"""Prometheus metrics of KV events and of the tokens by which calls are matched to them; read at each scrape."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.core.kv_blocks.kv_events import EventsReport
from router.core.model.request import WorkerId


class EventMetrics(Collector):
    """How each worker's events are followed, what was wrong with them, and what came of tokenising calls."""

    def __init__(
        self, report: Callable[[], Mapping[WorkerId, EventsReport]], outcomes: Callable[[], Mapping[str, int]]
    ) -> None:
        self._report = report
        self._outcomes = outcomes

    def collect(self) -> Iterator[Metric]:
        """All of it."""
        followed = GaugeMetricFamily(
            "d2lpm_kv_events_followed", "1 while the worker's KV events are read.", labels=("worker",)
        )
        complete = GaugeMetricFamily(
            "d2lpm_kv_events_complete", "1 while KV events tell all that the worker holds.", labels=("worker",)
        )
        faults = CounterMetricFamily(
            "d2lpm_kv_event_faults", "What was wrong with KV events.", labels=("worker", "fault")
        )
        for worker, report in self._report().items():
            followed.add_metric((worker,), report.followed)
            complete.add_metric((worker,), report.complete)
            for fault, count in report.faults.items():
                faults.add_metric((worker, fault), count)
        tokens = CounterMetricFamily(
            "d2lpm_token_lookups", "Calls by what came of finding their prompt's tokens.", labels=("outcome",)
        )
        for outcome, count in self._outcomes().items():
            tokens.add_metric((outcome,), count)
        return iter((followed, complete, faults, tokens))

"""The table of all metrics, from the code. `python -m tests.support.metric_table` writes it into docs/operations.md."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from router.cluster.report import ClusterMetrics, ClusterReport
from router.control.page.feed import PageFeed
from router.front.byte_budget import ByteBudget
from router.front.http.connection_limits import Connections, FrontLimits
from router.telemetry.loop_lag import LoopLag
from router.telemetry.metrics.component_metrics import (
    AdmissionMetrics,
    BackgroundMetrics,
    BuildInfo,
    EventMetrics,
    FileMetrics,
    LabelMetrics,
    LagMetrics,
    StoredMetrics,
    TokenMetrics,
)
from router.telemetry.metrics.counts import ClientLabels
from router.telemetry.metrics.front_metrics import FrontMeasurements, ProcessMetrics
from router.telemetry.metrics.handoff_metrics import HandoffMetrics
from router.telemetry.metrics.request_metrics import RequestMetrics
from router.telemetry.metrics.state_metrics import StateCollector
from router.telemetry.otel.span_counts import SpanCounts
from router.telemetry.report import FairnessReport, Service
from router.telemetry.session_report import GateMetrics, gate_report

OPERATIONS: Final = Path(__file__).parents[2] / "docs" / "operations.md"
HEAD: Final = "| metric | kind | labels | what |\n| --- | --- | --- | --- |\n"
SUFFIXES: Final = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}
"""Suffixes of a metric's sample names, by its kind."""


Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


async def no_report() -> FairnessReport:
    """A report without clients and workers."""
    return FairnessReport("", None, {}, Service(0, 0, 0, 0.0), {})


def metrics() -> list[Family]:
    """All metrics of a router, sorted by name, before any request."""
    registry = CollectorRegistry()
    labels = ClientLabels()
    RequestMetrics(registry, labels)
    HandoffMetrics(registry, ())
    empty_report = FairnessReport("", None, {}, Service(0, 0, 0, 0.0), {})
    state = StateCollector(labels)
    state.report = empty_report
    registry.register(state)
    registry.register(EventMetrics(dict))
    registry.register(TokenMetrics(dict))
    registry.register(AdmissionMetrics({}))
    registry.register(FileMetrics({}))
    registry.register(LoopLag())
    registry.register(PageFeed(no_report, list, bool))
    registry.register(StoredMetrics(()))
    registry.register(BuildInfo(""))
    registry.register(BackgroundMetrics(()))
    registry.register(LagMetrics(int))
    registry.register(LabelMetrics(int))
    registry.register(SpanCounts())
    registry.register(ClusterMetrics(lambda: ClusterReport("", 1, 0.0, "", {}, (), "ok", 0.0)))
    registry.register(GateMetrics(partial(gate_report, None, 0.0)))
    registry.register(ProcessMetrics("", float, int, FrontMeasurements()))
    budget = ByteBudget(1)
    registry.register(Connections(FrontLimits(), budget))
    registry.register(budget)
    found = [metric for metric in registry.collect() if isinstance(metric, Family)]
    return sorted(found, key=lambda metric: metric.name)


def samples() -> Iterator[str]:
    """The sample names of all metrics, as Prometheus knows them."""
    for metric in metrics():
        yield from (metric.name + suffix for suffix in SUFFIXES[metric.type])


def table() -> str:
    """The table with one row per metric."""
    return HEAD + "".join(
        f"| `{metric.name}{SUFFIXES[metric.type][0] if metric.type == 'counter' else ''}` | {metric.type} "
        f"| {', '.join(f'`{label}`' for label in metric._labelnames)} | {metric.documentation} |\n"
        for metric in metrics()
    )


def table_in_document() -> str:
    """The table in the document."""
    text = OPERATIONS.read_text("utf-8")
    begin = text.index(HEAD)
    return text[begin : text.find("\n\n", begin) + 1] if "\n\n" in text[begin:] else text[begin:]


if __name__ == "__main__":
    OPERATIONS.write_text(OPERATIONS.read_text("utf-8").replace(table_in_document(), table()), "utf-8")

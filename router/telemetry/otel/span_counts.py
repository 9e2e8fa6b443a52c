"""Counts the spans that are made, and those that a collector took or did not take."""

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector


@dataclass(slots=True, eq=False)
class SpanCounts(Collector):
    """Spans that ended, by what became of them. Those that are neither sent nor lost wait, or were dropped unsent."""

    ended: int = 0
    sent: int = 0
    """Written, as `lost`, by the thread that sends spans."""
    lost: int = 0

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "d2lpm_otel_spans",
            "Spans for the OpenTelemetry collector: all (ended), and those that it took (sent) or did not take (lost).",
            labels=("outcome",),
        )
        family.add_metric(("ended",), self.ended)
        family.add_metric(("sent",), self.sent)
        family.add_metric(("lost",), self.lost)
        yield family

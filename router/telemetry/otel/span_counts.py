"""Counts the spans that a collector took, and those that it did not."""

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector


@dataclass(slots=True, eq=False)
class SpanCounts(Collector):
    """Written by the thread that sends spans."""

    sent: int = 0
    lost: int = 0

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "d2lpm_otel_spans", "Spans for the OpenTelemetry collector, by whether it took them.", labels=("outcome",)
        )
        family.add_metric(("sent",), self.sent)
        family.add_metric(("lost",), self.lost)
        yield family

"""Prometheus metrics of the calls that are turned away before they wait for anything; read at each scrape."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector


class AdmissionMetrics(Collector):
    """How many, by the reason."""

    def __init__(self, refusals: Mapping[str, int]) -> None:
        self._refusals = refusals

    def collect(self) -> Iterator[Metric]:
        """All of it."""
        family = CounterMetricFamily(
            "d2lpm_limited_calls", "Calls beyond what their client or its group may have.", labels=("reason",)
        )
        for reason, count in self._refusals.items():
            family.add_metric((reason,), count)
        yield family

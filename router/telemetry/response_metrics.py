"""Prometheus metrics of stored responses."""

from collections.abc import Iterator, Sized

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class ResponseMetrics(Collector):
    """How many there are."""

    def __init__(self, stored: Sized, background: Sized) -> None:
        """`stored`: those that are remembered; `background`: those that engines compute after they have answered."""
        self._stored = stored
        self._background = background

    def collect(self) -> Iterator[Metric]:
        """All of it."""
        for name, what, responses in (
            ("d2lpm_background_responses", "Responses that engines compute in the background.", self._background),
            ("d2lpm_stored_responses", "Stored responses whose worker and client are remembered.", self._stored),
        ):
            yield GaugeMetricFamily(name, what, value=len(responses))

"""Prometheus metrics of the files that the router writes: whether each can be written."""

from collections.abc import Iterator, Mapping
from typing import Protocol

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class Kept(Protocol):
    """A file that is written again and again."""

    @property
    def failing(self) -> bool:
        """Whether it could not be written the last time."""


class KeptFiles(Collector):
    """State and journal, as far as there are any."""

    def __init__(self, files: Mapping[str, Kept | None]) -> None:
        """By their names; None for one that is not kept."""
        self._files = files

    def collect(self) -> Iterator[Metric]:
        """All of it."""
        family = GaugeMetricFamily(
            "d2lpm_file_failing", "1 while the journal or the state cannot be written, else 0.", labels=("file",)
        )
        for name, file in self._files.items():
            if file is not None:
                family.add_metric((name,), float(file.failing))
        yield family

"""Writes the Prometheus text format in small steps, so that a scrape does not block the event loop.

A thousand clients at eight workers make 20,000 lines. A collector may yield a metric family in several consecutive
parts; the event loop runs other tasks between any two of them.
"""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

ROWS_PER_PART: Final = 500
"""Rows of a metric family that are written in one step."""

Row = tuple[Sequence[str], float]
"""The label values and the value of a sample."""


class TextFamily(NamedTuple):
    """A counter or gauge family without its samples."""

    kind: type[CounterMetricFamily] | type[GaugeMetricFamily]
    name: str
    text: str
    labels: Sequence[str]

    def parts(self, rows: Iterable[Row]) -> Iterator[Metric]:
        """Yield the family in parts of at most `ROWS_PER_PART` rows, each built when it is requested.

        A family without rows is one empty part.
        """
        remaining = iter(rows)
        first = True
        while (batch := [*islice(remaining, ROWS_PER_PART)]) or first:
            part = self.kind(self.name, self.text, labels=self.labels)
            for labels, value in batch:
                part.add_metric(labels, value)
            yield part
            first = False


class FamilyPart(NamedTuple):
    """Presents one part of a family as a collector, which `generate_latest` can write."""

    metric: Metric

    def collect(self) -> Iterable[Metric]:
        return (self.metric,)


async def render_metrics(collector: Collector) -> bytes:
    """Render all metrics of a collector or a registry, without repeating the header of a family in parts."""
    written: list[bytes] = []
    name = None
    for metric in collector.collect():
        text = generate_latest(FamilyPart(metric))
        if metric.name == name:
            _help, _type, text = text.split(b"\n", 2)
        name = metric.name
        written.append(text)
        await asyncio.sleep(0)
    return b"".join(written)

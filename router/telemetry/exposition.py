"""Prometheus's text format, written a little at a time: a thousand clients at eight workers are 20,000 lines.

A collector may give a family in parts, one after the other; between any two the event loop can do something else.
"""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

ROWS_PER_PART: Final = 500
"""Rows of a family that are made and written in one go."""

Row = tuple[Sequence[str], float]
"""The values of the labels, and the number."""


class Family(NamedTuple):
    """A counter or a gauge without its samples."""

    kind: type[CounterMetricFamily] | type[GaugeMetricFamily]
    name: str
    text: str
    labels: Sequence[str]

    def parts(self, rows: Iterable[Row]) -> Iterator[Metric]:
        """The family in parts, each made of its rows when it is asked for; one without rows is one part."""
        left = iter(rows)
        first = True
        while (some := [*islice(left, ROWS_PER_PART)]) or first:
            part = self.kind(self.name, self.text, labels=self.labels)
            for labels, value in some:
                part.add_metric(labels, value)
            yield part
            first = False


class FamilyPart(NamedTuple):
    """A part of a family, as something that can be written."""

    metric: Metric

    def collect(self) -> Iterable[Metric]:
        """It alone."""
        return (self.metric,)


async def render_metrics(collector: Collector) -> bytes:
    """All that a collector, or a registry of them, tells."""
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

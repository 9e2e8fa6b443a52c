"""The Prometheus text format, written in parts."""

from collections.abc import Iterator

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.telemetry.metrics.exposition import ROWS_PER_PART, Row, TextFamily, render_metrics

GAUGE = TextFamily(GaugeMetricFamily, "d2lpm_x", "A text.", ("client", "worker"))
COUNTER = TextFamily(CounterMetricFamily, "d2lpm_y", "Another\ntext.", ("client",))


def rows(count: int) -> Iterator[Row]:
    return (((f'cli"ent\n{number}', "w"), number / 3) for number in range(count))


class Parts(Collector):
    """Two families, and one without a sample."""

    def collect(self) -> Iterator[Metric]:
        yield from GAUGE.parts(rows(3 * ROWS_PER_PART + 1))
        yield from GAUGE._replace(name="d2lpm_none").parts([])
        yield from COUNTER.parts(((client,), number) for (client, _), number in rows(ROWS_PER_PART))


class Whole(Collector):
    """The same families, each in one piece."""

    def collect(self) -> Iterator[Metric]:
        for name, count in (("d2lpm_x", 3 * ROWS_PER_PART + 1), ("d2lpm_none", 0)):
            gauge = GaugeMetricFamily(name, GAUGE.text, labels=GAUGE.labels)
            for labels, value in rows(count):
                gauge.add_metric(labels, value)
            yield gauge
        counter = CounterMetricFamily(COUNTER.name, COUNTER.text, labels=COUNTER.labels)
        for (client, _), value in rows(ROWS_PER_PART):
            counter.add_metric((client,), value)
        yield counter


async def test_parts_give_the_same_text_as_whole_families() -> None:
    """A family that is built in parts reads as if it had been built at once."""
    assert await render_metrics(Parts()) == generate_latest(Whole())


def test_a_part_is_built_when_it_is_requested() -> None:
    """The rows of a part are read when the part is requested, and not before."""
    left = rows(2 * ROWS_PER_PART)
    parts = GAUGE.parts(left)
    assert len(next(parts).samples) == ROWS_PER_PART
    assert len([*left]) == ROWS_PER_PART

"""Counts and histograms that become Prometheus metrics at a scrape, and labels of a bounded number.

Counts are plain numbers: incrementing a counter of the client library costs 20 times as much, for locks and exemplars
that nothing here needs.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate
from typing import Final

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from router.core.model.request import ClientId, WorkerId
from router.telemetry.metrics.exposition import TextFamily

CLIENT_LIMIT: Final = 1000
"""Distinct client labels; further clients share the label `other`."""
MODEL_LIMIT: Final = 200
"""Distinct model labels; further models share the label `other`."""
OTHER: Final = "other"
BUCKET_SECONDS: Final = (
    0.001,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
)


class ClientLabels(dict[ClientId, str]):
    """Maps any number of clients to a bounded set of labels: the names of the first clients asked for, else `other`."""

    def __init__(self, limit: int = CLIENT_LIMIT) -> None:
        super().__init__()
        self._limit = limit

    def __missing__(self, client: ClientId) -> str:
        if len(self) >= self._limit:
            return OTHER
        self[client] = client
        return client


class ModelLabels(dict[str, str]):
    """Maps models to a bounded set of labels, only those that some worker serves: clients may ask for any name."""

    def __init__(self, limit: int = MODEL_LIMIT) -> None:
        super().__init__()
        self._limit = limit

    def __missing__(self, model: str) -> str:
        return OTHER

    def add(self, models: Collection[str]) -> None:
        """Add models that some worker serves."""
        for model in sorted(models):
            if len(self) < self._limit:
                self[model] = model


class LabeledCounter(defaultdict[tuple[str, ...], float]):
    """A counter with labels: the count by label values."""

    def __init__(self, name: str, text: str, *labels: str) -> None:
        super().__init__(int)
        self._name = name
        self._text = text
        self._labels = labels

    def families(self) -> Iterator[Metric]:
        """Yield the metric family in parts."""
        return TextFamily(CounterMetricFamily, self._name, self._text, self._labels).parts(list(self.items()))


class WorkerCounter(LabeledCounter):
    """A counter whose first label is a worker."""

    def fold_into_other(self, worker: WorkerId) -> None:
        """Move the worker's counts to the label `other`."""
        for labels in [labels for labels in self if labels[0] == worker]:
            self[OTHER, *labels[1:]] += self.pop(labels)


class DurationHistogram:
    """A histogram of seconds by one label."""

    def __init__(self, name: str, text: str, label: str = "model", bounds: Sequence[float] = BUCKET_SECONDS) -> None:
        """`bounds`: upper bounds of the buckets but the last, in seconds."""
        self._name = name
        self._text = text
        self._label = label
        self._bounds = bounds
        self._counts: defaultdict[str, list[int]] = defaultdict(lambda: [0] * (len(bounds) + 1))
        """By label value, observations per bucket (not cumulative); the last bucket has no upper bound."""
        self._sums: defaultdict[str, float] = defaultdict(float)

    def observe(self, value: str, seconds: float) -> None:
        """`value`: of the label."""
        self._counts[value][bisect_left(self._bounds, seconds)] += 1
        self._sums[value] += seconds

    def families(self) -> Iterator[Metric]:
        """Yield the metric family, one label value at a time."""
        bounds = [*map(str, self._bounds), "+Inf"]
        if not self._counts:
            yield HistogramMetricFamily(self._name, self._text, labels=(self._label,))
        for value, counts in list(self._counts.items()):
            family = HistogramMetricFamily(self._name, self._text, labels=(self._label,))
            buckets = list(zip(bounds, accumulate(counts), strict=True))
            family.add_metric((value,), buckets, self._sums[value])
            yield family

"""The parsed metrics of an engine."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from ..processes import Server
from ..wire import WORKER_KEY, get

_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_TYPE = re.compile(r"^# TYPE (\S+) (\S+)$", re.MULTILINE)


class Sample(NamedTuple):
    name: str
    labels: Mapping[str, str]
    value: float


class Page(NamedTuple):
    """All samples at one moment, and the type of each metric."""

    samples: tuple[Sample, ...]
    types: Mapping[str, str]

    def total(self, name: str, **labels: str) -> float:
        """Return the sum over all series of this name with these labels; 0 if there is none."""
        found = (sample for sample in self.samples if sample.name == name and labels.items() <= sample.labels.items())
        return sum(sample.value for sample in found)

    def labels(self, name: str) -> set[frozenset[str]]:
        """Return the sets of label names of the series with this name."""
        return {frozenset(sample.labels) for sample in self.samples if sample.name == name}

    @property
    def names(self) -> set[str]:
        return {sample.name for sample in self.samples}


def read(server: Server) -> Page:
    """Return the answer of GET /metrics; no engine here asks for a key there."""
    answer = get(f"{server.url}/metrics")
    assert answer.status == 200, get(f"{server.url}/metrics", WORKER_KEY).status
    text = answer.body.decode()
    samples = []
    for line in text.split("\n"):
        if line and not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            name, _, labels = series.partition("{")
            samples.append(Sample(name, dict(_LABEL.findall(labels)), float(value)))
    return Page(tuple(samples), dict(_TYPE.findall(text)))

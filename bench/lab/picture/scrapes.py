"""Repeated scrapes of a router's `/metrics` as curves: the sums and rates that the dashboard draws."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

Curves = Mapping[str, Sequence[tuple[float, float]]]
"""By the value of a label: seconds, and the figure."""


class Scrape(NamedTuple):
    """One scrape."""

    at: float
    """Seconds since the beginning."""
    families: Mapping[str, Metric]
    """By name; a counter's name has no `_total`."""

    @classmethod
    def parsed(cls, at: float, text: str) -> "Scrape":
        """Parse an exposition. Raises ValueError if it is invalid."""
        return cls(at, {family.name: family for family in text_string_to_metric_families(text)})

    def sums(self, name: str, by: str, where: Mapping[str, str]) -> Mapping[str, float]:
        """Return the samples of a metric with the labels `where`, summed by the label `by`."""
        totals: dict[str, float] = {}
        family = self.families.get(name.removesuffix("_total"))
        for sample in family.samples if family is not None else ():
            if sample.name == name and where.items() <= sample.labels.items():
                totals[sample.labels[by]] = totals.get(sample.labels[by], 0.0) + sample.value
        return totals


def levels(scrapes: Sequence[Scrape], name: str, by: str, where: Mapping[str, str] | None = None) -> Curves:
    """Return the values of a gauge; nothing where it was missing."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for scrape in scrapes:
        for label, value in scrape.sums(name, by, where or {}).items():
            curves.setdefault(label, []).append((scrape.at, value))
    return curves


def shares(scrapes: Sequence[Scrape], name: str, by: str, window: float) -> Curves:
    """Return each label's share of a counter's increase within `window` seconds; nothing where it did not grow."""
    grown = increases(scrapes, name, by, window)
    total: dict[float, float] = {}
    for points in grown.values():
        for at, value in points:
            total[at] = total.get(at, 0.0) + value
    return {label: [(at, value / total[at]) for at, value in points if total[at]] for label, points in grown.items()}


def ratios(scrapes: Sequence[Scrape], part: str, whole: str, by: str, window: float) -> Curves:
    """Return one counter's increase over another's within `window` seconds; nothing where the other did not grow."""
    parts = {label: dict(points) for label, points in increases(scrapes, part, by, window).items()}
    return {
        label: [(at, parts.get(label, {}).get(at, 0.0) / value) for at, value in points if value]
        for label, points in increases(scrapes, whole, by, window).items()
    }


def increases(scrapes: Sequence[Scrape], name: str, by: str, window: float) -> Curves:
    """Return a counter's increase in the `window` seconds before each scrape but the first; it began at 0."""
    curves: dict[str, list[tuple[float, float]]] = {}
    seen = [scrape.sums(name, by, {}) for scrape in scrapes]
    since = 0
    for index, scrape in enumerate(scrapes):
        while scrapes[since].at < scrape.at - window:
            since += 1
        if index > since:
            for label, value in seen[index].items():
                curves.setdefault(label, []).append((scrape.at, value - seen[since].get(label, 0.0)))
    return curves

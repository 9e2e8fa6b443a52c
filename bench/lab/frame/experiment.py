"""An experiment: its simulations, what is measured in each, and what is plotted."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from bench.lab.frame.conditions import SEEDS
from bench.report.records import Result
from bench.report.summary import Summary
from bench.sim.scenario import Scenario

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Points = Sequence[tuple[float, float]]
Labels = tuple[tuple[str, str], ...]
"""Pairs of a column and a value."""
Value = float | None | Points
"""A figure, None if there is none, or a line over time."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One simulation of an experiment, run once per seed."""

    labels: Labels
    """No other cell of the experiment has the same; all of them have the same columns."""
    scenario: Scenario

    @property
    def name(self) -> str:
        """The labels in one word."""
        return " ".join(value for _, value in self.labels)

    def with_seed(self, seed: int) -> Scenario:
        """Return the scenario with this seed."""
        return replace(self.scenario, seed=seed)


class LinePoint(NamedTuple):
    """A point of a line over time, over all seeds that have it."""

    x: float
    median: float
    least: float
    most: float


@dataclass(frozen=True, slots=True)
class Row:
    """A cell and its figures: for each, the values of all seeds, in the order of the seeds.

    Where only a table of medians is left, each figure has that one value.
    """

    labels: Mapping[str, str]
    values: Mapping[str, Sequence[Value]]

    def median(self, figure: str) -> float | None:
        """Return the median of the seeds' values, the lower of two; None if a seed has none."""
        values = [value for value in self.values[figure] if isinstance(value, float | int)]
        if len(values) < len(self.values[figure]):
            return None
        return _median(values)

    def spread(self, figure: str) -> tuple[float, float] | None:
        """Return the least and the greatest of the seeds' values; None with fewer than two values."""
        values = [value for value in self.values[figure] if isinstance(value, float | int)]
        return (min(values), max(values)) if len(values) > 1 else None

    def line(self, figure: str) -> Sequence[LinePoint]:
        """Return the points of a line that most seeds have, in the order of x: where few are left, a median would be
        theirs, not that of the seeds.
        """
        seen: dict[float, list[float]] = {}
        for points in self.values[figure]:
            for x, y in points if isinstance(points, Sequence) else ():
                seen.setdefault(x, []).append(y)
        half = len(self.values[figure]) / 2
        return [LinePoint(x, _median(ys), min(ys), max(ys)) for x, ys in sorted(seen.items()) if len(ys) > half]


def _median(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]


class Experiment(ABC):
    """One figure or table of a paper, reproduced.

    An experiment holds no state; equal code, conditions and seeds give equal figures.
    """

    title: ClassVar[str]
    """One line."""
    published: ClassVar[str]
    """What the paper reports; a paragraph."""
    decimals: ClassVar[Mapping[str, int]]
    """The figures of the table in their order, and the decimals of each."""
    seeds: ClassVar[Sequence[int]] = SEEDS
    """The seeds of a run; only the first if quick."""
    over_time: ClassVar[bool] = False
    """Whether the plot has lines over time, which the table does not hold."""
    marks: ClassVar[str] = "bars from the least to the greatest seed"
    """What shows the range over the seeds; empty if the plot shows none."""
    caption: ClassVar[str] = ""
    """What else the plot shows; a sentence."""

    @abstractmethod
    def cells(self, *, quick: bool) -> Sequence[Cell]:
        """Return the simulations; if `quick`, fewer or shorter ones with the same shape."""

    @abstractmethod
    def measure(self, result: Result, summary: Summary) -> Mapping[str, Value]:
        """Return the figures of one simulation."""

    def digest(self, rows: Sequence[Row]) -> Sequence[str]:  # noqa: ARG002
        """Return lines of Markdown that summarise the table; most experiments have none."""
        return []

    @abstractmethod
    def draw(self, rows: Sequence[Row], figure: "Figure") -> None:
        """Plot the rows, each axis with its unit; rows that hold medians alone have no ranges."""

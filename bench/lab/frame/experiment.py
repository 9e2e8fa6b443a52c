"""What an experiment is: simulations, what is read from each, and what is drawn of it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from bench.lab.frame.conditions import SEEDS
from bench.report.records import Result
from bench.report.summary import Summary
from bench.sim.scenario import Scenario

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Points = Sequence[tuple[float, float]]
Value = float | None | Points
"""A figure, None where there is none, or a line of them over time."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One simulation of an experiment, to be run once for each seed."""

    labels: tuple[tuple[str, str], ...]
    """What tells it from the others, as (column, value); the same columns for all cells of an experiment."""
    scenario: Scenario

    @property
    def name(self) -> str:
        """Its labels in one word."""
        return " ".join(value for _, value in self.labels)

    def with_seed(self, seed: int) -> Scenario:
        """Its scenario under this seed."""
        return replace(self.scenario, seed=seed)


@dataclass(frozen=True, slots=True)
class Row:
    """A cell and its figures; for each the values of all seeds, in the order of the seeds."""

    labels: Mapping[str, str]
    values: Mapping[str, Sequence[Value]]

    def median(self, figure: str) -> float | None:
        """The middle one of the seeds' values, the lower of two; None where a seed has none."""
        values = [value for value in self.values[figure] if isinstance(value, float | int)]
        if len(values) < len(self.values[figure]):
            return None
        return sorted(values)[(len(values) - 1) // 2]

    def points(self, figure: str) -> Points:
        """The line of the first seed."""
        first = self.values[figure][0]
        return first if isinstance(first, Sequence) else ()


class Experiment(ABC):
    """One figure or table of a paper, made anew.

    An experiment holds no state; equal code, conditions and seeds give equal figures.
    """

    title: ClassVar[str]
    """In one line."""
    published: ClassVar[str]
    """What its paper reports; a paragraph."""
    decimals: ClassVar[Mapping[str, int]]
    """The figures of its table in their order, and how many decimals each is shown with."""
    seeds: ClassVar[Sequence[int]] = SEEDS
    """That it is run under; only the first when quick."""

    @abstractmethod
    def cells(self, *, quick: bool) -> Sequence[Cell]:
        """Its simulations; when `quick` fewer or shorter ones, whose shape is the same."""

    @abstractmethod
    def measure(self, result: Result, summary: Summary) -> Mapping[str, Value]:
        """What is read from one simulation."""

    def digest(self, rows: Sequence[Row]) -> Sequence[str]:  # noqa: ARG002
        """Lines of Markdown that say it shorter than the table; none for most."""
        return []

    @abstractmethod
    def draw(self, rows: Sequence[Row], figure: "Figure") -> None:
        """Plot it."""

"""What the experiments of this folder share: traces, seeds, figures, and how their plots look."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from bench.lab.balance.measures import DECIMALS, figures
from bench.lab.balance.tiers import TRACES
from bench.lab.frame.experiment import Row, Value
from bench.lab.frame.traced import TracedExperiment
from bench.report.records import Result
from bench.report.summary import Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class BalanceExperiment(TracedExperiment):
    """An experiment with a decode tier whose ranks step together."""

    kinds: ClassVar[Sequence[str]] = TRACES
    seeds: ClassVar[Sequence[int]] = (0, 1, 2)
    decimals: ClassVar[Mapping[str, int]] = DECIMALS

    def measure(self, result: Result, summary: Summary) -> Mapping[str, Value]:
        return figures(result, summary)


def loads_of(rows: Sequence[Row]) -> list[str]:
    """Return the loads of these rows, each once."""
    return list(dict.fromkeys(row.labels["load"] for row in rows))


def draw_bars(figure: "Figure", rows: Sequence[Row], shown: Mapping[str, str], name: Callable[[Row], str]) -> None:
    """Draw a column for each load, a line for each figure, and a bar for each row.

    `shown`: the figures, with the labels of their axes. `name`: returns that of a row.
    """
    loads = loads_of(rows)
    axes = figure.subplots(len(shown), len(loads), sharey=True, squeeze=False)
    axes[0][0].invert_yaxis()
    for column, load in enumerate(loads):
        axes[0][column].set_title(load)
        own = [row for row in rows if row.labels["load"] == load]
        for line, (measured, label) in enumerate(shown.items()):
            axes[line][column].barh([name(row) for row in own], [row.median(measured) or 0.0 for row in own])
            axes[line][column].set_xlabel(label)

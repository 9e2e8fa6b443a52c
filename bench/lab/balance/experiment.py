"""What the experiments of this folder share: traces, seeds, figures, and how their plots look."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from bench.lab.balance.measures import DECIMALS, figures
from bench.lab.balance.tiers import TRACES
from bench.lab.drawing.looks import BLUE, policy_look
from bench.lab.frame.experiment import Row, Value
from bench.lab.frame.plots import draw_bars
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


def draw_groups(figure: "Figure", rows: Sequence[Row], shown: Sequence[str], name: Callable[[Row], str]) -> None:
    """Draw a column for each load, a line for each figure, and a bar for each row; `name` returns that of a row."""
    loads = loads_of(rows)
    grid = figure.subplots(len(shown), len(loads), squeeze=False)
    lines = max(len([row for row in rows if row.labels["load"] == load]) for load in loads)
    figure.set_figheight(1.0 + len(shown) * (0.5 + 0.25 * lines))
    for column, load in enumerate(loads):
        grid[0][column].set_title(load)
        own = [row for row in rows if row.labels["load"] == load]
        colours = [policy_look(row.labels["policy"]).colour if "policy" in row.labels else BLUE for row in own]
        for axes, measured in zip(grid[:, column], shown, strict=True):
            draw_bars(axes, own, [name(row) for row in own], measured, colours)
            if column:
                axes.set_yticks(range(len(own)), [""] * len(own))

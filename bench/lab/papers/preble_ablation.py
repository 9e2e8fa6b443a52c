"""The Preble paper's figure 5: its parts one after the other, on ToolBench with tools of unequal popularity."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from bench.lab.drawing.looks import BLUE
from bench.lab.frame.conditions import ABLATION, ABLATION_RATE, ABLATION_WORKERS
from bench.lab.frame.experiment import Cell, Experiment, Row, Value
from bench.lab.frame.plots import draw_bars
from bench.lab.papers.preble import DECIMALS, at_calls, figures, scenario
from bench.report.records import Result
from bench.report.summary import Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class PrebleAblation(Experiment):
    title: ClassVar[str] = (
        "What each part of Preble adds, ToolBench with Zipf 1.1, four workers (Preble paper, figure 5)"
    )
    published: ClassVar[str] = (
        "E2 improves average and p99 latency over round robin, rebalancing and copying improve them further, above all"
        " p99; looking at prefill and decode improves both, and the priority groups p99 alone."
    )
    decimals: ClassVar[Mapping[str, int]] = DECIMALS

    def cells(self, *, quick: bool) -> Sequence[Cell]:  # noqa: ARG002 - quick means one seed, and no more
        workload = at_calls("toolbench-zipf", ABLATION_RATE)
        return [
            Cell((("policy", name),), scenario(contender, workload, ABLATION_WORKERS))
            for name, contender in ABLATION.items()
        ]

    def measure(self, result: Result, summary: Summary) -> Mapping[str, Value]:
        return figures(result, summary)

    def draw(self, rows: Sequence[Row], figure: "Figure") -> None:
        """Draw a bar for each part."""
        figure.set_figheight(2.6)
        names = [row.labels["policy"] for row in rows]
        for axes, measured in zip(figure.subplots(1, 2, sharey=True), ("latency avg", "latency p99"), strict=True):
            draw_bars(axes, rows, names, measured, [BLUE] * len(rows))

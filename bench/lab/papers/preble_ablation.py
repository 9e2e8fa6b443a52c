"""The Preble paper's figure 5: its parts one after the other, on ToolBench with tools of unequal popularity."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from bench.lab.frame.conditions import ABLATION, ABLATION_RATE, ABLATION_WORKERS
from bench.lab.frame.experiment import Cell, Experiment, Row, Value
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
        shown = ("latency avg", "latency p99")
        for axes, measured in zip(figure.subplots(1, len(shown)), shown, strict=True):
            axes.bar([row.labels["policy"] for row in rows], [row.median(measured) or 0.0 for row in rows])
            axes.set_ylabel(f"{measured}, s")
            axes.tick_params(axis="x", rotation=30)

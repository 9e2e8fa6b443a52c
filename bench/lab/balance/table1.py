"""BalanceRoute's table 1: policies before a decode tier of eight ranks in step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from bench.lab.balance.contenders import ALL
from bench.lab.balance.measures import DECIMALS, MEANING, compared, figures
from bench.lab.balance.tiers import TIERS, TRACES, balanced, loads, saturated, span
from bench.lab.frame.experiment import Cell, Row, Value
from bench.lab.frame.traced import TracedExperiment
from bench.report.records import Result
from bench.report.summary import Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Table1(TracedExperiment):
    kinds: ClassVar[Sequence[str]] = TRACES
    seeds: ClassVar[Sequence[int]] = SEEDS
    title: ClassVar[str] = "Eight ranks in step, saturated (BalanceRoute, table 1)"
    published: ClassVar[str] = (
        "Imbalance of JSQ 215,110, of BR-0 51,927 (0.24), of oracle BR-H 23,577 (0.11) on the proprietary trace; "
        "throughput over the best baseline +11.3 % and +21.5 %. Waits are not reported. " + MEANING
    )
    decimals: ClassVar[Mapping[str, int]] = DECIMALS

    def cells(self, *, quick: bool) -> Sequence[Cell]:
        return [
            Cell(
                (("load", load), ("policy", name)),
                balanced(TIERS[load], contender, workload, span(quick=quick)),
            )
            for load in loads(self.traces)
            for workload in [saturated(load, self.traces)]
            for name, contender in ALL.items()
        ]

    def measure(self, result: Result, summary: Summary) -> Mapping[str, Value]:
        return figures(result, summary)

    def digest(self, rows: Sequence[Row]) -> Sequence[str]:
        return compared(rows, "load")

    def draw(self, rows: Sequence[Row], figure: "Figure") -> None:
        """Draw a point for each policy on each load: imbalance over the reference's, and throughput."""
        names = list(dict.fromkeys(row.labels["load"] for row in rows))
        for axes, load in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
            own = [row for row in rows if row.labels["load"] == load]
            axes.barh([row.labels["policy"] for row in own], [row.median("idle") or 0.0 for row in own])
            axes.invert_yaxis()
            axes.set_title(load)
            axes.set_xlabel("idle share of attention time")

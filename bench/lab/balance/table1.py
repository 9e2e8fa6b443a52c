"""BalanceRoute's table 1: policies before a decode tier of eight ranks in step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from bench.lab.balance.contenders import ALL
from bench.lab.balance.experiment import BalanceExperiment, draw_groups
from bench.lab.balance.measures import MEANING, compared
from bench.lab.balance.tiers import TIERS, balanced, loads, saturated
from bench.lab.frame.experiment import Cell, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Table1(BalanceExperiment):
    title: ClassVar[str] = "Eight ranks in step, saturated (BalanceRoute, table 1)"
    published: ClassVar[str] = (
        "Imbalance of JSQ 215,110, of BR-0 51,927 (0.24), of oracle BR-H 23,577 (0.11) on the proprietary trace; "
        "throughput over the best baseline +11.3 % and +21.5 %. Waits are not reported. " + MEANING
    )

    def cells(self, *, quick: bool) -> Sequence[Cell]:
        return [
            Cell(
                (("load", load), ("policy", name)),
                balanced(TIERS[load], contender, workload, TIERS[load].span(quick=quick)),
            )
            for load in loads(self.traces)
            for workload in [saturated(load, self.traces)]
            for name, contender in ALL.items()
        ]

    def digest(self, rows: Sequence[Row]) -> Sequence[str]:
        return compared(rows, "load")

    def draw(self, rows: Sequence[Row], figure: "Figure") -> None:
        """Draw, for each load, the share of time in which ranks wait under each policy."""
        draw_groups(figure, rows, ["idle"], lambda row: row.labels["policy"])

"""BalanceRoute's table 2: the same with 4, 8 and 16 ranks, and as much load for each rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from bench.lab.balance.contenders import FEW
from bench.lab.balance.experiment import BalanceExperiment, loads_of
from bench.lab.balance.measures import MEANING, compared
from bench.lab.balance.tiers import TIERS, balanced, loads, saturated
from bench.lab.drawing.axes import counts, from_zero, legend, outer
from bench.lab.drawing.looks import POLICIES
from bench.lab.frame.experiment import Cell, Row
from bench.lab.frame.plots import draw_policies

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RANKS: Final = (4, 8, 16)
QUICK_RANKS: Final = (4, 16)
LOADS: Final = ("long", "mooncake")


@dataclass(frozen=True)
class Scaling(BalanceExperiment):
    title: ClassVar[str] = "More ranks in step, as much load for each (BalanceRoute, table 2)"
    published: ClassVar[str] = (
        "Throughput over the best baseline with 4, 8 and 16 ranks: BR-0 +11.1, +11.3, +20.5 %, oracle BR-H +13.3, "
        "+21.5, +34.5 %. " + MEANING
    )

    def cells(self, *, quick: bool) -> Sequence[Cell]:
        return [
            Cell(
                (("tier", f"{load} {ranks}"), ("load", load), ("ranks", f"{ranks}"), ("policy", name)),
                balanced(TIERS[load], contender, workload, TIERS[load].span(quick=quick), ranks),
            )
            for load in LOADS
            if load in loads(self.traces)
            for ranks in (QUICK_RANKS if quick else RANKS)
            for workload in [saturated(load, self.traces, ranks)]
            for name, contender in FEW.items()
        ]

    def digest(self, rows: Sequence[Row]) -> Sequence[str]:
        return compared(rows, "tier")

    def draw(self, rows: Sequence[Row], figure: "Figure") -> None:
        """Draw, for each load, the throughput of each policy by the number of ranks."""
        figure.set_figheight(3.6)
        names = loads_of(rows)
        for axes, load in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
            own = [row for row in rows if row.labels["load"] == load]
            draw_policies(axes, own, lambda row: float(row.labels["ranks"]), "tok/s")
            counts(axes, RANKS, "ranks (count)")
            from_zero(axes, "y")
            axes.set_title(load)
        outer(figure)
        legend(figure, list(POLICIES))

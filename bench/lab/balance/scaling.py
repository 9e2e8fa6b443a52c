"""BalanceRoute's table 2: the same with 4, 8 and 16 ranks, and as much load for each rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from bench.lab.balance.contenders import FEW
from bench.lab.balance.experiment import BalanceExperiment, loads_of
from bench.lab.balance.measures import MEANING, compared
from bench.lab.balance.tiers import TIERS, balanced, loads, saturated
from bench.lab.frame.experiment import Cell, Row

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
        """Draw, for each load, the throughput per rank of each policy by the number of ranks."""
        names = loads_of(rows)
        for axes, load in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
            for policy in FEW:
                own = [row for row in rows if (row.labels["load"], row.labels["policy"]) == (load, policy)]
                ranks = [int(row.labels["ranks"]) for row in own]
                each = [(row.median("tok/s") or 0.0) / count for row, count in zip(own, ranks, strict=True)]
                axes.plot(ranks, each, marker="o", label=policy)
            axes.set_title(load)
            axes.set_xlabel("ranks")
            axes.set_ylabel("tok/s of a rank")
            axes.legend()

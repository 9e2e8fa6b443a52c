"""How many waiting requests a choice needs: BR-0 and DLPM with the F-score, by their candidates."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from bench.lab.balance.experiment import BalanceExperiment
from bench.lab.balance.measures import MEANING
from bench.lab.balance.tiers import TIERS, balanced, loads, saturated
from bench.lab.drawing.axes import counts, legend
from bench.lab.drawing.looks import POLICIES
from bench.lab.frame.conditions import Contender
from bench.lab.frame.experiment import Cell, Row
from bench.lab.frame.plots import draw_policies
from router.core.policies.balance.balance_parameters import Br0Parameters, DlpmBalanceParameters

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CANDIDATES: Final = (1, 2, 4, 16, 64)
QUICK_CANDIDATES: Final = (1, 16)
LOADS: Final = ("long", "mooncake")


@dataclass(frozen=True)
class Pool(BalanceExperiment):
    title: ClassVar[str] = "Candidates of a choice, eight ranks"
    published: ClassVar[str] = "Of no paper: BalanceRoute does not say how many candidates it looks at. " + MEANING

    def cells(self, *, quick: bool) -> Sequence[Cell]:
        return [
            Cell(
                (("load", load), ("policy", contender.policy), ("candidates", f"{count}")),
                balanced(TIERS[load], contender, workload, TIERS[load].span(quick=quick)),
            )
            for load in LOADS
            if load in loads(self.traces)
            for workload in [saturated(load, self.traces)]
            for count in (QUICK_CANDIDATES if quick else CANDIDATES)
            for contender in (
                Contender("br0", Br0Parameters(candidates=count, fill_candidates=count)),
                Contender("dlpm_balance", DlpmBalanceParameters(candidates=count)),
            )
        ]

    def draw(self, rows: Sequence[Row], figure: "Figure") -> None:
        """Draw imbalance and the longest wait of each policy by the number of candidates, on the first load."""
        figure.set_figheight(3.6)
        own = [row for row in rows if row.labels["load"] == rows[0].labels["load"]]
        for axes, measured in zip(figure.subplots(1, 2), ("imbalance", "longest wait"), strict=True):
            draw_policies(axes, own, lambda row: float(row.labels["candidates"]), measured)
            counts(axes, CANDIDATES, "candidates (count)", logarithmic=True)
        legend(figure, list(POLICIES))

"""BalanceRoute's tables 6 and 7: how much the penalty and the discount of oracle BR-H matter."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from bench.lab.balance.experiment import BalanceExperiment, draw_groups
from bench.lab.balance.measures import MEANING
from bench.lab.balance.tiers import TIERS, balanced, loads, saturated
from bench.lab.frame.conditions import Contender
from bench.lab.frame.experiment import Cell, Row
from router.core.policies.balance.balance_parameters import BrhParameters

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BETAS: Final = (1.0, 24.0, 48.0, 96.0)
"""At the paper's discount."""
DISCOUNTS: Final = (0.5, 0.7, 0.9, 1.0)
"""At the paper's penalty."""
BETA, DISCOUNT = 48.0, 0.9
POINTS: Final = (
    *((beta, DISCOUNT) for beta in BETAS),
    *((BETA, discount) for discount in DISCOUNTS if discount != DISCOUNT),
)
QUICK_POINTS: Final = ((1.0, DISCOUNT), (BETA, DISCOUNT), (BETA, 0.5))
LOADS: Final = ("mooncake", "long")


@dataclass(frozen=True)
class Sensitivity(BalanceExperiment):
    title: ClassVar[str] = "Penalty and discount of oracle BR-H, eight ranks (BalanceRoute, table 6)"
    published: ClassVar[str] = (
        "With 1, 24, 48, 96 at a discount of 0.9: imbalance 32,304, 24,706, 25,608, 31,862; with a discount of 0.5, "
        "0.7, 1.0 at 48: 28,327, 26,599, 29,318. The paper's text does not name the swept parameter: it is read as beta"
        " here, not as the horizon. " + MEANING
    )

    def cells(self, *, quick: bool) -> Sequence[Cell]:
        return [
            Cell(
                (("load", load), ("beta", f"{beta:g}"), ("discount", f"{discount:g}")),
                balanced(
                    TIERS[load],
                    Contender("brh", BrhParameters(beta=beta, discount=discount, predictor="oracle")),
                    workload,
                    TIERS[load].span(quick=quick),
                ),
            )
            for load in LOADS
            if load in loads(self.traces)
            for workload in [saturated(load, self.traces)]
            for beta, discount in (QUICK_POINTS if quick else POINTS)
        ]

    def draw(self, rows: Sequence[Row], figure: "Figure") -> None:
        """Draw the imbalance of each setting, by load."""
        draw_groups(
            figure, rows, ["imbalance"], lambda row: f"beta {row.labels['beta']}, discount {row.labels['discount']}"
        )

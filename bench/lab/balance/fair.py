"""Balance among clients: eight that always wait, and light ones beside one with long prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from bench.lab.balance.contenders import FEW
from bench.lab.balance.experiment import BalanceExperiment, draw_groups
from bench.lab.balance.measures import DECIMALS, MEANING, compared, figures
from bench.lab.balance.tiers import TIERS, balanced, clients_at, loads, saturated
from bench.lab.frame.experiment import Cell, Row, Value
from bench.lab.frame.measures import light_times
from bench.report.records import Result
from bench.report.summary import Summary
from bench.workloads.combined import Misbehaving
from bench.workloads.papers.balance import LongContexts
from bench.workloads.parts.lengths import Lengths
from bench.workloads.parts.traffic import Workload

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EQUAL: Final = ("mooncake", "long")
"""The loads of which eight equal clients ask for 1.2 times the tier."""
HEAVY: Final = LongContexts(client_count=1, rate=1.0, input=Lengths(12_000, 14_900, least=32, most=64_000))
LIGHT: Final = LongContexts(client_count=7, rate=1.0, input=Lengths(2000, 2480, least=32, most=64_000))
HEAVY_LOAD, LIGHT_LOAD = 1.0, 0.3
"""Shares of the tier that the heavy client and all light clients together ask for."""
FAIR_DECIMALS: Final[Mapping[str, int]] = {
    **{name: DECIMALS[name] for name in ("imbalance", "idle", "tok/s", "tok/s in backlog", "drain")},
    "light TTFT p50": 2,
    "light TTFT p95": 2,
    "light TTFT longest": 2,
    "longest wait": 1,
    "Jain": 3,
    "gap / bound": 3,
}


def beside_a_heavy_client() -> Workload:
    """Return one client with long prompts that asks for the whole tier, and seven with short ones for a part of it."""
    tier = TIERS["long"]
    return Misbehaving(heavy=clients_at(HEAVY_LOAD, HEAVY, tier), light=clients_at(LIGHT_LOAD, LIGHT, tier))


@dataclass(frozen=True)
class Fair(BalanceExperiment):
    title: ClassVar[str] = "Ranks in step, shared by clients"
    published: ClassVar[str] = (
        "Of no paper: BalanceRoute knows no clients. Gap / bound: the largest difference in service between two clients"
        " that both wait, over the policy's bound. " + MEANING
    )
    decimals: ClassVar[Mapping[str, int]] = FAIR_DECIMALS

    def cells(self, *, quick: bool) -> Sequence[Cell]:
        workloads: dict[str, tuple[str, Workload]] = {
            name: (name, saturated(name, self.traces)) for name in EQUAL if name in loads(self.traces)
        }
        workloads["beside a heavy client"] = ("long", beside_a_heavy_client())
        return [
            Cell(
                (("load", load), ("policy", name)),
                balanced(TIERS[tier], contender, workload, TIERS[tier].span(quick=quick)),
            )
            for load, (tier, workload) in workloads.items()
            for name, contender in FEW.items()
        ]

    def measure(self, result: Result, summary: Summary) -> Mapping[str, Value]:
        """Return the figures; those of light clients are of the calls that arrived after the warm-up."""
        used = [
            worker.service_gap / worker.service_gap_bound
            for worker in result.workers.values()
            if worker.service_gap_bound is not None
        ]
        return {**figures(result, summary), **light_times(result), "gap / bound": max(used, default=None)}

    def digest(self, rows: Sequence[Row]) -> Sequence[str]:
        return [*compared(rows, "load"), "", *compared(rows, "load", "dlpm_home")]

    def draw(self, rows: Sequence[Row], figure: "Figure") -> None:
        """Draw, for each load, the imbalance under each policy, and the throughput that comes of it."""
        draw_groups(figure, rows, ["imbalance", "tok/s"], lambda row: row.labels["policy"])

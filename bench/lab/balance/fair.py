"""Balance among clients: eight that always wait, and light ones beside one with long prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, ClassVar, Final

from bench.lab.balance.contenders import FEW
from bench.lab.balance.measures import DECIMALS, MEANING, compared, figures
from bench.lab.balance.table1 import SEEDS
from bench.lab.balance.tiers import SAMPLE, TIERS, TRACES, balanced, loads, saturated, span
from bench.lab.frame.experiment import Cell, Row, Value
from bench.lab.frame.measures import light_times
from bench.lab.frame.traced import TracedExperiment
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
    **{name: DECIMALS[name] for name in ("imbalance", "idle", "tok/s", "tok/s in backlog")},
    "light TTFT p50": 2,
    "light TTFT p95": 2,
    "light TTFT longest": 2,
    "longest wait": 1,
    "Jain": 3,
    "gap / bound": 3,
}


def beside_a_heavy_client() -> Workload:
    """Return one client with long prompts that asks for the whole tier, and seven with short ones for a part of it."""
    return Misbehaving(heavy=_asking(HEAVY, HEAVY_LOAD), light=_asking(LIGHT, LIGHT_LOAD))


def _asking(part: LongContexts, load: float) -> LongContexts:
    """Return the clients at this share of what the tier can do for them."""
    random = Random(0)
    rate = TIERS["long"].balanced_rate([part.sizes(random) for _ in range(SAMPLE)])
    return replace(part, rate=load * rate)


@dataclass(frozen=True)
class Fair(TracedExperiment):
    kinds: ClassVar[Sequence[str]] = TRACES
    seeds: ClassVar[Sequence[int]] = SEEDS
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
                balanced(TIERS[tier], contender, workload, span(quick=quick)),
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
        """Draw the light clients' wait for their first token beside the heavy one."""
        own = [row for row in rows if row.labels["load"] == "beside a heavy client"]
        axes = figure.subplots()
        axes.barh([row.labels["policy"] for row in own], [row.median("light TTFT p95") or 0.0 for row in own])
        axes.set_xscale("log")
        axes.set_xlabel("p95 of light clients' seconds to the first token")

"""The DLPM paper's figure 1: what Q^u trades, between VTC and LPM."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from bench.lab.drawing.axes import counts, legend
from bench.lab.drawing.looks import POLICIES
from bench.lab.frame.conditions import (
    A10G_3B,
    FIG1_QUANTA,
    FIG1_QUICK_QUANTA,
    FIG1_RATE,
    FIG1_SPAN,
    ONE_WORKER,
    Contender,
    Span,
    at_rate,
    fleet,
)
from bench.lab.frame.experiment import Cell, Experiment, Row, Value
from bench.lab.frame.measures import service_seen
from bench.lab.frame.plots import draw_levels, draw_policies
from bench.report.records import Result
from bench.report.summary import Summary
from bench.sim.scenario import Scenario
from bench.workloads.papers.dlpm import DLPM
from router.core.policies.dlpm.dlpm_parameters import DlpmParameters

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Figure1(Experiment):
    """Trees of thoughts, of which one client has ten times as long questions."""

    title: ClassVar[str] = "Throughput against fairness as Q^u grows, one worker (DLPM paper, figure 1)"
    published: ClassVar[str] = (
        "DLPM is a frontier that dominates what lies between VTC and LPM: as Q^u grows, throughput approaches LPM's; as"
        " it shrinks, Jain's index approaches VTC's. The figure has no numbers in the text."
    )
    decimals: ClassVar[Mapping[str, int]] = {"service/s": 0, "Jain": 3, "Jain as seen": 3, "hit rate": 3}

    def cells(self, *, quick: bool) -> Sequence[Cell]:
        span = FIG1_SPAN
        dlpm = [
            self._cell("dlpm", Contender("rr+dlpm", DlpmParameters(quantum=quantum)), f"{quantum}", span)
            for quantum in (FIG1_QUICK_QUANTA if quick else FIG1_QUANTA)
        ]
        ends = [self._cell(name, contender, "-", span) for name, contender in ONE_WORKER.items() if name != "dlpm"]
        return dlpm + ends

    @staticmethod
    def _cell(name: str, contender: Contender, quantum: str, span: Span) -> Cell:
        scenario = Scenario(
            contender.policy,
            at_rate(DLPM["tot-s2"], FIG1_RATE),
            fleet(A10G_3B, 1),
            span.seconds,
            span.warmup,
            parameters=contender.parameters,
        )
        return Cell((("policy", name), ("Q^u", quantum)), scenario)

    def measure(self, result: Result, summary: Summary) -> Mapping[str, Value]:
        return {
            "service/s": service_seen(summary) / (result.seconds - result.warmup),
            "Jain": summary["jain"],
            "Jain as seen": summary["jain_client"],
            "hit rate": summary["hit_rate"],
        }

    def draw(self, rows: Sequence[Row], figure: "Figure") -> None:
        """Draw both figures over DLPM's Q^u, with dotted lines for the policies that have none."""
        figure.set_figheight(3.6)
        swept = [row for row in rows if row.labels["Q^u"] != "-"]
        quanta = [int(row.labels["Q^u"]) for row in swept]
        for axes, measured in zip(figure.subplots(1, 2), ("service/s", "Jain"), strict=True):
            draw_policies(axes, swept, lambda row: float(row.labels["Q^u"]), measured)
            draw_levels(axes, [row for row in rows if row.labels["Q^u"] == "-"], measured)
            counts(axes, quanta, "Q^u (cost units)", logarithmic=True)
        legend(figure, list(POLICIES))

"""The DLPM paper's figure 10: what Q^w does to throughput and fairness on four workers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Final

from bench.lab.drawing.axes import counts, legend, outer
from bench.lab.drawing.looks import POLICIES
from bench.lab.frame.conditions import (
    A10G_3B,
    CONTENDERS,
    FIG9_RATE,
    FIG10_QUANTA,
    FIG10_RATE,
    FIG10_SPAN,
    PRINTED,
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
from bench.workloads.papers.dlpm import DLPM, TREES
from bench.workloads.parts.traffic import Workload
from router.core.policies.dlpm.dlpm_parameters import D2lpmParameters

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORKLOADS: Final[Mapping[str, Workload]] = {
    "misbehaving": at_rate(DLPM["tot-fig9"], FIG9_RATE),
    "alike": replace(TREES, branches=3, client_count=3, rate=FIG10_RATE),
}
LEVELS: Final = ("dlpm_home", "rr+lpm", "preble", "vtc")


def swept(quantum: float) -> Mapping[str, Contender]:
    """Return D²LPM with this Q^w, as printed and with our defaults."""
    placement, order = PRINTED
    assert isinstance(placement, D2lpmParameters)
    return {
        "d2lpm printed": Contender("d2lpm", replace(placement, quantum=quantum), order),
        "d2lpm": Contender("d2lpm", D2lpmParameters(quantum=quantum)),
    }


@dataclass(frozen=True)
class Figure10(Experiment):
    """Trees of three branches, with or without a client whose questions are ten times as long."""

    title: ClassVar[str] = "Throughput and fairness as Q^w grows, four workers (DLPM paper, figure 10)"
    published: ClassVar[str] = (
        "Throughput rises with Q^w, levels off and surpasses all other schedulers. Beside a misbehaving client Jain's"
        " index falls from 0.855 to 0.83 between Q^w of 2000 and 40 000; where all are well-behaved it is always 1."
    )
    decimals: ClassVar[Mapping[str, int]] = {"service/s": 0, "Jain": 3, "Jain as seen": 3, "hit rate": 3}

    def cells(self, *, quick: bool) -> Sequence[Cell]:  # noqa: ARG002 - quick means one seed, and no more
        span = FIG10_SPAN
        return [
            cell
            for workload in WORKLOADS
            for cell in [
                *(
                    self._cell(workload, name, contender, f"{quantum}", span)
                    for quantum in FIG10_QUANTA
                    for name, contender in swept(quantum).items()
                ),
                *(self._cell(workload, name, CONTENDERS[name], "-", span) for name in LEVELS),
            ]
        ]

    @staticmethod
    def _cell(workload: str, name: str, contender: Contender, quantum: str, span: Span) -> Cell:
        scenario = Scenario(
            contender.policy,
            WORKLOADS[workload],
            fleet(A10G_3B, 4),
            span.seconds,
            span.warmup,
            parameters=contender.parameters,
        )
        return Cell((("workload", workload), ("policy", name), ("Q^w", quantum)), scenario)

    def measure(self, result: Result, summary: Summary) -> Mapping[str, Value]:
        return {
            "service/s": service_seen(summary) / (result.seconds - result.warmup),
            "Jain": summary["jain"],
            "Jain as seen": summary["jain_client"],
            "hit rate": summary["hit_rate"],
        }

    def draw(self, rows: Sequence[Row], figure: "Figure") -> None:
        """Draw a column for each workload, with dotted lines for policies that have no Q^w."""
        figure.set_figheight(6.5)
        shown = ("service/s", "Jain", "Jain as seen")
        grid = figure.subplots(len(shown), len(WORKLOADS), sharex=True, squeeze=False)
        for column, workload in enumerate(WORKLOADS):
            own = [row for row in rows if row.labels["workload"] == workload]
            swept_rows = [row for row in own if row.labels["Q^w"] != "-"]
            grid[0][column].set_title(workload)
            for axes, measured in zip(grid[:, column], shown, strict=True):
                draw_policies(axes, swept_rows, lambda row: float(row.labels["Q^w"]), measured)
                draw_levels(axes, [row for row in own if row.labels["Q^w"] == "-"], measured)
                counts(axes, FIG10_QUANTA, "Q^w (cost units)", logarithmic=True)
        outer(figure)
        legend(figure, list(POLICIES))

"""The DLPM paper's figure 7: its three workloads, two ways to misbehave, one to eight workers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from bench.lab.drawing.axes import counts, legend, outer
from bench.lab.drawing.looks import POLICIES
from bench.lab.frame.conditions import A100, CONTENDERS, FIG7_SEEDS, FIG7_SESSIONS, fig7_span, fleet
from bench.lab.frame.experiment import Cell, Experiment, Row, Value
from bench.lab.frame.loads import loaded
from bench.lab.frame.measures import light_records, service_seen
from bench.lab.frame.plots import draw_policies
from bench.report.programs import summarise_programs
from bench.report.records import Result
from bench.report.summary import Summary
from bench.sim.scenario import Scenario

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORKLOADS: Final = tuple(FIG7_SESSIONS)
WORKERS: Final = (1, 2, 4, 8)
QUICK_WORKERS: Final = (1, 4)


@dataclass(frozen=True)
class Figure7(Experiment):
    seeds: ClassVar[Sequence[int]] = FIG7_SEEDS
    title: ClassVar[str] = "Throughput, fairness and latency beside a misbehaving client (DLPM paper, figure 7)"
    published: ClassVar[str] = (
        "D²LPM has up to 2.87 times VTC's throughput and 2.22 times that of round robin over LPM; the latency of others"
        " is up to 7.18 (Preble), 9.55 (RR+LPM) and 7.96 times (VTC) its own; Jain's index falls from VTC over D²LPM"
        " and Preble to RR+LPM."
    )
    decimals: ClassVar[Mapping[str, int]] = {
        "service/s": 0,
        "hit rate": 3,
        "Jain": 3,
        "Jain as seen": 3,
        "light p50": 2,
        "light p99": 2,
        "light mean": 2,
    }

    def cells(self, *, quick: bool) -> Sequence[Cell]:
        """Return the simulations; a quick run leaves out D²LPM as printed."""
        return [
            Cell(
                (("workload", workload), ("workers", str(workers)), ("policy", name)),
                Scenario(
                    contender.policy,
                    loaded(workload, workers),
                    fleet(A100, workers),
                    span.seconds,
                    span.warmup,
                    parameters=contender.parameters,
                ),
            )
            for workload in WORKLOADS
            for workers in (QUICK_WORKERS if quick else WORKERS)
            for span in [fig7_span(workload, workers, quick=quick)]
            for name, contender in CONTENDERS.items()
            if not (quick and contender.parameters)
            # With one worker there is nothing for Preble to choose.
            if not (contender.policy == "preble" and workers == 1)
        ]

    def measure(self, result: Result, summary: Summary) -> Mapping[str, Value]:
        """Return service as clients see it, input + 2 · output, and Jain's index over extend + 2 · output."""
        programs = summarise_programs(light_records(result), result.warmup, result.seconds)
        return {
            "service/s": service_seen(summary) / (result.seconds - result.warmup),
            "hit rate": summary["hit_rate"],
            "Jain": summary["jain"],
            "Jain as seen": summary["jain_client"],
            "light p50": programs["latency_p50_s"],
            "light p99": programs["latency_p99_s"],
            "light mean": programs["latency_mean_s"],
        }

    def draw(self, rows: Sequence[Row], figure: "Figure") -> None:
        """Draw a column for each workload, and in it a line for each policy over the workers."""
        figure.set_figheight(6.5)
        shown = ("service/s", "Jain", "light p99")
        grid = figure.subplots(len(shown), len(WORKLOADS), sharex=True, squeeze=False)
        for axes in grid[1:, 1:].flat:
            axes.sharey(grid[axes.get_subplotspec().rowspan.start, 0])
        for column, workload in enumerate(WORKLOADS):
            own = [row for row in rows if row.labels["workload"] == workload]
            grid[0][column].set_title(workload)
            for line, measured in enumerate(shown):
                axes = grid[line][column]
                draw_policies(axes, own, lambda row: float(row.labels["workers"]), measured)
                counts(axes, WORKERS, "workers (count)", logarithmic=True)
        outer(figure)
        legend(figure, list(POLICIES))

"""The DLPM paper's figure 11: the same load from ever more clients."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from bench.lab.drawing.axes import counts, legend
from bench.lab.drawing.looks import POLICIES
from bench.lab.frame.conditions import A10G_3B, FIG11_CLIENTS, FIG11_RATE, FIG11_SPAN, ONE_WORKER, fleet
from bench.lab.frame.experiment import Cell, Experiment, Row, Value
from bench.lab.frame.measures import service_seen
from bench.lab.frame.plots import draw_policies
from bench.report.records import Result
from bench.report.summary import Summary
from bench.sim.scenario import Scenario
from bench.workloads.papers.dlpm import TREES

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Figure11(Experiment):
    """Trees of thoughts of two branches."""

    caption: ClassVar[str] = "No axis begins at 0."
    title: ClassVar[str] = "Service rate of 5 to 50 clients with one total rate, one worker (DLPM paper, figure 11)"
    published: ClassVar[str] = (
        "DLPM's service rate is comparable to LPM's and falls as slightly, since there are more prefixes; VTC's is"
        " lower throughout and hardly changes, since its hit rate is low with any number of clients."
    )
    decimals: ClassVar[Mapping[str, int]] = {"service/s": 0, "hit rate": 3, "Jain": 3, "Jain as seen": 3}

    def cells(self, *, quick: bool) -> Sequence[Cell]:  # noqa: ARG002 - quick means one seed, and no more
        return [
            Cell(
                (("clients", f"{clients}"), ("policy", name)),
                Scenario(
                    contender.policy,
                    replace(TREES, client_count=clients, rate=FIG11_RATE),
                    fleet(A10G_3B, 1),
                    FIG11_SPAN.seconds,
                    FIG11_SPAN.warmup,
                    parameters=contender.parameters,
                ),
            )
            for clients in FIG11_CLIENTS
            for name, contender in ONE_WORKER.items()
        ]

    def measure(self, result: Result, summary: Summary) -> Mapping[str, Value]:
        return {
            "service/s": service_seen(summary) / (result.seconds - result.warmup),
            "hit rate": summary["hit_rate"],
            "Jain": summary["jain"],
            "Jain as seen": summary["jain_client"],
        }

    def draw(self, rows: Sequence[Row], figure: "Figure") -> None:
        """Draw throughput and hit rate over the clients; neither axis begins at 0."""
        figure.set_figheight(3.6)
        for axes, measured in zip(figure.subplots(1, 2), ("service/s", "hit rate"), strict=True):
            draw_policies(axes, rows, lambda row: float(row.labels["clients"]), measured)
            counts(axes, FIG11_CLIENTS, "clients (count)")
        legend(figure, list(POLICIES))

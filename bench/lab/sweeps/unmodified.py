"""What D²LPM's placement alone achieves with engines that keep their own order, and what the queue in the proxy
adds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Final

from bench.lab.drawing.axes import legend, outer, scale
from bench.lab.drawing.looks import looks
from bench.lab.frame.conditions import BACKLOGGED, FAIR_SPAN, PATIENT, SGLANG_A10G, UNMODIFIED_WORKERS, fleet
from bench.lab.frame.experiment import Cell, Experiment, Row, Value
from bench.lab.frame.measures import service_seen
from bench.lab.frame.plots import OVER_TIME, draw_line
from bench.lab.sweeps.window import ENGINES, HEAVY, LIGHT
from bench.report.records import Result
from bench.report.service_difference import difference_line, widest
from bench.report.summary import Summary, WorkerSummary
from bench.sim.scenario import Scenario
from router.core.fleet.window import LearnedWindow, NoWindow, Window

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEANS: Final[Mapping[str, tuple[str, Window]]] = {
    "placement alone": ("d2lpm+fcfs", NoWindow()),
    "queues in the proxy": ("d2lpm", LearnedWindow()),
    "one queue in the proxy": ("dlpm_home", LearnedWindow()),
}


@dataclass(frozen=True)
class Unmodified(Experiment):
    over_time: ClassVar[bool] = True
    marks: ClassVar[str] = f"{OVER_TIME}; dotted: the bound in one queue"
    title: ClassVar[str] = "Two clients that always wait: placement alone against the queue in the proxy"
    published: ClassVar[str] = (
        "No paper has this: D²LPM's workers run DLPM themselves, and its bound holds only there. With engines as they"
        " are an engine serves clients as they arrive, and the gap between two of them grows for as long as both wait."
    )
    decimals: ClassVar[Mapping[str, int]] = {
        "gap by half time": 0,
        "gap": 0,
        "queue's gap": 0,
        "bound": 0,
        "light's share": 3,
        "service/s": 0,
        "hit rate": 3,
    }

    def cells(self, *, quick: bool) -> Sequence[Cell]:  # noqa: ARG002 - quick means one seed, and no more
        return [
            Cell(
                (("engines", order), ("fairness by", name)),
                Scenario(
                    policy,
                    BACKLOGGED,
                    fleet(replace(SGLANG_A10G, order=order), UNMODIFIED_WORKERS),
                    FAIR_SPAN.seconds,
                    FAIR_SPAN.warmup,
                    settings=replace(PATIENT, window=window),
                ),
            )
            for order in ENGINES
            for name, (policy, window) in MEANS.items()
        ]

    def measure(self, result: Result, summary: Summary) -> Mapping[str, Value]:
        """Return gaps of actual service over all intervals, in cost units.

        The first is over the whole fleet. The queue's is that of the worker whose queue comes nearest to its bound,
        while both clients wait there: who waits at one worker alone may fall behind without limit at the others.
        """
        line = difference_line(result, HEAVY, LIGHT)
        nearest = max(summary["workers"].values(), key=_nearness)
        shares = {name: client["service"] for name, client in summary["clients"].items()}
        half = (result.warmup + result.seconds) / 2
        return {
            "gap by half time": widest(point for point in line if point[0] <= half),
            "gap": widest(line),
            "queue's gap": nearest["service_gap"],
            "bound": nearest["service_gap_bound"],
            "light's share": shares[LIGHT] / sum(shares.values()),
            "service/s": service_seen(summary) / (result.seconds - result.warmup),
            "hit rate": summary["hit_rate"],
            "line": line,
        }

    def draw(self, rows: Sequence[Row], figure: "Figure") -> None:
        """Draw the heavy client's lead over time, and as a dotted line its bound in one queue."""
        grid = figure.subplots(1, len(ENGINES), sharey=True, squeeze=False)[0]
        seen = looks(list(MEANS))
        for axes, order in zip(grid, ENGINES, strict=True):
            for row in rows:
                look = seen[row.labels["fairness by"]]
                if row.labels["engines"] == order:
                    draw_line(axes, row, "line", row.labels["fairness by"], look)
                    if bound := row.median("bound"):
                        axes.axhline(bound, linestyle=":", color=look.colour)
            axes.set_title(f"engines: {order}")
            axes.set_xlabel("time (s)")
        for axes in grid:
            scale(axes, "y", "heavy's service less light's (cost units)")
        outer(figure)
        legend(figure, list(MEANS))


def _nearness(worker: WorkerSummary) -> float:
    bound = worker["service_gap_bound"]
    return worker["service_gap"] / bound if bound else 0.0

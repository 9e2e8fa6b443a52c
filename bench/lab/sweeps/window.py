"""The cost and benefit of the admission window: service gap and throughput against its size."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final

from bench.lab.drawing.axes import at, from_zero, legend, scale
from bench.lab.drawing.looks import looks
from bench.lab.frame.conditions import (
    BACKLOGGED,
    FAIR_SPAN,
    PATIENT,
    SGLANG_A10G,
    UNLIMITED_TOKENS,
    WINDOW_QUICK_REQUESTS,
    WINDOW_REQUESTS,
)
from bench.lab.frame.experiment import Cell, Experiment, Row, Value
from bench.lab.frame.measures import service_seen
from bench.lab.frame.plots import LABELS, draw_points
from bench.report.records import Result
from bench.report.service_difference import difference_line, widest
from bench.report.summary import Summary
from bench.sim.scenario import Scenario
from router.core.fleet.window import FixedWindow, LearnedWindow, NoWindow, Window
from workers.engine.model import Order

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEAVY, LIGHT = "heavy", "light"
ENGINES: Final[Sequence[Order]] = ("fcfs", "lpm")
"""The engines' own order of admitted requests."""
BOUNDS: Final[Mapping[str, str]] = {"fcfs": "_", "lpm": "x"}
"""The marks of their bounds."""


@dataclass(frozen=True)
class WindowSize(Experiment):
    title: ClassVar[str] = "Gap of service and throughput against the window's size"
    published: ClassVar[str] = (
        "No paper has this: DLPM runs inside an engine. By arithmetic the gap of two clients that both wait is bounded"
        " by 2(U' + E + X + Q^u) + 2R, which grows in proportion to what the window lets be in flight, and throughput"
        " needs about as many requests as the engine can run, and one or two more."
    )
    decimals: ClassVar[Mapping[str, int]] = {
        "gap": 0,
        "queue's gap": 0,
        "bound": 0,
        "service/s": 0,
        "hit rate": 3,
        "waiting in engine p95": 0,
    }

    def cells(self, *, quick: bool) -> Sequence[Cell]:
        return [
            Cell(
                (("engine", order), ("window", name)),
                Scenario(
                    "d2lpm",
                    BACKLOGGED,
                    (replace(SGLANG_A10G, order=order),),
                    FAIR_SPAN.seconds,
                    FAIR_SPAN.warmup,
                    settings=replace(PATIENT, window=window),
                ),
            )
            for order in ENGINES
            for name, window in windows(WINDOW_QUICK_REQUESTS if quick else WINDOW_REQUESTS).items()
        ]

    def measure(self, result: Result, summary: Summary) -> Mapping[str, Value]:
        """Return gaps over all intervals, in cost units; the queue's gap counts while both clients wait
        in the router.
        """
        (worker,) = summary["workers"].values()
        return {
            "gap": widest(difference_line(result, HEAVY, LIGHT)),
            "queue's gap": worker["service_gap"],
            "bound": worker["service_gap_bound"],
            "service/s": service_seen(summary) / (result.seconds - result.warmup),
            "hit rate": summary["hit_rate"],
            "waiting in engine p95": worker["waiting_requests_p95"],
        }

    def draw(self, rows: Sequence[Row], figure: "Figure") -> None:
        """Draw gaps and their bounds on a logarithmic scale, and throughput."""
        figure.set_figheight(5.5)
        sizes = list(dict.fromkeys(row.labels["window"] for row in rows))
        gaps, throughputs = figure.subplots(2, 1, sharex=True)
        for aside, (order, look) in zip((-0.1, 0.1), looks(ENGINES).items(), strict=True):
            own = [row for row in rows if row.labels["engine"] == order]
            place = partial(_place, sizes, aside)
            point = look._replace(line="")
            draw_points(gaps, own, place, "gap", f"gap, engine: {order}", point)
            bound = point._replace(mark=BOUNDS[order])
            draw_points(gaps, own, place, "bound", f"bound, engine: {order}", bound)
            draw_points(throughputs, own, place, "service/s", f"gap, engine: {order}", point)
        gaps.set_yscale("log")
        scale(gaps, "y", LABELS["gap"])
        from_zero(throughputs, "y")
        scale(throughputs, "y", LABELS["service/s"])
        at(throughputs, range(len(sizes)), sizes, "window (requests)")
        legend(figure)


def _place(sizes: Sequence[str], aside: float, row: Row) -> float:
    """Return the place of a row's window on the axis, a little aside, so that no mark hides another."""
    return sizes.index(row.labels["window"]) + aside


def windows(sizes: Sequence[int]) -> Mapping[str, Window]:
    """Return fixed windows of these sizes (requests), the learned one, and none."""
    fixed: dict[str, Window] = {str(size): FixedWindow(size, UNLIMITED_TOKENS) for size in sizes}
    return {**fixed, "learned": LearnedWindow(), "off": NoWindow()}

"""Cells: the workers shared out to 1 to 16 schedulers, with D²LPM's placement of requests among them.

Of no paper, and not built: a simulation of what a fleet too large for one scheduler could do. The workers are emulated,
the schedulers are the router's own (`bench.sim.cells`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Final

from bench.lab.drawing.axes import counts, from_zero, legend, outer, scale
from bench.lab.drawing.looks import looks
from bench.lab.frame.conditions import A100, PATIENT, QUICK_SEEDS, Span, fleet
from bench.lab.frame.experiment import Cell, Experiment, Row, Value
from bench.lab.frame.measures import LIGHT, actual, light_times, service_seen
from bench.lab.frame.plots import LABELS, draw_points
from bench.report.records import Result
from bench.report.summary import Summary
from bench.sim.scenario import FRONT_REPORT_SECONDS, Scenario, WorkerSpec
from bench.workloads.combined import Misbehaving
from bench.workloads.parts.lengths import Lengths
from bench.workloads.shared_prefix import SharedPrefix
from bench.workloads.unrelated import Unrelated
from router.core.fleet.window import FixedWindow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FLEETS: Final[Mapping[int, Sequence[int]]] = {16: (1, 2, 4, 8, 16), 256: (1, 4, 16), 1024: (1, 4, 16)}
"""The numbers of workers, and of cells that have them."""
QUICK_FLEETS: Final[Mapping[int, Sequence[int]]] = {16: (1, 4)}
SPAN, LARGE_SPAN, QUICK_SPAN = Span(20.0, 8.0), Span(12.0, 6.0), Span(10.0, 4.0)
"""The second one for more than 16 workers: longer ones would take an hour."""
CLIENTS, QUICK_CLIENTS = 10_000, 500
HEAVY: Final = 16
"""Clients that always wait; all others rarely call."""
PLACES: Final = 8
"""Calls that a worker runs at once: few and long ones, so that 1,024 workers can be simulated in minutes."""
WORKER: Final = WorkerSpec(hardware=A100.hardware, speed=0.5, max_running=PLACES, kv_tokens=120_000)
"""Half as fast as an A100 with a model of 7 B."""
DEMAND: Final = 2.0
"""Calls that the heavy clients have open, as a multiple of the places of all workers."""
SETTINGS: Final = replace(PATIENT, window=FixedWindow(PLACES + 2, unstarted_tokens=2 * 8192))
"""Two calls more than the places wait at a worker. A learned window would find that out, and costs too much to be
simulated for 1,024 workers."""
LIGHT_RATE: Final = 0.25
"""Calls a second of all light clients together, for each worker: about a tenth of what it can serve."""


def workload(workers: int, clients: int) -> Misbehaving:
    """Return the traffic of a fleet: each heavy client has as many prefixes and open calls as fit its size."""
    return Misbehaving(
        heavy=SharedPrefix(
            client_count=HEAVY,
            concurrency=round(DEMAND * PLACES * workers / HEAVY),
            groups=max(1, workers // 4),
            own=True,
            prefix=Lengths(3000),
            question=Lengths(200),
            output=Lengths(150),
        ),
        light=Unrelated(client_count=clients - HEAVY, rate=LIGHT_RATE * workers, input=300, output=50, spread=0.5),
    )


@dataclass(frozen=True)
class CellsOfWorkers(Experiment):
    seeds: ClassVar[Sequence[int]] = QUICK_SEEDS
    title: ClassVar[str] = "Workers in cells, each with a scheduler, and D²LPM's placement among them"
    published: ClassVar[str] = (
        "Of no paper. Each cell orders its queue by dlpm_home; a deficit for each client and cell says to which cell a"
        f" call goes. {HEAVY} heavy clients always wait, {CLIENTS - HEAVY:,} light ones rarely call. Gap: the largest"
        " difference in service between two heavy clients since the warm-up, in 1,000 cost units. Sum of gaps: each"
        " cell's largest between two that wait there, added up; bound: the same of the cells' bounds, which is the"
        " factor of cells. Gap / mean: the gap over what a heavy client was served on average. Decisions: those of a"
        " second, of all cells and of the busiest. Busiest / mean: the decisions of the busiest over the mean of cells."
    )
    decimals: ClassVar[Mapping[str, int]] = {
        "service/s": 0,
        "hit rate": 3,
        "busy": 3,
        "gap": 1,
        "sum of gaps": 1,
        "bound": 1,
        "gap / mean": 3,
        "light TTFT p50": 2,
        "light TTFT p99": 2,
        "decisions/s": 0,
        "of one cell": 0,
        "busiest / mean": 2,
    }

    def cells(self, *, quick: bool) -> Sequence[Cell]:
        return [
            Cell(
                (("workers", f"{workers}"), ("cells", f"{cells}")),
                Scenario(
                    "dlpm_home",
                    workload(workers, QUICK_CLIENTS if quick else CLIENTS),
                    fleet(WORKER, workers),
                    span.seconds,
                    span.warmup,
                    settings=SETTINGS,
                    progress_seconds=FRONT_REPORT_SECONDS,
                    cells=cells,
                ),
            )
            for workers, numbers in (QUICK_FLEETS if quick else FLEETS).items()
            for span in [QUICK_SPAN if quick else SPAN if workers <= min(FLEETS) else LARGE_SPAN]
            for cells in numbers
        ]

    def measure(self, result: Result, summary: Summary) -> Mapping[str, Value]:
        """Return the figures; gaps and bounds in 1,000 cost units."""
        seconds = result.seconds - result.warmup
        decisions = [cell.decisions for cell in result.cells]
        bounds = [cell.service_gap_bound for cell in result.cells if cell.service_gap_bound is not None]
        gap, mean = heavy_gap(result)
        return {
            "service/s": service_seen(summary) / seconds,
            "hit rate": summary["hit_rate"],
            "busy": sum(each.busy_seconds for each in result.workers.values()) / seconds / len(result.workers),
            "gap": gap / 1000,
            "sum of gaps": sum(cell.service_gap for cell in result.cells) / 1000,
            "bound": sum(bounds) / 1000,
            "gap / mean": gap / mean if mean else None,
            **{name: value for name, value in light_times(result).items() if name in self.decimals},
            "decisions/s": sum(decisions) / seconds,
            "of one cell": max(decisions) / seconds,
            "busiest / mean": max(decisions) * len(decisions) / sum(decisions),
        }

    def draw(self, rows: Sequence[Row], figure: "Figure") -> None:
        """Draw, over the number of cells, what is served, how fairly, and how long light clients wait, by fleet."""
        figure.set_figheight(3.6)
        names = list(dict.fromkeys(row.labels["workers"] for row in rows))
        styles = looks([f"{name} workers" for name in names])
        for axes, name in zip(figure.subplots(1, 4), SHOWN, strict=True):
            for workers, look in zip(names, styles, strict=True):
                own = [row for row in rows if row.labels["workers"] == workers]
                draw_points(axes, own, lambda row: float(row.labels["cells"]), name, look, styles[look])
            scale(axes, "y", SHOWN[name])
            numbers = sorted({float(row.labels["cells"]) for row in rows})
            counts(axes, numbers, "cells (count)", logarithmic=True)
            from_zero(axes, "y")
        outer(figure, columns_alike=False)
        legend(figure)


SHOWN: Final[Mapping[str, str]] = {
    "busy": "time in which workers work (ratio)",
    "hit rate": LABELS["hit rate"],
    "gap / mean": "gap of heavy clients over mean (ratio)",
    "light TTFT p99": "light TTFT, p99 (s)",
}


def heavy_gap(result: Result) -> tuple[float, float]:
    """Return the largest difference between two heavy clients' service since the warm-up, at any time, and the mean
    of what each was served until the end; in cost units.
    """
    heavy = [client for client in result.weights if not client.startswith(LIGHT)]
    samples = [sample for sample in result.timeline if sample.time >= result.warmup]
    grown = [[actual(client)(sample) - actual(client)(samples[0]) for client in heavy] for sample in samples]
    return max(max(each) - min(each) for each in grown), sum(grown[-1]) / len(heavy)

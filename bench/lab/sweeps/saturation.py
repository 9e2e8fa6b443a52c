"""Measure the most that one worker can serve of each kind of session; the loads of the figures are multiples of it.

Not a figure of a paper: the papers state no loads for figures 1 to 12. One client keeps so many sessions open that the
worker is always busy, and shares their prefixes, under longest prefix match: the best possible case.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from bench.lab.drawing.axes import scale
from bench.lab.drawing.looks import BLUE
from bench.lab.frame.conditions import A10G_3B, A100, ON_A10G, ON_A100, QUICK_SEEDS, SATURATING, SATURATION_SPAN
from bench.lab.frame.experiment import Cell, Experiment, Row, Value
from bench.lab.frame.plots import LABELS
from bench.report.records import Result
from bench.report.summary import Summary
from bench.sim.scenario import Scenario
from bench.workloads.parts.traffic import Outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HARDWARE = {"A10G, 3 B": (A10G_3B, ON_A10G), "A100": (A100, ON_A100)}
"""The hardware, and the sessions whose figures are kept in the conditions."""


@dataclass(frozen=True)
class Saturation(Experiment):
    seeds: ClassVar[Sequence[int]] = QUICK_SEEDS
    title: ClassVar[str] = "Seconds of a worker that a session takes"
    published: ClassVar[str] = "Of no paper: the loads of the other experiments are multiples of these."
    decimals: ClassVar[Mapping[str, int]] = {"seconds a session": 3, "calls/s": 2, "busy": 3, "hit rate": 3}

    def cells(self, *, quick: bool) -> Sequence[Cell]:  # noqa: ARG002
        """Return the simulations; a quick run has as many, since the conditions hold the figures of all."""
        return [
            Cell(
                (("hardware", hardware), ("session", name)),
                Scenario(
                    "rr+lpm",
                    replace(workload, rate=0.0, client_count=1, concurrency=open_sessions),
                    (worker,),
                    SATURATION_SPAN.seconds,
                    SATURATION_SPAN.warmup,
                ),
            )
            for hardware, (worker, sessions) in HARDWARE.items()
            for name in sessions
            for workload, open_sessions in [SATURATING[name]]
        ]

    def measure(self, result: Result, summary: Summary) -> Mapping[str, Value]:
        """Return the figures of one worker; each ended call counts as its part of a session."""
        begin, end = result.warmup, result.seconds
        ended = [
            record
            for record in result.records
            if record.outcome is Outcome.DONE and record.finished is not None and begin <= record.finished < end
        ]
        sessions = sum(1 / record.program_calls for record in ended)
        (worker,) = result.workers.values()
        return {
            "seconds a session": (end - begin) / sessions if sessions else None,
            "calls/s": len(ended) / (end - begin),
            "busy": worker.busy_seconds / (end - begin),
            "hit rate": summary["hit_rate"],
        }

    def draw(self, rows: Sequence[Row], figure: "Figure") -> None:
        """Draw a mark for each kind of session, by hardware, on a logarithmic scale."""
        figure.set_figheight(3.8)
        for axes, hardware in zip(figure.subplots(1, len(HARDWARE), squeeze=False)[0], HARDWARE, strict=True):
            own = [row for row in rows if row.labels["hardware"] == hardware]
            for place, row in enumerate(own):
                if (median := row.median("seconds a session")) is not None:
                    axes.plot(median, place, "o", color=BLUE)
            axes.set_yticks(range(len(own)), [row.labels["session"] for row in own])
            axes.set_ylim(len(own) - 0.5, -0.5)
            axes.set_title(hardware)
            axes.set_xscale("log")
            scale(axes, "x", LABELS["seconds a session"])

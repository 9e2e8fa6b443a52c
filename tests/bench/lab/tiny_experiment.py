"""An experiment of very short simulations, and a program that runs it in its own processes."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from bench.lab.drawing.axes import legend
from bench.lab.drawing.looks import policy_look
from bench.lab.frame.experiment import Cell, Experiment, Row, Value
from bench.lab.frame.measures import first_token_line
from bench.lab.frame.plots import draw_points
from bench.lab.frame.report import write
from bench.lab.frame.runner import run
from bench.report.records import Result
from bench.report.summary import Summary
from bench.sim.scenario import Scenario, WorkerSpec
from bench.workloads.documents import SharedDocuments
from router.core.policies.dlpm.dlpm_parameters import LpmParameters

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEEDS = (0, 1)
LENGTHS = (3.0, 1.0)
"""Durations in seconds of each policy's simulations."""
HELD = (4.0, 3.0, 2.0, 1.0)
"""Durations in seconds of the simulations that wait for each other."""


@dataclass(frozen=True)
class Tiny(Experiment):
    """Simulates two policies for each duration."""

    title: ClassVar[str] = "A tiny experiment"
    published: ClassVar[str] = "Nothing."
    decimals: ClassVar[Mapping[str, int]] = {"calls": 0, "Jain": 3, "none": 0}

    def cells(self, *, quick: bool) -> Sequence[Cell]:
        workload = SharedDocuments(documents=3, tokens=800, client_count=3, rate=20.0)
        workers = (WorkerSpec(kv_tokens=20_000),) * 2
        return [
            Cell(
                (("seconds", f"{seconds:g}"), ("policy", policy)),
                Scenario(policy, workload, workers, seconds, parameters=(LpmParameters(),)),
            )
            for seconds in (LENGTHS[1:] if quick else LENGTHS)
            for policy in ("d2lpm", "dlpm_home")
        ]

    def measure(self, result: Result, summary: Summary) -> Mapping[str, Value]:
        return {
            "calls": len(result.records),
            "Jain": summary["jain"],
            "none": None,
            "TTFT": first_token_line(result.records, 0.5, result.seconds),
        }

    def draw(self, rows: Sequence[Row], figure: "Figure") -> None:
        axes = figure.subplots()
        for policy in ("d2lpm", "dlpm_home"):
            own = [row for row in rows if row.labels["policy"] == policy]
            draw_points(axes, own, lambda row: float(row.labels["seconds"]), "calls", policy, policy_look(policy))
        legend(figure)


@dataclass(frozen=True)
class Held(Tiny):
    """Its first simulation ends last: it waits for what the last one writes."""

    fifo: Path
    """The named pipe on which the first simulation waits."""

    def cells(self, *, quick: bool) -> Sequence[Cell]:
        one = super().cells(quick=quick)[0].scenario
        return [Cell((("seconds", f"{s}"),), replace(one, seconds=s)) for s in HELD]

    def measure(self, result: Result, summary: Summary) -> Mapping[str, Value]:  # noqa: ARG002
        if result.seconds == HELD[0]:
            with self.fifo.open("rb") as pipe:
                pipe.read()
        elif result.seconds == HELD[-1]:
            self.fifo.write_bytes(b"over")
        return {"seconds": result.seconds}


class Unsendable(SharedDocuments):
    """A workload that cannot be pickled."""

    def __reduce__(self) -> str:
        raise TypeError("a part of a scenario was sent to another process")


class Unsent(Tiny):
    """Its scenarios cannot be pickled, as those of compiled code."""

    def cells(self, *, quick: bool) -> Sequence[Cell]:
        workload = Unsendable(documents=3, tokens=800, client_count=3, rate=20.0)
        return [
            replace(each, scenario=replace(each.scenario, workload=workload)) for each in super().cells(quick=quick)
        ]


def rows(jobs: int) -> Sequence[Row]:
    """Run the experiment and return its rows."""
    return run(Tiny(), quick=False, seeds=SEEDS, jobs=jobs, done=lambda _over, _of: None)


if __name__ == "__main__":
    # Imported under the module's own name, so that the processes of the pool can unpickle them.
    from tests.bench.lab.tiny_experiment import Held as NamedHeld
    from tests.bench.lab.tiny_experiment import Tiny as Named
    from tests.bench.lab.tiny_experiment import rows as rows_of

    if sys.argv[1] == "held":
        run(NamedHeld(Path(sys.argv[2])), quick=True, seeds=[0], jobs=1, done=lambda _over, _of: None)
    else:
        write("tiny", Named(), rows_of(1), SEEDS, Path(sys.argv[1]))

"""The Preble paper's figures 3 and 4: latency against the rate of its workloads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Final

from bench.lab.drawing.axes import at, from_zero, legend, outer
from bench.lab.drawing.looks import POLICIES
from bench.lab.frame.calls import latencies, response_times
from bench.lab.frame.conditions import (
    A6000,
    AZURE_VIDEOS,
    AZURE_WORKERS,
    CALLS_PER_TASK,
    PATIENT,
    PREBLE_POLICIES,
    PREBLE_RATES,
    PREBLE_SPAN,
    PREBLE_WORKERS,
    Contender,
    fleet,
)
from bench.lab.frame.experiment import Cell, Row, Value
from bench.lab.frame.plots import draw_policies
from bench.lab.frame.traced import TracedExperiment
from bench.report.records import Result
from bench.report.summary import Summary
from bench.sim.scenario import Scenario
from bench.workloads.combined import ToolsAndVideos
from bench.workloads.embodied import Embodied
from bench.workloads.papers.preble import PREBLE
from bench.workloads.parts.traffic import Rated, Workload
from bench.workloads.recorded.traces import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DECIMALS: Final[Mapping[str, int]] = {"latency avg": 2, "latency p99": 2, "TTFT avg": 2, "hit rate": 3, "requests/s": 2}


def figures(result: Result, summary: Summary) -> Mapping[str, Value]:
    """Return the figures of all calls that arrived in the measured time; times in seconds."""
    spans = latencies(result)
    return {
        "latency avg": spans["latency_mean_s"],
        "latency p99": spans["latency_p99_s"],
        "TTFT avg": response_times(result, result.weights)["latency_mean_s"],
        "hit rate": summary["hit_rate"],
        "requests/s": summary["requests_per_s"],
    }


def scenario(contender: Contender, workload: Workload, workers: int) -> Scenario:
    """Return `workers` A6000 under this load."""
    return Scenario(
        contender.policy,
        workload,
        fleet(A6000, workers),
        PREBLE_SPAN.seconds,
        PREBLE_SPAN.warmup,
        settings=PATIENT,
        parameters=contender.parameters,
    )


@dataclass(frozen=True)
class PrebleLatency(TracedExperiment):
    """With `azure`, the experiment also runs its mix of tools and videos at those times."""

    kinds: ClassVar[Sequence[str]] = ("azure",)
    title: ClassVar[str] = "Latency against the rate of calls (Preble paper, figures 3 and 4)"
    published: ClassVar[str] = (
        "Against SGLang behind round robin, Preble's average latency is 1.5 to 14.5 times lower and its p99 2 to 10"
        " times, the more so the higher the rate; for programming 1.56 to 1.8 times, and 3 to 4 times."
    )
    decimals: ClassVar[Mapping[str, int]] = DECIMALS

    def cells(self, *, quick: bool) -> Sequence[Cell]:
        """Return the simulations; a quick run has the highest rates, Preble and what it is compared with."""
        policies = {name: PREBLE_POLICIES[name] for name in ("rr+lpm", "preble")} if quick else PREBLE_POLICIES
        cells = [
            Cell(
                (("workload", workload), ("calls/s", f"{rate:g}"), ("policy", name)),
                scenario(contender, at_calls(workload, rate), PREBLE_WORKERS),
            )
            for workload, rates in PREBLE_RATES.items()
            for rate in (rates[-1:] if quick else rates)
            for name, contender in policies.items()
        ]
        trace = self.traces.get("azure")
        if not isinstance(trace, Trace):
            return cells
        mixed = tools_and_videos([request.at / trace.play.speed for request in trace.requests])
        return cells + [
            Cell(
                (("workload", "tools-and-videos"), ("calls/s", "Azure's"), ("policy", name)),
                scenario(contender, mixed, AZURE_WORKERS),
            )
            for name, contender in policies.items()
        ]

    def measure(self, result: Result, summary: Summary) -> Mapping[str, Value]:
        return figures(result, summary)

    def draw(self, rows: Sequence[Row], figure: "Figure") -> None:
        """Draw a column for each workload, and in it a line for each policy over the rates."""
        shown = ("latency avg", "latency p99")
        grid = figure.subplots(len(shown), len(PREBLE_RATES), sharex="col", squeeze=False)
        for column, (workload, rates) in enumerate(PREBLE_RATES.items()):
            own = [row for row in rows if row.labels["workload"] == workload]
            grid[0][column].set_title(workload)
            for axes, measured in zip(grid[:, column], shown, strict=True):
                draw_policies(axes, own, lambda row: float(row.labels["calls/s"]), measured)
                at(axes, rates, [f"{rate:g}" for rate in rates], "rate (calls/s)")
                from_zero(axes, "y")
        outer(figure)
        legend(figure, list(POLICIES))


def tools_and_videos(times: Sequence[float]) -> Workload:
    """Return the mix of the paper's figure 4, with these arrival times."""
    mixed = PREBLE["tools-and-videos"]
    assert isinstance(mixed, ToolsAndVideos)
    tools = tuple(at for number, at in enumerate(times, 1) if number % AZURE_VIDEOS)
    videos = tuple(times[AZURE_VIDEOS - 1 :: AZURE_VIDEOS])
    return replace(
        mixed, tools=replace(mixed.tools, rate=0.0, times=tools), videos=replace(mixed.videos, rate=0.0, times=videos)
    )


def at_calls(name: str, calls: float) -> Workload:
    """Return a data set of the paper at `calls` calls per second."""
    workload = PREBLE[name]
    assert isinstance(workload, Rated)
    return workload.at_rate(calls / CALLS_PER_TASK if isinstance(workload, Embodied) else calls)

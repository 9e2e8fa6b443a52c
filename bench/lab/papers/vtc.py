"""The VTC paper's figures 3 to 14 as one table: its suites, its policies, its measures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Final

from bench.lab.drawing.axes import legend
from bench.lab.drawing.looks import POLICIES
from bench.lab.frame.calls import response_times
from bench.lab.frame.conditions import PATIENT, Contender
from bench.lab.frame.experiment import Cell, Row, Value
from bench.lab.frame.plots import draw_marks
from bench.lab.frame.traced import TracedExperiment
from bench.lab.papers.vtc_conditions import (
    A10G,
    A100_13B,
    POOL_SECONDS,
    POOLS,
    VTC_FORESEEING,
    VTC_LIMITS,
    VTC_LONG_SECONDS,
    VTC_POLICIES,
    VTC_SECONDS,
    VTC_SHIFT_SECONDS,
    VTC_WARMUP,
)
from bench.report.records import Result
from bench.report.service_difference import difference_line, service_difference, widest
from bench.report.summary import Summary
from bench.sim.scenario import Scenario, WorkerSpec
from bench.workloads.papers.vtc import VTC_SUITES
from bench.workloads.parts.traffic import Workload

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUITES: Final[Mapping[str, str]] = {
    "vtc-overload": "figure 3",
    "vtc-proportional": "figure 4",
    "vtc-on-off-less": "figure 5",
    "vtc-on-off-overload": "figure 6",
    "vtc-short-long": "figure 7",
    "vtc-prefill-decode": "figure 8",
    "vtc-increase": "figure 9",
    "vtc-shift": "figure 10",
    "vtc-27": "figures 11 to 13",
    "vtc-overload-multi": "artifact",
}
"""The suites, and where the paper shows them."""
FORESEEN: Final = ("vtc-overload", "vtc-overload-multi", "vtc-27")
LIMITED: Final = ("vtc-27",)
QUICK: Final = ("vtc-overload", "vtc-27")


@dataclass(frozen=True)
class VtcSuites(TracedExperiment):
    """With `arena`, the experiment also runs on the paper's own trace, which `vtc-27` stands in for."""

    kinds: ClassVar[Sequence[str]] = ("arena",)
    title: ClassVar[str] = "Service difference, response time and throughput (VTC paper, figures 3 to 14)"
    published: ClassVar[str] = (
        "From its artifact, service difference as max, avg, var, and tokens a second. 27 clients: FCFS 760, 434, 32112,"
        " 777; LCF 750, 324, 29089, 778; VTC 368, 252, 6549, 779; VTC (predict) 365, 240, 5322, 773; VTC (oracle) 329,"
        " 228, 4476, 781; RPM 5 144, 84, 1020, 340; RPM 20 447, 196, 7450, 694; RPM 30 694, 309, 24221, 747. Two"
        " clients, max and avg: FCFS 447, 439; VTC 193, 104; oracle with an error of 50 % 34, 13; oracle 6, 0.5. Eight:"
        " VTC 322, 162; 99, 66; 43, 36. Output with RPM 5 is 224 tokens a second, with VTC and FCFS about 500 (figure"
        " 13). The difference of accumulated service varies more with a larger pool and with longer calls, up to 512"
        " tokens in and out (figure 14)."
    )
    marks: ClassVar[str] = ""
    decimals: ClassVar[Mapping[str, int]] = {
        "difference max": 0,
        "difference avg": 1,
        "difference var": 0,
        "accumulated": 0,
        "TTFT mean": 2,
        "light TTFT mean": 2,
        "tokens/s": 0,
        "output tokens/s": 0,
    }

    def cells(self, *, quick: bool) -> Sequence[Cell]:
        suites = [
            _cell(name, SUITES[name], policy, contender, VTC_SUITES[name], A10G, _seconds(name, quick))
            for name in (QUICK if quick else SUITES)
            for policy, contender in _contenders(name).items()
        ]
        pools = [
            _cell(name, "figure 14", "vtc", VTC_POLICIES["vtc"], suite, replace(A100_13B, kv_tokens=pool), POOL_SECONDS)
            for name, (pool, suite) in POOLS.items()
        ]
        traced = [
            _cell("arena", "figures 11 to 13", policy, contender, self.traces["arena"], A10G, VTC_LONG_SECONDS)
            for policy, contender in _contenders("vtc-27").items()
            if "arena" in self.traces
        ]
        return [*suites, *traced] if quick else [*suites, *traced, *pools]

    def measure(self, result: Result, summary: Summary) -> Mapping[str, Value]:
        """Return the figures. Accumulated: the most that two clients' services drift apart; light: the half that asks
        for least.
        """
        spread = service_difference(result.records, result.seconds)
        asked = dict.fromkeys(result.weights, 0)
        for record in result.records:
            asked[record.client] += record.input_tokens + 2 * record.output_tokens
        clients = sorted(asked, key=lambda client: asked[client])
        pair = len(clients) == 2
        return {
            "difference max": spread.largest,
            "difference avg": spread.mean,
            "difference var": spread.variance,
            "accumulated": widest(difference_line(result, clients[1], clients[0])) if pair else None,
            "TTFT mean": response_times(result, clients)["latency_mean_s"],
            "light TTFT mean": response_times(result, clients[: len(clients) // 2])["latency_mean_s"],
            "tokens/s": summary["throughput_tokens_per_s"],
            "output tokens/s": summary["output_tokens_per_s"],
        }

    def draw(self, rows: Sequence[Row], figure: "Figure") -> None:
        """Draw a mark for each policy in the line of its suite, times and differences on scales that are logarithmic
        above 1.
        """
        figure.set_figheight(6.5)
        shown = ("difference avg", "light TTFT mean", "output tokens/s")
        for axes, measured in zip(figure.subplots(1, len(shown), sharey=True), shown, strict=True):
            if measured != shown[-1]:
                axes.set_xscale("symlog", linthresh=1)
            draw_marks(axes, rows, "suite", measured)
        legend(figure, list(POLICIES))


def _contenders(suite: str) -> Mapping[str, Contender]:
    foreseeing = VTC_FORESEEING if suite in FORESEEN else {}
    limits = VTC_LIMITS if suite in LIMITED else {}
    return {**VTC_POLICIES, **foreseeing, **limits}


def _seconds(suite: str, quick: bool) -> float:
    if quick:
        return VTC_SECONDS
    return {"vtc-shift": VTC_SHIFT_SECONDS, "vtc-27": VTC_LONG_SECONDS}.get(suite, VTC_SECONDS)


def _cell(
    suite: str, where: str, policy: str, contender: Contender, workload: Workload, worker: WorkerSpec, seconds: float
) -> Cell:
    scenario = Scenario(
        contender.policy,
        workload,
        (worker,),
        seconds,
        VTC_WARMUP,
        settings=PATIENT,
        parameters=contender.parameters,
        drain=True,
    )
    return Cell((("suite", suite), ("shown in", where), ("policy", policy)), scenario)

"""The DLPM paper's figure 12: two clients that talk and two that run programs, one worker."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Final

from bench.lab.frame.conditions import (
    A10G_3B,
    FIG12_ARRIVING,
    FIG12_CHAT_RATE,
    FIG12_JUDGE_RATE,
    FIG12_QUICK_ARRIVING,
    FIG12_SPAN,
    FIG12_TREE_RATE,
    ONE_WORKER,
    fleet,
)
from bench.lab.frame.experiment import Cell, Experiment, Row, Value
from bench.lab.frame.measures import actual, first_token_line, first_token_spans, service_line, service_seen
from bench.lab.frame.plots import OVER_TIME, draw_over_time
from bench.report.meters import censored_mean, censored_percentile
from bench.report.records import Result
from bench.report.summary import Summary
from bench.sim.scenario import Scenario
from bench.workloads.combined import ChatAndPrograms
from bench.workloads.papers.dlpm import DLPM
from bench.workloads.parts.traffic import Workload

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLIENTS: Final = ("trees", "judge", "chat-1", "chat-2")
WIDTH: Final = 3.0
"""Seconds between the points of a line over time."""


def mixed(seconds: float) -> Workload:
    """Return the workload with as many sessions of each client as arrive in `seconds`."""
    workload = DLPM["mix"]
    assert isinstance(workload, ChatAndPrograms)
    return replace(
        workload,
        chat=replace(workload.chat, rate=FIG12_CHAT_RATE, sessions=round(FIG12_CHAT_RATE * seconds / 2)),
        trees=replace(workload.trees, rate=FIG12_TREE_RATE, sessions=round(FIG12_TREE_RATE * seconds)),
        judge=replace(workload.judge, rate=FIG12_JUDGE_RATE, sessions=round(FIG12_JUDGE_RATE * seconds)),
    )


@dataclass(frozen=True)
class Figure12(Experiment):
    over_time: ClassVar[bool] = True
    marks: ClassVar[str] = OVER_TIME
    title: ClassVar[str] = "Conversations beside programs, one worker (DLPM paper, figure 12)"
    published: ClassVar[str] = (
        "DLPM has the best response times and ends first. Under LPM the client with trees of thoughts makes the others"
        " wait long. VTC gives more even actual service than DLPM."
    )
    decimals: ClassVar[Mapping[str, int]] = {
        "ends": 1,
        "service/s": 0,
        "hit rate": 3,
        "Jain": 3,
        "TTFT mean": 2,
        "chat p50": 2,
        "chat p99": 2,
        "trees p50": 1,
        "judge p50": 1,
    }

    def cells(self, *, quick: bool) -> Sequence[Cell]:
        span, arriving = FIG12_SPAN, FIG12_QUICK_ARRIVING if quick else FIG12_ARRIVING
        return [
            Cell(
                (("policy", name),),
                Scenario(
                    contender.policy,
                    mixed(arriving),
                    fleet(A10G_3B, 1),
                    span.seconds,
                    span.warmup,
                    parameters=contender.parameters,
                ),
            )
            for name, contender in ONE_WORKER.items()
        ]

    def measure(self, result: Result, summary: Summary) -> Mapping[str, Value]:
        """Return seconds to the first token of conversations and of all calls, and to the end of programs."""
        end = summary["last_end_s"] or result.seconds
        chat = list(first_token_spans([r for r in result.records if r.client.startswith("chat")], end))
        values: dict[str, Value] = {
            "ends": end,
            "service/s": service_seen(summary) / end,
            "hit rate": summary["hit_rate"],
            "Jain": summary["jain"],
            "TTFT mean": censored_mean(first_token_spans(result.records, end)),
            "chat p50": censored_percentile(chat, 0.50),
            "chat p99": censored_percentile(chat, 0.99),
            "trees p50": summary["clients"]["trees"]["programs"]["latency_p50_s"],
            "judge p50": summary["clients"]["judge"]["programs"]["latency_p50_s"],
        }
        for client in CLIENTS:
            calls = [record for record in result.records if record.client == client]
            values[f"TTFT {client}"] = first_token_line(calls, WIDTH, end)
            values[f"actual {client}"] = service_line(result.timeline, actual(client), WIDTH, end)
        return values

    def draw(self, rows: Sequence[Row], figure: "Figure") -> None:
        """Draw a column for each policy and a line for each client."""
        draw_over_time(figure, rows, ("TTFT", "actual"), CLIENTS)

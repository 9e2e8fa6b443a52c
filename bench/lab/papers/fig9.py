"""The DLPM paper's figure 9: trees of thoughts over time, one client with questions ten times as long, four workers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Final

from bench.lab.frame.conditions import A10G_3B, CONTENDERS, FIG9_RATE, FIG9_SPAN, FIG9_TREES, at_rate, fleet
from bench.lab.frame.experiment import Cell, Experiment, Row, Value
from bench.lab.frame.measures import (
    actual,
    first_token_line,
    light_records,
    longest_alone,
    seen,
    service_line,
    service_seen,
    worst_spread,
)
from bench.lab.frame.plots import OVER_TIME, draw_over_time
from bench.report.programs import summarise_programs
from bench.report.records import Result
from bench.report.summary import Summary
from bench.sim.scenario import Scenario
from bench.workloads.combined import Misbehaving
from bench.workloads.papers.dlpm import DLPM
from bench.workloads.parts.traffic import Workload

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLIENTS: Final = ("heavy", "light-1", "light-2")
SHARE, WIDTH = 0.9, 2.0
"""A client is served almost alone while it gets this share; seconds over which shares are taken."""


def ending(trees: int) -> Workload:
    """Return the workload with `trees` trees of each client."""
    workload = DLPM["tot-fig9"]
    assert isinstance(workload, Misbehaving)
    heavy, light = (replace(part, sessions=trees) for part in (workload.heavy, workload.light))
    return at_rate(replace(workload, heavy=heavy, light=light), FIG9_RATE)


@dataclass(frozen=True)
class Figure9(Experiment):
    """Client 0 is the heavy one. A simulation ends when all trees have ended."""

    over_time: ClassVar[bool] = True
    marks: ClassVar[str] = OVER_TIME
    title: ClassVar[str] = "Response time and service over time, four workers (DLPM paper, figure 9)"
    published: ClassVar[str] = (
        "D²LPM ends first, up to 2 times as fast as VTC and Preble. Actual service is equal among clients under VTC and"
        " D²LPM, while client 0 sees more. Preble serves clients 1 and 2 almost nothing from 100 to 700 s, their calls"
        " wait up to 600 s, and from 300 to 600 s one of the four GPUs does all the work."
    )
    decimals: ClassVar[Mapping[str, int]] = {
        "ends": 1,
        "service/s": 0,
        "hit rate": 3,
        "Jain": 3,
        "Jain as seen": 3,
        "spread": 0,
        "gap/bound": 2,
        "alone": 0,
        "light p50": 1,
        "light p99": 1,
    }

    def cells(self, *, quick: bool) -> Sequence[Cell]:  # noqa: ARG002 - quick means one seed, and no more
        return [
            Cell(
                (("policy", name),),
                Scenario(
                    contender.policy,
                    ending(FIG9_TREES),
                    fleet(A10G_3B, 4),
                    FIG9_SPAN.seconds,
                    FIG9_SPAN.warmup,
                    parameters=contender.parameters,
                ),
            )
            for name, contender in CONTENDERS.items()
        ]

    def measure(self, result: Result, summary: Summary) -> Mapping[str, Value]:
        """Return times in seconds and actual service in cost units.

        spread: the largest difference between clients since all were active. gap/bound: the largest of any worker
        against its bound (`router.core.clients.fairness`). alone: how long one client got nine tenths of the
        service.
        """
        end = summary["last_end_s"] or result.seconds
        programs = summarise_programs(light_records(result), result.warmup, result.seconds)
        bounds = [(w["service_gap"], w["service_gap_bound"]) for w in summary["workers"].values()]
        values: dict[str, Value] = {
            "ends": end,
            "service/s": service_seen(summary) / end,
            "hit rate": summary["hit_rate"],
            "Jain": summary["jain"],
            "Jain as seen": summary["jain_client"],
            "spread": worst_spread(result),
            "gap/bound": max((gap / bound for gap, bound in bounds if bound), default=None),
            "alone": longest_alone(result, SHARE, WIDTH),
            "light p50": programs["latency_p50_s"],
            "light p99": programs["latency_p99_s"],
        }
        for client in CLIENTS:
            calls = [record for record in result.records if record.client == client]
            values[f"TTFT {client}"] = first_token_line(calls, WIDTH, end)
            values[f"actual {client}"] = service_line(result.timeline, actual(client), WIDTH, end)
            values[f"as seen {client}"] = service_line(result.timeline, seen(client), WIDTH, end)
        return values

    def draw(self, rows: Sequence[Row], figure: "Figure") -> None:
        """Draw a column for each policy and a line for each client."""
        draw_over_time(figure, rows, ("TTFT", "actual", "as seen"), CLIENTS)

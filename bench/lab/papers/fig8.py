"""The DLPM paper's figure 8: conversations of two clients beside two that ask too much, one of them for a while."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Final

from bench.lab.frame.conditions import A10G_3B, FIG8_CONTENDERS, FIG8_RATE, FIG8_SPAN, Span, at_rate, fleet
from bench.lab.frame.experiment import Cell, Experiment, Row, Value
from bench.lab.frame.measures import first_token_line, first_token_spans, seen, service_line, service_seen
from bench.lab.frame.plots import OVER_TIME, draw_over_time
from bench.report.meters import censored_percentile
from bench.report.records import Result
from bench.report.summary import Summary
from bench.sim.scenario import Scenario
from bench.workloads.combined import Reforming
from bench.workloads.papers.dlpm import DLPM
from bench.workloads.parts.traffic import Workload

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLIENTS: Final = ("heavy", "reformed", "light-1", "light-2")
GROUPS: Final = ("light", "reformed", "heavy")
POINTS: Final = 40
"""Points of a line over time."""


def reforming(span: Span) -> Workload:
    """Return the workload, in which one client behaves well from half-way on."""
    workload = DLPM["arena-fig8"]
    assert isinstance(workload, Reforming)
    return at_rate(replace(workload, reformed=replace(workload.reformed, changes=span.seconds / 2)), FIG8_RATE)


@dataclass(frozen=True)
class Figure8(Experiment):
    """Clients 0 and 1 are the light ones, 2 is the reformed one and 3 the heavy one."""

    over_time: ClassVar[bool] = True
    marks: ClassVar[str] = OVER_TIME
    title: ClassVar[str] = "Seconds to the first token beside heavy clients, two workers (DLPM paper, figure 8)"
    published: ClassVar[str] = (
        "LPM serves the heavy clients at the cost of the others, which wait long and get less; VTC keeps the light"
        " clients' times low and makes the heavy ones wait up to 80 s; D²LPM keeps the times of the light clients and"
        " of the one that returned to normal low."
    )
    decimals: ClassVar[Mapping[str, int]] = {
        "service/s": 0,
        "hit rate": 3,
        "longest": 1,
        **{f"{group} {share} {phase}": 2 for group in GROUPS for phase in (1, 2) for share in ("p50", "p99")},
    }

    def cells(self, *, quick: bool) -> Sequence[Cell]:  # noqa: ARG002 - quick means one seed, and no more
        return [
            Cell(
                (("policy", name),),
                Scenario(
                    contender.policy,
                    reforming(FIG8_SPAN),
                    fleet(A10G_3B, 2),
                    FIG8_SPAN.seconds,
                    FIG8_SPAN.warmup,
                    parameters=contender.parameters,
                ),
            )
            for name, contender in FIG8_CONTENDERS.items()
        ]

    def measure(self, result: Result, summary: Summary) -> Mapping[str, Value]:
        """Return seconds to the first token of calls that came before one client reformed (1) or after (2).

        What has not come by the end is a lower bound; `longest` is of all clients.
        """
        end = result.seconds
        values: dict[str, Value] = {
            "service/s": service_seen(summary) / end,
            "hit rate": summary["hit_rate"],
            "longest": max(span for span, _ in first_token_spans(result.records, end)),
        }
        for group in GROUPS:
            calls = [record for record in result.records if record.client.startswith(group)]
            for phase in (1, 2):
                spans = list(first_token_spans([r for r in calls if (r.arrived >= end / 2) == (phase == 2)], end))
                values[f"{group} p50 {phase}"] = censored_percentile(spans, 0.50)
                values[f"{group} p99 {phase}"] = censored_percentile(spans, 0.99)
        for client in CLIENTS:
            calls = [record for record in result.records if record.client == client]
            values[f"TTFT {client}"] = first_token_line(calls, end / POINTS, end)
            values[f"service/s {client}"] = service_line(result.timeline, seen(client), end / POINTS, end)
        return values

    def draw(self, rows: Sequence[Row], figure: "Figure") -> None:
        """Draw a column for each policy and a line for each client."""
        draw_over_time(figure, rows, ("TTFT", "service/s"), CLIENTS)

"""The default and the best five other policies on every workload, at four loads, with programs run to their end.

Takes hours; `--resume` keeps finished simulations. Nothing is censored, so every percentile is an observed one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

from bench.lab.drawing.heat import Scale, draw_table
from bench.lab.frame.conditions import A100, ALL, PATIENT, POLICIES_WORKERS, SEEDS, Span, fleet
from bench.lab.frame.experiment import Cell, Row, Value
from bench.lab.frame.felt_loads import FELT_LOADS, TRACED, Load, felt_load
from bench.lab.frame.loads import loaded
from bench.lab.frame.traced import TracedExperiment
from bench.lab.sweeps.policies import (
    DECIMALS,
    FELT,
    LEAST_SERVICE,
    MOST_WAIT,
    SERVES,
    WORKLOADS,
    figures,
    over_shortest,
    wait_of,
)
from bench.report.programs import program_spans
from bench.report.records import Result
from bench.report.summary import Summary
from bench.sim.scenario import Scenario
from bench.workloads.combined import Combined
from bench.workloads.papers.vtc import Suite
from bench.workloads.parts.pace import RatedWorkload
from bench.workloads.parts.traffic import Workload
from bench.workloads.recorded.sessions import Sessions
from bench.workloads.recorded.traces import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFAULT: Final = "dlpm_home"
FINALISTS: Final = ("d2lpm", "cache_aware", "rr+dlpm", "d2lpm printed", "preble")
"""The policies that the digest of `policies` named; since clients that begin no call count as the last served there, it
names `lcf` instead of `d2lpm printed`."""
LOADS: Final = (0.8, 1.0, 1.2, 1.5)
"""Multiples of the sustained rate; if calls follow each other, multiples of the open calls."""
QUICK_LOADS: Final = (1.5,)
QUICK_WORKLOADS: Final = ("judge", "crowd of 60")
QUICK_POLICIES: Final = (DEFAULT, "cache_aware")
SPAN: Final = Span(60.0, 15.0)
QUICK_SPAN: Final = Span(24.0, 6.0)
SERVEGEN_SPEED: Final = 1.3
"""At this multiple of its recorded speed, the mix asks for the most that two workers can serve."""
WAITS: Final = ("light TTFT p95", "light TTFT longest")


@dataclass(frozen=True)
class FullGrid(TracedExperiment):
    kinds: ClassVar[Sequence[str]] = tuple(TRACED.values())
    seeds: ClassVar[Sequence[int]] = SEEDS
    marks: ClassVar[str] = ""
    title: ClassVar[str] = "The default and the best five policies on every workload, two A100, four loads"
    published: ClassVar[str] = (
        "Of no paper: the default is chosen from it. Programs run to their end, and no more come after the time"
        " measured; unended counts those that did not end even so."
    )
    decimals: ClassVar[Mapping[str, int]] = {**DECIMALS, "unended": 0}

    def cells(self, *, quick: bool) -> Sequence[Cell]:
        return [
            Cell(
                (("workload", workload), ("load", f"{factor:g}"), ("policy", name)),
                Scenario(
                    ALL[name].policy,
                    load.workload,
                    fleet(load.spec, POLICIES_WORKERS),
                    load.span.seconds,
                    load.span.warmup,
                    settings=PATIENT,
                    parameters=ALL[name].parameters,
                    drain=True,
                ),
            )
            for workload in (QUICK_WORKLOADS if quick else (*WORKLOADS, *FELT))
            for factor in (QUICK_LOADS if quick else LOADS)
            for load in [at_load(workload, factor, self.traces, quick=quick)]
            for name in (QUICK_POLICIES if quick else (DEFAULT, *FINALISTS))
        ]

    def measure(self, result: Result, summary: Summary) -> Mapping[str, Value]:
        spans = program_spans(result.records, result.warmup, result.seconds)
        return {**figures(result, summary), "unended": sum(not ended for _, ended in spans)}

    def digest(self, rows: Sequence[Row]) -> Sequence[str]:
        """Return the default beside the best under each load, with what falls short of the aim in bold."""
        lines = ["| workload | load | throughput / best | light p95 / best | light longest / best |"]
        lines.append("| --- | ---: | ---: | ---: | ---: |")
        verdicts = list(compared(rows))
        for verdict in verdicts:
            cells = [_marked(verdict.service, verdict.service < LEAST_SERVICE)]
            cells += [_marked(wait, wait > MOST_WAIT) for wait in verdict.waits]
            lines.append(f"| {verdict.workload} | {verdict.load} | {' | '.join(cells)} |")
        missed = sum(v.service < LEAST_SERVICE or max(v.waits) > MOST_WAIT for v in verdicts)
        head = f"The default beside the best; in bold what misses the aim, in {missed} of {len(verdicts)} places:"
        return [head, "", *lines]

    def draw(self, rows: Sequence[Row], figure: "Figure") -> None:
        """Draw the default's figures over the best's, a cell for each workload and load."""
        verdicts = list(compared(rows))
        workloads = list(dict.fromkeys(verdict.workload for verdict in verdicts))
        loads = list(dict.fromkeys(verdict.load for verdict in verdicts))
        at = {(verdict.workload, verdict.load): verdict for verdict in verdicts}
        figure.set_figheight(2.2 + 0.2 * len(workloads))
        scales = (
            Scale("throughput over the best's (ratio)", 0.5, 1.5, "RdBu"),
            Scale("light p95 over the shortest (ratio)", 0.5, 1.5, "RdBu_r"),
        )
        for axes, scale, read in zip(figure.subplots(1, 2, sharey=True), scales, (_service, _p95), strict=True):
            values = [
                [read(at[place]) if (place := (workload, load)) in at else None for load in loads]
                for workload in workloads
            ]
            draw_table(figure, axes, values, loads, scale)
            axes.set_xlabel("load over the sustained rate (ratio)")
        figure.axes[0].set_yticks(range(len(workloads)), workloads)


def _service(verdict: "Verdict") -> float:
    return verdict.service


def _p95(verdict: "Verdict") -> float:
    return verdict.waits[0]


def at_load(name: str, factor: float, traces: Mapping[str, Workload], *, quick: bool = False) -> Load:
    """Return a workload at this multiple of the sustained rate, or of its open calls."""
    if name not in FELT_LOADS:
        return Load(loaded(name, POLICIES_WORKERS, factor), A100, QUICK_SPAN if quick else SPAN)
    usual = felt_load(name, traces)
    return Load(_scaled(usual.workload, factor), usual.spec, QUICK_SPAN if quick else usual.span)


def _scaled(workload: Workload, factor: float) -> Workload:
    if isinstance(workload, Suite):
        return replace(workload, speed=workload.speed * factor * SERVEGEN_SPEED)
    if isinstance(workload, Trace):
        return replace(workload, play=replace(workload.play, speed=workload.play.speed * factor * SERVEGEN_SPEED))
    if isinstance(workload, Sessions):
        return replace(workload, play=replace(workload.play, concurrency=round(workload.play.concurrency * factor)))
    assert isinstance(workload, Combined)
    parts = {name: _more(part, factor) for name, part in workload.parts.items() if name != "light"}
    return replace(workload, **parts)  # type: ignore[arg-type]


def _more(part: RatedWorkload, factor: float) -> RatedWorkload:
    """Multiply the open calls: more clients if each has one, otherwise more per client."""
    if part.concurrency == 1:
        return replace(part, client_count=max(1, round(part.client_count * factor)))
    return replace(part, concurrency=max(1, round(part.concurrency * factor)))


class Verdict(NamedTuple):
    """The default under one load, relative to the best policy there."""

    workload: str
    load: str
    service: float
    """Throughput over the best policy's."""
    waits: tuple[float, ...]
    """`WAITS` over the shortest of the policies that serve enough."""


def compared(rows: Sequence[Row]) -> Iterator[Verdict]:
    """Yield the default's verdict under each load, by medians; missing throughput counts as 0."""
    places: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        places.setdefault((row.labels["workload"], row.labels["load"]), {})[row.labels["policy"]] = row
    for (workload, load), policies in places.items():
        own = policies[DEFAULT]
        service = {policy: row.median("service/s") or 0.0 for policy, row in policies.items()}
        enough = [row for policy, row in policies.items() if service[policy] >= SERVES * service[DEFAULT]]
        waits = tuple(over_shortest(wait_of(own, name), [wait_of(row, name) for row in enough]) for name in WAITS)
        yield Verdict(workload, load, service[DEFAULT] / (max(service.values()) or 1.0), waits)


def _marked(value: float, missed: bool) -> str:
    return f"**{value:.2f}**" if missed else f"{value:.2f}"

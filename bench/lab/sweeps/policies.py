"""Every policy on every workload, which shows what each is good for, and which could be the default everywhere."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean
from typing import TYPE_CHECKING, ClassVar, Final

from bench.lab.drawing.heat import Scale, draw_table
from bench.lab.frame.conditions import (
    A100,
    ALL,
    FIG7_SESSIONS,
    PLAIN_SESSIONS,
    POLICIES_SPAN,
    POLICIES_WORKERS,
    SCREEN_SEEDS,
    fleet,
)
from bench.lab.frame.experiment import Cell, Row, Value
from bench.lab.frame.felt_loads import FELT_LOADS, TRACED, Load, felt_load
from bench.lab.frame.loads import loaded
from bench.lab.frame.measures import LIGHT_TIMES, jain_of_shares, light_times, service_seen
from bench.lab.frame.traced import TracedExperiment
from bench.report.records import Result
from bench.report.summary import Summary
from bench.sim.scenario import Scenario
from bench.workloads.parts.traffic import Workload

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORKLOADS: Final = (*FIG7_SESSIONS, *PLAIN_SESSIONS)
FELT: Final = (
    *("crowd of 20", "crowd of 60", "crowd of 200", "crowd of 1000", "documents", "documents, 4x16 chats"),
    *("32 cold prompts, 4x32 chats", "200 chats, 4x24", "cancellers", "3 KV holders", "coding agents", "ServeGen"),
)
"""Crowds, floods and mixes: their load is fixed, not a multiple of the sustained rate."""
BEST: Final = 6
"""How many policies go on to the full grid: the default, if it is among them, and five others."""
NOTICED: Final = 0.1
"""Seconds; all shorter waits count as equal."""
LEAST_SERVICE, MOST_WAIT = 0.93, 1.25
"""A default's targets: at least this share of the best throughput, at most this multiple of the shortest waits ..."""
SERVES: Final = 0.9
"""... of all policies that serve at least this share of the best throughput."""
DECIMALS: Final[Mapping[str, int]] = {
    "service/s": 0,
    "hit rate": 3,
    "Jain": 3,
    "Jain of shares": 3,
    **dict.fromkeys(LIGHT_TIMES, 2),
}
"""The figures of policies in their order, with their decimals."""
QUICK_WORKLOADS: Final = ("judge-s2", "qa-s1", "toolbench-zipf")


@dataclass(frozen=True)
class PolicyTable(TracedExperiment):
    kinds: ClassVar[Sequence[str]] = tuple(TRACED.values())
    seeds: ClassVar[Sequence[int]] = SCREEN_SEEDS
    marks: ClassVar[str] = ""
    caption: ClassVar[str] = "The policies nearest to the best come first; white where there is no figure."
    title: ClassVar[str] = "Every policy on every workload, two A100, half as much again asked as they can do"
    published: ClassVar[str] = (
        "Of no paper: who goes on to the full grid is taken from it, and with that the default. Jain of shares: of what"
        " clients were served over their max-min shares."
    )
    decimals: ClassVar[Mapping[str, int]] = DECIMALS

    def cells(self, *, quick: bool) -> Sequence[Cell]:
        return [
            Cell(
                (("workload", workload), ("policy", name)),
                Scenario(
                    contender.policy,
                    load.workload,
                    fleet(load.spec, POLICIES_WORKERS),
                    load.span.seconds,
                    load.span.warmup,
                    parameters=contender.parameters,
                ),
            )
            for workload in (QUICK_WORKLOADS if quick else (*WORKLOADS, *FELT))
            for load in [screened(workload, self.traces)]
            for name, contender in ALL.items()
        ]

    def measure(self, result: Result, summary: Summary) -> Mapping[str, Value]:
        return figures(result, summary)

    def digest(self, rows: Sequence[Row]) -> Sequence[str]:
        """Return how near each policy is to the best, over all workloads and on each."""
        table = Relative(rows)
        return [
            f"Nearest to the best: {', '.join(table.best(BEST))}.",
            "",
            f"Least and mean throughput over the best policy's. Of {len(table.workloads)} workloads, on how many it is"
            f" at least {LEAST_SERVICE:g}, and on how many the light clients' p95 to the first token is at most"
            f" {MOST_WAIT:g} times the shortest of all policies that serve {SERVES:g} of what this one does.",
            "",
            *_summary(table),
            "",
            "Throughput over the best policy's / Jain's index / light p99 to the first token, s:",
            "",
            *_by_workload(table),
        ]

    def draw(self, rows: Sequence[Row], figure: "Figure") -> None:
        """Draw a cell for each policy on each workload: throughput over the best's, and Jain's index."""
        table = Relative(rows)
        policies = table.best(len(table.policies))
        figure.set_figheight(2.6 + 0.2 * len(table.workloads))
        for axes, read, label in zip(
            figure.subplots(1, 2, sharey=True),
            (table.share, table.jain_if_any),
            ("throughput over the best policy's (ratio)", "Jain's index of actual service (ratio)"),
            strict=True,
        ):
            values = [[read(workload, policy) for policy in policies] for workload in table.workloads]
            draw_table(figure, axes, values, policies, Scale(label, 0.0, 1.0, "cividis"))
        figure.axes[0].set_yticks(range(len(table.workloads)), table.workloads)


def screened(workload: str, traces: Mapping[str, Workload]) -> Load:
    """Return a workload at its one load."""
    if workload in FELT_LOADS:
        return felt_load(workload, traces)
    return Load(loaded(workload, POLICIES_WORKERS), A100, POLICIES_SPAN)


def figures(result: Result, summary: Summary) -> Mapping[str, Value]:
    """Return service as clients see it, Jain's index of actual service, and the waits of light clients (s)."""
    return {
        "service/s": service_seen(summary) / (result.seconds - result.warmup),
        "hit rate": summary["hit_rate"],
        "Jain": summary["jain"],
        "Jain of shares": jain_of_shares(result, summary),
        **light_times(result),
    }


def _summary(table: "Relative") -> Sequence[str]:
    lines = [
        "| policy | least | where | mean | throughput near | waits near |",
        "| --- | ---: | --- | ---: | ---: | ---: |",
    ]
    for policy in table.best(len(table.policies)):
        shares = {workload: table.share(workload, policy) for workload in table.workloads}
        worst = min(shares, key=lambda workload: shares[workload])
        serving = sum(share >= LEAST_SERVICE for share in shares.values())
        prompt = sum(table.wait(workload, policy) <= MOST_WAIT for workload in table.workloads)
        mean = fmean(shares.values())
        lines.append(f"| {policy} | {shares[worst]:.2f} | {worst} | {mean:.2f} | {serving} | {prompt} |")
    return lines


def _by_workload(table: "Relative") -> Sequence[str]:
    lines = [f"| policy | {' | '.join(table.workloads)} |", f"| --- |{' ---: |' * len(table.workloads)}"]
    for policy in table.policies:
        cells = [table.cell(workload, policy) for workload in table.workloads]
        lines.append(f"| {policy} | {' | '.join(cells)} |")
    return lines


def wait_of(row: Row, figure: str) -> float:
    """Return a wait in seconds, those below `NOTICED` as that; infinite if no modest client began a call in the time
    measured, since those that could have done so were still waiting.
    """
    wait = row.median(figure)
    return inf if wait is None else max(NOTICED, wait)


def over_shortest(wait: float, waits: Iterable[float]) -> float:
    """Return a wait over the shortest of these; 1 if none is shorter, even if all are infinite."""
    shortest = min(waits)
    return 1.0 if wait == shortest else wait / shortest


class Relative:
    """The medians of the table, by workload and policy."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = {(row.labels["workload"], row.labels["policy"]): row for row in rows}
        self.workloads: Final = list(dict.fromkeys(workload for workload, _ in self._rows))
        self.policies: Final = list(dict.fromkeys(policy for _, policy in self._rows))

    def figure(self, workload: str, policy: str, name: str) -> float:
        """Return a figure's median; 0 if there is none."""
        return self._rows[workload, policy].median(name) or 0.0

    def share(self, workload: str, policy: str) -> float:
        """Return throughput over the best policy's on the same workload."""
        best = max(self.figure(workload, other, "service/s") for at, other in self._rows if at == workload)
        return self.figure(workload, policy, "service/s") / best if best else 0.0

    def jain(self, workload: str, policy: str) -> float:
        """Return Jain's index of actual service."""
        return self.figure(workload, policy, "Jain")

    def jain_if_any(self, workload: str, policy: str) -> float | None:
        """Return Jain's index of actual service; None if there is none."""
        return self._rows[workload, policy].median("Jain")

    def best(self, count: int) -> Sequence[str]:
        """Return `count` policies, the nearest to the best first.

        Nearness is the mean, over all workloads, of throughput as a share of the best policy's and of the best policy's
        p95 of light clients' first tokens as a share of this policy's. Waits under 0.1 s count as equal.
        """
        return sorted(self.policies, key=self._nearness, reverse=True)[:count]

    def wait(self, workload: str, policy: str) -> float:
        """Return the light clients' p95 to the first token over the shortest of all policies that serve about as
        much.
        """
        least = SERVES * self.share(workload, policy)
        enough = [self._waits(workload, each) for each in self.policies if self.share(workload, each) >= least]
        return over_shortest(self._waits(workload, policy), enough)

    def _nearness(self, policy: str) -> float:
        return fmean((self.share(each, policy) + self._promptness(each, policy)) / 2 for each in self.workloads)

    def _promptness(self, workload: str, policy: str) -> float:
        waits = [self._waits(workload, each) for each in self.policies]
        return 1 / over_shortest(self._waits(workload, policy), waits)

    def _waits(self, workload: str, policy: str) -> float:
        return wait_of(self._rows[workload, policy], "light TTFT p95")

    def cell(self, workload: str, policy: str) -> str:
        """Return the three figures of a policy on a workload."""
        light = self._rows[workload, policy].median("light TTFT p99")
        waited = "-" if light is None else f"{light:.1f}"
        return f"{self.share(workload, policy):.2f} / {self.jain(workload, policy):.2f} / {waited}"

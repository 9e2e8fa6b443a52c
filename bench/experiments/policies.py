"""Every policy on every workload: what each is good for, and which is good enough everywhere to be the default."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, ClassVar, Final

from bench.experiments.conditions import (
    A100,
    ALL,
    FIG7_SESSIONS,
    PLAIN_SESSIONS,
    POLICIES_SPAN,
    POLICIES_WORKERS,
    SCREEN_SEEDS,
    fleet,
)
from bench.experiments.experiment import Cell, Row, Value
from bench.experiments.felt_loads import FELT_LOADS, TRACED, Load, felt_load
from bench.experiments.loads import loaded
from bench.experiments.measures import LIGHT_TIMES, jain_of_shares, light_times, service_seen
from bench.experiments.traced import TracedExperiment
from bench.records import Result
from bench.scenario import Scenario
from bench.summary import Summary
from bench.traffic import Workload

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORKLOADS: Final = (*FIG7_SESSIONS, *PLAIN_SESSIONS)
FELT: Final = (
    *("crowd of 20", "crowd of 60", "crowd of 200", "crowd of 1000", "documents", "documents, 4x16 chats"),
    *("32 cold prompts, 4x32 chats", "200 chats, 4x24", "cancellers", "3 KV holders", "coding agents", "ServeGen"),
)
"""Crowds, floods and mixes: they ask as much as they do, not a multiple of what is sustained."""
BEST: Final = 6
"""How many go on to the full grid: the default, if it is among them, and five others."""
NOTICED: Final = 0.1
"""Seconds."""
DECIMALS: Final[Mapping[str, int]] = {
    "service/s": 0,
    "hit rate": 3,
    "Jain": 3,
    "Jain of shares": 3,
    **dict.fromkeys(LIGHT_TIMES, 2),
}
"""Of the figures of policies, in their order."""
QUICK_WORKLOADS: Final = ("judge-s2", "qa-s1", "toolbench-zipf")


@dataclass(frozen=True)
class PolicyTable(TracedExperiment):
    """See the module."""

    kinds: ClassVar[Sequence[str]] = tuple(TRACED.values())
    seeds: ClassVar[Sequence[int]] = SCREEN_SEEDS
    title: ClassVar[str] = "Every policy on every workload, two A100, half as much again asked as they can do"
    published: ClassVar[str] = (
        "Of no paper: who goes on to the full grid is taken from it, and with that the default. Jain of shares: of what"
        " clients were served over their max-min shares."
    )
    decimals: ClassVar[Mapping[str, int]] = DECIMALS

    def cells(self, *, quick: bool) -> Sequence[Cell]:
        """See `Experiment`."""
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
        """See `Experiment`."""
        return figures(result, summary)

    def digest(self, rows: Sequence[Row]) -> Sequence[str]:
        """See `Experiment`. A line for each policy: throughput over the best's, Jain's index, light p99 in seconds."""
        workloads = list(dict.fromkeys(row.labels["workload"] for row in rows))
        table = Relative(rows)
        lines = [
            f"| policy | least | mean | {' | '.join(workloads)} |",
            f"| --- | ---: | ---: |{' ---: |' * len(workloads)}",
        ]
        for policy in dict.fromkeys(row.labels["policy"] for row in rows):
            shares = [table.share(workload, policy) for workload in workloads]
            cells = [table.cell(workload, policy) for workload in workloads]
            lines.append(f"| {policy} | {min(shares):.2f} | {fmean(shares):.2f} | {' | '.join(cells)} |")
        head = "Throughput over the best policy's / Jain's index / light p99 to the first token, s:"
        return [f"Nearest to the best: {', '.join(table.best(BEST))}.", "", head, "", *lines]

    def draw(self, rows: Sequence[Row], figure: "Figure") -> None:
        """See `Experiment`. A point for each policy on each workload: throughput over the best's, Jain's index."""
        table = Relative(rows)
        workloads = list(dict.fromkeys(row.labels["workload"] for row in rows))
        policies = list(dict.fromkeys(row.labels["policy"] for row in rows))
        for axes, read, title in zip(
            figure.subplots(1, 2, sharey=True),
            (table.share, table.jain),
            ("throughput over the best policy's", "Jain's index of actual service"),
            strict=True,
        ):
            values = [[read(workload, policy) for workload in workloads] for policy in policies]
            axes.imshow(values, aspect="auto", vmin=0.0, vmax=1.0, cmap="viridis")
            axes.set_xticks(range(len(workloads)), workloads, rotation=60, ha="right")
            axes.set_yticks(range(len(policies)), policies)
            axes.set_title(title)


def screened(workload: str, traces: Mapping[str, Workload]) -> Load:
    """A workload at its one load."""
    if workload in FELT_LOADS:
        return felt_load(workload, traces)
    return Load(loaded(workload, POLICIES_WORKERS), A100, POLICIES_SPAN)


def figures(result: Result, summary: Summary) -> Mapping[str, Value]:
    """Service as clients see it, Jain's index of actual service, and what the light clients wait, in seconds."""
    return {
        "service/s": service_seen(summary) / (result.seconds - result.warmup),
        "hit rate": summary["hit_rate"],
        "Jain": summary["jain"],
        "Jain of shares": jain_of_shares(result, summary),
        **light_times(result),
    }


class Relative:
    """The medians of the table, by workload and policy."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = {(row.labels["workload"], row.labels["policy"]): row for row in rows}

    def figure(self, workload: str, policy: str, name: str) -> float:
        """A figure's median; 0 where there is none."""
        return self._rows[workload, policy].median(name) or 0.0

    def share(self, workload: str, policy: str) -> float:
        """Throughput over the best policy's on the same workload."""
        best = max(self.figure(workload, other, "service/s") for at, other in self._rows if at == workload)
        return self.figure(workload, policy, "service/s") / best if best else 0.0

    def jain(self, workload: str, policy: str) -> float:
        """Jain's index of actual service."""
        return self.figure(workload, policy, "Jain")

    def best(self, count: int) -> Sequence[str]:
        """So many policies, the nearest to the best first.

        Near are throughput, as a share of the best policy's, and the p95 of light clients' first tokens, of which the
        best policy's is a share; the mean of both over all workloads. Waits under 0.1 s are all alike.
        """
        policies = dict.fromkeys(policy for _, policy in self._rows)
        return sorted(policies, key=self._nearness, reverse=True)[:count]

    def _nearness(self, policy: str) -> float:
        workloads = dict.fromkeys(workload for workload, _ in self._rows)
        return fmean((self.share(each, policy) + self._promptness(each, policy)) / 2 for each in workloads)

    def _promptness(self, workload: str, policy: str) -> float:
        waits = {
            other: max(NOTICED, self.figure(workload, other, "light TTFT p95"))
            for at, other in self._rows
            if at == workload
        }
        return min(waits.values()) / waits[policy]

    def cell(self, workload: str, policy: str) -> str:
        """The three figures of a policy on a workload."""
        light = self.figure(workload, policy, "light TTFT p99")
        return f"{self.share(workload, policy):.2f} / {self.jain(workload, policy):.2f} / {light:.1f}"

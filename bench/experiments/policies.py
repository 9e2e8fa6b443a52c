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
    QUICK_SEEDS,
    fleet,
)
from bench.experiments.experiment import Cell, Experiment, Row, Value
from bench.experiments.loads import loaded
from bench.experiments.measures import first_token_spans, light_records, service_seen
from bench.meters import censored_percentile
from bench.records import Result
from bench.scenario import Scenario
from bench.summary import Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORKLOADS: Final = (*FIG7_SESSIONS, *PLAIN_SESSIONS)
QUICK_WORKLOADS: Final = ("judge-s2", "qa-s1", "toolbench-zipf")


@dataclass(frozen=True)
class PolicyTable(Experiment):
    """See the module."""

    seeds: ClassVar[Sequence[int]] = QUICK_SEEDS
    title: ClassVar[str] = "Every policy on every workload, two A100, half as much again asked as they can do"
    published: ClassVar[str] = "Of no paper: the defaults are taken from it."
    decimals: ClassVar[Mapping[str, int]] = {
        "service/s": 0,
        "hit rate": 3,
        "Jain": 3,
        "light TTFT p50": 2,
        "light TTFT p99": 2,
    }

    def cells(self, *, quick: bool) -> Sequence[Cell]:
        """See `Experiment`."""
        return [
            Cell(
                (("workload", workload), ("policy", name)),
                Scenario(
                    contender.policy,
                    loaded(workload, POLICIES_WORKERS),
                    fleet(A100, POLICIES_WORKERS),
                    POLICIES_SPAN.seconds,
                    POLICIES_SPAN.warmup,
                    parameters=contender.parameters,
                ),
            )
            for workload in (QUICK_WORKLOADS if quick else WORKLOADS)
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
        return ["Throughput over the best policy's / Jain's index / light p99 to the first token, s:", "", *lines]

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


def figures(result: Result, summary: Summary) -> Mapping[str, Value]:
    """Service as clients see it, Jain's index of actual service; light are the well-behaved, or all if none is not."""
    spans = list(first_token_spans(light_records(result) or result.records, result.seconds))
    return {
        "service/s": service_seen(summary) / (result.seconds - result.warmup),
        "hit rate": summary["hit_rate"],
        "Jain": summary["jain"],
        "light TTFT p50": censored_percentile(spans, 0.50),
        "light TTFT p99": censored_percentile(spans, 0.99),
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

    def cell(self, workload: str, policy: str) -> str:
        """The three figures of a policy on a workload."""
        light = self.figure(workload, policy, "light TTFT p99")
        return f"{self.share(workload, policy):.2f} / {self.jain(workload, policy):.2f} / {light:.1f}"

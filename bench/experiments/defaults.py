"""What changes with each parameter: the defaults beside what else they could be, one at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from bench.experiments.conditions import (
    A100,
    POLICIES_SPAN,
    POLICIES_WORKERS,
    QUICK_SEEDS,
    SWEPT_WORKLOADS,
    Contender,
    fleet,
)
from bench.experiments.experiment import Cell, Experiment, Row, Value
from bench.experiments.loads import loaded
from bench.experiments.policies import figures
from bench.records import Result
from bench.scenario import Scenario
from bench.summary import Summary
from router.core.policies.d2lpm import D2lpmParameters
from router.core.policies.dlpm import DlpmParameters
from router.core.policies.dlpm_home import DlpmHomeParameters
from router.core.scheduler import SchedulerSettings
from router.core.window import FixedWindow, NoWindow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFAULT: Final = "default"
PARAMETERS: Final[Mapping[str, Mapping[str, Sequence[object]]]] = {
    "d2lpm": {
        DEFAULT: (),
        "Q^u 5,000": (DlpmParameters(quantum=5_000.0),),
        "Q^u 100,000": (DlpmParameters(quantum=100_000.0),),
        "Q^w 20,000": (D2lpmParameters(quantum=20_000.0),),
        "Q^w 400,000": (D2lpmParameters(quantum=400_000.0),),
        "charge full input": (D2lpmParameters(charge_full_input=True),),
        "no takeover": (D2lpmParameters(steal_loss=-1),),
        "takeover of anything": (D2lpmParameters(steal_loss=1_000_000),),
        "not sparse first": (DlpmParameters(sparse_first=False),),
    },
    "dlpm_home": {
        DEFAULT: (),
        "Q^u 5,000": (DlpmHomeParameters(quantum=5_000.0),),
        "Q^u 100,000": (DlpmHomeParameters(quantum=100_000.0),),
        "Q^w 20,000": (DlpmHomeParameters(worker_quantum=20_000.0),),
        "Q^w 400,000": (DlpmHomeParameters(worker_quantum=400_000.0),),
        "home patience 1": (DlpmHomeParameters(home_patience=1.0),),
        "home patience 10": (DlpmHomeParameters(home_patience=10.0),),
        "not sparse first": (DlpmHomeParameters(sparse_first=False),),
    },
}
"""By policy and name; all else is at its default."""
SETTINGS: Final[Mapping[str, SchedulerSettings]] = {
    "least match 1": SchedulerSettings(match_minimum=1),
    "least match 512": SchedulerSettings(match_minimum=512),
    "window of 32": SchedulerSettings(window=FixedWindow(requests=32)),
    "no window": SchedulerSettings(window=NoWindow()),
}
"""Of the core, under either policy."""


@dataclass(frozen=True)
class Defaults(Experiment):
    """See the module."""

    seeds: ClassVar[Sequence[int]] = QUICK_SEEDS
    title: ClassVar[str] = "The defaults and what else they could be, two A100"
    published: ClassVar[str] = (
        "The DLPM paper shows Q^u in figure 1 and Q^w in figure 10, and charges the full input. All else is ours."
    )
    decimals: ClassVar[Mapping[str, int]] = {
        "service/s": 0,
        "hit rate": 3,
        "Jain": 3,
        "light TTFT p50": 2,
        "light TTFT p99": 2,
    }

    def cells(self, *, quick: bool) -> Sequence[Cell]:
        """See `Experiment`. When quick, the defaults alone."""
        return [
            Cell(
                (("workload", workload), ("policy", policy), ("parameter", name)),
                Scenario(
                    policy,
                    loaded(workload, POLICIES_WORKERS),
                    fleet(A100, POLICIES_WORKERS),
                    POLICIES_SPAN.seconds,
                    POLICIES_SPAN.warmup,
                    settings=settings,
                    parameters=contender.parameters,
                ),
            )
            for workload in SWEPT_WORKLOADS
            for policy in PARAMETERS
            for name, contender, settings in _variants(policy)
            if name == DEFAULT or not quick
        ]

    def measure(self, result: Result, summary: Summary) -> Mapping[str, Value]:
        """See `Experiment`, and `PolicyTable`."""
        return figures(result, summary)

    def draw(self, rows: Sequence[Row], figure: "Figure") -> None:
        """See `Experiment`. Throughput against Jain's index, a point for each parameter, a plot for each workload."""
        for axes, workload in zip(
            figure.subplots(1, len(SWEPT_WORKLOADS), squeeze=False).flat, SWEPT_WORKLOADS, strict=True
        ):
            for policy, colour in zip(PARAMETERS, ("tab:blue", "tab:green"), strict=True):
                own = [row for row in rows if (row.labels["workload"], row.labels["policy"]) == (workload, policy)]
                for row in own:
                    at = row.median("service/s") or 0.0, row.median("Jain") or 0.0
                    is_default = row.labels["parameter"] == DEFAULT
                    axes.plot(*at, marker="*" if is_default else ".", markersize=12 if is_default else 5, color=colour)
                    axes.annotate(row.labels["parameter"], at, fontsize=5)
            axes.set_title(workload)
            axes.set_xlabel("service/s")
            axes.set_ylabel("Jain")


def _variants(policy: str) -> Sequence[tuple[str, Contender, SchedulerSettings]]:
    usual = SchedulerSettings()
    own = [(name, Contender(policy, *changed), usual) for name, changed in PARAMETERS[policy].items()]
    return [*own, *((name, Contender(policy), settings) for name, settings in SETTINGS.items())]

"""The effect of each parameter: the defaults compared with other values, one at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, ClassVar, Final

from bench.lab.drawing.heat import Scale, draw_table
from bench.lab.frame.conditions import POLICIES_WORKERS, QUICK_SEEDS, Contender, fleet
from bench.lab.frame.experiment import Cell, Experiment, Row, Value
from bench.lab.sweeps.policies import DECIMALS, QUICK_WORKLOADS, WORKLOADS, figures, screened
from bench.report.records import Result
from bench.report.summary import Summary
from bench.sim.scenario import Scenario
from router.core.fleet.window import FixedWindow, NoWindow
from router.core.policies.dlpm.dlpm_parameters import D2lpmParameters, DlpmHomeParameters, DlpmParameters
from router.core.scheduler_settings import SchedulerSettings

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
        "no head start": (DlpmParameters(head_start=0.0),),
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
        "no head start": (DlpmHomeParameters(head_start=0.0),),
        "rounds without end": (DlpmHomeParameters(round_seconds=0.0),),
        "rounds of 10 s": (DlpmHomeParameters(round_seconds=10.0),),
        "overdue never first": (DlpmHomeParameters(overdue_after=0.0),),
        "no isolation": (DlpmHomeParameters(isolation=0.0),),
        "isolation 0.7": (DlpmHomeParameters(isolation=0.7),),
    },
}
"""By policy and name; all else is at its default."""
FELT: Final = ("crowd of 200", "documents", "32 cold prompts, 4x32 chats", "200 chats, 4x24", "coding agents")
"""Crowds and floods, for the parameters of rounds and isolation."""
SETTINGS: Final[Mapping[str, SchedulerSettings]] = {
    "least match 1": SchedulerSettings(match_minimum=1),
    "least match 512": SchedulerSettings(match_minimum=512),
    "window of 32": SchedulerSettings(window=FixedWindow(requests=32)),
    "no window": SchedulerSettings(window=NoWindow()),
}
"""Settings of the core, with either policy."""


@dataclass(frozen=True)
class Defaults(Experiment):
    seeds: ClassVar[Sequence[int]] = QUICK_SEEDS
    marks: ClassVar[str] = ""
    caption: ClassVar[str] = "Blue is more than the default has, red less; what is beyond the scale is written out."
    title: ClassVar[str] = "The defaults and what else they could be, two A100"
    published: ClassVar[str] = (
        "The DLPM paper shows Q^u in figure 1 and Q^w in figure 10, and charges the full input. All else is ours."
    )
    decimals: ClassVar[Mapping[str, int]] = DECIMALS

    def cells(self, *, quick: bool) -> Sequence[Cell]:
        """Return the simulations; a quick run has the defaults alone."""
        return [
            Cell(
                (("workload", workload), ("policy", policy), ("parameter", name)),
                Scenario(
                    policy,
                    load.workload,
                    fleet(load.spec, POLICIES_WORKERS),
                    load.span.seconds,
                    load.span.warmup,
                    settings=settings,
                    parameters=contender.parameters,
                ),
            )
            for workload in (QUICK_WORKLOADS if quick else (*WORKLOADS, *FELT))
            for load in [screened(workload, {})]
            for policy in PARAMETERS
            for name, contender, settings in _variants(policy)
            if name == DEFAULT or not quick
        ]

    def measure(self, result: Result, summary: Summary) -> Mapping[str, Value]:
        return figures(result, summary)

    def digest(self, rows: Sequence[Row]) -> Sequence[str]:
        """Return a line for each parameter: throughput over the default's, and Jain's index less the default's."""
        changes = Changes(rows)
        lines = [
            f"| policy | parameter | least | mean | {' | '.join(changes.workloads)} |",
            f"| --- | --- | ---: | ---: |{' ---: |' * len(changes.workloads)}",
        ]
        for policy, parameter in changes.changed:
            gains = [changes.throughput(workload, policy, parameter) for workload in changes.workloads]
            jains = [changes.jain(workload, policy, parameter) for workload in changes.workloads]
            cells = [f"{gain:.2f} / {jain:+.2f}" for gain, jain in zip(gains, jains, strict=True)]
            lines.append(f"| {policy} | {parameter} | {min(gains):.2f} | {fmean(gains):.2f} | {' | '.join(cells)} |")
        return ["Throughput over the default's / Jain's index less the default's:", "", *lines]

    def draw(self, rows: Sequence[Row], figure: "Figure") -> None:
        """Draw the digest in colours, without the defaults themselves."""
        changes = Changes(rows)
        changed = [(policy, parameter) for policy, parameter in changes.changed if parameter != DEFAULT]
        figure.set_figheight(2.6 + 0.2 * len(changed))
        for axes, read, scale in zip(
            figure.subplots(1, 2, sharey=True),
            (changes.throughput, changes.jain_if_any),
            (
                Scale("throughput over the default's (ratio)", 0.5, 1.5, "RdBu"),
                Scale("Jain's index less the default's (ratio)", -0.2, 0.2, "RdBu"),
            ),
            strict=True,
        ):
            values = [[read(workload, *each) for workload in changes.workloads] for each in changed]
            draw_table(figure, axes, values, changes.workloads, scale)
        figure.axes[0].set_yticks(range(len(changed)), [f"{policy}: {parameter}" for policy, parameter in changed])


class Changes:
    """The medians of the table relative to the default's."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = {(row.labels["workload"], row.labels["policy"], row.labels["parameter"]): row for row in rows}
        self.workloads: Final = list(dict.fromkeys(workload for workload, _, _ in self._rows))
        self.changed: Final = list(dict.fromkeys((policy, parameter) for _, policy, parameter in self._rows))

    def throughput(self, workload: str, policy: str, parameter: str) -> float:
        """Return throughput over the default's."""
        usual = self._figure(workload, policy, DEFAULT, "service/s")
        return self._figure(workload, policy, parameter, "service/s") / usual if usual else 0.0

    def jain(self, workload: str, policy: str, parameter: str) -> float:
        """Return Jain's index less the default's."""
        return self._figure(workload, policy, parameter, "Jain") - self._figure(workload, policy, DEFAULT, "Jain")

    def jain_if_any(self, workload: str, policy: str, parameter: str) -> float | None:
        """Return Jain's index less the default's; None if either is missing."""
        measured = [self._rows[workload, policy, name].median("Jain") for name in (parameter, DEFAULT)]
        return None if None in measured else self.jain(workload, policy, parameter)

    def _figure(self, workload: str, policy: str, parameter: str, name: str) -> float:
        return self._rows[workload, policy, parameter].median(name) or 0.0


def _variants(policy: str) -> Sequence[tuple[str, Contender, SchedulerSettings]]:
    usual = SchedulerSettings()
    own = [(name, Contender(policy, *changed), usual) for name, changed in PARAMETERS[policy].items()]
    return [*own, *((name, Contender(policy), settings) for name, settings in SETTINGS.items())]

"""Decode tiers and their loads: 1.2 times what each could serve if its ranks always had equal loads.

Prompts are computed elsewhere, and a step takes C + t·L of the fullest rank. Nothing of this was tuned afterwards.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Final

from bench.lab.frame.conditions import PATIENT, Contender, Span, fleet
from bench.sim.scenario import FRONT_REPORT_SECONDS, Scenario, WorkerSpec
from bench.workloads.papers.balance import BfIo, LongContexts
from bench.workloads.parts.pace import RatedWorkload
from bench.workloads.parts.traffic import Workload
from bench.workloads.recorded.traces import Playback, Trace
from router.core.fleet.window import FixedWindow
from workers.engine.hardware import RankSteps

OVERLOAD: Final = 1.2
"""Load as a multiple of what the tier serves if its ranks are always balanced."""
CLIENTS: Final = 8
RANKS: Final = 8
SAMPLE: Final = 20_000
"""Calls drawn to find the mean cost of a synthetic load's tokens."""
SPAN: Final = 3.0
"""How long calls arrive, in multiples of the time of the longest answers; what has arrived is run to its end.

In a shorter run, slots are free for most of it, and what is served of the whole run depends on its end, when a few long
answers are left.
"""
QUICK_SPAN: Final = Span(75.0, 25.0)
UNLIMITED: Final = 10**9

Sizes = tuple[int, int]
"""Tokens of a prompt and of its answer."""


@dataclass(frozen=True, slots=True)
class Tier:
    """Equal ranks in step, by what one of them can do."""

    slots: int
    """Most requests that run on a rank: B."""
    steps: RankSteps
    answer_seconds: float
    """About how long the longest answers take while the loads are equal. They fill the last slots, so until then there
    is little choice among waiting calls.
    """

    @property
    def rank(self) -> WorkerSpec:
        """One rank, with memory for whatever its slots hold: only slots are scarce, as in the paper."""
        return WorkerSpec(
            kv_tokens=self.slots * 130_000,
            block_size=128,
            max_running=self.slots,
            max_batched_tokens=UNLIMITED,
            steps=self.steps,
            barrier="ranks",
        )

    def span(self, *, quick: bool) -> Span:
        """Return the length of a simulation. It is measured once the longest answers could have ended."""
        return QUICK_SPAN if quick else Span(SPAN * self.answer_seconds, self.answer_seconds)

    def balanced_rate(self, sizes: Iterable[Sizes], ranks: int = RANKS) -> float:
        """Return the calls per second that `ranks` ranks would serve if their loads were always equal.

        A slot holds on average k = Σ o·(p + o/2) / Σ o tokens, since a call stays for its o steps.
        """
        calls = list(sizes)
        outputs = sum(output for _, output in calls)
        held = sum(output * (prompt + output / 2) for prompt, output in calls) / outputs
        step_ms = self.steps.fixed + self.steps.context / 1000 * self.slots * held
        return ranks * self.slots / (step_ms / 1000) / (outputs / len(calls))


MOONCAKE: Final = Tier(16, RankSteps(20.0, 0.07), 70.0)
TIERS: Final[Mapping[str, Tier]] = {
    "long": Tier(8, RankSteps(20.0, 0.3), 300.0),
    "bf-io": Tier(72, RankSteps((0.6 * 72 + 35) / 16, 0.1005), 130.0),
    "mooncake": MOONCAKE,
    "azure": replace(MOONCAKE, answer_seconds=25.0),
}
"""The tier of each load. That of BF-IO is its paper's. Azure's short contexts come to the same ranks as Mooncake's."""
TRACES: Final = ("mooncake", "azure")
"""The loads that need a trace of this kind."""


def loads(traces: Mapping[str, object]) -> list[str]:
    """Return the loads that can be run with these traces."""
    return [name for name in TIERS if name not in TRACES or name in traces]


def saturated(name: str, traces: Mapping[str, object], ranks: int = RANKS, clients: int = CLIENTS) -> Workload:
    """Return a load at its rate for so many ranks, from equal clients."""
    tier = TIERS[name]
    if name in TRACES:
        trace = traces[name]
        assert isinstance(trace, Trace)
        rate = OVERLOAD * tier.balanced_rate([(each.input, each.output) for each in trace.requests], ranks)
        return replace(trace, play=Playback(rate=rate, client_count=clients))
    family = BfIo if name == "bf-io" else LongContexts
    return clients_at(OVERLOAD, family(rate=1.0, client_count=clients), tier, ranks)


def clients_at(load: float, clients: BfIo | LongContexts, tier: Tier, ranks: int = RANKS) -> RatedWorkload:
    """Return these clients with `load` times the rate that balanced ranks could serve."""
    random = Random(0)
    return clients.at_rate(load * tier.balanced_rate([clients.sizes(random) for _ in range(SAMPLE)], ranks))


def balanced(tier: Tier, contender: Contender, workload: Workload, span: Span, ranks: int = RANKS) -> Scenario:
    """Return the scenario of a policy before a tier, in which nothing is rejected and every call ends."""
    return Scenario(
        contender.policy,
        workload,
        fleet(tier.rank, ranks),
        span.seconds,
        span.warmup,
        settings=replace(PATIENT, window=FixedWindow(tier.slots, UNLIMITED)),
        parameters=contender.parameters,
        drain=True,
        progress_seconds=FRONT_REPORT_SECONDS,
    )

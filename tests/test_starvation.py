"""One heavy client and four light ones, in virtual time: the light are not starved, and the fleet serves no less.

The load is that of the demo. Round robin before engines that serve in order of arrival is what most routers do.
"""

from dataclasses import dataclass
from functools import cache

import pytest

from bench.scenario import Scenario, WorkerSpec
from bench.simulation import Simulation
from bench.summary import summarise
from bench.workloads import WORKLOADS
from router.core.policies.dlpm import DlpmParameters
from router.core.policies.dlpm_home import DlpmHomeParameters
from router.core.scheduler import SchedulerSettings
from router.core.window import LearnedWindow, NoWindow

SLOTS = 8
SECONDS, WARMUP = {"a100-mistral-7b": 100.0, "a6000-mistral-7b": 180.0}, 20.0


@dataclass(frozen=True, slots=True)
class Figures:
    """What a run came to."""

    light_ttft_p95: float
    light_requests: int
    cost: float
    """Of all that was served."""


@cache
def figures(policy: str, hardware: str, quantum: float = 20_000.0) -> Figures:
    window = NoWindow() if policy == "rr+fcfs" else LearnedWindow()
    result = Simulation(
        Scenario(
            policy,
            WORKLOADS["heavy-light"],
            (WorkerSpec(hardware, max_running=SLOTS),) * 2,
            SECONDS[hardware],
            WARMUP,
            settings=SchedulerSettings(window=window),
            parameters=(DlpmParameters(quantum), DlpmHomeParameters(quantum)),
        )
    ).run()
    clients = summarise(result)["clients"]
    light = [figures for name, figures in clients.items() if name.startswith("light")]
    return Figures(
        max(float(figures["ttft_p95_s"] or "inf") for figures in light),
        sum(figures["requests"] for figures in light),
        sum(figures["service"] for figures in clients.values()),
    )


@pytest.mark.parametrize("hardware", SECONDS)
@pytest.mark.parametrize("quantum", [2_000.0, 20_000.0, 100_000.0])
@pytest.mark.parametrize("policy", ["d2lpm", "dlpm_home"])
def test_light_clients_are_not_starved_and_the_fleet_serves_no_less(policy: str, quantum: float, hardware: str) -> None:
    """Light requests wait a third of round robin's time at most, and little longer than under VTC, for any quantum."""
    ours, theirs, vtc = figures(policy, hardware, quantum), figures("rr+fcfs", hardware), figures("vtc", hardware)
    assert ours.light_requests >= 100
    assert ours.light_ttft_p95 <= theirs.light_ttft_p95 / 3
    assert ours.light_ttft_p95 <= 1.5 * vtc.light_ttft_p95
    assert ours.cost >= 0.95 * theirs.cost

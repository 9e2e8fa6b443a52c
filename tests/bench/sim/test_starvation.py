"""One heavy client and four light ones, in virtual time: the light are not starved, and the fleet serves no less.

The load is that of the demo. Most routers do round robin before engines that serve in order of arrival.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import inf

import pytest

from bench.lab.frame.measures import first_token_spans, light_records
from bench.report.meters import censored_percentile
from bench.report.summary import summarise
from bench.sim.scenario import Scenario, WorkerSpec
from bench.sim.simulation import Simulation
from bench.workloads.combined import Misbehaving
from bench.workloads.parts.lengths import Lengths
from bench.workloads.registry import WORKLOADS
from bench.workloads.shared_prefix import SharedPrefix
from router.core.fleet.window import LearnedWindow, NoWindow
from router.core.policies.dlpm.dlpm_parameters import DlpmHomeParameters, DlpmParameters
from router.core.scheduler_settings import SchedulerSettings

SLOTS = 8
SECONDS, WARMUP = {"a100-mistral-7b": 100.0, "a6000-mistral-7b": 180.0}, 20.0


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one run."""

    light_ttft_p95: float
    light_requests: int
    cost: float
    """The cost of everything that was served."""


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
    """For any quantum, light requests wait at most a third of round robin's time, and little longer than under VTC."""
    ours, theirs, vtc = figures(policy, hardware, quantum), figures("rr+fcfs", hardware), figures("vtc", hardware)
    assert ours.light_requests >= 100
    assert ours.light_ttft_p95 <= theirs.light_ttft_p95 / 3
    assert ours.light_ttft_p95 <= 1.5 * vtc.light_ttft_p95
    assert ours.cost >= 0.95 * theirs.cost


def short_calls(clients: int, **load: float) -> SharedPrefix:
    """Return a workload of calls that cost a hundredth of a quantum each."""
    lengths = {"prefix": Lengths(64), "question": Lengths(64), "output": Lengths(48)}
    return SharedPrefix(client_count=clients, groups=4, own=True, **lengths, **load)  # type: ignore[arg-type]


@cache
def beside_many(policy: str) -> tuple[Sequence[float], float]:
    """Return the median and p95 in seconds to the first token of eight light clients beside twenty heavy ones, and the
    throughput in requests per second.
    """
    workload = Misbehaving(heavy=short_calls(20, concurrency=20), light=short_calls(8, rate=4.0))
    workers = (WorkerSpec("a100-mistral-7b", max_running=SLOTS),) * 2
    result = Simulation(Scenario(policy, workload, workers, 50.0, WARMUP)).run()
    light = [record for record in light_records(result) if record.arrived >= WARMUP]
    spans = list(first_token_spans(light, result.seconds))
    return [censored_percentile(spans, share) or inf for share in (0.5, 0.95)], summarise(result)["requests_per_s"]


@pytest.mark.parametrize("policy", ["d2lpm", "dlpm_home"])
def test_a_light_client_need_not_wait_for_the_quanta_of_many(policy: str) -> None:
    """Twenty heavy clients at sixteen slots have deficits that last a minute, and light clients do not wait for
    that.
    """
    (waits, throughput), (vtc, least) = beside_many(policy), beside_many("vtc")
    assert [wait < other for wait, other in zip(waits, vtc, strict=True)] == [True, True]
    assert throughput >= 0.99 * least

"""The purpose of each policy, in virtual time on emulated A100s: it delivers what it promises, at little cost
elsewhere.

Every figure is compared with another policy's under the same load. Seeds and loads are those of the documents; `python
-m bench simulate --report-seconds 0.1` repeats the same runs.
"""

from collections.abc import Hashable
from functools import cache
from statistics import mean

import pytest

from bench.report.records import Record, Result
from bench.report.summary import summarise
from bench.sim.scenario import Scenario, WorkerSpec
from bench.sim.simulation import Simulation
from bench.workloads.combined import Misbehaving
from bench.workloads.documents import SharedDocuments
from bench.workloads.parts.traffic import Workload
from bench.workloads.registry import WORKLOADS
from bench.workloads.unrelated import Unrelated

OURS = ("d2lpm", "dlpm_home")
FOUR = (WorkerSpec(),) * 4
COMES = 45.0
SMALL_CACHES = (WorkerSpec(kv_tokens=120_000),) * 4
"""Each cache holds 20 prefixes of 6k tokens."""


@cache
def simulated(scenario: Hashable) -> Result:
    assert isinstance(scenario, Scenario)
    return Simulation(scenario).run()


def run(
    policy: str, workload: Workload, workers: tuple[WorkerSpec, ...], seconds: float = 35.0, warmup: float = 15.0
) -> Result:
    """Run the simulation, once for all callers."""
    return simulated(Scenario(policy, workload, workers, seconds, warmup))


def throughput(result: Result) -> float:
    return summarise(result)["throughput_tokens_per_s"]


def hit_rate(result: Result) -> float:
    rate = summarise(result)["hit_rate"]
    assert rate is not None
    return rate


@pytest.mark.parametrize("policy", OURS)
def test_documents_stay_where_they_are_cached(policy: str) -> None:
    """With more documents than one cache holds, the policy is nearly as good as a placement by hash."""
    result, hashed = (run(each, WORKLOADS["documents"], FOUR, 45.0, 15.0) for each in (policy, "consistent_hash"))
    assert hit_rate(result) >= 0.9
    assert throughput(result) >= 0.9 * throughput(hashed)


@pytest.mark.parametrize("policy", OURS)
def test_a_prefix_that_all_clients_share_is_served_by_all_workers(policy: str) -> None:
    """A hot prefix does not pin the fleet's load to one worker."""
    result, balanced = (run(each, WORKLOADS["prefix-1"], FOUR) for each in (policy, "least_requests"))
    assert throughput(result) >= 0.97 * throughput(balanced)
    served = [totals.prompt_tokens + totals.output_tokens for totals in result.workers.values()]
    assert max(served) <= 1.3 * mean(served)


@pytest.mark.parametrize("prefixes", [40, 400])
@pytest.mark.parametrize(("policy", "gain"), [("d2lpm", 1.2), ("dlpm_home", 1.3)])
def test_prefixes_that_exceed_a_cache_are_divided_among_workers(policy: str, gain: float, prefixes: int) -> None:
    """With prefixes beyond one cache, placement by prefix serves more than placement by load."""
    workload = WORKLOADS[f"prefix-{prefixes}"]
    result, balanced = (run(each, workload, SMALL_CACHES) for each in (policy, "least_requests"))
    assert throughput(result) >= gain * throughput(balanced)


@pytest.mark.parametrize("policy", OURS)
def test_a_slow_worker_does_not_slow_the_others(policy: str) -> None:
    """A worker that is four times slower gets only what it can serve."""
    workload = SharedDocuments(documents=4, tokens=6000, rate=75.0)
    workers = (*(WorkerSpec(),) * 3, WorkerSpec(speed=0.25))
    result, balanced = (run(each, workload, workers, 25.0, 10.0) for each in (policy, "least_requests"))
    assert throughput(result) >= 0.95 * throughput(balanced)


@pytest.mark.parametrize("policy", OURS)
def test_a_worker_that_joins_an_overloaded_fleet_is_used(policy: str) -> None:
    """From 30 seconds on, it carries at least 0.8 of its share."""
    workers = (*(WorkerSpec(),) * 3, WorkerSpec(joins=5.0))
    result = run(policy, SharedDocuments(documents=40, tokens=6000, rate=100.0), workers, 45.0, 5.0)
    last = [r for r in result.records if r.finished is not None and 35.0 <= r.finished < 45.0]
    carried = sum(served(record) for record in last if record.worker == "w4")
    assert carried >= 0.8 * sum(served(record) for record in last) / 4


def served(record: Record) -> int:
    return record.input_tokens + record.output_tokens


def ttft_p95(result: Result, name: str) -> float:
    """Return the largest value of the clients whose names begin like this."""
    clients = summarise(result)["clients"]
    times = [figures["ttft_p95_s"] for client, figures in clients.items() if client.startswith(name)]
    assert times
    return max(time if time is not None else float("inf") for time in times)


LIGHT = Unrelated(client_count=4, input=300, output=30, rate=2.0, spread=0.3)


@pytest.mark.parametrize("policy", OURS)
def test_an_engine_that_orders_by_match_starves_nobody(policy: str) -> None:
    """Uncached requests of light clients wait little longer than with an engine that serves in order of arrival."""
    hot = SharedDocuments(documents=2, tokens=3000, output=100, concurrency=64)
    workload = Misbehaving(heavy=hot, light=LIGHT)
    fcfs, lpm = (
        run(policy, workload, (WorkerSpec(dialect="sglang", order=order, max_running=8),)) for order in ("fcfs", "lpm")
    )
    assert ttft_p95(lpm, "light") <= 1.5 * ttft_p95(fcfs, "light")
    assert throughput(lpm) >= 0.9 * throughput(fcfs)


@pytest.mark.parametrize("policy", OURS)
def test_calls_that_do_not_stream_block_nobody(policy: str) -> None:
    """Light clients wait at most a third of their time under rr+fcfs, and the engine stays as busy."""
    silent = Unrelated(client_count=1, input=3000, output=100, spread=0.5, concurrency=64, stream=False)
    workload = Misbehaving(heavy=silent, light=LIGHT)
    result, plain = (run(each, workload, (WorkerSpec(max_running=16),), 95.0) for each in (policy, "rr+fcfs"))
    assert ttft_p95(result, "light") <= ttft_p95(plain, "light") / 3
    assert throughput(result) >= 0.97 * throughput(plain)


@pytest.mark.parametrize("policy", OURS)
def test_using_an_idle_machine_alone_costs_nothing_later(policy: str) -> None:
    """When another client sends very many calls, the first client's next call waits at most as long as one of them
    takes.
    """
    alone = Unrelated(client_count=1, input=20_000, output=200, spread=0.3, concurrency=1)
    crowd = Unrelated(client_count=1, input=500, output=200, spread=0.3, times=(COMES,) * 400)
    result = run(policy, Misbehaving(heavy=crowd, light=alone), (WorkerSpec(max_running=4),), 90.0, 5.0)
    first = next(record for record in result.records if record.client == "light" and record.arrived >= COMES)
    assert first.started is not None
    assert first.started - first.arrived <= max(seconds_served(r) for r in result.records if r.client == "heavy")


def seconds_served(record: Record) -> float:
    if record.finished is None or record.dispatched is None:
        return 0.0
    return record.finished - record.dispatched

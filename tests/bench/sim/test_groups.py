"""Ranks in step in virtual time: a barrier changes times, and the figures of a group are those of its steps."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.report.summary import summarise
from bench.sim.command import simulate
from bench.sim.scenario import Scenario, WorkerSpec
from bench.sim.simulation import Simulation
from bench.workloads.parts.traffic import Call, Outcome
from router.core.fleet.window import FixedWindow, NoWindow
from router.core.model.events import WorkerJoined
from router.core.policies.balance.balance_parameters import BrhParameters
from router.core.scheduler_settings import SchedulerSettings
from tests.bench.sim.simulated import EventLog, Scripted, own_prompt
from workers.engine.hardware import RankSteps

STEPS = RankSteps(20.0, 10.0)
"""A step of 20 ms, and 10 ms more per 1,000 tokens of context."""
RANK = WorkerSpec(kv_tokens=8000, max_running=4, max_batched_tokens=8000, steps=STEPS, barrier="ranks")
CALLS = st.builds(
    lambda number, at, size, output: Call(at, own_prompt(number, size), output, output),
    st.integers(0, 10_000),
    st.floats(0, 3).map(lambda at: round(at, 2)),
    st.integers(1, 900),
    st.integers(1, 60),
)
LOADS = st.lists(st.tuples(st.sampled_from("ab"), CALLS), min_size=1, max_size=20).map(tuple).map(Scripted)


def scenario(workload: Scripted, worker: WorkerSpec = RANK, ranks: int = 2, policy: str = "rr+fcfs") -> Scenario:
    wide = SchedulerSettings(window=NoWindow())
    return Scenario(policy, workload, (worker,) * ranks, 6.0, settings=wide, drain=True)


def call(number: int, size: int, output: int, at: float = 0.0) -> tuple[str, Call]:
    return "a", Call(at, own_prompt(number, size), output, output)


@given(LOADS)
@settings(max_examples=50, deadline=None)
def test_a_group_of_one_steps_as_its_engine_does(workload: Scripted) -> None:
    """A barrier for one rank changes no record and no total."""
    grouped = simulate(scenario(workload, ranks=1))
    assert replace(grouped, groups={}) == simulate(scenario(workload, replace(RANK, barrier=None), ranks=1))


@given(LOADS, st.sampled_from(["rr+fcfs", "dlpm_home", "least_requests"]))
@settings(max_examples=50, deadline=None)
def test_every_call_ends_once_behind_a_barrier(workload: Scripted, policy: str) -> None:
    """All calls are done, each engine is empty at the end, and its answers are as long as was asked."""
    simulation = Simulation(scenario(workload, ranks=3, policy=policy))
    records = simulation.run().records
    assert len(records) == len(workload.calls)
    assert {record.outcome for record in records} == {Outcome.DONE}
    assert sum(record.output_tokens for record in records) == sum(each.output_tokens for _, each in workload.calls)
    for worker in simulation.workers.values():
        assert not worker.engine.has_work
        worker.engine.check_integrity()


def test_the_lighter_rank_waits_for_the_heavier_one() -> None:
    """A call of 100 tokens beside one of 900 gets its tokens every 29 ms, not every 21."""
    heavy, light = call(1, 900, 50), call(2, 100, 10)
    records = simulate(scenario(Scripted((heavy, light)))).records
    lasting = (20 * 10 + 10 * sum(900 + step for step in range(10)) / 1000) / 1000
    assert records[1].finished == pytest.approx(lasting + 0.001)


def test_a_call_that_arrives_amid_a_step_joins_at_its_end() -> None:
    """A second rank's call waits for the end of the step that the first rank is in, and then takes part."""
    first, second = call(1, 1000, 5), call(2, 100, 2, at=0.01)
    records = simulate(scenario(Scripted((first, second)))).records
    assert records[1].started == pytest.approx(0.0005 + 0.030 + (20 + 10 * 1.001) / 1000 + 0.0005)


def test_the_figures_of_a_group_are_those_of_its_steps() -> None:
    """Imbalance, idle share and attention share of two ranks, one of which is idle for all but two steps."""
    workload = Scripted((call(1, 1000, 4), call(2, 400, 2)))
    group = summarise(simulate(scenario(workload)))["groups"]["ranks"]
    loads = [(1000, 400), (1001, 401), (1002, 0), (1003, 0)]
    gaps = sum(heavy - light for heavy, light in loads)
    attention = sum(heavy for heavy, _ in loads) / 100
    assert group["ranks"] == 2
    assert group["steps"] == 4
    assert group["imbalance_tokens"] == group["imbalance_sum_tokens"] == gaps / 4
    assert group["idle_share"] == pytest.approx(gaps / (2 * sum(heavy for heavy, _ in loads)))
    assert group["step_ms"] == pytest.approx((80 + attention) / 4)
    assert group["attention_share"] == pytest.approx(attention / (80 + attention))


def test_three_ranks_have_two_measures_of_imbalance() -> None:
    """The tables' is the largest less the smallest load, the theory's the sum over all ranks."""
    workload = Scripted((call(1, 1000, 1), call(2, 400, 1), call(3, 300, 1)))
    group = summarise(simulate(scenario(workload, ranks=3)))["groups"]["ranks"]
    assert (group["imbalance_tokens"], group["imbalance_sum_tokens"]) == (700, 1300)


def test_the_router_knows_which_workers_are_ranks_of_a_group() -> None:
    """Each rank joins with its number and its barrier, an engine by itself with neither."""
    mixed = (RANK, replace(RANK, barrier=None), RANK, replace(RANK, barrier="others"))
    log = EventLog()
    simulate(replace(scenario(Scripted((call(1, 10, 1),))), workers=mixed), [log])
    facts = [event.worker for _, event in log.events if isinstance(event, WorkerJoined)]
    assert [(worker.rank, worker.barrier) for worker in facts] == [
        (0, "ranks"),
        (None, None),
        (1, "ranks"),
        (0, "others"),
    ]


@pytest.mark.parametrize("other", [replace(RANK, joins=1.0), replace(RANK, leaves=2.0), replace(RANK, crashes=True)])
def test_the_ranks_of_a_group_live_together(other: WorkerSpec) -> None:
    """A rank that would join, leave or crash by itself is refused: one of them dead is the group dead."""
    with pytest.raises(ValueError, match="together"):
        replace(scenario(Scripted(())), workers=(RANK, other))


def test_the_whole_run_counts_what_was_put_off() -> None:
    """Throughput over the whole run includes the drain, and the longest wait is that for a place at a worker."""
    workload = Scripted((call(1, 10, 400), call(2, 10, 200, at=0.5)))
    one = replace(scenario(workload, ranks=1, policy="pooled_fcfs"), seconds=1.0)
    one = replace(one, settings=SchedulerSettings(window=FixedWindow(requests=1)))
    result = simulate(one)
    whole, first = summarise(result)["whole_run"], result.records[0]
    assert first.finished is not None
    assert whole["longest_wait_s"] == pytest.approx(first.finished - 0.5)
    assert whole["ttft_max_s"] == pytest.approx(first.finished - 0.5, abs=0.05)
    last = result.records[1].finished
    assert last is not None
    assert whole["output_tokens_per_s"] == pytest.approx(600 / last)


def test_without_a_drain_the_whole_run_ends_with_the_measured_time() -> None:
    """Tokens of calls that have not ended are not counted over the shorter time until the last call that has."""
    workload = Scripted((call(1, 10, 10), call(2, 10, 400)))
    result = simulate(replace(scenario(workload, ranks=1), seconds=1.0, drain=False))
    done, cut = result.records
    assert done.finished is not None
    assert cut.outcome is Outcome.UNFINISHED
    output = done.output_tokens + cut.output_tokens
    assert summarise(result)["whole_run"]["output_tokens_per_s"] == pytest.approx(output / 1.0)


def test_an_oracle_knows_answers_whose_clients_set_no_limit() -> None:
    """The policy that is told the truth gets each answer's length from the simulation, not from the request."""
    calls = tuple(("a", Call(0.01 * number, own_prompt(number, 100 + 40 * number), 5 + number)) for number in range(20))
    told = replace(scenario(Scripted(calls), policy="brh"), parameters=(BrhParameters(predictor="oracle"),))
    records = simulate(replace(told, settings=SchedulerSettings(window=FixedWindow(4, 10**6)))).records
    assert [record.output_tokens for record in records] == [5 + number for number in range(20)]


RANKS = st.builds(
    WorkerSpec,
    dialect=st.sampled_from(["vllm", "sglang"]),
    kv_tokens=st.integers(1300, 4000),
    max_running=st.integers(1, 6),
    max_batched_tokens=st.sampled_from([64, 4000]),
    max_queued=st.none() | st.just(2),
    steps=st.sampled_from([STEPS, RankSteps(5.0, 40.0, 0.1)]),
    barrier=st.sampled_from(["ranks", "others"]),
)
MIXED = st.builds(
    Scenario,
    policy=st.sampled_from(["d2lpm", "rr+fcfs", "dlpm_balance", "br0"]),
    workload=LOADS,
    workers=st.lists(RANKS, min_size=1, max_size=4).map(tuple),
    seconds=st.just(4.0),
    warmup=st.sampled_from([0.0, 1.0]),
    settings=st.sampled_from([SchedulerSettings(window=FixedWindow(4, 600)), SchedulerSettings(window=NoWindow())]),
    drain=st.booleans(),
    latency=st.sampled_from([0.0005, 0.0, 0.02]),
)


@given(MIXED)
@settings(max_examples=100, deadline=None)
def test_jumps_of_ranks_change_nothing(mixed: Scenario) -> None:
    """Groups whose engines jump give the scheduler equal events at equal times, and equal records and totals."""
    jumped, stepped = EventLog(), EventLog()
    result = simulate(mixed, [jumped])
    assert result == simulate(replace(mixed, jumps=False), [stepped])
    assert jumped.events == stepped.events
    assert jumped.commands == stepped.commands

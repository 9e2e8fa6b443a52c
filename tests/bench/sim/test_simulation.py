"""The virtual-time driver: its events, and that no call is lost or invented and nothing depends on chance."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.sim.command import simulate
from bench.sim.scenario import Scenario, WorkerSpec
from bench.sim.simulation import Simulation
from bench.workloads.documents import SharedDocuments
from bench.workloads.parts.traffic import Call, Ending, Outcome
from bench.workloads.registry import WORKLOADS
from bench.workloads.unrelated import Unrelated
from router.core.clients.queue_limits import WaitingLimits
from router.core.fleet.window import FixedWindow, NoWindow
from router.core.model.commands import Dispatch
from router.core.model.events import Arrived, Progressed, Started, WorkerReported
from router.core.scheduler_settings import SchedulerSettings
from tests.bench.sim.simulated import EventLog, Scripted, own_prompt, prompt
from workers.engine.hardware import HARDWARE, Batch
from workers.engine.model import Dialect

A100 = HARDWARE["a100-mistral-7b"].step_seconds
SMALL = WorkerSpec(kv_tokens=4000, max_running=6)


def scripted(*calls: Call, policy: str = "rr+fcfs", worker: WorkerSpec = SMALL, seconds: float = 30.0) -> Scenario:
    """Return a scenario in which one client makes all calls."""
    return Scenario(policy, Scripted(tuple(("c", call) for call in calls)), (worker,), seconds, drain=True)


CALLS = st.builds(
    Call,
    at=st.floats(0, 3).map(lambda at: round(at, 2)),
    prompt=st.builds(prompt, st.integers(1, 300), st.none() | st.integers(0, 2), st.sampled_from([100, 700])),
    output_tokens=st.integers(1, 80),
    output_limit=st.none() | st.just(80),
    streamed=st.booleans(),
    cancel_after=st.none() | st.floats(0.0, 2.0),
)
WORKERS = st.builds(
    WorkerSpec,
    hardware=st.sampled_from(["a100-mistral-7b", "instant"]),
    speed=st.sampled_from([1.0, 0.25]),
    dialect=st.sampled_from(["vllm", "sglang"]),
    kv_tokens=st.integers(1300, 4000),
    max_running=st.integers(1, 8),
    max_batched_tokens=st.sampled_from([64, 2048]),
    max_queued=st.none() | st.just(2),
    joins=st.sampled_from([0.0, 0.5]),
    leaves=st.sampled_from([float("inf"), 1.5]),
    crashes=st.booleans(),
    reports_capacity=st.booleans(),
)
SCENARIOS = st.builds(
    Scenario,
    policy=st.sampled_from(["d2lpm", "least_requests+fcfs", "pooled_fcfs"]),
    workload=st.lists(st.tuples(st.sampled_from("ab"), CALLS), min_size=1, max_size=20).map(tuple).map(Scripted),
    workers=st.lists(WORKERS, min_size=1, max_size=3).map(tuple),
    seconds=st.just(4.0),
    warmup=st.sampled_from([0.0, 1.0]),
    settings=st.sampled_from([SchedulerSettings(window=FixedWindow(4, 600)), SchedulerSettings(window=NoWindow())]),
    drain=st.booleans(),
    latency=st.sampled_from([0.0005, 0.0, 0.02]),
)


@given(SCENARIOS)
@settings(max_examples=200, deadline=None)
def test_jumps_change_nothing(scenario: Scenario) -> None:
    """The scheduler gets equal events at equal times, and all records are equal."""
    jumped, stepped = EventLog(), EventLog()
    result = simulate(scenario, [jumped])
    assert result == simulate(replace(scenario, jumps=False), [stepped])
    assert jumped.events == stepped.events
    assert jumped.commands == stepped.commands


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
@pytest.mark.parametrize("name", ["chat", "slot-bound", "heavy-light", "kv-bound"])
def test_jumps_change_no_workload(name: str, dialect: Dialect) -> None:
    """The workloads run the same with jumps as without, on workers that run out of slots and memory."""
    workers = (WorkerSpec(dialect=dialect, kv_tokens=20_000, max_running=16),) * 2
    scenario = Scenario("d2lpm", WORKLOADS[name], workers, 2.0)
    assert simulate(scenario) == simulate(replace(scenario, jumps=False))


@given(SCENARIOS)
@settings(max_examples=100, deadline=None)
def test_every_call_ends_once(scenario: Scenario) -> None:
    """Each call has one record; after the drain none is unfinished and the scheduler holds none."""
    simulation = Simulation(replace(scenario, drain=True))
    records = simulation.run().records
    assert sorted(record.id for record in records) == sorted({record.id for record in records})
    assert Outcome.UNFINISHED not in {record.outcome for record in records}
    assert simulation.scheduler.live == 0
    simulation.scheduler.ledger.check_conservation()
    for worker in simulation.workers.values():
        assert not worker.engine.has_work
        worker.engine.check_integrity()


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_what_is_charged_is_what_the_engines_computed(dialect: Dialect) -> None:
    """After a drained run the clients' accounts hold exactly the tokens that the engines counted."""
    workload = SharedDocuments(documents=5, tokens=600, rate=20.0, client_count=3)
    workers = (WorkerSpec(dialect=dialect, kv_tokens=8000),) * 2
    simulation = Simulation(Scenario("d2lpm", workload, workers, 5.0, drain=True))
    records = simulation.run().records
    served = [account.served for account in simulation.scheduler.ledger.accounts.values()]
    counters = [worker.engine.counters for worker in simulation.workers.values()]
    assert {record.outcome for record in records} == {Outcome.DONE}
    assert sum(tokens.output for tokens in served) == sum(each.generation_tokens for each in counters)
    assert sum(tokens.cached for tokens in served) == sum(each.prefix_hits for each in counters)
    assert sum(tokens.extend + tokens.cached for tokens in served) == sum(each.prompt_tokens for each in counters)
    assert sum(record.input_tokens for record in records) == sum(each.prompt_tokens for each in counters)


def test_a_call_submitted_as_a_step_ends_is_in_the_next_step() -> None:
    """With workers in lockstep and no latency, one's end sends the other a request at the instant at which a step
    ends.
    """

    def two_more(_: Call, ending: Ending) -> list[Call]:
        return [Call(ending.at, own_prompt(number, 100), 5) for number in (2, 3)]

    calls = (Call(0.0, own_prompt(0, 100), 10, then=two_more), Call(0.0, own_prompt(1, 100), 50))
    scenario = replace(scripted(*calls), workers=(SMALL, SMALL), latency=0.0)
    result = simulate(scenario)
    ends = {record.id: record for record in result.records}
    both = A100(Batch(extends=[(100, 100)], decodes=1, decode_context=110))
    assert ends["r4"].started == pytest.approx((ends["r1"].finished or 0) + both)
    assert result == simulate(replace(scenario, jumps=False))


def test_a_seed_determines_the_result() -> None:
    """The same scenario gives the same records, samples and totals, and another seed gives others."""
    scenario = Scenario("d2lpm", WORKLOADS["heavy-light"], (WorkerSpec(),) * 2, 3.0)
    assert simulate(scenario) == simulate(scenario)
    assert simulate(scenario).records != simulate(replace(scenario, seed=1)).records


def test_a_call_takes_its_steps_and_the_latency_of_both_ways() -> None:
    """A call lasts the latency to the engine, one prefill step, a step per further token, and the latency back."""
    (record,) = simulate(scripted(Call(1.0, own_prompt(0, 100), 3))).records
    prefill = A100(Batch(extends=[(100, 100)]))
    decodes = [A100(Batch(decodes=1, decode_context=context)) for context in (101, 102)]
    assert record.dispatched == 1.0
    assert record.started == pytest.approx(1.0 + 0.0005 + prefill + 0.0005)
    assert record.finished == pytest.approx(1.0 + 0.0005 + prefill + sum(decodes) + 0.0005)


def test_a_slow_worker_takes_longer() -> None:
    """At a quarter of the speed each step takes four times as long."""
    call = Call(0.0, own_prompt(0, 100), 20)
    fast, slow = (
        simulate(replace(scripted(call, worker=WorkerSpec(speed=speed)), latency=0.0)).records[0] for speed in (1, 0.25)
    )
    assert slow.finished == pytest.approx(4 * (fast.finished or 0))


def test_progress_is_reported_every_tenth_of_a_second() -> None:
    """From the first token on, the scheduler gets cumulative counts at fixed intervals, and then the usage."""
    event_log = EventLog()
    (record,) = simulate(scripted(Call(0.0, own_prompt(0, 100), 60)), [event_log]).records
    (started,) = [now for now, event in event_log.events if isinstance(event, Started)]
    reported = [
        (now, *event.output_tokens.values()) for now, event in event_log.events if isinstance(event, Progressed)
    ]
    assert started == record.started
    assert [now for now, _ in reported] == pytest.approx([started + 0.1 * (n + 1) for n in range(len(reported))])
    decode = A100(Batch(decodes=1, decode_context=130))
    for now, tokens in reported:
        assert tokens == pytest.approx(1 + (now - started) / decode, abs=1)
    assert len(reported) == int(((record.finished or 0) - started) / 0.1)


def test_a_call_that_does_not_stream_shows_no_progress() -> None:
    """The scheduler gets neither its first token nor its progress, only its end."""
    event_log = EventLog()
    (record,) = simulate(scripted(Call(0.0, own_prompt(0, 100), 60, streamed=False)), [event_log]).records
    assert not [event for _, event in event_log.events if isinstance(event, Started | Progressed)]
    assert record.outcome is Outcome.DONE
    assert record.started is None


def test_a_cancelled_call_leaves_the_engine() -> None:
    """A client that disconnects pays for the tokens it got, and its slot is free for the next call."""
    one_slot = WorkerSpec(max_running=1)
    first = Call(0.0, own_prompt(0, 100), 500, cancel_after=0.5)
    second = Call(0.1, own_prompt(1, 100), 5)
    scenario = scripted(first, second, worker=one_slot)
    left, next_one = simulate(replace(scenario, settings=SchedulerSettings(window=NoWindow()))).records
    assert left.outcome is Outcome.CANCELLED
    assert left.finished == 0.5
    assert 0 < left.output_tokens < 100
    assert next_one.started is not None
    assert 0.5 < next_one.started < 0.6


def test_a_call_cancelled_while_it_waits_never_reaches_an_engine() -> None:
    """The call's record has no worker, and the engine gets only one request."""
    calls = (Call(0.0, own_prompt(0, 100), 100), Call(0.1, own_prompt(1, 100), 5, cancel_after=0.1))
    simulation = Simulation(replace(scripted(*calls), settings=SchedulerSettings(window=FixedWindow(requests=1))))
    records = simulation.run().records
    assert [(record.outcome, record.worker) for record in records] == [("done", "w1"), ("cancelled", None)]
    assert [worker.engine.counters.submitted_requests for worker in simulation.workers.values()] == [1]


def test_refusals_are_recorded() -> None:
    """A call that the scheduler rejects is `rejected`, one that the engine rejects is `failed`, and no client is
    charged.
    """
    window, limits = FixedWindow(requests=1), WaitingLimits(requests=1)
    rejected = scripted(*(Call(0.0, own_prompt(n, 100), 5) for n in range(3)))
    full = replace(rejected, settings=SchedulerSettings(window=window, waiting=limits))
    assert [record.outcome for record in simulate(full).records] == ["done", "done", "rejected"]
    too_large = Simulation(scripted(Call(0.0, own_prompt(0, 5000), 5)))
    assert [record.outcome for record in too_large.run().records] == ["failed"]
    assert not any(account.charged.extend for account in too_large.scheduler.ledger.accounts.values())


def test_workers_come_and_go() -> None:
    """A worker gets no calls before it joins or after it leaves; its running calls end, unless it crashes."""
    calls = [Call(at / 10, own_prompt(at, 50), 100) for at in range(40)]
    late, early = replace(SMALL, joins=1.0), replace(SMALL, leaves=2.0)
    for crashes in (False, True):
        workers = (late, replace(early, crashes=crashes))
        records = simulate(replace(scripted(*calls), workers=workers)).records
        assert min(r.dispatched for r in records if r.worker == "w1" and r.dispatched is not None) >= 1.0
        assert max(r.dispatched for r in records if r.worker == "w2" and r.dispatched is not None) < 2.0
        assert {r.outcome for r in records} == ({Outcome.DONE, Outcome.FAILED} if crashes else {Outcome.DONE})
        assert all(r.finished == 2.0 for r in records if r.outcome is Outcome.FAILED)


def test_capacity_is_reported_or_hidden() -> None:
    """Polls come twice a second, with the engine's capacity or without."""
    for reports, capacity in ((True, 4000 - 16), (False, None)):
        event_log = EventLog()
        simulate(
            replace(scripted(worker=replace(SMALL, reports_capacity=reports), seconds=2.2), drain=False), [event_log]
        )
        polls = [(now, event) for now, event in event_log.events if isinstance(event, WorkerReported)]
        assert [now for now, _ in polls] == [0.0, 0.5, 1.0, 1.5, 2.0]
        assert {event.kv_tokens for _, event in polls} == {capacity}


def test_weights_reach_the_scheduler() -> None:
    """A client's weight is that of its requests and of the result."""
    calls = (("a", Call(0.0, own_prompt(0, 50), 5)), ("b", Call(0.0, own_prompt(1, 50), 5)))
    event_log = EventLog()
    result = simulate(Scenario("d2lpm", Scripted(calls, (("b", 4.0),)), seconds=5.0), [event_log])
    arrived = {
        event.request.client: event.request.weight for _, event in event_log.events if isinstance(event, Arrived)
    }
    assert arrived == dict(result.weights) == {"a": 1.0, "b": 4.0}


def test_predictions_equal_the_engines_hits() -> None:
    """The second call with a document hits what the router predicted, within two blocks."""
    calls = (Call(0.0, prompt(40, text=0), 5), Call(2.0, prompt(60, text=0), 5))
    event_log = EventLog()
    records = simulate(scripted(*calls, worker=WorkerSpec()), [event_log]).records
    predicted = [command.cached_tokens for _, command in event_log.commands if isinstance(command, Dispatch)]
    assert [record.predicted_cached_tokens for record in records] == predicted
    assert predicted[0] == records[0].cached_tokens == 0
    assert records[1].cached_tokens == 5040  # the first 5040 tokens are equal, in blocks of 16
    assert 5040 - 32 <= predicted[1] <= 5040


def test_the_engines_own_queue_is_measured() -> None:
    """Without a window, requests beyond the engine's slots wait in the engine; with one they wait in the router."""
    workload = Unrelated(input=400, output=50, concurrency=16, client_count=1)
    worker = WorkerSpec(max_running=4)
    scenario = Scenario("rr+fcfs", workload, (worker,), 10.0, 2.0, settings=SchedulerSettings(window=NoWindow()))
    totals = simulate(scenario).workers["w1"]
    assert totals.waiting_requests_p95 == 12
    assert totals.waiting_tokens_p95 == 12 * 400
    narrow = replace(scenario, settings=SchedulerSettings(window=FixedWindow(requests=4)))
    assert simulate(narrow).workers["w1"].waiting_requests_p95 <= 1


def test_busy_time_is_that_of_steps() -> None:
    """A worker that always has work is busy all the measured time, one with a single call for that call's duration."""
    workload = Unrelated(input=400, output=50, concurrency=16, client_count=1)
    for jumps in (True, False):
        full = simulate(Scenario("rr+fcfs", workload, seconds=5.0, warmup=1.234, jumps=jumps)).workers["w1"]
        assert full.busy_seconds == pytest.approx(5.0 - 1.234)
    single = simulate(scripted(Call(1.0, own_prompt(0, 100), 20)))
    took = (single.records[0].finished or 0) - 1.0 - 2 * 0.0005
    assert single.workers["w1"].busy_seconds == pytest.approx(took)

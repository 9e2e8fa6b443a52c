"""What clients experience: the figures, from constructed records and from small simulations."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf

import pytest

from bench.lab.frame.felt_loads import FELT_LOADS, WORKERS
from bench.lab.frame.measures import asked, jain_of_shares, light_times, max_min, modest
from bench.lab.sweeps.felt import CONTENDERS, Felt, cell
from bench.report.records import Record, Result, ServiceSample
from bench.report.summary import Summary, summarise
from bench.sim.scenario import Scenario, WorkerSpec
from bench.sim.simulation import Simulation
from bench.workloads.crowds import CHATS, LIGHT, POLITE, Crowd, Flood
from bench.workloads.parts.traffic import Outcome

BEGIN, END = 10.0, 110.0


def call(
    client: str, arrived: float, started: float | None, finished: float | None, output: int = 11, size: int = 28
) -> Record:
    """Return a call of 50 cost units: 28 input tokens, and 11 output tokens that count twice."""
    outcome = Outcome.UNFINISHED if finished is None else Outcome.DONE
    name = f"{client}{arrived}"
    return Record(name, client, outcome, arrived, None, started, finished, None, None, size, 0, None, output)


def result(calls: Sequence[Record], service: Mapping[str, float]) -> Result:
    samples = (ServiceSample(BEGIN, {}, {}), ServiceSample(END, service, service))
    return Result(END, BEGIN, tuple(calls), {}, dict.fromkeys(service, 1.0), samples)


def measured(calls: Sequence[Record], service: Mapping[str, float]) -> Mapping[str, object]:
    run = result(calls, service)
    return Felt().measure(run, summarise(run))


def test_waits_last_until_the_first_token_or_the_end() -> None:
    """A call from the warm-up counts if it still waited after it."""
    calls = [
        call("light-1", 0.0, 9.0, 9.5),
        call("light-1", 9.5, 12.0, 13.0),
        call("light-1", 105.0, None, None),
        call("crowd-1", 1.0, 31.0, 40.0),
        call("crowd-2", 40.0, None, None),
    ]
    figures = measured(calls, {"light-1": 50.0, "crowd-1": 50.0, "crowd-2": 0.0})
    assert figures["light longest"] == figures["light p95"] == 5.0
    assert figures["others longest"] == 70.0
    assert figures["unserved"] == 1.0
    assert figures["TPOT"] == pytest.approx(900.0)


def test_a_fair_round_serves_every_client_once() -> None:
    """A round lasts the number of clients over the calls per second, and the longest unserved time is given in
    rounds.
    """
    calls = [call("a", 0.0, 20.0, 21.0), call("b", 0.0, 60.0, 61.0), call("a", 21.0, 30.0, 31.0)]
    figures = measured(calls, {"a": 100.0, "b": 50.0})
    assert figures["fair round"] == pytest.approx(2 / (3 / 100))
    assert figures["unserved rounds"] == pytest.approx(60 / (2 / (3 / 100)))


def test_a_closed_loop_client_has_infinite_demand() -> None:
    """Other clients demand the cost of their calls, at their own mean or, if none has ended, the mean of all
    clients.
    """
    calls = [
        call("busy", 0.0, 5.0, 20.0),
        call("busy", 20.0, 25.0, 40.0),
        call("calm", 11.0, 12.0, 13.0, output=1),
        call("calm", 50.0, 52.0, 53.0, output=1),
        call("stuck", 30.0, None, None),
        call("stuck", 60.0, None, None),
        call("waits", 0.0, None, None),
    ]
    demands = asked(result(calls, dict.fromkeys(("busy", "calm", "stuck", "waits", "silent"), 0.0)))
    assert demands == {"busy": inf, "calm": 60.0, "stuck": 2 * (2 * 50.0 + 2 * 30.0) / 4, "waits": inf, "silent": 0.0}
    later = [call("open", 20.0, 21.0, 22.0), call("open", 30.0, None, None), call("open", 31.0, None, None)]
    assert asked(result(later, {"open": 0.0})) == {"open": 150.0}


def test_calls_of_a_program_do_not_make_a_closed_loop() -> None:
    """Calls of a program follow each other, although its client's programs arrive at any time."""
    steps = [(12.0, "1"), (14.0, "1"), (40.0, "2"), (42.0, "2"), (70.0, "3")]
    calls = [call("tree", at, at + 1, at + 2)._replace(program=program, id=f"r{at}") for at, program in steps]
    assert asked(result(calls, {"tree": 0.0})) == {"tree": 250.0}


def test_a_fair_share_is_divided_by_max_min() -> None:
    """Jain's index over the shares is 1 if all clients got theirs, even if some asked for little."""
    assert max_min({"a": inf, "b": 10.0, "c": inf}, 100.0) == {"b": 10.0, "a": 45.0, "c": 45.0}
    calls = [call("light", 20.0, 21.0, 22.0), call("a", 0.0, 5.0, 30.0), call("a", 30.0, 33.0, 50.0)]
    calls += [call("b", 0.0, 5.0, 30.0), call("b", 30.0, 33.0, 50.0)]
    fair, unfair = ({"light": 50.0, "a": a, "b": 200.0 - a} for a in (100.0, 180.0))
    assert jain_of_shares(*summed(calls, fair)) == pytest.approx(1.0)
    assert (jain_of_shares(*summed(calls, unfair)) or 1.0) < 0.8


def summed(calls: Sequence[Record], service: Mapping[str, float]) -> tuple[Result, Summary]:
    run = result(calls, service)
    return run, summarise(run)


def test_light_clients_are_named_light_or_ask_for_little() -> None:
    """A client asks for little if that is no more than twice the mean, and equal clients are all light."""
    calls = [call(client, 20.0, 21.0, 22.0) for client in "abcd"] + [call("a", 20.0, 21.0, 22.0, output=900)]
    assert modest(result(calls, dict.fromkeys("abcd", 0.0))) == ["b", "c", "d"]
    assert modest(result(calls[:4], dict.fromkeys("abcd", 0.0))) == ["a", "b", "c", "d"]
    named = [call("light-1", 20.0, 21.0, 22.0, output=900), call("b", 20.0, 21.0, 22.0)]
    assert modest(result(named, {"light-1": 0.0, "b": 0.0})) == ["light-1"]


def test_light_times_count_what_has_not_ended() -> None:
    """Unfinished calls count with their duration so far; calls from the warm-up and cancelled calls do not count."""
    calls = [
        call("light", 5.0, 100.0, 101.0),
        call("light", 20.0, 21.0, 25.0),
        call("light", 30.0, 33.0, 35.0),
        call("light", 100.0, None, None),
        call("light", 40.0, 90.0, 95.0)._replace(outcome=Outcome.CANCELLED),
    ]
    times = light_times(result(calls, {"light": 0.0}))
    assert times["light TTFT longest"] == 10.0
    assert times["light TTFT p50"] == 3.0
    assert times["light latency p50"] == 5.0
    assert times["light latency longest"] == 10.0


@pytest.mark.parametrize("load", FELT_LOADS)
def test_every_load_can_be_run(load: str) -> None:
    """Each load runs for a second, and its light clients can be distinguished."""
    made = cell("dlpm_home", CONTENDERS["dlpm_home"], load).scenario
    run = Simulation(replace(made, seconds=1.0, warmup=0.0)).run()
    assert len(made.workers) == WORKERS
    assert modest(run)
    Felt().measure(run, summarise(run))


def test_a_trace_replaces_its_stand_in() -> None:
    """The trace replaces the stand-in in one load and changes no other."""
    played = Crowd(crowd=POLITE, light=LIGHT)
    experiment = Felt(traces={"servegen": played})  # type: ignore[dict-item]
    replaced = {
        dict(with_trace.labels)["load"]
        for with_trace, alone in zip(experiment.cells(quick=False), Felt().cells(quick=False), strict=True)
        if with_trace.scenario.workload is played or with_trace.scenario.workload != alone.scenario.workload
    }
    assert replaced == {"ServeGen"}


def test_a_starved_crowd_shows_in_the_unserved_clients() -> None:
    """Longest match alone leaves most of a crowd unserved, and first-come-first-served leaves nobody unserved."""
    workload = Crowd(crowd=replace(POLITE, client_count=60), light=LIGHT)
    unserved = {}
    for policy in ("rr+lpm", "pooled_fcfs"):
        run = Simulation(Scenario(policy, workload, (WorkerSpec(max_running=8),) * 2, 40.0, 10.0)).run()
        unserved[policy] = Felt().measure(run, summarise(run))["unserved"]
    assert unserved["pooled_fcfs"] == 0.0
    assert float(str(unserved["rr+lpm"])) > 20


def test_honest_clients_are_compared_with_their_fair_share() -> None:
    """Beside equal chats they get their share, and beside a flood of uncached prompts under FCFS they do not."""
    equal = replace(CHATS, client_count=1)
    share = {}
    for name, heavy in (("equal", equal), ("flood", replace(equal, input=20_000, output=16))):
        workload = Flood(heavy=heavy, honest=CHATS, light=LIGHT)
        run = Simulation(Scenario("pooled_fcfs", workload, (WorkerSpec(),) * 2, 30.0, 10.0)).run()
        share[name] = float(str(Felt().measure(run, summarise(run))["least/fair"]))
    assert share["equal"] > 0.9
    assert share["flood"] < 0.3

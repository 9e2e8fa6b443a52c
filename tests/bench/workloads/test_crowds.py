"""Crowds, floods and mixes: how many calls clients have open, what prompts share, and which calls are cancelled."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

import pytest

from bench.report.records import Record
from bench.sim.command import simulate
from bench.sim.scenario import Scenario, WorkerSpec
from bench.workloads.crowds import AGENTS, GIVING_UP, HOLDERS, LIGHT, POLITE, Crowd, Flood
from bench.workloads.papers.servegen import SERVEGEN_MID
from bench.workloads.parts.spec import parse_spec
from bench.workloads.parts.traffic import Outcome
from bench.workloads.registry import WORKLOADS
from tests.core.played import played

SLOW = (WorkerSpec(max_running=16),) * 2


def most_open(records: Sequence[Record], client: str) -> int:
    """Return the most calls that a client had open at a time; an end comes before the arrival that follows it."""
    own = [record for record in records if record.client == client]
    changes = sorted([(r.arrived, 1) for r in own] + [(r.finished, -1) for r in own if r.finished is not None])
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def test_a_polite_client_has_one_call_open_and_a_prefix_of_its_own() -> None:
    """A client waits for its answer, however long that takes, and shares its calls' prefix with no other client."""
    workload = Crowd(crowd=replace(POLITE, client_count=40), light=LIGHT)
    records = simulate(Scenario("pooled_fcfs", workload, SLOW, seconds=15.0)).records
    crowd = [client.name for client in workload.clients(0) if client.name.startswith("crowd")]
    assert len(crowd) == 40
    assert {most_open(records, client) for client in crowd} == {1}
    beginnings = {
        client.name: {call.prompt.tokens[:3000] for _, call in played(client, 5)}
        for client in workload.clients(0)
        if client.name in crowd
    }
    assert all(len(each) == 1 for each in beginnings.values())
    assert len(set.union(*beginnings.values())) == 40


def test_the_size_of_a_crowd_is_a_parameter() -> None:
    """The command line sets it, too."""
    workload = parse_spec("crowd:crowd.client_count=7,light.client_count=1", WORKLOADS)
    names = [client.name for client in workload.clients(0)]
    assert names == [*(f"crowd-{number}" for number in range(1, 8)), "light"]


@pytest.mark.parametrize("name", ["flood", "aided-flood", "chat-flood", "documents-flood", "cancellers", "kv-holders"])
def test_a_flood_has_honest_and_light_clients_beside(name: str) -> None:
    """Beside any kind of heavy client, four clients use their share and two ask for little."""
    workload = WORKLOADS[name]
    assert isinstance(workload, Flood)
    kinds = Counter(client.name.partition("-")[0] for client in workload.clients(0))
    assert (kinds["honest"], kinds["light"]) == (4, 2)
    assert kinds["heavy"] == workload.heavy.client_count
    assert kinds["accomplice"] == (name == "aided-flood")


def test_cancellers_cancel_calls_that_are_not_answered_in_time() -> None:
    """Each call is cancelled after a time of its own, whose mean is the workload's, and the next call follows at
    once.
    """
    calls = [call for client in GIVING_UP.clients(3) for _, call in played(client, 600)]
    assert fmean(call.cancel_after or 0.0 for call in calls) == pytest.approx(6.0, rel=0.1)
    workload = replace(GIVING_UP, client_count=1, concurrency=4, patience=1.0)
    records = simulate(Scenario("pooled_fcfs", workload, seconds=30.0)).records
    ended = Counter(record.outcome for record in records)
    assert ended[Outcome.CANCELLED] > 3 * ended[Outcome.DONE]
    assert most_open(records, "c1") == 4


def test_holders_pay_little_for_long_contexts() -> None:
    """Each call begins with one of a few contexts of 60,000 tokens."""
    (client,) = HOLDERS.clients(0)
    calls = [call for _, call in played(client, 30)]
    assert len({call.prompt.tokens[:60_000] for call in calls}) == 3
    assert {len(call.prompt) for call in calls} == {60_100}


def test_agents_continue_from_their_last_call() -> None:
    """A call begins with the one before it and its answer, and contexts grow to tens of thousands of tokens."""
    (client, *_) = replace(AGENTS, client_count=1, concurrency=1).clients(0)
    calls = [call for _, call in played(client, 60)]
    continued = [after.prompt.tokens[: len(before.prompt)] == before.prompt.tokens for before, after in pairwise(calls)]
    assert 0.8 < fmean(continued) < 1.0
    assert max(len(call.prompt) for call in calls) > 30_000


def test_one_client_of_the_production_mix_makes_half_of_its_load() -> None:
    """As in the trace that the mix replaces, one client asks in bursts for half of input + 2 · output in five
    minutes.
    """
    asked: dict[str, float] = {}
    for client in SERVEGEN_MID.clients(0):
        calls = []
        for call in client.calls:
            if call.at >= 300:
                break
            calls.append(call)
        asked[client.name] = sum(len(call.prompt) + 2 * call.output_tokens for call in calls)
        if client.name == "c1":
            assert not any(15 <= call.at < 30 for call in calls)
    assert asked["c1"] / sum(asked.values()) == pytest.approx(0.48, abs=0.05)
    assert sum(asked.values()) / 300 == pytest.approx(22_000, rel=0.1)

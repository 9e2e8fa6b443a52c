"""The workloads: they do what their parameters say, and depend only on these and the seed."""

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import islice, pairwise, takewhile
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.report.records import Record
from bench.sim.command import simulate, summarise
from bench.sim.scenario import Scenario, WorkerSpec
from bench.workloads.chat import Chat
from bench.workloads.documents import SharedDocuments
from bench.workloads.heavy_light import HeavyAndLight
from bench.workloads.judge import Judge
from bench.workloads.parts.lengths import Lengths
from bench.workloads.parts.prompts import EMPTY, Prompt, Text
from bench.workloads.parts.traffic import BACKOFF_SECONDS, Call, Ending, Outcome, closed_loop
from bench.workloads.registry import WORKLOADS
from bench.workloads.unrelated import Unrelated
from router.core.model.prompt_key import CHUNK_BYTES, HASH_BYTES
from workers.engine.tokenizer import VOCABULARY

ROOT = Path(__file__).parents[3]
TOKENS = st.lists(st.integers(0, (1 << 31) - 1) | st.sampled_from(VOCABULARY), max_size=120).map(tuple)


def calls_of(name: str, seed: int) -> list[tuple[str, float, int, int, object]]:
    return [
        (client.name, call.at, len(call.prompt), call.output_tokens, call.prompt.key)
        for client in WORKLOADS[name].clients(seed)
        for call in islice(client.calls, 3)
    ]


def most_at_once(records: Sequence[Record]) -> int:
    """Return the most calls between arrival and end at any time; an end comes before the arrivals it causes."""
    changes = sorted(
        change for r in records for change in ((r.arrived, 1), (float("inf") if r.finished is None else r.finished, -1))
    )
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_depends_only_on_the_seed(name: str) -> None:
    """The same seed gives the same calls, and another seed gives other prompts."""
    assert calls_of(name, 1) == calls_of(name, 1)
    assert calls_of(name, 1) != calls_of(name, 2)


def test_nothing_depends_on_the_hash_seed() -> None:
    """Processes with different hash seeds make the same calls of every workload, also those that follow answers."""
    script = (
        "from hashlib import blake2b; from bench.workloads.registry import WORKLOADS;"
        "from tests.core.played import played;"
        "digest = blake2b();"
        "[digest.update(repr((c.name, at, call.prompt.key.hashes, call.output_tokens, call.program)).encode())"
        " for w in WORKLOADS.values() for c in w.clients(3)[:3] for at, call in played(c, 8)];"
        "print(digest.hexdigest())"
    )
    here = {"PYTHONPATH": str(ROOT)}
    digests = {
        subprocess.check_output([sys.executable, "-c", script], env={**here, "PYTHONHASHSEED": seed})
        for seed in ("1", "2")
    }
    assert len(digests) == 1
    assert len(digests.pop()) == 129


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_can_be_simulated(name: str) -> None:
    """A few seconds of every workload run, and no call is too large for the engine."""
    result = simulate(Scenario("d2lpm", WORKLOADS[name], seconds=3.0, seed=1))
    assert all(record.client in result.weights for record in result.records)
    assert not any(record.outcome in (Outcome.FAILED, Outcome.REJECTED) for record in result.records)


def test_records_and_summary_agree_on_programs_and_service() -> None:
    """Once all calls have ended, the service of clients is the sum of their records, with and without cached tokens."""
    workload = Judge(client_count=2, rate=1.0, sessions=3)
    result = simulate(Scenario("d2lpm", workload, seconds=60.0))
    assert all(record.outcome is Outcome.DONE for record in result.records)
    for name, client in summarise(result)["clients"].items():
        records = [record for record in result.records if record.client == name]
        assert Counter(record.program for record in records) == {"1": 3, "2": 3, "3": 3}
        assert (client["programs"]["done"], client["programs"]["unfinished"]) == (3, 0)
        assert {record.program_calls for record in records} == {3}
        seen = sum(record.input_tokens + 2 * record.output_tokens for record in records)
        cached = sum(record.cached_tokens or 0 for record in records)
        assert cached > 0
        assert client["client_service"] == pytest.approx(seen)
        assert client["service"] == pytest.approx(seen - cached)


@pytest.mark.parametrize("arrivals", ["poisson", "gamma", "uniform"])
def test_a_rate_may_change(arrivals: Literal["poisson", "gamma", "uniform"]) -> None:
    """After the given time, every client calls at the changed rate."""
    workload = Unrelated(rate=80.0, client_count=2, arrivals=arrivals, cv=2.0, changes=100.0, change=0.25)
    for client in workload.clients(1):
        at = [call.at for call in takewhile(lambda call: call.at < 200, client.calls)]
        assert sum(each < 100 for each in at) == pytest.approx(4000, rel=0.1)
        assert sum(each >= 100 for each in at) == pytest.approx(1000, rel=0.15)


def test_clients_take_given_times_in_turn() -> None:
    """Sessions begin at exactly the given times, and there are no others."""
    one, other = Unrelated(times=(0.5, 1.0, 1.5, 4.0, 9.0), client_count=2).clients(1)
    assert [call.at for call in one.calls] == [0.5, 1.5, 9.0]
    assert [call.at for call in other.calls] == [1.0, 4.0]


@pytest.mark.parametrize("pace", [{"rate": 30.0}, {"concurrency": 2}])
def test_each_client_has_a_limited_number_of_sessions(pace: dict[str, float]) -> None:
    """The limit holds in an open loop and in a closed one."""
    workload = Unrelated(**pace, client_count=3, sessions=7, output=5)  # type: ignore[arg-type]
    records = simulate(Scenario("rr+fcfs", workload, seconds=20.0)).records
    assert Counter(record.client for record in records) == {"c1": 7, "c2": 7, "c3": 7}


@given(TOKENS, TOKENS, TOKENS, st.booleans())
def test_a_prompt_is_hashed_as_one_text(
    head: tuple[int, ...], middle: tuple[int, ...], tail: tuple[int, ...], hash_before: bool
) -> None:
    """A prompt's key does not depend on its parts or on earlier hashing, and equal prefixes have equal hashes."""
    beginning = Prompt(Text(head), middle)
    if hash_before:
        assert beginning.key == Prompt(EMPTY, head + middle).key
    prompt = beginning.followed_by(tail)
    whole = Prompt(EMPTY, head + middle + tail)
    assert prompt.key == whole.key
    assert prompt.tokens == whole.tokens
    assert len(prompt) == prompt.key.tokens == len(head + middle + tail)
    shared = len(head) * 4 // CHUNK_BYTES * HASH_BYTES
    assert prompt.key.hashes[:shared] == Text(head).hashed.key.hashes


def test_open_loops_keep_their_rate() -> None:
    """The clients together call at the rate, evenly spaced or not."""
    for arrivals in ("poisson", "uniform"):
        workload = Unrelated(rate=50.0, client_count=5, arrivals=arrivals, output=1)
        records = simulate(Scenario("rr+fcfs", workload, (WorkerSpec(hardware="instant"),), 20.0)).records
        assert len(records) == pytest.approx(1000, rel=0.1 if arrivals == "poisson" else 0.002)
        assert set(Counter(record.client for record in records)) == {"c1", "c2", "c3", "c4", "c5"}


def test_uniform_arrivals_are_evenly_spaced() -> None:
    """The calls of all clients together have equal gaps."""
    workload = Unrelated(rate=10.0, client_count=5, arrivals="uniform")
    at = sorted(call.at for client in workload.clients(0) for call in islice(client.calls, 4))
    assert [later - earlier for earlier, later in pairwise(at)] == pytest.approx([0.1] * 19)


@pytest.mark.parametrize("think", [0.0, 0.2])
def test_closed_loops_never_exceed_their_concurrency(think: float) -> None:
    """Each client has at most its concurrency in flight, and without think time never less."""
    workload = Unrelated(concurrency=3, client_count=2, think=think, output=5)
    result = simulate(Scenario("rr+fcfs", workload, seconds=5.0))
    for client in result.weights:
        records = [record for record in result.records if record.client == client]
        assert most_at_once(records) == 3
        assert len(records) > 20
        if not think:
            assert sum(record.outcome is Outcome.UNFINISHED for record in records) == 3


def test_a_refused_client_waits_before_it_calls_again() -> None:
    """A closed loop backs off after a refusal, so that refusals do not multiply."""
    (first,) = closed_loop(lambda at: [Call(at, Prompt(EMPTY, (1,)), 1)], 1, lambda: 0.25)
    assert first.then is not None
    at = {outcome: next(iter(first.then(first, Ending(outcome, 10.0)))).at for outcome in Outcome}
    assert at[Outcome.DONE] == at[Outcome.CANCELLED] == 10.25
    assert at[Outcome.REJECTED] == at[Outcome.FAILED] == 10.25 + BACKOFF_SECONDS


def test_shared_documents_are_found_in_the_cache() -> None:
    """With one call at a time and enough memory, every call but the first with each document hits the document."""
    workload = SharedDocuments(documents=3, tokens=1600, question=20, output=5, concurrency=1, client_count=1)
    records = simulate(Scenario("d2lpm", workload, seconds=20.0)).records
    done = [record for record in records if record.outcome is Outcome.DONE]
    assert len(done) > 50
    assert Counter(record.cached_tokens for record in done) == {0: 3, 1600: len(done) - 3}


def test_a_turn_finds_the_one_before_it_in_the_cache() -> None:
    """On one worker each turn's prompt holds the previous prompt and answer, and the engine hits both."""
    workload = Chat(systems=1, concurrency=1, client_count=1, turns=Lengths(4), reading=0.1)
    records = simulate(Scenario("d2lpm", workload, seconds=60.0)).records
    turns = [record for record in records if record.outcome is Outcome.DONE][: 4 * (len(records) // 4 - 1)]
    assert len(turns) >= 8
    for number, (before, turn) in enumerate(pairwise(turns), 1):
        if number % 4:
            known = before.input_tokens + before.output_tokens
            assert turn.input_tokens > known
            # The KV of an answer's last token is never computed, and only whole blocks are cached.
            assert turn.cached_tokens == (known - 1) // 16 * 16
            assert known - 16 - 32 <= (turn.predicted_cached_tokens or 0) <= known
            assert turn.arrived > (before.finished or 0)
        else:
            assert turn.cached_tokens == 1000 // 16 * 16  # a new conversation


def test_lengths_stay_within_their_spread() -> None:
    """Prompts and answers vary within the spread, and use most of it."""
    (client,) = Unrelated(input=1000, output=100, spread=0.5, rate=1.0, client_count=1).clients(3)
    calls = list(islice(client.calls, 200))
    for lengths, mean in (([len(c.prompt) for c in calls], 1000), ([c.output_tokens for c in calls], 100)):
        assert mean / 2 <= min(lengths) < mean * 0.6
        assert mean * 1.4 < max(lengths) <= mean * 1.5


def test_the_heavy_client_is_heavy() -> None:
    """The heavy client has 20 calls in flight and each light one at most one, and weights are assigned in turn."""
    result = simulate(Scenario("rr+fcfs", HeavyAndLight(in_flight=20, lights=3), (WorkerSpec(),) * 2, 5.0))
    by_client = {name: [r for r in result.records if r.client == name] for name in result.weights}
    assert {name: most_at_once(records) for name, records in by_client.items()} == {
        "heavy": 20,
        **{f"light-{n}": 1 for n in (1, 2, 3)},
    }
    weighted = Unrelated(rate=1.0, client_count=4, weights=(1.0, 2.0, 4.0)).clients(0)
    assert [client.weight for client in weighted] == [1.0, 2.0, 4.0, 1.0]


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"rate": 1.0, "concurrency": 1},
        {"rate": 1.0, "times": (1.0,)},
        {"rate": 1.0, "client_count": 0},
        {"rate": 1.0, "weights": (0,)},
        {"rate": 1.0, "cv": 0.0},
        {"rate": 1.0, "change": 0.0},
    ],
)
def test_a_workload_without_traffic_is_refused(parameters: dict[str, object]) -> None:
    """A workload needs a client, exactly one kind of pace, and positive parameters."""
    with pytest.raises(ValueError, match="workload"):
        Unrelated(**parameters)  # type: ignore[arg-type]

"""Public traces: the simulated calls are those of the file, and an invalid file is an error with its line."""

from itertools import pairwise
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.sim.command import simulate
from bench.sim.scenario import Scenario, WorkerSpec
from bench.workloads.parts.traffic import Call
from bench.workloads.recorded.traces import BLOCK_TOKENS, TraceError, parse_trace
from router.core.model.prompt_key import CHUNK_BYTES, HASH_BYTES

ARENA = "arrival_s,client,prompt_tokens,output_tokens\n0.5,0,13,199\n1.0,1,36,137\n1.5,2,456,156\n2.5,1,72,89\n"
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 23:59:59.5000000,374,44\n2023-11-17 00:00:01.7500000,396,109\n2023-11-17 00:00:01.7500000,879,55\n"
)
MOONCAKE = (
    '{"timestamp": 2000, "input_length": 1100, "output_length": 4, "hash_ids": [7, 8, 9]}\n'
    '{"timestamp": 3000, "input_length": 1030, "output_length": 5, "hash_ids": [7, 8, 10]}\n'
    '{"timestamp": 3500, "input_length": 600, "output_length": 6, "hash_ids": [7, 11]}\n'
)


def calls(kind: str, text: str, tmp_path: Path, seed: int = 0) -> dict[str, list[Call]]:
    """Return the calls by client of a file with this text; `kind` may have parameters."""
    path = tmp_path / "trace"
    path.write_text(text)
    return {client.name: list(client.calls) for client in parse_trace(f"{kind}:{path}").clients(seed)}


def figures(calls: list[Call]) -> list[tuple[float, int, int]]:
    return [(call.at, len(call.prompt), call.output_tokens) for call in calls]


def test_arena_names_clients(tmp_path: Path) -> None:
    """Each client makes its own requests, at times relative to the first of all, and no two prompts share a prefix."""
    read = calls("arena", ARENA, tmp_path)
    assert {name: figures(each) for name, each in read.items()} == {
        "c0": [(0.0, 13, 199)],
        "c1": [(0.5, 36, 137), (2.0, 72, 89)],
        "c2": [(1.0, 456, 156)],
    }
    assert len({call.prompt.tokens[0] for each in read.values() for call in each}) == 4


def test_clients_may_be_merged(tmp_path: Path) -> None:
    """A smaller number of clients shares the requests of the trace by client number."""
    read = calls("arena,client_count=2", ARENA, tmp_path)
    assert {name: [call.at for call in each] for name, each in read.items()} == {"c0": [0.0, 1.0], "c1": [0.5, 2.0]}


def test_azure_has_times_and_lengths(tmp_path: Path) -> None:
    """Times continue past midnight, and the speed divides them."""
    assert figures(calls("azure", AZURE, tmp_path)["c0"]) == [(0.0, 374, 44), (2.25, 396, 109), (2.25, 879, 55)]
    assert [call.at for call in calls("azure,speed=3", AZURE, tmp_path)["c0"]] == [0.0, 0.75, 0.75]


def test_requests_without_a_client_are_distributed(tmp_path: Path) -> None:
    """A trace without clients gets them at random, by the seed and by popularity."""
    many = AZURE + "2023-11-17 00:00:02.0,5,5\n" * 2000
    equal, skewed = (
        calls("azure,client_count=4", many, tmp_path),
        calls("azure,client_count=4,popularity=1", many, tmp_path),
    )
    assert all(450 < len(each) < 550 for each in equal.values())
    shares = [len(skewed[f"c{number}"]) / 2003 for number in range(4)]
    assert shares == pytest.approx([0.48, 0.24, 0.16, 0.12], abs=0.03)
    again, other = calls("azure,client_count=4", many, tmp_path), calls("azure,client_count=4", many, tmp_path, seed=1)
    assert [len(each) for each in again.values()] == [len(each) for each in equal.values()]
    assert [len(each) for each in other.values()] != [len(each) for each in equal.values()]


def test_equal_hashes_are_equal_blocks(tmp_path: Path) -> None:
    """Mooncake's prompts share exactly the blocks of their leading equal hashes, in the prompt keys and in the
    cache.
    """
    first, second, third = calls("mooncake", MOONCAKE, tmp_path)["c0"]
    assert [figures([call]) for call in (first, second, third)] == [[(0.0, 1100, 4)], [(1.0, 1030, 5)], [(1.5, 600, 6)]]
    assert first.prompt.tokens[: 2 * BLOCK_TOKENS] == second.prompt.tokens[: 2 * BLOCK_TOKENS]
    assert first.prompt.tokens[2 * BLOCK_TOKENS] != second.prompt.tokens[2 * BLOCK_TOKENS]
    assert first.prompt.tokens[:BLOCK_TOKENS] == third.prompt.tokens[:BLOCK_TOKENS]
    assert first.prompt.tokens[BLOCK_TOKENS] != third.prompt.tokens[BLOCK_TOKENS]
    shared = 2 * BLOCK_TOKENS * 4 // CHUNK_BYTES * HASH_BYTES
    assert first.prompt.key.hashes[:shared] == second.prompt.key.hashes[:shared]
    path = tmp_path / "trace"
    records = simulate(
        Scenario("d2lpm", parse_trace(f"mooncake:{path}"), (WorkerSpec(hardware="instant"),), 9.0)
    ).records
    assert [record.cached_tokens for record in records] == [0, 2 * BLOCK_TOKENS, BLOCK_TOKENS]


def test_a_conversation_has_one_client(tmp_path: Path) -> None:
    """Requests with a common prefix go to one client, except where all requests have this prefix."""
    request = '{"timestamp": %d, "input_length": 1500, "output_length": %d, "hash_ids": [0, %d, %d]}'
    lines = [request % (n, n % 20 + 1, n % 20 + 1, n + 50) for n in range(200)]
    read = calls("mooncake,client_count=4", "\n".join(lines), tmp_path)
    talks = [{call.output_tokens for call in each} for each in read.values()]
    assert len(talks) == 4
    assert sum(map(len, talks)) == len(set().union(*talks)) == 20
    assert sum(map(len, read.values())) == 200


def test_times_ascend(tmp_path: Path) -> None:
    """Requests that are out of order in the file are sorted by time."""
    lines = ARENA.splitlines()
    (read,) = calls("arena,client_count=1", "\n".join([lines[0], *reversed(lines[1:])]), tmp_path).values()
    assert len(read) == 4
    assert all(before.at <= after.at for before, after in pairwise(read))


@pytest.mark.parametrize(
    ("kind", "text", "complaint"),
    [
        ("arena", AZURE, "trace, line 2: there is no 'arrival_s'"),
        ("arena", ARENA + "3,1,x,5\n", "trace, line 6: invalid literal for int"),
        ("arena", ARENA + "3,1\n", "trace, line 6: invalid literal for int"),
        ("arena", ARENA + "nan,1,5,5\n", "trace, line 6: 'nan' is no time"),
        ("arena", ARENA + "3,1,0,5\n", "trace, line 6: '0' is no number of tokens"),
        ("arena", ARENA.splitlines()[0], "trace holds no request"),
        ("azure", AZURE + "yesterday,5,5\n", "trace, line 5: Invalid isoformat string"),
        ("azure", "", "trace holds no request"),
        ("mooncake", ARENA, "trace, line 1: it is no JSON"),
        ("mooncake", MOONCAKE + "\n[1]\n", "trace, line 5: it is no object"),
        ("mooncake", MOONCAKE.replace(", 11]", "]"), "trace, line 3: hash_ids are no list of one for each 512 tokens"),
        ("mooncake", MOONCAKE.replace("[7, 11]", "[7, null]"), "trace, line 3: int()"),
    ],
)
def test_a_malformed_file_is_an_error(kind: str, text: str, complaint: str, tmp_path: Path) -> None:
    """The message has the file, the line and the reason."""
    with pytest.raises(TraceError) as raised:
        calls(kind, text, tmp_path)
    assert complaint in str(raised.value)


def test_a_binary_file_is_an_error(tmp_path: Path) -> None:
    """The message says that the file is no text."""
    (tmp_path / "trace").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="trace is no text"):
        parse_trace(f"arena:{tmp_path / 'trace'}")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("arena:{}/missing.csv", "missing.csv: No such file or directory"),
        ("arena:{}", "cannot read"),
        ("arena", "'arena' is not KIND:PATH"),
        ("arena:", "'arena:' is not KIND:PATH"),
        ("tape:{}", "unknown trace 'tape' (known: arena, azure, mooncake, servegen, sessions"),
        ("arena,tempo=2:{}", "unknown parameter 'tempo' (known: speed, client_count"),
        ("arena,speed=0:{}", "speed and client_count are positive"),
    ],
)
def test_the_command_reports_mistakes_in_one_line(
    text: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command exits with status 2 and one line, before it simulates anything."""
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "--trace", text.format(tmp_path)])
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert complaint in captured.err
    assert captured.err.count("\n") == 1


def test_a_trace_replaces_the_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every request of the trace in the simulated time is made, and a trace together with a workload is refused."""
    (tmp_path / "trace").write_text(ARENA)
    main(["simulate", "--trace", f"arena:{tmp_path / 'trace'}", "--seconds", "9", "--hardware", "instant"])
    assert '"done": 4' in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "--trace", "arena:x", "--workload", "chat"])
    assert ended.value.code == 2


def test_a_trace_with_a_rate_comes_in_random_order(tmp_path: Path) -> None:
    """Each request comes once, at Poisson times, in an order that only the seed decides; its client stays."""
    many = AZURE + "".join(f"2023-11-17 00:00:02.0,{size},{size}\n" for size in range(1000, 3000))
    own, shuffled = calls("azure,client_count=4", many, tmp_path), calls("azure,client_count=4,rate=50", many, tmp_path)
    assert {name: sorted(len(call.prompt) for call in each) for name, each in shuffled.items()} == {
        name: sorted(len(call.prompt) for call in each) for name, each in own.items()
    }
    together = sorted((call.at, len(call.prompt)) for each in shuffled.values() for call in each)
    assert together[-1][0] == pytest.approx(2003 / 50, rel=0.1)
    assert all(list(each) == sorted(each, key=lambda call: call.at) for each in shuffled.values())
    assert [size for _, size in together] != sorted(size for _, size in together)
    again = calls("azure,client_count=4,rate=50", many, tmp_path)
    assert [figures(each) for each in again.values()] == [figures(each) for each in shuffled.values()]
    assert calls("azure,client_count=4,rate=50", many, tmp_path, seed=1)["c0"][0].at != shuffled["c0"][0].at


@pytest.mark.parametrize("play", ["rate=0", "rate=-1", "rate=2,speed=3"])
def test_a_rate_takes_the_place_of_the_speed(play: str, tmp_path: Path) -> None:
    """A rate is positive, and there is nothing that a speed could change beside it."""
    with pytest.raises(ValueError, match="rate"):
        calls(f"azure,{play}", AZURE, tmp_path)

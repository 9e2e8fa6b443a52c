"""Recorded sessions: a call follows the answer before it, with the lengths and the shared prefixes of the file."""

import json
from pathlib import Path

import pytest

from bench.sim.command import simulate
from bench.sim.scenario import Scenario, WorkerSpec
from bench.workloads.parts.traffic import Call
from bench.workloads.recorded.sessions import Sessions, parse_recorded
from bench.workloads.recorded.traces import TraceError
from tests.core.played import played

FIRST = [[0.0, 500, 20, 0, 5.0, 0.0, "tool_use"], [9.0, 700, 30, 7, 3.0, 4.0, "x"], [20.0, 300, 0, 4, None, None, ""]]
SECOND = [[0.0, 900, 10, 0, 5.0, 0.0, "tool_use"], [9.0, 90_000, 10, 14, 5.0, 1000.0, "end_turn"]]


def line(requests: object, tools: int = 100) -> str:
    return json.dumps({"id": "one", "tool_tokens": tools, "system_tokens": 50, "requests": requests}) + "\n"


def sessions(tmp_path: Path, text: str, parameters: str = "") -> Sessions:
    path = tmp_path / "sessions"
    path.write_text(text)
    read = parse_recorded(f"sessions,client_count=1,concurrency=1{parameters}:{path}")
    assert isinstance(read, Sessions)
    return read


def calls(workload: Sessions, count: int) -> list[tuple[float, Call]]:
    (client,) = workload.clients(0)
    return played(client, count)


def test_calls_have_the_lengths_of_the_file_and_follow_each_other(tmp_path: Path) -> None:
    """A call comes its pause after the last answer, which takes a second here; the next session follows the last
    call.
    """
    read = calls(sessions(tmp_path, line(FIRST)), 4)
    assert [(at, len(call.prompt), call.output_tokens) for at, call in read] == [
        (0.0, 500, 20),
        (5.0, 700, 30),
        (6.0, 300, 1),
        (7.0, 500, 20),
    ]


def test_prompts_share_what_the_file_says(tmp_path: Path) -> None:
    """A prompt shares the whole previous prompt and answer if all blocks are kept, and else exactly the kept blocks."""
    (_, first), (_, second), (_, third), (_, again) = calls(sessions(tmp_path, line(FIRST)), 4)
    assert second.prompt.tokens[:500] == first.prompt.tokens
    assert second.prompt.tokens[500:520] == tuple(range(20))
    assert third.prompt.tokens[: 4 * 64] == second.prompt.tokens[: 4 * 64]
    assert third.prompt.tokens[4 * 64] != second.prompt.tokens[4 * 64]
    assert again.prompt.tokens[:150] == first.prompt.tokens[:150]
    assert again.prompt.tokens[150] != first.prompt.tokens[150]


def test_only_sessions_with_equal_tools_share_a_prefix(tmp_path: Path) -> None:
    """Sessions with other tools share nothing."""
    workload = sessions(tmp_path, line(FIRST[:1]) + line(FIRST[:1], tools=101))
    assert len({call.prompt.tokens[:150] for _, call in calls(workload, 12)}) == 2


def test_a_session_ends_before_a_prompt_that_is_too_long(tmp_path: Path) -> None:
    """A session whose first prompt is too long never begins."""
    workload = sessions(tmp_path, line(SECOND) + line([[0.0, 70_000, 5, 0, 1.0, 0.0, ""]]), ",patience=2")
    assert [(at, len(call.prompt)) for at, call in calls(workload, 3)] == [(0.0, 900), (1.0, 900), (2.0, 900)]
    longer = calls(sessions(tmp_path, line(SECOND), ",patience=2,longest=90000"), 2)
    assert [(at, len(call.prompt)) for at, call in longer] == [(0.0, 900), (3.0, 90_000)]
    with pytest.raises(ValueError, match="no session begins"):
        sessions(tmp_path, line(SECOND), ",longest=800").clients(0)


def test_a_cache_finds_what_is_shared(tmp_path: Path) -> None:
    """The engine hits the blocks that the previous prompt left in its cache."""
    workload = sessions(tmp_path, line(FIRST[:2]))
    records = simulate(Scenario("d2lpm", workload, (WorkerSpec(hardware="instant"),), 5.5)).records
    assert [record.cached_tokens for record in records[:2]] == [0, 512]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "holds no request"),
        (line([]), "holds no request"),
        ("{}\n", "line 1: there is no 'requests'"),
        (line(FIRST) + line([[0.0, None, 5, 0, 1.0, 0.0]]), "line 2: .* has no input"),
        (line([[0.0, 5]]), "line 1: not enough values"),
        ("x\n", "line 1: "),
    ],
)
def test_an_invalid_file_is_an_error(tmp_path: Path, text: str, complaint: str) -> None:
    """The message has the file, the line and the reason."""
    with pytest.raises(TraceError, match=complaint):
        sessions(tmp_path, text)


def test_other_kinds_are_traces(tmp_path: Path) -> None:
    """The same flag reads traces, and an unknown kind is refused."""
    path = tmp_path / "mix.csv"
    path.write_text("arrival_s,client,prompt_tokens,output_tokens\n0.5,3,13,199\n")
    assert [client.name for client in parse_recorded(f"servegen:{path}").clients(0)] == ["c3"]
    with pytest.raises(ValueError, match="unknown trace"):
        parse_recorded(f"letters:{path}")

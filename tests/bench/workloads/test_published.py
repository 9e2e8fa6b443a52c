"""The generated workloads have the statistics that the papers publish of their data sets (means within a tenth)."""

from itertools import islice
from statistics import fmean, pstdev

import pytest

from bench.workloads.papers.dlpm import ARENA_CHAT, JUDGE, QA, TREES
from bench.workloads.papers.preble import LOOGLE, PROGRAMMING, TOOLBENCH, VIDEO
from bench.workloads.parts.pace import RatedWorkload
from bench.workloads.parts.traffic import Call
from bench.workloads.registry import WORKLOADS
from bench.workloads.shared_prefix import SharedPrefix
from tests.core.played import played

CALLS = 3000
# Preble, table 1: mean and standard deviation of prompt and output in tokens, the share of a prompt that others have,
# and the share that is the key portion.
PREBLE = {
    "toolbench": (TOOLBENCH, 1835, 742, 43, 16, 0.85, 0.76),
    "toolbench-zipf": (WORKLOADS["toolbench-zipf"], 1835, 742, 43, 16, 0.85, 0.76),
    "programming": (PROGRAMMING, 3871, 1656, 190, 343, 0.97, 0.78),
    "video": (VIDEO, 9865, 5976, 4, 1.5, 0.88, 0.99),
    "loogle": (LOOGLE, 23_474, 6105, 16, 9.9, 0.91, 0.94),
}


def calls(workload: object, count: int = CALLS) -> list[Call]:
    assert isinstance(workload, RatedWorkload)
    return [call for _, call in played(workload.clients(1)[0], count)]


def shares(workload: SharedPrefix, calls: list[Call]) -> tuple[float, float]:
    """Return the share of the prompts that others have, and the key portion, as Preble defines both.

    A prefix is shared if another call has it; the key portion is the deepest part longer than all before it.
    """
    ends: dict[tuple[int, ...], list[Call]] = {}
    for call in calls:
        ends.setdefault(call.prompt.tokens[workload.system : workload.system + 4], []).append(call)
    shared, key = [], []
    for group in ends.values():
        common = workload.system
        if len(group) > 1:
            one, other = group[0].prompt.tokens, group[1].prompt.tokens
            common = next(at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
        for call in group:
            shared.append(common / len(call.prompt))
            behind = common - workload.system
            if len(group) > 1:
                key.append((behind if behind > workload.system else workload.system) / len(call.prompt))
    return fmean(shared), fmean(key)


@pytest.mark.parametrize("name", PREBLE)
def test_prebles_data_sets(name: str) -> None:
    """Lengths of prompts and outputs, the shared part of a prompt and its key portion are those of table 1."""
    workload, prompt, prompt_sd, output, output_sd, shared, key = PREBLE[name]
    made = calls(workload, 1000 if name in ("video", "loogle") else CALLS)
    assert fmean(len(call.prompt) for call in made) == pytest.approx(prompt, rel=0.1)
    assert pstdev(len(call.prompt) for call in made) == pytest.approx(prompt_sd, rel=0.15)
    assert fmean(call.output_tokens for call in made) == pytest.approx(output, rel=0.1)
    assert pstdev(call.output_tokens for call in made) == pytest.approx(output_sd, rel=0.15)
    assert isinstance(workload, SharedPrefix)
    assert shares(workload, made) == pytest.approx((shared, key), rel=0.1)


def test_prebles_embodied_agents() -> None:
    """Table 1 has 2285 (471) and 16 (13) tokens, 97 % shared, 76 % key portion, and 48 calls of one key."""
    made = calls(WORKLOADS["embodied"], 8000)
    assert fmean(len(call.prompt) for call in made) == pytest.approx(2285, rel=0.1)
    assert pstdev(len(call.prompt) for call in made) == pytest.approx(471, rel=0.15)
    assert fmean(call.output_tokens for call in made) == pytest.approx(16, rel=0.1)
    starts = {call.program: len(call.prompt) - 7 for call in reversed(made)}
    assert fmean(starts[call.program] / len(call.prompt) for call in made) == pytest.approx(0.76, rel=0.1)
    assert fmean({call.program: call.program_calls for call in made}.values()) == pytest.approx(48, rel=0.1)
    # All but the last observation is the previous prompt and its answer.
    assert fmean(1 - 7 / len(call.prompt) for call in made) == pytest.approx(0.97, rel=0.1)


def test_dlpms_trees_of_thoughts() -> None:
    """Table 2 has prompts of 546 tokens, as trees of two branches have if answers use half of the 256 tokens
    allowed.
    """
    made = calls(TREES)
    assert fmean(len(call.prompt) for call in made) == pytest.approx(546, rel=0.1)
    assert {call.output_limit for call in made} == {256}


@pytest.mark.parametrize("name", ["judge", "judge-16"])
def test_dlpms_judge(name: str) -> None:
    """Table 2 has prompts of 2701 tokens and judgements of 256."""
    made = calls(WORKLOADS[name])
    assert fmean(len(call.prompt) for call in made) == pytest.approx(2701, rel=0.1)
    assert fmean(call.output_tokens for call in made if call.output_tokens > 2) == pytest.approx(256, rel=0.1)
    assert JUDGE.output.mean == 256


def test_dlpms_long_context_questions() -> None:
    """Table 2 has prompts of 21449 tokens and answers of 15."""
    made = calls(QA, 1500)
    assert fmean(len(call.prompt) for call in made) == pytest.approx(21_449, rel=0.1)
    assert fmean(call.output_tokens for call in made) == pytest.approx(15, rel=0.1)


def test_dlpms_conversations() -> None:
    """Table 2 has 56 tokens before the question, as many in the question, and answers of 142."""
    made = calls(ARENA_CHAT, 6000)
    assert fmean(call.output_tokens for call in made) == pytest.approx(142, rel=0.1)
    assert fmean(len(call.prompt) for call in made) == pytest.approx(56 + 56, rel=0.1)


def test_vtcs_clients() -> None:
    """The stand-in for VTC's trace has its 27 clients, 150 calls a minute, and lengths of 136 and 256."""
    clients = WORKLOADS["vtc-27"].clients(1)
    made = [list(islice(client.calls, 600)) for client in clients]
    assert len(made) == 27
    assert sum(600 / each[-1].at for each in made) == pytest.approx(2.5, rel=0.05)
    both = [call for each in made[:3] for call in each]
    assert fmean(len(call.prompt) for call in both) == pytest.approx(136, rel=0.1)
    assert fmean(call.output_tokens for call in both) == pytest.approx(256, rel=0.1)

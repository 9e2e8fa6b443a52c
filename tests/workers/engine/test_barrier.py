"""Ranks in step: the barrier sets the time of every step, and changes nothing that a rank computes."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.engine.barrier import Barrier, GroupStep
from workers.engine.engine import Engine, create_engine, default_config
from workers.engine.hardware import HARDWARE, Batch, Hardware, RankSteps, rank
from workers.engine.model import Dialect, Request

STEPS = RankSteps(20.0, 0.5)
RANK = rank(4000, STEPS)
UNEQUAL = (HARDWARE["a100-mistral-7b"], RANK, rank(4000, RankSteps(5.0, 40.0)))

DIALECTS = st.sampled_from(["vllm", "sglang"])
SIZES = st.tuples(st.integers(1, 60), st.integers(1, 12))
"""Tokens of a prompt and of its answer."""
LAST_ARRIVAL = 20
Arrivals = Sequence[tuple[int, int, tuple[int, int]]]
ARRIVALS = st.lists(st.tuples(st.integers(0, LAST_ARRIVAL), st.integers(0, 2), SIZES), max_size=20)
"""The step before which each request arrives, its rank, and its sizes."""


def engine(dialect: Dialect = "vllm", hardware: Hardware = RANK) -> Engine:
    return create_engine(default_config(dialect, hardware, kv_tokens=4000, block_size=4, max_running=4), hardware)


def request(name: str, size: tuple[int, int]) -> Request:
    prompt, answer = size
    return Request(name, [number + len(name) for number in range(prompt)], answer, ignore_eos=True)


def steps_of(group: Barrier, limit: int = 1000) -> Sequence[GroupStep]:
    """Step until no rank has work."""
    steps = []
    while (step := group.step()) is not None:
        steps.append(step)
        assert len(steps) < limit
    return steps


@given(DIALECTS, st.integers(1, 4), st.lists(SIZES, min_size=1, max_size=6))
@settings(deadline=None)
def test_ranks_with_equal_loads_step_as_one_engine_would(
    dialect: Dialect, ranks: int, sizes: Sequence[tuple[int, int]]
) -> None:
    """A group whose ranks all have the same requests has the steps and the tokens of one engine with them."""
    alone, group = engine(dialect), Barrier([engine(dialect) for _ in range(ranks)])
    for number, size in enumerate(sizes):
        for each in (alone, *group.ranks):
            each.submit(request(f"r{number}", size))
    for step in steps_of(group):
        seconds, outputs = alone.step()
        assert step.seconds == seconds
        assert step.outputs == [outputs] * ranks
        assert step.loads == [alone.last_step_context] * ranks
    assert not alone.has_work


@given(DIALECTS, ARRIVALS)
@settings(deadline=None)
def test_the_barrier_changes_when_tokens_exist_and_nothing_else(dialect: Dialect, arrivals: Arrivals) -> None:
    """Each rank produces the tokens of an engine without a barrier, in the same order.

    No step is shorter than any rank's own, that of a dummy batch included, and each is as long as one of them.
    """
    ranks, alone = ([engine(dialect, each) for each in UNEQUAL] for _ in range(2))
    group = Barrier(ranks)
    for number in range(LAST_ARRIVAL + 1):
        for name, (at, place, size) in enumerate(arrivals):
            if at == number:
                for each in (ranks[place], alone[place]):
                    each.submit(request(f"r{name}", size))
        compare(group, alone)
    while group.has_work:
        compare(group, alone)
    assert not any(each.has_work for each in alone)


def compare(group: Barrier, alone: Sequence[Engine]) -> None:
    """Take one step of the group, and one of each engine that has work."""
    if (step := group.step()) is None:
        return
    own = [each.step() if each.has_work else (each.hardware.step_seconds(Batch()), []) for each in alone]
    assert step.outputs == [outputs for _, outputs in own]
    assert step.seconds == max(seconds for seconds, _ in own)
    for each in group.ranks:
        each.check_integrity()


def test_a_request_that_arrives_amid_a_step_joins_at_its_end() -> None:
    """A step has the requests that were submitted before it, and the next one has the others as well."""
    group = Barrier([engine(), engine()])
    group.ranks[0].submit(request("first", (40, 3)))
    step = group.step()
    assert step is not None
    group.ranks[1].submit(request("second", (8, 2)))
    later = group.step()
    assert later is not None
    assert (step.loads, later.loads) == ([40, 0], [41, 8])
    assert [output.id for outputs in later.outputs for output in outputs] == ["first", "second"]


def test_a_group_without_work_does_not_step() -> None:
    """Ranks run dummy batches only beside a rank with work."""
    group = Barrier([engine(), engine()])
    assert group.step() is None
    group.ranks[1].submit(request("only", (5, 2)))
    first, last = steps_of(group)
    assert (first.loads, last.loads) == ([0, 5], [0, 6])
    assert [first.seconds, last.seconds] == pytest.approx([0.020 + 5 * 0.5e-6, 0.020 + 6 * 0.5e-6])


def test_an_idle_rank_sets_the_pace_if_its_dummy_step_is_the_longest() -> None:
    """A dummy batch takes the fixed time of a step."""
    group = Barrier([engine(), engine(hardware=rank(4000, RankSteps(30.0, 0.0)))])
    group.ranks[0].submit(request("only", (5, 1)))
    assert [step.seconds for step in steps_of(group)] == [0.030]


def test_a_group_needs_a_rank() -> None:
    """An empty group is refused."""
    with pytest.raises(ValueError, match="rank"):
        Barrier([])

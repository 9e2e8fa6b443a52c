"""KV events in virtual time: with them the router knows what an emulated cache holds."""

from random import Random
from typing import get_args

import pytest

from bench.sim.scenario import Scenario, WorkerSpec
from bench.sim.simulation import Simulation
from bench.workloads.parts.lengths import Lengths
from bench.workloads.parts.prompts import BLOCK_HASHER, Prompt, Text, random_tokens
from bench.workloads.shared_prefix import SharedPrefix
from workers.engine.model import Dialect

ONE_BY_ONE = SharedPrefix(
    client_count=1,
    concurrency=1,
    groups=6,
    prefix=Lengths(900),
    question=Lengths(100),
    output=Lengths(30),
)
ROOM_FOR_THREE = 4_000


@pytest.mark.parametrize("dialect", get_args(Dialect))
def test_predictions_are_exact_for_one_call_at_a_time(dialect: Dialect) -> None:
    """With KV events a prediction equals the engine's hit, although half of the prefixes do not fit into the cache."""
    worker = WorkerSpec(dialect=dialect, kv_tokens=ROOM_FOR_THREE)
    result = Simulation(Scenario("d2lpm", ONE_BY_ONE, (worker,), 30.0, kv_events=True)).run()
    answered = [each for each in result.records if each.cached_tokens is not None]
    assert len({each.cached_tokens for each in answered}) > 1
    assert [each.predicted_cached_tokens for each in answered] == [each.cached_tokens for each in answered]


def test_a_prompt_has_the_same_blocks_whether_or_not_its_beginning_is_known() -> None:
    """The blocks of a text are hashed once, and what follows continues from the last full one."""
    random = Random(0)
    for known, more in ((0, 50), (33, 0), (64, 31), (100, 100)):
        text, tail = Text(random_tokens(random, known)), random_tokens(random, more)
        prompt = Prompt(text, tail)
        for _ in range(2):
            assert prompt.block_key((1, 16, 32)) == BLOCK_HASHER.key(prompt.tokens, (1, 16, 32))

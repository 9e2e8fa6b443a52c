"""The measured speeds by which pauses are divided. Needs no engine."""

import pytest

from bench.lab.frame.conditions import A100
from bench.workloads.recorded.sessions import Recorded, Turn
from workers.engine.hardware import HARDWARE, Batch

from .session_scale import a100_speed

PROMPT = 40_000
CHUNK = 2048


@pytest.mark.parametrize("turns", [1, 3])
def test_no_token_of_a_measured_call_is_cached(turns: int) -> None:
    """The emulated A100 is as fast as its step times say for prompts that are computed in full, however many calls of
    the recorded sessions share a prefix.
    """
    session = Recorded(5000, 3000, tuple(Turn(PROMPT, 500, PROMPT, 0.0) for _ in range(turns)))
    ends = [*range(CHUNK, PROMPT, CHUNK), PROMPT]
    chunks = [Batch([(end - begin, end)]) for begin, end in zip([0, *ends], ends, strict=False)]
    seconds = sum(map(HARDWARE[A100.hardware].step_seconds, chunks))
    assert a100_speed([session]) == pytest.approx(PROMPT / seconds, rel=0.05)

"""Jumps of the emulated engines: a jump over many decode steps has the same effect as the single steps."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.engine.engine import Engine, create_engine, default_config
from workers.engine.hardware import HARDWARE
from workers.engine.model import Dialect, EngineConfig, Request

HARD = HARDWARE["a100-mistral-7b"]


@dataclass(frozen=True)
class Submission:
    """A request and the step at which it arrives. With `abort_after`, it is aborted that many steps later."""

    step: int
    prefix: int
    own: int
    max_tokens: int
    ignore_eos: bool
    abort_after: int | None


SUBMISSIONS = st.lists(
    st.builds(
        Submission,
        step=st.integers(0, 60),
        prefix=st.integers(0, 2),
        own=st.integers(1, 30),
        max_tokens=st.integers(1, 40),
        ignore_eos=st.booleans(),
        abort_after=st.none() | st.integers(1, 20),
    ),
    min_size=1,
    max_size=25,
)
CONFIGS = st.builds(
    lambda scheduler, **sizes: EngineConfig(scheduler[0], order=scheduler[1], **sizes),
    scheduler=st.sampled_from([("vllm", "fcfs"), ("sglang", "fcfs"), ("sglang", "lpm")]),
    kv_tokens=st.integers(160, 600),
    block_size=st.sampled_from([1, 4, 16]),
    max_running=st.integers(1, 8),
    max_batched_tokens=st.integers(20, 80),
)


@dataclass
class Log:
    """The observable behaviour of an engine: the time of each step, and the tokens and end of each request."""

    times: list[float] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    finished: dict[str, tuple[int, str, int]] = field(default_factory=dict)
    jumped: int = 0


class Driver:
    """Submits and aborts at given steps, and advances between them by steps, or by jumps where possible."""

    def __init__(self, config: EngineConfig, submissions: list[Submission], limit: int) -> None:
        """`limit`: the longest jump; 0 for none."""
        self.engine: Engine = create_engine(config, HARD)
        self.log = Log()
        self._limit = limit
        self._due: dict[int, list[tuple[str, Request | None]]] = {}
        for number, each in enumerate(submissions):
            name = f"{number}"
            prompt = [*range(1000 * each.prefix, 1000 * each.prefix + 20 * each.prefix), *range(each.own)]
            if len(prompt) + each.max_tokens > self.engine.max_request_tokens:
                continue
            asked = Request(name, prompt, each.max_tokens, each.ignore_eos)
            self._due.setdefault(each.step, []).append((name, asked))
            if each.abort_after is not None:
                self._due.setdefault(each.step + each.abort_after, []).append((name, None))

    def run(self) -> Log:
        step = 0
        while self._due or self.engine.has_work:
            for name, request in self._due.pop(step, []):
                if request is None:
                    self.engine.abort(name)
                else:
                    self.engine.submit(request)
            step += self._advance(min(self._due, default=step + 1000) - step)
        return self.log

    def _advance(self, most: int) -> int:
        log = self.log
        seconds = self.engine.lookahead(min(most, self._limit)) if self._limit else []
        if seconds:
            log.times += seconds
            log.jumped += len(seconds)
            for name, tokens in self.engine.jump(len(seconds)):
                log.tokens[name] += tokens
            return len(seconds)
        elapsed, outputs = self.engine.step()
        log.times.append(elapsed)
        for output in outputs:
            log.tokens.setdefault(output.id, []).append(output.token)
            if output.finish:
                log.finished[output.id] = (len(log.times), output.finish, output.cached_tokens)
        return 1


@given(config=CONFIGS, submissions=SUBMISSIONS, limit=st.integers(1, 50))
@settings(max_examples=150, deadline=None)
def test_jumps_and_steps_are_the_same(config: EngineConfig, submissions: list[Submission], limit: int) -> None:
    """Tokens, times, ends and counts are equal with jumps of any length and without jumps."""
    stepped, jumped = Driver(config, submissions, 0), Driver(config, submissions, limit)
    expected, got = stepped.run(), jumped.run()
    assert got.times == expected.times
    assert got.tokens == expected.tokens
    assert got.finished == expected.finished
    assert jumped.engine.counters == stepped.engine.counters
    assert jumped.engine.cached_tokens == stepped.engine.cached_tokens
    jumped.engine.check_integrity()


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_steps_that_only_decode_are_one_jump(dialect: Dialect) -> None:
    """All steps between the last prefill and the first end are predicted, and the prediction changes nothing."""
    engine = create_engine(default_config(dialect), HARD)
    for name in ("a", "b"):
        engine.submit(Request(name, [1] * 100, 50, ignore_eos=True))
    assert engine.lookahead(1000) == []
    engine.step()
    assert engine.lookahead(1000) == engine.lookahead(1000)
    assert len(engine.lookahead(1000)) == 48
    assert len(engine.lookahead(7)) == 7
    engine.jump(48)
    assert engine.lookahead(1000) == []
    assert [output.finish for output in engine.step()[1]] == ["length", "length"]


def test_no_jump_skips_an_admission_by_a_completed_block() -> None:
    """A vLLM request that waits for memory is admitted when a running one completes a block, jumps or not."""
    prompt = [1, 2, 3, 4]
    probe = create_engine(EngineConfig("vllm", 160, 4, 8, 64), HARD)
    probe.submit(Request("probe", prompt, 4, ignore_eos=True))
    answer = [probe.step()[1][0].token for _ in range(4)]
    engine = create_engine(EngineConfig("vllm", 16, 4, 8, 64), HARD)  # three blocks
    engine.submit(Request("running", prompt, 8, ignore_eos=True))
    engine.step()
    engine.submit(Request("waiting", [*prompt, *answer, 7, 8, 9], 1, ignore_eos=True))
    engine.step()
    assert engine.waiting == 1
    assert len(engine.lookahead(2)) == 2
    assert engine.lookahead(3) == []
    for _ in range(3):
        engine.step()
    assert engine.waiting == 0

"""Requests whose KV comes from another engine: memory first, then the KV, then the answer of one engine."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.engine.test_engine import DIALECTS, drain, engine
from workers.engine.engine import Engine
from workers.engine.model import Dialect, Request

PROMPT = list(range(1, 42))


def answer(dialect: Dialect, prompt: list[int], max_tokens: int) -> list[int]:
    """Return the tokens of an engine that computes the prompt itself."""
    alone = engine(dialect)
    alone.submit(Request("a", prompt, max_tokens, ignore_eos=True))
    return drain(alone).tokens("a")


@dataclass
class Decoding:
    """A decode engine, and the tokens of each of its requests."""

    engine: Engine
    tokens: dict[str, list[int]] = field(default_factory=dict)
    allocated: list[str] = field(default_factory=list)

    def submit(self, name: str, prompt: list[int], max_tokens: int = 6) -> None:
        self.engine.submit(Request(name, prompt, max_tokens, ignore_eos=True, pulls=True))

    def step(self) -> None:
        _, outputs = self.engine.step()
        self.engine.check_integrity()
        self.allocated += self.engine.take_allocated()
        for output in outputs:
            self.tokens.setdefault(output.id, []).append(output.token)

    def drain(self, limit: int = 500) -> None:
        for _ in range(limit):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("still at work")


@pytest.fixture(params=DIALECTS)
def decoding(request: pytest.FixtureRequest) -> Decoding:
    return Decoding(engine(request.param))


def test_a_request_gets_memory_before_its_kv(decoding: Decoding) -> None:
    """Until the KV has come it holds its prompt's memory and computes nothing; then it answers as one engine does."""
    decoding.submit("a", PROMPT)
    decoding.step()
    emulated = decoding.engine
    assert decoding.allocated == ["a"]
    assert (emulated.loading, emulated.waiting, emulated.running, emulated.has_work) == (1, 0, 0, False)
    assert emulated.used_tokens >= len(PROMPT)
    assert emulated.tokens_to_pull("a") == len(PROMPT)
    assert emulated.step() == (0.0, [])
    assert emulated.loaded("a", cached_tokens=17)
    decoding.drain()
    assert decoding.tokens["a"] == answer(emulated.config.dialect, PROMPT, 6)
    assert emulated.counters.prefilled_tokens == 1
    assert emulated.counters.external_hits == len(PROMPT)
    assert emulated.used_tokens == 0


def test_outputs_report_the_prefix_hit_of_the_prefill_engine(decoding: Decoding) -> None:
    """Its own cache says nothing about what was computed."""
    decoding.submit("a", PROMPT, 1)
    decoding.step()
    decoding.engine.loaded("a", cached_tokens=17)
    _, (output,) = decoding.engine.step()
    assert output.cached_tokens == 17


def test_what_is_cached_is_not_pulled(decoding: Decoding) -> None:
    """A second request with the same prompt pulls only what the first has not left in the cache."""
    for name in "ab":
        decoding.submit(name, PROMPT)
        decoding.step()
        missing = decoding.engine.tokens_to_pull(name)
        decoding.engine.loaded(name)
        decoding.drain()
    assert missing == len(PROMPT) - 40
    assert decoding.tokens["a"] == decoding.tokens["b"]


def test_wrong_kv_gives_another_answer(decoding: Decoding) -> None:
    """Its length and everything else is as usual: nothing tells that it is wrong."""
    decoding.submit("a", PROMPT, 20)
    decoding.step()
    decoding.engine.loaded("a", damage=1)
    decoding.drain()
    assert len(decoding.tokens["a"]) == 20
    assert decoding.tokens["a"] != answer(decoding.engine.config.dialect, PROMPT, 20)


def test_a_prompt_whose_kv_does_not_come_can_be_computed(decoding: Decoding) -> None:
    """The request answers as one engine does, and has computed all of its prompt."""
    decoding.submit("a", PROMPT)
    decoding.step()
    assert decoding.engine.recompute("a")
    decoding.drain()
    assert decoding.tokens["a"] == answer(decoding.engine.config.dialect, PROMPT, 6)
    assert decoding.engine.counters.prefilled_tokens == len(PROMPT)


@pytest.mark.parametrize("loaded", [False, True])
def test_an_abort_releases_the_memory(decoding: Decoding, loaded: bool) -> None:
    """Before the KV has come, and after; the KV that comes later is nobody's."""
    decoding.submit("a", PROMPT)
    decoding.step()
    if loaded:
        decoding.engine.loaded("a")
    assert decoding.engine.abort("a")
    decoding.engine.check_integrity()
    assert decoding.engine.used_tokens == 0
    assert not decoding.engine.loaded("a")
    assert not decoding.engine.recompute("a")
    assert not decoding.engine.has_work


def test_a_request_without_memory_blocks_the_queue(decoding: Decoding) -> None:
    """The one behind it waits too; both go on when memory is released."""
    decoding.submit("big", list(range(2000, 2800)))
    decoding.step()
    decoding.submit("next", list(range(5000, 5400)))
    decoding.submit("small", PROMPT)
    decoding.step()
    assert decoding.allocated == ["big"]
    assert decoding.engine.stalled
    decoding.engine.abort("big")
    decoding.step()
    assert decoding.allocated == ["big", "next", "small"]


def test_held_kv_is_released_once() -> None:
    """A prefill of either dialect stays in memory after its only token."""
    for dialect in DIALECTS:
        emulated = engine(dialect)
        emulated.submit(Request("a", PROMPT, 1, ignore_eos=True, hands_off=True))
        drain(emulated)
        assert emulated.take_held() == ["a"]
        assert emulated.used_tokens >= len(PROMPT)
        with pytest.raises(RuntimeError):
            emulated.flush_cache()
        assert emulated.release_held("a")
        assert not emulated.release_held("a")
        emulated.check_integrity()
        assert emulated.used_tokens == 0


@given(data=st.data(), dialect=st.sampled_from(DIALECTS))
@settings(deadline=None, max_examples=60)
def test_no_order_of_events_loses_memory_or_changes_an_answer(data: st.DataObject, dialect: Dialect) -> None:
    """Pulling, aborted, failed and ordinary requests, in small memory: the rest answer as alone, all is freed."""
    decoding = Decoding(engine(dialect, kv_tokens=200, max_running=3))
    prompts, over, pending = dict[str, list[int]](), set[str](), list[str]()
    for number in range(data.draw(st.integers(1, 8))):
        name = str(number)
        start = data.draw(st.sampled_from([0, 0, 500]))
        prompts[name] = list(range(start, start + data.draw(st.integers(1, 60))))
        pulls = data.draw(st.booleans())
        decoding.engine.submit(Request(name, prompts[name], 5, ignore_eos=True, pulls=pulls))
        for _ in range(data.draw(st.integers(0, 4))):
            decoding.step()
        pending, decoding.allocated = pending + decoding.allocated, []
        for each in list(pending):
            event = data.draw(st.sampled_from(["wait", "load", "recompute", "abort"]))
            if event != "wait":
                pending.remove(each)
            if event == "load":
                decoding.engine.loaded(each)
            elif event == "recompute":
                decoding.engine.recompute(each)
            elif event == "abort":
                decoding.engine.abort(each)
                over.add(each)
    for _ in range(500):
        decoding.step()
        for each in [*pending, *decoding.allocated]:
            decoding.engine.loaded(each)
        pending, decoding.allocated = [], []
    assert not decoding.engine.has_work
    assert decoding.engine.used_tokens == 0
    for name, prompt in prompts.items():
        if name not in over:
            assert decoding.tokens[name] == answer(dialect, prompt, 5)

"""The emulated engines: no request is lost, each ends once, and each dialect schedules by its own rules."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.engine.engine import Engine, create_engine, default_config
from workers.engine.hardware import HARDWARE
from workers.engine.model import Dialect, EngineConfig, Output, QueueFull, Request, RequestTooLarge
from workers.engine.tokenizer import EOS, VOCABULARY

INSTANT = HARDWARE["instant"]
DIALECTS: tuple[Dialect, ...] = ("vllm", "sglang")


def engine(
    dialect: Dialect,
    kv_tokens: int = 1000,
    block_size: int = 4,
    max_running: int = 8,
    max_batched_tokens: int = 64,
    max_queued: int | None = None,
    seed: int = 0,
) -> Engine:
    sizes = EngineConfig(
        dialect, kv_tokens, block_size, max_running, max_batched_tokens, max_queued=max_queued, seed=seed
    )
    return create_engine(sizes, INSTANT)


def request(name: str, prompt: list[int], max_tokens: int = 4) -> Request:
    return Request(name, prompt, max_tokens, ignore_eos=True)


@dataclass
class Record:
    """All outputs of an engine, in order."""

    outputs: list[Output] = field(default_factory=list)
    aborted: set[str] = field(default_factory=set)
    seconds: float = 0.0

    def tokens(self, name: str) -> list[int]:
        return [output.token for output in self.outputs if output.id == name]

    def ends(self) -> list[str]:
        return [output.id for output in self.outputs if output.finish]

    def firsts(self) -> list[str]:
        """Requests in the order of their first tokens."""
        return list(dict.fromkeys(output.id for output in self.outputs))

    def cached(self, name: str) -> int:
        return next(output.cached_tokens for output in self.outputs if output.id == name)


def step(emulated: Engine, record: Record) -> list[Output]:
    elapsed, outputs = emulated.step()
    record.seconds += elapsed
    record.outputs += outputs
    emulated.check_integrity()
    assert 0 <= emulated.used_tokens <= emulated.capacity
    return outputs


def drain(emulated: Engine, record: Record | None = None, limit: int = 5000) -> Record:
    """Step until the engine is empty. Fails after `limit` steps."""
    record = record or Record()
    for _ in range(limit):
        if not emulated.has_work:
            return record
        step(emulated, record)
    raise AssertionError(f"still {emulated.running} running, {emulated.waiting} waiting")


def step_until_preempted(emulated: Engine, record: Record, limit: int = 200) -> None:
    for _ in range(limit):
        if emulated.counters.preempted_requests:
            return
        step(emulated, record)
    raise AssertionError("nobody was preempted")


def overcommitted(emulated: Engine) -> Record:
    """Submit two requests that 95 tokens of KV admit together and that need 100 tokens near their ends.

    Both may end early, as otherwise SGLang would reserve all of their max_tokens.
    """
    record = Record()
    emulated.submit(replace(request("a", [1] * 10, 45), ignore_eos=False))
    for _ in range(5):
        step(emulated, record)
    emulated.submit(replace(request("b", [2] * 5, 40), ignore_eos=False))
    return record


def finish(emulated: Engine, *requests: Request) -> Record:
    for each in requests:
        emulated.submit(each)
    return drain(emulated)


configs = st.builds(
    lambda dialect, blocks, block_size, running, batched, lpm, seed: EngineConfig(
        dialect,
        blocks * block_size,
        block_size,
        running,
        batched + block_size,
        order="lpm" if lpm and dialect == "sglang" else "fcfs",
        seed=seed,
    ),
    st.sampled_from(DIALECTS),
    st.integers(5, 40),
    st.sampled_from([1, 2, 4, 16]),
    st.integers(1, 6),
    st.integers(0, 24),
    st.booleans(),
    st.integers(0, 3),
)
requests = st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=24), st.integers(1, 24), st.booleans())
programs = st.lists(st.tuples(st.lists(requests, max_size=3), st.one_of(st.none(), st.integers(0, 20))), max_size=12)


def play(config: EngineConfig, program: list[tuple[list[tuple[list[int], int, bool]], int | None]]) -> Record:
    """Submit, abort and step as the program says, then drain. Checks that every accepted request ends exactly once."""
    emulated, record, accepted = create_engine(config, INSTANT), Record(), dict[str, Request]()
    for arrivals, abort in program:
        for prompt, max_tokens, ignore_eos in arrivals:
            arrival = Request(str(len(accepted)), prompt, max_tokens, ignore_eos)
            if len(prompt) + max_tokens <= emulated.max_request_tokens:
                emulated.submit(arrival)
                accepted[arrival.id] = arrival
        if abort is not None and emulated.abort(str(abort)):
            record.aborted.add(str(abort))
        step(emulated, record)
    drain(emulated, record)
    assert emulated.used_tokens == 0
    assert sorted([*record.ends(), *record.aborted]) == sorted(accepted)
    for output in record.outputs:
        assert output.cached_tokens < len(accepted[output.id].prompt)
    for name in record.ends():
        assert 1 <= len(record.tokens(name)) <= accepted[name].max_tokens
    return record


@settings(max_examples=300)
@given(configs, programs)
def test_every_request_ends_once_and_every_block_is_accounted_for(
    config: EngineConfig, program: list[tuple[list[tuple[list[int], int, bool]], int | None]]
) -> None:
    """Requests and blocks add up under any load, pool and aborts, and equal programs give equal outputs at equal
    times.
    """
    assert play(config, program) == play(config, program)


@settings(max_examples=100)
@given(st.sampled_from(DIALECTS), st.lists(requests, min_size=2, max_size=8), st.integers(1, 5), st.integers(4, 40))
def test_fcfs_gives_first_tokens_in_the_order_of_arrival(
    dialect: Dialect, arrivals: list[tuple[list[int], int, bool]], running: int, batched: int
) -> None:
    """With enough memory, no request overtakes another."""
    emulated = engine(dialect, max_running=running, max_batched_tokens=batched)
    record = finish(emulated, *(Request(str(n), *arrival) for n, arrival in enumerate(arrivals)))
    assert record.firsts() == [str(n) for n in range(len(arrivals))]


@settings(max_examples=100)
@given(st.sampled_from(DIALECTS), st.lists(requests, min_size=1, max_size=8), st.integers(12, 20))
def test_answers_do_not_depend_on_memory(
    dialect: Dialect, arrivals: list[tuple[list[int], int, bool]], blocks: int
) -> None:
    """A request's tokens are those that it gets with a pool of its own, whether or not it was preempted or cached."""
    submitted = [Request(str(n), *arrival) for n, arrival in enumerate(arrivals)]
    tight = finish(engine(dialect, kv_tokens=blocks * 4 + 4), *submitted)
    for each in submitted:
        assert tight.tokens(each.id) == finish(engine(dialect), each).tokens(each.id)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_preemption_recomputes_to_the_same_answer(dialect: Dialect) -> None:
    """Of two requests that together outgrow the pool, one is preempted, starts over and gives the same answer."""
    tight, ample = engine(dialect, kv_tokens=95, block_size=1), engine(dialect)
    seen, expected = drain(tight, overcommitted(tight)), drain(ample, overcommitted(ample))
    assert tight.counters.preempted_requests > 0
    assert ample.counters.preempted_requests == 0
    for name in ("a", "b"):
        assert seen.tokens(name) == expected.tokens(name)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_answers_differ_by_seed_prompt_and_sample(dialect: Dialect) -> None:
    """An answer depends on nothing else: neither on the request's id nor on what ran before."""
    base = engine(dialect)
    said = finish(base, request("a", [1, 2], 20)).tokens("a")
    assert finish(base, request("again", [1, 2], 20)).tokens("again") == said
    assert finish(engine(dialect, seed=1), request("a", [1, 2], 20)).tokens("a") != said
    assert finish(base, request("other", [1, 3], 20)).tokens("other") != said
    assert finish(base, replace(request("n", [1, 2], 20), sample=1)).tokens("n") != said


@pytest.mark.parametrize("dialect", DIALECTS)
def test_without_ignore_eos_an_answer_may_end_early(dialect: Dialect) -> None:
    """The end marker is the answer's last token, and the same request ends at the same place each time."""
    runs = [finish(engine(dialect, kv_tokens=8000), Request("a", [5], 4000)) for _ in range(2)]
    assert runs[0] == runs[1]
    last = runs[0].outputs[-1]
    assert (last.finish, last.token) == ("stop", EOS)
    assert set(runs[0].tokens("a")[:-1]) <= set(VOCABULARY)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_nothing_is_emitted_before_the_prefill_is_done(dialect: Dialect) -> None:
    """A prompt of five chunks emits nothing for four steps."""
    emulated, record = engine(dialect, max_batched_tokens=8), Record()
    emulated.submit(request("a", [*range(40)], 2))
    assert [len(step(emulated, record)) for _ in range(6)] == [0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize(("dialect", "hit"), [("vllm", 8), ("sglang", 8)])
def test_a_repeated_prompt_hits_all_but_its_last_token(dialect: Dialect, hit: int) -> None:
    """Of twelve tokens in blocks of four the third block is computed again, because it holds the last token."""
    emulated = engine(dialect)
    assert finish(emulated, request("a", [*range(12)])).cached("a") == 0
    assert finish(emulated, request("b", [*range(12)])).cached("b") == hit
    assert (emulated.counters.prefix_queries, emulated.counters.prefix_hits) == (24, hit)


@pytest.mark.parametrize(("dialect", "block_size", "hit"), [("vllm", 4, 20), ("sglang", 1, 21)])
def test_generated_tokens_are_cached_too(dialect: Dialect, block_size: int, hit: int) -> None:
    """A second turn hits prompt and answer, except the answer's last token, whose KV was never computed."""
    emulated = engine(dialect, block_size=block_size)
    answer = finish(emulated, request("a", [*range(12)], 10)).tokens("a")
    turn = [*range(12), *answer, 99, 99]
    assert finish(emulated, request("b", turn)).cached("b") == hit


@pytest.mark.parametrize("dialect", DIALECTS)
def test_abort_releases_at_once(dialect: Dialect) -> None:
    """An aborted request, running or waiting, keeps no token in use, emits nothing more, and can be aborted only
    once.
    """
    emulated, record = engine(dialect, max_running=1), Record()
    for name in ("running", "waiting"):
        emulated.submit(request(name, [1, 2, 3], 50))
    step(emulated, record)
    assert (emulated.running, emulated.waiting) == (1, 1)
    assert emulated.abort("waiting")
    assert emulated.abort("running")
    emulated.check_integrity()
    assert (emulated.used_tokens, emulated.has_work) == (0, False)
    assert not emulated.abort("running")
    assert emulated.step() == (0.0, [])
    assert emulated.counters.aborted_requests == 2


@pytest.mark.parametrize("dialect", DIALECTS)
def test_abort_in_the_middle_of_a_prefill(dialect: Dialect) -> None:
    """The chunks computed so far stay cached, and the next request is not delayed."""
    emulated, record = engine(dialect, max_batched_tokens=8), Record()
    emulated.submit(request("a", [*range(40)]))
    step(emulated, record)
    emulated.abort("a")
    emulated.check_integrity()
    assert finish(emulated, request("b", [*range(40)])).cached("b") == 8


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_request_that_can_never_fit_is_refused_at_once(dialect: Dialect) -> None:
    """The largest request that is accepted ends, and one with one more token is refused."""
    emulated = engine(dialect, kv_tokens=64)
    limit = emulated.max_request_tokens
    with pytest.raises(RequestTooLarge):
        emulated.submit(request("big", [1] * 30, limit - 29))
    assert finish(emulated, request("fits", [1] * 30, limit - 30)).ends() == ["fits"]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_full_queue_refuses_requests(dialect: Dialect) -> None:
    """The limit of the queue counts waiting requests only."""
    emulated = engine(dialect, max_running=1, max_queued=1)
    emulated.submit(request("a", [1]))
    with pytest.raises(QueueFull):
        emulated.submit(request("b", [1]))
    emulated.step()
    emulated.submit(request("b", [1]))
    assert emulated.waiting == 1


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("bad", [request("a", []), request("a", [1], 0), request("taken", [1])])
def test_invalid_requests_are_errors(dialect: Dialect, bad: Request) -> None:
    """A request without a prompt, without an output token or with an id in use is refused."""
    emulated = engine(dialect)
    emulated.submit(request("taken", [1]))
    with pytest.raises(ValueError, match="a request needs"):
        emulated.submit(bad)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_waiting_uncached_tokens_changes_nothing(dialect: Dialect) -> None:
    """The count covers the tokens of waiting prompts that the cache does not hold, and leaves the cache's order as it
    is.
    """
    emulated = engine(dialect)
    finish(emulated, request("a", [*range(12)]))
    emulated.submit(request("b", [*range(12)]))
    emulated.submit(request("c", [50] * 5))
    assert [emulated.waiting_uncached_tokens() for _ in range(2)] == [4 + 5, 4 + 5]
    emulated.check_integrity()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_flushed_cache_hits_nothing(dialect: Dialect) -> None:
    """A flush needs an idle engine and empties the cache."""
    emulated = engine(dialect)
    emulated.submit(request("a", [*range(12)]))
    with pytest.raises(RuntimeError):
        emulated.flush_cache()
    drain(emulated)
    emulated.flush_cache()
    assert emulated.cached_tokens == 0
    assert finish(emulated, request("b", [*range(12)])).cached("b") == 0


@pytest.mark.parametrize("dialect", DIALECTS)
def test_running_never_exceeds_its_limit(dialect: Dialect) -> None:
    """Of ten requests at most three run at a time."""
    emulated, record = engine(dialect, max_running=3), Record()
    for n in range(10):
        emulated.submit(request(str(n), [n] * 5))
    most = 0
    while emulated.has_work:
        step(emulated, record)
        most = max(most, emulated.running)
    assert most <= 3
    assert len(record.ends()) == 10


def test_vllm_shares_the_budget_running_first() -> None:
    """Of a budget of eight tokens a decode takes one and the waiting prompt the rest."""
    emulated, record = engine("vllm", max_batched_tokens=8), Record()
    emulated.submit(request("a", [1, 2, 3], 10))
    step(emulated, record)
    emulated.submit(request("b", [9] * 14, 10))
    assert [output.id for output in step(emulated, record)] == ["a"]
    assert emulated.counters.prefilled_tokens == 3 + 7
    assert [output.id for output in step(emulated, record)] == ["a", "b"]


def test_vllm_head_of_line_blocks_when_it_does_not_fit() -> None:
    """A small request behind a large one waits, although it would fit."""
    emulated, record = engine("vllm", kv_tokens=44), Record()
    for arrival in (request("a", [1] * 20, 6), request("large", [2] * 24), request("small", [3] * 2)):
        emulated.submit(arrival)
    step(emulated, record)
    assert (emulated.running, emulated.waiting) == (1, 2)
    assert drain(emulated, record).firsts() == ["a", "large", "small"]


def test_vllm_admits_nobody_in_a_step_that_preempted() -> None:
    """The preempted request waits a step at the head of the queue, although the blocks that it shares are free
    again.
    """
    emulated, record = engine("vllm", kv_tokens=36, max_running=2), Record()
    for name, token in (("a", 1), ("twin", 1), ("c", 3)):
        emulated.submit(request(name, [token] * 12, 12))
    step_until_preempted(emulated, record)
    assert (emulated.running, emulated.waiting) == (1, 2)
    step(emulated, record)
    assert (emulated.running, emulated.waiting) == (2, 1)
    assert drain(emulated, record).ends() == ["a", "twin", "c"]


def test_sglang_prefills_before_it_decodes() -> None:
    """A running answer gets no token while a new prompt is prefilled, chunk after chunk."""
    emulated, record = engine("sglang", max_batched_tokens=8), Record()
    emulated.submit(request("a", [1, 2, 3], 10))
    step(emulated, record)
    emulated.submit(request("b", [9] * 16, 10))
    ids = [[output.id for output in step(emulated, record)] for _ in range(3)]
    assert ids == [[], ["b"], ["a", "b"]]


def test_sglang_reserves_for_answers_to_come() -> None:
    """Two requests whose prompts fit do not run together if their answers would not fit."""
    emulated, record = engine("sglang", kv_tokens=100, block_size=1), Record()
    emulated.submit(request("a", [1] * 10, 60))
    emulated.submit(request("b", [2] * 10, 60))
    step(emulated, record)
    assert (emulated.running, emulated.waiting) == (1, 1)
    drain(emulated, record)
    assert emulated.counters.preempted_requests == 0


def test_sglang_retracts_the_shortest_answer_to_the_end_of_the_queue() -> None:
    """When decoding runs out of memory, the request with the shortest output is retracted, behind all that wait."""
    emulated = engine("sglang", kv_tokens=95, block_size=1, max_running=2)
    record = overcommitted(emulated)
    emulated.submit(request("c", [3] * 4, 5))
    step_until_preempted(emulated, record)
    assert emulated.counters.preempted_output_tokens == len(record.tokens("b"))
    before = len(record.outputs)
    after = [output.id for output in drain(emulated, record).outputs[before:]]
    assert after.index("c") < after.index("b")


@pytest.mark.parametrize(("waiting", "first"), [(2, "warm"), (128, "0")])
def test_lpm_order_prefers_the_longest_match_up_to_128_waiting(waiting: int, first: str) -> None:
    """A cached prompt overtakes uncached ones, and in a longer queue the order is first come, first served."""
    config = default_config("sglang", INSTANT, kv_tokens=10_000, max_running=1, order="lpm")
    emulated = create_engine(config, INSTANT)
    finish(emulated, request("a", [1] * 50))
    cold = [request(str(n), [n + 2] * 50, 1) for n in range(waiting)]
    assert finish(emulated, *cold, request("warm", [1] * 50, 1)).firsts()[0] == first


@pytest.mark.parametrize(
    "change",
    [{"block_size": 0}, {"kv_tokens": 3}, {"max_running": 0}, {"order": "lpm"}, {"max_queued": 0}],
)
def test_invalid_sizes_are_errors(change: dict[str, object]) -> None:
    """A configuration that could not run is refused when it is constructed."""
    config = default_config("vllm")
    with pytest.raises(ValueError, match=r"must|has no"):
        replace(config, **change)  # type: ignore[arg-type]

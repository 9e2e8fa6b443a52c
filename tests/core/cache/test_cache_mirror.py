"""What the engines' caches must hold, replayed from outside and put right by what the engines say."""

from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router.core.cache.cache_mirror import CacheMirror
from router.core.cache.calibration import MIN_ANSWERS
from router.core.cache.engine_rules import Tracking
from router.core.cache.prefix_tree import PrefixTree
from router.core.model.commands import Dispatch
from router.core.model.events import Arrived, CacheReport, Finished, WorkerReported
from router.core.model.request import ClientId, Request, RequestId, Usage, Worker, WorkerId
from router.core.predict.token_estimates import Estimates
from tests.core.scenario import CHUNK_TOKENS, HASHER, MODEL, Scene, key

W1, W2 = WorkerId("w1"), WorkerId("w2")
WORKERS = (W1, W2)

texts = st.text("xy", min_size=0, max_size=8)
workers = st.sampled_from(WORKERS)
counts = st.none() | st.integers(0, 2000)


class Caches:
    """A mirror, and requests that come and go."""

    def __init__(
        self, chunks: int = 100, tracking: Tracking | None = None, engine: str = "", limit: int = 1000
    ) -> None:
        """`chunks`: the capacity of each worker's cache; `limit`: that of the tree."""
        self.tree = PrefixTree(limit)
        self.mirror = CacheMirror(self.tree, Estimates(), chunks * CHUNK_TOKENS, tracking or Tracking())
        self.now = 0.0
        self.arrived = 0
        self.running: dict[RequestId, Request] = {}
        for worker in WORKERS:
            self.mirror.update_worker(Worker(worker, frozenset([MODEL]), engine=engine))

    def send(self, *prompts: str, worker: WorkerId = W1, after: float = 1.0, turn: float | None = None) -> RequestId:
        """A request goes there, a second after what was before; its turn is at once."""
        self.now += after
        self.arrived += 1
        request = Request(RequestId(f"r{self.arrived}"), ClientId("ada"), MODEL, tuple(key(text) for text in prompts))
        self.running[request.id] = request
        size = sum(len(text) for text in prompts) * CHUNK_TOKENS
        matched = sum(self.held(text, worker) for text in prompts) * CHUNK_TOKENS
        self.predicted = self.mirror.dispatch(request, worker, self.now, matched, size, turn or self.now)
        return request.id

    def end(self, request: RequestId, answer: str = "", cached: int | None = None, *, computed: bool = True) -> None:
        """It is over a second later; `cached`: chunks, by the engine's word."""
        self.now += 1.0
        prompts = self.running.pop(request).prompts
        size = sum(prompt.tokens or 0 for prompt in prompts)
        usage = None if cached is None else Usage(size, 0, cached * CHUNK_TOKENS)
        self.mirror.end(request, usage, [key(answer)] if answer else [], self.now, computed=computed)

    def serve(self, *prompts: str, cached: int | None = None, worker: WorkerId = W1) -> None:
        """Both."""
        self.end(self.send(*prompts, worker=worker), cached=cached)

    def report(self, report: CacheReport, worker: WorkerId = W1) -> None:
        self.mirror.apply_report(worker, report, self.now)

    def held(self, text: str, worker: WorkerId = W1) -> int:
        """Chunks."""
        return self.tree.match(key(text).hashes).get(worker, 0)


class AnyHistory(RuleBasedStateMachine):
    """Requests, reports, corrections, evictions and restarts in any order."""

    @initialize(limit=st.sampled_from([3, 12, 1000]))
    def begin(self, limit: int) -> None:
        self.caches = Caches(chunks=12, limit=limit)
        self.mirror = self.caches.mirror

    @rule(prompts=st.lists(texts, min_size=1, max_size=3), worker=workers, wait=st.sampled_from([0.0, 1.0]))
    def send(self, prompts: list[str], worker: WorkerId, wait: float) -> None:
        self.caches.send(*prompts, worker=worker, after=wait)

    @precondition(lambda self: self.caches.running)
    @rule(data=st.data(), output=st.integers(0, 200))
    def progress(self, data: st.DataObject, output: int) -> None:
        self.mirror.set_output(data.draw(st.sampled_from(list(self.caches.running))), output)

    @precondition(lambda self: self.caches.running)
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.mirror.on_first_token(data.draw(st.sampled_from(list(self.caches.running))), self.caches.now)

    @precondition(lambda self: self.caches.running)
    @rule(data=st.data(), answer=texts, cached=st.none() | st.integers(0, 8), computed=st.booleans())
    def end(self, data: st.DataObject, answer: str, cached: int | None, computed: bool) -> None:
        self.caches.end(data.draw(st.sampled_from(list(self.caches.running))), answer, cached, computed=computed)

    @rule(
        worker=workers, evicted=counts, hits=counts, seconds=counts, blocks=counts, asleep=st.integers(0, 9).map(bool)
    )
    def report(
        self,
        worker: WorkerId,
        evicted: int | None,
        hits: int | None,
        seconds: int | None,
        blocks: int | None,
        asleep: bool,
    ) -> None:
        told = CacheReport(None, None, None, hits, evicted, seconds, blocks, asleep=not asleep)
        self.mirror.apply_report(worker, told, self.caches.now)

    @rule(worker=workers, chunks=st.integers(0, 20))
    def tell_capacity(self, worker: WorkerId, chunks: int) -> None:
        self.mirror.set_capacity(worker, chunks * CHUNK_TOKENS)

    @rule(worker=workers, chunks=st.integers(0, 6))
    def evict(self, worker: WorkerId, chunks: int) -> None:
        self.mirror.evict(worker, chunks * CHUNK_TOKENS)

    @rule(worker=workers)
    def restart(self, worker: WorkerId) -> None:
        self.mirror.drop(worker)

    @rule(worker=workers, engine=st.sampled_from(["", "vllm", "sglang"]), batch=st.none() | st.just(96))
    def join(self, worker: WorkerId, engine: str, batch: int | None) -> None:
        self.mirror.update_worker(Worker(worker, frozenset([MODEL]), engine=engine, batch_tokens=batch))

    @invariant()
    def totals_are_those_of_the_nodes(self) -> None:
        """And no worker holds more than its capacity."""
        self.caches.tree.check_integrity()
        for worker, cache in self.mirror.caches.items():
            assert cache.own_tokens >= 0
            assert self.mirror.held_tokens(worker) <= max(0, cache.capacity - cache.own_tokens)
            assert 0 <= cache.calibration.discount <= 1

    def teardown(self) -> None:
        """When all has ended nothing is pinned any more."""
        for request in list(self.caches.running):
            self.caches.end(request)
        for worker, cache in self.mirror.caches.items():
            assert cache.own_tokens == pytest.approx(0.0, abs=1e-6)
            assert self.caches.tree.holding(worker).pinned.oldest is None
        self.caches.tree.check_integrity()


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=60)


def test_prompts_of_one_request_that_void_each_others_pins_leave_none() -> None:
    """The tree has no room for all of them: what is pinned after that is released at its end like the rest."""
    caches = Caches(limit=3)
    caches.end(caches.send("xx", "yy", "zz"))
    assert caches.tree.holding(W1).pinned.oldest is None


def test_what_runs_is_not_evicted() -> None:
    """However long ago it began; what was used since and is over goes first."""
    caches = Caches(chunks=8)
    running = caches.send("xxxx")
    caches.serve("yyy")
    caches.serve("zzz")
    assert (caches.held("xxxx"), caches.held("yyy"), caches.held("zzz")) == (4, 1, 3)
    caches.end(running)
    caches.serve("wwww")
    assert (caches.held("xxxx"), caches.held("yyy"), caches.held("zzz")) == (4, 0, 0)


def test_the_end_of_a_prompt_goes_before_its_beginning() -> None:
    """As vLLM frees blocks in reverse."""
    caches = Caches(chunks=8, engine="vllm")
    caches.serve("xxxx")
    caches.serve("yyyyyy")
    assert caches.held("xxxx") == 2


def test_sglang_evicts_what_a_request_added_as_a_whole() -> None:
    """The beginning that others share stays for as long as it is fresher."""
    caches = Caches(chunks=8, engine="sglang")
    caches.serve("xxyy")
    caches.serve("xxzz")
    caches.serve("www")
    assert (caches.held("xxyy"), caches.held("xxzz"), caches.held("www")) == (2, 4, 3)


def test_an_answer_fills_the_cache_while_it_grows() -> None:
    """Its tokens evict others at once, not when it is over."""
    caches = Caches(chunks=8)
    caches.serve("xxxx")
    running = caches.send("yyyy")
    caches.mirror.set_output(running, 2 * CHUNK_TOKENS)
    assert caches.held("xxxx") == 2
    caches.end(running, "yyyyzz")
    assert (caches.held("xxxx"), caches.held("yyyyzz")) == (2, 6)


def test_an_answer_that_nobody_can_match_fills_the_cache_all_the_same() -> None:
    """As of a client that left: what it got is cached, and can only be evicted."""
    caches = Caches(chunks=8)
    caches.serve("xxxx")
    running = caches.send("yyyy")
    caches.mirror.set_output(running, 2 * CHUNK_TOKENS)
    caches.end(running)
    assert (caches.mirror.held_tokens(W1), caches.held("xxxx")) == (8 * CHUNK_TOKENS, 2)


def test_what_an_engine_turned_away_is_not_cached() -> None:
    """But for what was there before."""
    caches = Caches()
    caches.serve("xx")
    caches.end(caches.send("xxyy"), computed=False)
    assert caches.held("xxyy") == 2


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_what_an_engine_turned_away_again_and_again_is_not_cached(order: tuple[int, ...]) -> None:
    """However the requests with one prompt overlap, none is taken for the proof that its prompt was there."""
    caches = Caches()
    caches.serve("xx")
    refused = [caches.send("xxyy"), caches.send("xxyyz"), caches.send("xxyy")]
    for place in order:
        caches.end(refused[place], computed=False)
    assert caches.held("xxyyz") == 2


def test_what_one_request_brought_stays_when_others_with_it_are_turned_away() -> None:
    """The engine has it from the one that it computed."""
    caches = Caches()
    first, second, third = (caches.send("xxyy") for _ in range(3))
    caches.end(first, computed=False)
    caches.end(second)
    caches.end(third, computed=False)
    assert caches.held("xxyy") == 4


def test_a_prefix_that_was_gone_takes_with_it_what_goes_on_from_there_and_what_is_staler() -> None:
    """Caches evict in order: whatever was released before something that is gone is gone as well."""
    caches = Caches()
    for prompt in ("old", "xxyy", "xxzz", "new"):
        caches.serve(prompt)
    caches.serve("xxyyw", cached=0)
    assert [caches.held(text) for text in ("old", "xxyyw", "xxzz", "new")] == [0, 5, 2, 3]
    assert caches.mirror.cache(W1).evictions["corrected"] == 5 * CHUNK_TOKENS


def test_a_prediction_that_fails_on_something_young_says_nothing_about_what_is_old() -> None:
    """If older things were found lately, its text was never cached like that."""
    caches = Caches()
    for prompt in ("old", "older", "xxyy"):
        caches.serve(prompt)
    caches.serve("old!", cached=3)
    caches.serve("xxyy!", cached=0)
    assert (caches.held("older"), caches.held("xxyy!")) == (5, 5)


def test_a_miss_on_what_is_being_computed_evicts_nothing() -> None:
    """It was sent, and is still pinned: the two were computed at the same time."""
    caches = Caches()
    caches.serve("old")
    first = caches.send("xxyy")
    second = caches.send("xxyy!")
    caches.end(second, cached=0)
    caches.end(first, cached=0)
    assert (caches.held("old"), caches.held("xxyy!")) == (3, 5)


def test_evictions_that_the_engine_counts_are_made_up_for_once() -> None:
    """Those replayed are among them; those in excess are taken now."""
    caches = Caches(chunks=8)
    caches.report(CacheReport(evicted_tokens=100))
    caches.serve("xxxx")
    caches.serve("yyyyyy")
    caches.report(CacheReport(evicted_tokens=100 + 2 * CHUNK_TOKENS))
    assert caches.mirror.held_tokens(W1) == 8 * CHUNK_TOKENS
    caches.report(CacheReport(evicted_tokens=100 + 5 * CHUNK_TOKENS))
    assert (caches.held("xxxx"), caches.held("yyyyyy")) == (0, 5)
    assert caches.mirror.cache(W1).evictions == {"replayed": 2 * CHUNK_TOKENS, "counted": 3 * CHUNK_TOKENS}


def test_an_age_at_which_blocks_are_evicted_ends_what_is_older() -> None:
    """Blocks that had lain for three seconds were evicted: whatever was released before that is gone."""
    caches = Caches()
    caches.report(CacheReport(idle_seconds=10.0, idle_blocks=4))
    for prompt in ("xx", "yy", "zz"):
        caches.serve(prompt)
    caches.report(CacheReport(idle_seconds=16.0, idle_blocks=6))
    assert [caches.held(text) for text in ("xx", "yy", "zz")] == [0, 2, 2]


def test_nothing_that_was_found_lately_is_too_old_to_be_there() -> None:
    """VLLM's ages are also those of blocks that were never cached, which are young."""
    caches = Caches()
    caches.report(CacheReport(idle_seconds=10.0, idle_blocks=4))
    for prompt in ("old", "xx", "yy"):
        caches.serve(prompt)
    caches.serve("old!", cached=3)
    caches.report(CacheReport(idle_seconds=10.5, idle_blocks=5))
    assert [caches.held(text) for text in ("old", "xx", "yy")] == [3, 2, 2]


def test_a_cache_holds_as_much_as_its_engine_stores() -> None:
    """If a prompt of eight chunks takes the room of five, more of them are there before any is evicted."""
    caches = Caches(chunks=80)
    for number in range(200):
        name = chr(ord("a") + number % 26) * 2 + chr(ord("A") + number // 26)
        request = caches.send(f"{name}xxxxx")
        caches.running.pop(request)
        caches.mirror.end(request, Usage(5 * CHUNK_TOKENS + 1, 0, 0), [], caches.now, computed=True)
    assert 120 <= caches.tree.held_chunks(W1) <= 128
    assert caches.mirror.held_tokens(W1) <= 80 * CHUNK_TOKENS


def test_the_next_match_is_as_long_as_the_engine_found_the_last() -> None:
    """What two prompts share behind their last common chunk is found of the third as well."""
    scene = Scene("round_robin")
    texts = [b"d" * 1000 + question * 600 for question in (b"1", b"2", b"3")]
    predicted = []
    for number, text in enumerate(texts):
        request = Request(RequestId(f"q{number}"), ClientId("ada"), MODEL, (HASHER.prompt(text).key,))
        (sent,) = [c for c in scene.tell(Arrived(request)) if isinstance(c, Dispatch)]
        predicted.append(sent.cached_tokens)
        scene.now += 1.0
        scene.tell(Finished(request.id, Usage(400, 1, 248 if number else 0)))
    assert predicted == [0, 224, 248]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (CacheReport(born=1.0), CacheReport(born=2.0)),
        (CacheReport(computed_tokens=10.0), CacheReport(computed_tokens=9.0)),
        (CacheReport(hit_tokens=10.0), CacheReport(hit_tokens=9.0)),
        (CacheReport(evicted_tokens=10.0), CacheReport(evicted_tokens=0.0)),
        (CacheReport(), CacheReport(asleep=True)),
    ],
    ids=["born", "computed", "hits", "evicted", "asleep"],
)
def test_an_engine_that_started_anew_or_sleeps_holds_nothing(before: CacheReport, after: CacheReport) -> None:
    """And what ran there then pins nothing of what comes after."""
    caches = Caches()
    caches.report(before)
    caches.serve("xx")
    running = caches.send("yyyy")
    caches.report(after)
    assert caches.mirror.held_tokens(W1) == 0
    caches.report(after)
    caches.serve("zz")
    caches.end(running, "yyyyy")
    assert (caches.held("yyyy"), caches.held("zz")) == (0, 2)


def test_an_engine_that_says_what_it_said_before_goes_on() -> None:
    """Neither equal counts nor missing ones are a new start."""
    caches = Caches()
    caches.report(CacheReport(born=1.0, computed_tokens=10.0, hit_tokens=5.0))
    caches.serve("xx")
    caches.report(CacheReport(born=1.0, computed_tokens=10.0, hit_tokens=5.0))
    caches.report(CacheReport())
    caches.report(CacheReport(born=1.0, computed_tokens=10.0, hit_tokens=6.0))
    assert caches.held("xx") == 2


def test_two_that_are_computed_in_one_batch_do_not_find_each_other() -> None:
    """Where prompts are found once they are computed; the one after the first token does."""
    caches = Caches(engine="sglang")
    first = caches.send("xxxx", turn=5.0)
    caches.send("xxxy", after=0.5, turn=5.0)
    assert caches.predicted == 0
    caches.mirror.on_first_token(first, caches.now)
    caches.send("xxxz", after=0.5, turn=9.0)
    assert caches.predicted == 3 * CHUNK_TOKENS


def test_a_silent_engine_is_recognised_and_its_counters_are_taken_instead() -> None:
    """Predictions that its hits do not bear out are discounted."""
    caches = Caches(chunks=1000)
    for _ in range(MIN_ANSWERS):
        caches.end(caches.send("xxxx"), cached=None)
    for number in range(MIN_ANSWERS):
        caches.report(CacheReport(hit_tokens=10.0 * number))
        request = caches.send("xxxx!")
        caches.mirror.end(request, Usage(5 * CHUNK_TOKENS, 1), (), caches.now, computed=True)
    calibration = caches.mirror.cache(W1).calibration
    assert calibration.silent
    for number in range(MIN_ANSWERS + 1):
        caches.report(CacheReport(hit_tokens=10.0 * (MIN_ANSWERS + number)))
        caches.running.clear()
        caches.mirror.end(caches.send("xxxx!"), None, (), caches.now, computed=True)
    assert calibration.discount < 0.2


def test_a_worker_whose_predictions_fail_is_believed_less_until_they_are_right() -> None:
    """What the scheduler predicts of its matches is multiplied with what came true of late."""
    scene = Scene("rr+fcfs")
    scene.finish(scene.arrive("ada", "doc?"))
    calibration = scene.scheduler.mirror.cache(W1).calibration
    for _ in range(MIN_ANSWERS):
        calibration.record(1000, 500, 1000)
    assert scene.dispatched[scene.arrive("ada", "doc!")].cached_tokens == round(3 * CHUNK_TOKENS * 0.5)
    for _ in range(200):
        calibration.record(1000, 1000, 1000)
    assert scene.dispatched[scene.arrive("ada", "docs")].cached_tokens == 3 * CHUNK_TOKENS


def test_the_scheduler_drops_what_a_restarted_worker_held() -> None:
    """At the first report after the restart."""
    scene = Scene("rr+fcfs")
    scene.tell(WorkerReported(W1, 0, 0, cache=CacheReport(born=1.0)))
    scene.finish(scene.arrive("ada", "doc?"))
    request = scene.requests[scene.arrive("ada", "doc!")]
    assert scene.scheduler.prefixes.match(request)
    scene.tell(WorkerReported(W1, 0, 0, cache=CacheReport(born=2.0)))
    assert not scene.scheduler.prefixes.match(request)


def test_less_can_be_followed() -> None:
    """Of the ways to be compared with, one evicts nothing, and one evicts by what was sent last."""
    never = Caches(chunks=4, tracking=Tracking(evicts=False, replays=False, corrects=False))
    plain = Caches(chunks=4, tracking=Tracking(replays=False, corrects=False))
    for caches in (never, plain):
        caches.send("xxxx")
        caches.send("yy")
    assert (never.held("xxxx"), plain.held("xxxx"), plain.held("yy")) == (4, 2, 2)


def test_the_same_history_gives_the_same_caches() -> None:
    """Nothing depends on anything else."""

    def played() -> list[float]:
        random, caches = Random(7), Caches(chunks=20)
        found = []
        for _ in range(200):
            if caches.running and random.random() < 0.5:
                caches.end(random.choice(list(caches.running)), cached=random.choice([None, 0, 3]))
            else:
                caches.send("".join(random.choices("xy", k=6)), worker=random.choice(WORKERS))
            found += [caches.mirror.held_tokens(W1), caches.mirror.held_tokens(W2), caches.predicted]
        return found

    assert played() == played()

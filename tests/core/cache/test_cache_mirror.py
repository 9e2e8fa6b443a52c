"""The cache mirror replays the engines' caches from outside and is corrected by the engines' reports."""

from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router.core.cache.cache_mirror import CacheMirror
from router.core.cache.cache_model import MIN_ANSWERS, PinnedRun
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
    """A mirror, and requests that are sent to workers and end."""

    def __init__(
        self, chunks: int = 100, tracking: Tracking | None = None, engine: str = "", limit: int = 1000
    ) -> None:
        """`chunks`: the capacity of each worker's cache; `limit`: that of the tree."""
        self.tree = PrefixTree(limit)
        self.mirror = CacheMirror(self.tree, Estimates(), chunks * CHUNK_TOKENS, tracking or Tracking())
        self.now = 0.0
        self.arrived = 0
        self.running: dict[PinnedRun, Request] = {}
        for worker in WORKERS:
            self.mirror.update_worker(Worker(worker, frozenset([MODEL]), engine=engine))

    def send(
        self, *prompts: str, worker: WorkerId = W1, after: float = 1.0, starts_at: float | None = None
    ) -> PinnedRun:
        """Send a request, `after` seconds after the previous event; the worker starts it at once by default."""
        self.now += after
        self.arrived += 1
        request = Request(RequestId(f"r{self.arrived}"), ClientId("ada"), MODEL, tuple(key(text) for text in prompts))
        size = sum(len(text) for text in prompts) * CHUNK_TOKENS
        matched = sum(self.held(text, worker) for text in prompts) * CHUNK_TOKENS
        run = self.mirror.dispatch(request, worker, self.now, matched, size, lambda now: starts_at or now)
        self.running[run] = request
        self.predicted = run.predicted_tokens
        return run

    def end(self, run: PinnedRun, answer: str = "", cached: int | None = None, *, computed: bool = True) -> None:
        """End a request a second later. `cached`: chunks that the engine reports as cached."""
        self.now += 1.0
        prompts = self.running.pop(run).prompts
        size = sum(prompt.tokens or 0 for prompt in prompts)
        usage = None if cached is None else Usage(size, 0, cached * CHUNK_TOKENS)
        self.mirror.end(run, usage, [key(answer)] if answer else [], self.now, computed=computed)

    def serve(self, *prompts: str, cached: int | None = None, worker: WorkerId = W1) -> None:
        """Send a request and end it."""
        self.end(self.send(*prompts, worker=worker), cached=cached)

    def report(self, report: CacheReport, worker: WorkerId = W1) -> None:
        self.mirror.apply_report(worker, report, self.now)

    def held(self, text: str, worker: WorkerId = W1) -> int:
        """Return how many chunks of the text the worker holds."""
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
        cache_report = CacheReport(None, None, None, hits, evicted, seconds, blocks, asleep=not asleep)
        self.mirror.apply_report(worker, cache_report, self.caches.now)

    @rule(worker=workers, chunks=st.integers(0, 20))
    def set_capacity(self, worker: WorkerId, chunks: int) -> None:
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
    def totals_agree_with_the_nodes(self) -> None:
        """The totals agree with the nodes, and no worker holds more than its capacity."""
        self.caches.tree.check_integrity()
        for worker, cache in self.mirror.caches.items():
            assert cache.own_tokens >= 0
            assert self.mirror.held_tokens(worker) <= max(0, cache.capacity - cache.own_tokens)
            assert 0 <= cache.calibration.discount <= 1

    def teardown(self) -> None:
        """When all requests have ended, nothing is pinned."""
        for request in list(self.caches.running):
            self.caches.end(request)
        for worker, cache in self.mirror.caches.items():
            assert cache.own_tokens == pytest.approx(0.0, abs=1e-6)
            assert self.caches.tree.holding(worker).pinned.oldest is None
        self.caches.tree.check_integrity()


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=60)


def test_voided_pins_of_one_request_leave_no_pin() -> None:
    """If the tree has no room for all prompts of a request, they void each other's pins and leave none behind."""
    caches = Caches(limit=3)
    caches.end(caches.send("xx", "yy", "zz"))
    assert caches.tree.holding(W1).pinned.oldest is None


def test_prefixes_of_running_requests_are_not_evicted() -> None:
    """The prefix of a running request stays, however old it is; that of a later request that has ended is evicted
    first.
    """
    caches = Caches(chunks=8)
    running = caches.send("xxxx")
    caches.serve("yyy")
    caches.serve("zzz")
    assert (caches.held("xxxx"), caches.held("yyy"), caches.held("zzz")) == (4, 1, 3)
    caches.end(running)
    caches.serve("wwww")
    assert (caches.held("xxxx"), caches.held("yyy"), caches.held("zzz")) == (4, 0, 0)


def test_the_end_of_a_prompt_is_evicted_before_its_beginning() -> None:
    """Chunks are evicted from the end of a prompt, as in vLLM, which frees blocks in reverse order."""
    caches = Caches(chunks=8, engine="vllm")
    caches.serve("xxxx")
    caches.serve("yyyyyy")
    assert caches.held("xxxx") == 2


def test_sglang_evicts_what_a_request_added_as_a_whole() -> None:
    """The beginning that other requests share stays for as long as it is fresher."""
    caches = Caches(chunks=8, engine="sglang")
    caches.serve("xxyy")
    caches.serve("xxzz")
    caches.serve("www")
    assert (caches.held("xxyy"), caches.held("xxzz"), caches.held("www")) == (2, 4, 3)


def test_an_answer_fills_the_cache_while_it_grows() -> None:
    """The tokens of an answer evict others as they come, and not only when the answer is complete."""
    caches = Caches(chunks=8)
    caches.serve("xxxx")
    running = caches.send("yyyy")
    caches.mirror.set_output(running, 2 * CHUNK_TOKENS)
    assert caches.held("xxxx") == 2
    caches.end(running, "yyyyzz")
    assert (caches.held("xxxx"), caches.held("yyyyzz")) == (2, 6)


def test_an_unmatchable_answer_fills_the_cache() -> None:
    """The answer of a client that disconnected is cached, and can only be evicted."""
    caches = Caches(chunks=8)
    caches.serve("xxxx")
    running = caches.send("yyyy")
    caches.mirror.set_output(running, 2 * CHUNK_TOKENS)
    caches.end(running)
    assert (caches.mirror.held_tokens(W1), caches.held("xxxx")) == (8 * CHUNK_TOKENS, 2)


def test_a_refused_prompt_is_not_cached() -> None:
    """Of a refused request's prompt, only what was cached before stays."""
    caches = Caches()
    caches.serve("xx")
    caches.end(caches.send("xxyy"), computed=False)
    assert caches.held("xxyy") == 2


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_a_repeatedly_refused_prompt_is_not_cached(order: tuple[int, ...]) -> None:
    """However refused requests with the same prompt overlap, none proves that the prompt was cached."""
    caches = Caches()
    caches.serve("xx")
    refused = [caches.send("xxyy"), caches.send("xxyyz"), caches.send("xxyy")]
    for place in order:
        caches.end(refused[place], computed=False)
    assert caches.held("xxyyz") == 2


def test_a_computed_prompt_stays_if_others_are_refused() -> None:
    """The engine has the prompt from the one request that it computed, so refusals of others do not remove it."""
    caches = Caches()
    first, second, third = (caches.send("xxyy") for _ in range(3))
    caches.end(first, computed=False)
    caches.end(second)
    caches.end(third, computed=False)
    assert caches.held("xxyy") == 4


def test_a_missing_prefix_removes_its_continuation_and_older_ones() -> None:
    """Caches evict in order, so all that was released before a missing prefix is gone as well."""
    caches = Caches()
    for prompt in ("old", "xxyy", "xxzz", "new"):
        caches.serve(prompt)
    caches.serve("xxyyw", cached=0)
    assert [caches.held(text) for text in ("old", "xxyyw", "xxzz", "new")] == [0, 5, 2, 3]
    assert caches.mirror.cache(W1).evictions["corrected"] == 5 * CHUNK_TOKENS


def test_a_missing_recent_prefix_removes_nothing_older() -> None:
    """If older prefixes were hit recently, the missing text was never cached in that form."""
    caches = Caches()
    for prompt in ("old", "older", "xxyy"):
        caches.serve(prompt)
    caches.serve("old!", cached=3)
    caches.serve("xxyy!", cached=0)
    assert (caches.held("older"), caches.held("xxyy!")) == (5, 5)


def test_a_miss_on_a_prefilling_prefix_evicts_nothing() -> None:
    """A prefix that is missing while another request pins it was computed for both at the same time."""
    caches = Caches()
    caches.serve("old")
    first = caches.send("xxyy")
    second = caches.send("xxyy!")
    caches.end(second, cached=0)
    caches.end(first, cached=0)
    assert (caches.held("old"), caches.held("xxyy!")) == (3, 5)


def test_counted_evictions_are_applied_once() -> None:
    """Replayed evictions are among those that the engine counts; only the excess is evicted now."""
    caches = Caches(chunks=8)
    caches.report(CacheReport(evicted_tokens=100))
    caches.serve("xxxx")
    caches.serve("yyyyyy")
    caches.report(CacheReport(evicted_tokens=100 + 2 * CHUNK_TOKENS))
    assert caches.mirror.held_tokens(W1) == 8 * CHUNK_TOKENS
    caches.report(CacheReport(evicted_tokens=100 + 5 * CHUNK_TOKENS))
    assert (caches.held("xxxx"), caches.held("yyyyyy")) == (0, 5)
    assert caches.mirror.cache(W1).evictions == {"replayed": 2 * CHUNK_TOKENS, "counted": 3 * CHUNK_TOKENS}


def test_the_age_of_evicted_blocks_evicts_older_prefixes() -> None:
    """Blocks that were idle for three seconds were evicted, so everything released before that is gone."""
    caches = Caches()
    caches.report(CacheReport(idle_seconds=10.0, idle_blocks=4))
    for prompt in ("xx", "yy", "zz"):
        caches.serve(prompt)
    caches.report(CacheReport(idle_seconds=16.0, idle_blocks=6))
    assert [caches.held(text) for text in ("xx", "yy", "zz")] == [0, 2, 2]


def test_the_age_of_recent_hits_is_not_evicted() -> None:
    """A reported age below that of recent hits evicts nothing, since vLLM also reports the ages of blocks that were
    never cached.
    """
    caches = Caches()
    caches.report(CacheReport(idle_seconds=10.0, idle_blocks=4))
    for prompt in ("old", "xx", "yy"):
        caches.serve(prompt)
    caches.serve("old!", cached=3)
    caches.report(CacheReport(idle_seconds=10.5, idle_blocks=5))
    assert [caches.held(text) for text in ("old", "xx", "yy")] == [3, 2, 2]


def test_a_cache_holds_as_much_as_its_engine_stores() -> None:
    """If a prompt of eight chunks takes the room of five, more prompts fit before any is evicted."""
    caches = Caches(chunks=80)
    for number in range(200):
        name = chr(ord("a") + number % 26) * 2 + chr(ord("A") + number // 26)
        request = caches.send(f"{name}xxxxx")
        caches.running.pop(request)
        caches.mirror.end(request, Usage(5 * CHUNK_TOKENS + 1, 0, 0), [], caches.now, computed=True)
    assert 120 <= caches.tree.held_chunks(W1) <= 128
    assert caches.mirror.held_tokens(W1) <= 80 * CHUNK_TOKENS


def test_matches_learn_from_what_the_engine_found() -> None:
    """What two prompts share behind their last common chunk is predicted for the third as well."""
    scene = Scene("round_robin")
    texts = [b"d" * 1000 + question * 600 for question in (b"1", b"2", b"3")]
    predicted = []
    for number, text in enumerate(texts):
        request = Request(RequestId(f"q{number}"), ClientId("ada"), MODEL, (HASHER.prompt(text).key,))
        (sent,) = [c for c in scene.feed(Arrived(request)) if isinstance(c, Dispatch)]
        predicted.append(sent.cached_tokens)
        scene.now += 1.0
        scene.feed(Finished(request.id, Usage(400, 1, 248 if number else 0)))
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
def test_a_restarted_or_sleeping_engine_holds_nothing(before: CacheReport, after: CacheReport) -> None:
    """The engine's cache is empty then, and a request that ran before pins nothing of what comes after."""
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


def test_unchanged_counters_are_no_restart() -> None:
    """Equal counters, and missing ones, show no restart."""
    caches = Caches()
    caches.report(CacheReport(born=1.0, computed_tokens=10.0, hit_tokens=5.0))
    caches.serve("xx")
    caches.report(CacheReport(born=1.0, computed_tokens=10.0, hit_tokens=5.0))
    caches.report(CacheReport())
    caches.report(CacheReport(born=1.0, computed_tokens=10.0, hit_tokens=6.0))
    assert caches.held("xx") == 2


def test_prompts_of_one_batch_do_not_hit_each_other() -> None:
    """In SGLang a prompt can be hit only once it is computed; a request after its first token hits it."""
    caches = Caches(engine="sglang")
    first = caches.send("xxxx", starts_at=5.0)
    caches.send("xxxy", after=0.5, starts_at=5.0)
    assert caches.predicted == 0
    caches.mirror.on_first_token(first, caches.now)
    caches.send("xxxz", after=0.5, starts_at=9.0)
    assert caches.predicted == 3 * CHUNK_TOKENS


def test_counters_replace_the_reports_of_a_silent_engine() -> None:
    """Predictions that the engine's hit counter does not confirm are discounted."""
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


def test_failing_predictions_are_discounted_until_they_hold() -> None:
    """The scheduler's predictions are multiplied by the share that came true recently."""
    scene = Scene("rr+fcfs")
    scene.finish(scene.arrive("ada", "doc?"))
    calibration = scene.scheduler.mirror.cache(W1).calibration
    for _ in range(MIN_ANSWERS):
        calibration.record(1000, 500, 1000)
    scene.feed(WorkerReported(W1, 0, 0, cache=CacheReport()))
    assert scene.dispatched[scene.arrive("ada", "doc!")].cached_tokens == round(3 * CHUNK_TOKENS * 0.5)
    for _ in range(200):
        calibration.record(1000, 1000, 1000)
    scene.feed(WorkerReported(W1, 0, 0, cache=CacheReport()))
    assert scene.dispatched[scene.arrive("ada", "docs")].cached_tokens == 3 * CHUNK_TOKENS


def test_the_scheduler_drops_what_a_restarted_worker_held() -> None:
    """The scheduler drops it at the first report after the restart."""
    scene = Scene("rr+fcfs")
    scene.feed(WorkerReported(W1, 0, 0, cache=CacheReport(born=1.0)))
    scene.finish(scene.arrive("ada", "doc?"))
    request = scene.requests[scene.arrive("ada", "doc!")]
    assert scene.scheduler.prefixes.match(request)
    scene.feed(WorkerReported(W1, 0, 0, cache=CacheReport(born=2.0)))
    assert not scene.scheduler.prefixes.match(request)


def test_tracking_can_be_reduced() -> None:
    """There are two reduced ways of tracking: one evicts nothing, and one evicts in the order of dispatch."""
    never = Caches(chunks=4, tracking=Tracking(evicts=False, replays=False, corrects=False))
    plain = Caches(chunks=4, tracking=Tracking(replays=False, corrects=False))
    for caches in (never, plain):
        caches.send("xxxx")
        caches.send("yy")
    assert (never.held("xxxx"), plain.held("xxxx"), plain.held("yy")) == (4, 2, 2)


def test_the_same_history_gives_the_same_caches() -> None:
    """The caches depend on the history alone."""

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

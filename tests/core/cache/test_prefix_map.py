"""The prefix map says in tokens what workers are believed to hold, and reports changes for watched requests."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.core.cache.held_chunks import HeldChunks
from router.core.cache.match_group import MatchGroup
from router.core.cache.prefix_map import Lookup, PrefixMap
from router.core.model.events import CacheReport
from router.core.model.request import ClientId, Request, RequestId, Usage, WorkerId
from router.core.predict.token_estimates import Estimates
from tests.core.scenario import CHUNK_TOKENS, MODEL, key

W1, W2 = WorkerId("w1"), WorkerId("w2")
WORKERS = (W1, W2)

texts = st.text("xy", max_size=6)
workers = st.sampled_from((*WORKERS, WorkerId("w3")))
watched_workers = workers | st.sets(workers, min_size=1).map(lambda drawn: dict.fromkeys(sorted(drawn)))
"""One worker, or some of all, of which the others are not asked for."""


def request(*prompts: str, number: int = 1) -> Request:
    return Request(RequestId(f"r{number}"), ClientId("ada"), MODEL, tuple(key(prompt) for prompt in prompts))


def prefixes(limit: int = 1000, minimum: int = 0) -> PrefixMap:
    return PrefixMap(limit, Estimates(), minimum)


def watch(held: PrefixMap, watched: Request, worker: WorkerId) -> int:
    """Watch a request at one worker."""
    return held.watch_at(watched, worker)


def changed(held: PrefixMap, worker: WorkerId) -> list[RequestId]:
    """Return what changed at one worker, and check that nothing changed elsewhere."""
    found = held.take_changes()
    assert found.keys() <= {worker}
    return list(found.get(worker, ()))


class Told(NamedTuple):
    """What a watch told."""

    workers: dict[WorkerId, None] | WorkerId
    """The workers of a watch at all workers, or the only one that is watched."""
    chunks: Mapping[WorkerId, int]
    concern: Collection[WorkerId] | None = None
    """The workers of a narrow watch."""


class Watches(RuleBasedStateMachine):
    """Watches on requests of one or two prompts, while prefixes are inserted, dropped and evicted for lack of room."""

    def __init__(self) -> None:
        super().__init__()
        self.map = PrefixMap(12, Estimates(), match_minimum=0)
        self.tree = self.map.tree
        self.arrivals = 0
        self.told: dict[Request, Told] = {}

    def matched(self, worker: WorkerId, request: Request) -> int:
        return sum(self.tree.match(prompt.hashes).get(worker, 0) for prompt in request.prompts)

    def watch_anew(self, watched: Request, workers: dict[WorkerId, None] | WorkerId) -> None:
        if isinstance(workers, dict):
            held = self.map.watch(watched, workers)
            assert held.by_worker == self.map.chunks_held(watched, workers).by_worker
            self.told[watched] = Told(workers, {worker: held.at(worker) for worker in workers})
        else:
            self.told[watched] = Told(workers, {workers: self.map.watch_at(watched, workers)})

    @rule(workers=watched_workers, prompts=st.lists(texts, min_size=1, max_size=2))
    def watch(self, workers: dict[WorkerId, None] | WorkerId, prompts: list[str]) -> None:
        self.arrivals += 1
        self.watch_anew(request(*prompts, number=self.arrivals), workers)

    @precondition(lambda self: self.told)
    @rule(data=st.data(), workers=watched_workers)
    def watch_elsewhere(self, data: st.DataObject, workers: dict[WorkerId, None] | WorkerId) -> None:
        self.watch_anew(data.draw(st.sampled_from(list(self.told))), workers)

    @precondition(lambda self: any(isinstance(told.workers, dict) for told in self.told.values()))
    @rule(data=st.data())
    def watch_narrowly(self, data: st.DataObject) -> None:
        """Of a narrow watch, only what it holds at its workers is known to be current, the most, and the common."""
        watched = data.draw(
            st.sampled_from([each for each, told in self.told.items() if isinstance(told.workers, dict)])
        )
        workers = self.told[watched].workers
        assert isinstance(workers, dict)
        concern = data.draw(st.lists(st.sampled_from(list(workers)), unique=True))
        self.watch_anew(watched, workers)
        self.map.watch_narrowly(watched, concern, workers)
        if len(watched.prompts) == 1:
            self.told[watched] = self.told[watched]._replace(concern=concern)

    @precondition(lambda self: self.told)
    @rule(data=st.data())
    def unwatch(self, data: st.DataObject) -> None:
        watched = data.draw(st.sampled_from(list(self.told)))
        self.map.unwatch(watched.id)
        del self.told[watched]

    @rule(worker=workers, prompts=st.lists(texts, max_size=2))
    def insert(self, worker: WorkerId, prompts: list[str]) -> None:
        self.map.insert(MODEL, [key(prompt) for prompt in prompts], worker, 0.0)
        self.take_changes()

    @rule(worker=workers, chunks=st.integers(0, 4))
    def evict(self, worker: WorkerId, chunks: int) -> None:
        self.map.mirror.evict(worker, chunks * CHUNK_TOKENS)
        self.take_changes()

    @rule(worker=workers)
    def drop(self, worker: WorkerId) -> None:
        self.map.drop(worker)
        self.take_changes()

    def take_changes(self) -> None:
        """Only watched requests are reported as changed."""
        for worker, requests in self.map.take_changes().items():
            for name in requests:
                (watched,) = [watched for watched in self.told if watched.id == name]
                workers = self.told[watched].workers
                assert isinstance(workers, dict) or workers == worker
                self.watch_anew(watched, workers)
        assert not self.map.take_changes()

    @invariant()
    def every_change_is_reported(self) -> None:
        """The reported match of a watched request is its match, and the index holds nothing but the watches."""
        for watched, told in self.told.items():
            now = {worker: self.matched(worker, watched) for worker in told.chunks}
            if told.concern is None:
                assert told.chunks == now
            else:
                assert min(told.chunks.values(), default=0) == min(now.values(), default=0)
                assert max(told.chunks.values(), default=0) == max(now.values(), default=0)
                assert all(told.chunks[worker] == now[worker] for worker in told.concern)
        assert self.map.watched == len(self.told)
        self.map.check_integrity()


TestWatches = Watches.TestCase
TestWatches.settings = settings(max_examples=40)


def test_a_match_is_in_tokens_by_worker() -> None:
    """A request matches each worker's longest common prefix, at the learned tokens per chunk."""
    held = prefixes()
    held.insert(MODEL, [key("doc?")], W1, 0.0)
    held.insert(MODEL, [key("do")], W2, 0.0)
    assert held.match(request("doc!")) == {W1: 3 * CHUNK_TOKENS, W2: 2 * CHUNK_TOKENS}
    assert held.match(request("else")) == {}


def test_a_held_prompt_still_costs_its_last_token() -> None:
    """An engine computes at least one token, even if it has cached the whole prompt."""
    held = prefixes()
    held.insert(MODEL, [key("doc")], W1, 0.0)
    assert held.match(request("doc")) == {W1: 3 * CHUNK_TOKENS - 1}


def test_the_matches_of_several_prompts_add_up() -> None:
    """A call with a list of prompts matches with each of them."""
    held = prefixes()
    held.insert(MODEL, [key("ab"), key("xyz")], W1, 0.0)
    assert held.match(request("ab!", "xyz!", "else")) == {W1: 5 * CHUNK_TOKENS}


def test_a_match_below_the_minimum_does_not_count() -> None:
    """Below the minimum neither the match nor the watch finds anything; growth beyond it is still reported."""
    held = prefixes(minimum=3 * CHUNK_TOKENS)
    held.insert(MODEL, [key("do")], W1, 0.0)
    assert (held.match(request("doc!")), watch(held, request("doc!"), W1)) == ({}, 0)
    held.insert(MODEL, [key("doc")], W1, 1.0)
    assert changed(held, W1) == ["r1"]
    assert (held.match(request("doc!")), watch(held, request("doc!"), W1)) == ({W1: 3 * CHUNK_TOKENS}, 3)


def test_growth_is_reported_for_its_worker_and_prefix_only() -> None:
    """An insertion at another worker, of another prefix, or of nothing new, is no growth."""
    held = prefixes()
    watch(held, request("doc!"), W1)
    for worker, prompt in ((W2, "doc?"), (W1, "else")):
        held.insert(MODEL, [key(prompt)], worker, 0.0)
        assert changed(held, worker) == []
    held.insert(MODEL, [key("doc?")], W1, 0.0)
    assert changed(held, W1) == ["r1"]
    watch(held, request("doc!"), W1)
    held.insert(MODEL, [key("doc?")], W1, 0.0)
    assert changed(held, W1) == []


def test_loss_is_reported_for_its_worker_and_prefix_only() -> None:
    """An eviction at another worker, or of nothing in the request's match, is no loss."""
    held = prefixes()
    for worker in WORKERS:
        held.insert(MODEL, [key("doc?")], worker, 0.0)
    watch(held, request("doc!"), W1)
    held.mirror.evict(W1, CHUNK_TOKENS)
    held.drop(W2)
    assert changed(held, W1) == []
    held.mirror.evict(W1, CHUNK_TOKENS)
    assert changed(held, W1) == ["r1"]
    assert watch(held, request("doc!"), W1) == 2
    held.drop(W1)
    assert changed(held, W1) == ["r1"]


def test_an_eviction_for_lack_of_room_is_reported() -> None:
    """An insertion at one worker may push another worker's prefix out of the tree."""
    held = prefixes(limit=4)
    held.insert(MODEL, [key("doc")], W1, 0.0)
    watch(held, request("doc!"), W1)
    held.insert(MODEL, [key("else")], W2, 1.0)
    assert changed(held, W1) == ["r1"]
    assert watch(held, request("doc!"), W1) == 0


def test_a_prompt_longer_than_the_tree_is_held_up_to_its_limit() -> None:
    """The tree holds the beginning of such a prompt, and a watched request matches as much."""
    held = prefixes(limit=4)
    watched = request("documents!")
    assert watch(held, watched, W1) == 0
    held.insert(MODEL, [key("documents?")], W1, 0.0)
    assert changed(held, W1) == ["r1"]
    assert watch(held, watched, W1) == 4


def test_a_narrow_watch_reports_what_concerns_it() -> None:
    """That is a change at its workers, or of the most that any worker holds, or of what all hold."""
    held, five = prefixes(), dict.fromkeys(map(WorkerId, ("w1", "w2", "w3", "w4", "w5")))
    for worker in ("w1", "w2", "w3", "w4"):
        held.insert(MODEL, [key("doc?")], WorkerId(worker), 0.0)

    def reported(change: Callable[[], object]) -> bool:
        watched = request("doc!", number=1)
        held.watch(watched, five)
        held.watch_narrowly(watched, [W1], five)
        change()
        return any(RequestId("r1") in requests for requests in held.take_changes().values())

    w4, w5 = WorkerId("w4"), WorkerId("w5")
    assert not reported(lambda: held.mirror.evict(w4, CHUNK_TOKENS * 2)), "one of many"
    assert reported(lambda: held.mirror.evict(W1, CHUNK_TOKENS * 2)), "its worker"
    assert reported(lambda: held.insert(MODEL, [key("d")], w5, 1.0)), "all hold a part"
    assert not reported(lambda: held.mirror.evict(w4, CHUNK_TOKENS)), "the least is not less"
    assert reported(lambda: held.insert(MODEL, [key("doc!")], w5, 2.0)), "the most"
    held.insert(MODEL, [key("doc!")], WorkerId("w6"), 3.0)
    assert reported(lambda: held.mirror.evict(w5, CHUNK_TOKENS)), "the most, beside a worker that may not serve it"


def test_less_than_the_minimum_concerns_a_narrow_watch_only_if_all_hold_some() -> None:
    """Otherwise no chunks are common, whether such a match counts or not; nor does the watch need any worker."""
    held, four = prefixes(minimum=3 * CHUNK_TOKENS), dict.fromkeys(map(WorkerId, ("w1", "w2", "w3", "w4")))
    w3, w4 = WorkerId("w3"), WorkerId("w4")
    for worker in (W1, W2):
        held.insert(MODEL, [key("document")], worker, 0.0)

    def reported(change: Callable[[], object], *workers: WorkerId) -> bool:
        watched = Request(RequestId("r1"), ClientId("ada"), MODEL, (key("document!", exact=False),))
        held.watch(watched, four)
        held.watch_narrowly(watched, workers, four)
        change()
        return any(RequestId("r1") in requests for requests in held.take_changes().values())

    assert not reported(lambda: held.insert(MODEL, [key("d")], w3, 1.0), W1, W2), "one that holds little"
    assert not reported(lambda: held.insert(MODEL, [key("do")], w3, 1.0)), "the same, without workers"
    assert reported(lambda: held.insert(MODEL, [key("d")], w4, 1.0), W1, W2), "all hold a part"
    assert reported(lambda: held.drop(w4), W1, W2), "no longer all"
    held.mirror.evict(W2, 6 * CHUNK_TOKENS)
    assert reported(lambda: held.insert(MODEL, [key("doc")], w3, 2.0), W1, W2), "its own may not count"
    assert not reported(lambda: held.insert(MODEL, [key("docu")], w3, 2.0), W1), "the least is not needed"


@pytest.mark.parametrize(("workers", "tokens"), [(3, 9), (4, 180)])
def test_what_may_no_longer_count_concerns_a_narrow_watch(workers: int, tokens: int) -> None:
    """Once a prompt turns out to have so few tokens, what its own worker holds may be below the minimum, or the least
    that all hold.
    """
    estimates, four = Estimates(), dict.fromkeys(map(WorkerId, ("w1", "w2", "w3", "w4")))
    held = PrefixMap(1000, estimates, 3 * CHUNK_TOKENS)
    for worker in [*four][:workers]:
        held.insert(MODEL, [key("docu" if worker == "w3" else "document")], worker, 0.0)
    watched = Request(RequestId("r1"), ClientId("ada"), MODEL, (key("document!", exact=False),))
    for learned in (False, True):
        held.watch(watched, four)
        held.watch_narrowly(watched, [W1], four)
        if learned:
            estimates.learn(watched, Usage(tokens, 1))
        held.mirror.evict(W2, CHUNK_TOKENS)
        assert bool(held.take_changes()) is learned


def test_an_unwatched_request_is_not_reported() -> None:
    """A request that is no longer watched is not reported, even if its match changed before."""
    held = prefixes()
    watch(held, request("doc!"), W1)
    held.insert(MODEL, [key("doc?")], W1, 0.0)
    held.unwatch(RequestId("r1"))
    assert changed(held, W1) == []


@pytest.mark.parametrize("prompts", [("doc", "doc"), ("doc!", "doc?")])
def test_prompts_that_lack_the_same_chunk_are_one_watch(prompts: tuple[str, ...]) -> None:
    """Prompts of one request with the same beginning are reported once and leave nothing behind."""
    held = prefixes()
    watch(held, request(*prompts), W1)
    held.insert(MODEL, [key("doc")], W1, 0.0)
    assert changed(held, W1) == ["r1"]
    held.unwatch(RequestId("r1"))
    held.check_integrity()
    assert held.watched == 0


def test_learning_does_not_change_watched_matches() -> None:
    """Matches that were returned at different times are compared, so their unit must not change."""
    estimates = Estimates()
    held = PrefixMap(100, estimates, match_minimum=0)
    held.insert(MODEL, [key("doc?", exact=False)], W1, 0.0)
    watched = Request(RequestId("r1"), ClientId("ada"), MODEL, (key("doc!", exact=False),))
    before, tokens = watch(held, watched, W1), held.match(watched)[W1]
    estimates.learn(watched, Usage(4 * 128, 1))
    assert watch(held, watched, W1) == before
    assert held.match(watched)[W1] > tokens


class Carrier:
    """Stands for a live request, which carries its lookup."""

    def __init__(self, request: Request) -> None:
        self.lookup = Lookup(request)


def test_a_live_request_keeps_its_match_until_something_changes() -> None:
    """A live request's match is found once, and again after a change of the tree; for other requests
    nothing is kept.
    """
    live, other = request("doc!"), request("dots", number=2)
    held = PrefixMap(100, Estimates(), 0, live={live.id: Carrier(live)})
    held.insert(MODEL, [key("doc?")], W1, 0.0)
    first = held.match(live)
    assert held.match(other) is not held.match(other)
    assert held.match(live) is first
    held.insert(MODEL, [key("doc?")], W2, 0.0)
    assert held.match(live) == {W1: 3 * CHUNK_TOKENS, W2: 3 * CHUNK_TOKENS}


def test_a_watched_request_keeps_its_match_while_changes_concern_others() -> None:
    """A watched request's match is found once, and again when workers hold more of it; with the watch goes what it was
    found from.
    """
    watched = request("doc!")
    carrier = Carrier(watched)
    held = PrefixMap(100, Estimates(), 0, live={watched.id: carrier})
    for worker in WORKERS:
        held.mirror.apply_report(worker, CacheReport(1), 0.0)
    held.insert(MODEL, [key("doc?")], W1, 0.0)
    held.watch(watched, dict.fromkeys(WORKERS))
    first = held.match(watched)
    held.insert(MODEL, [key("else")], W2, 0.0)
    assert held.match(watched) is first
    held.insert(MODEL, [key("do")], W2, 0.0)
    assert held.match(watched) == {W1: 3 * CHUNK_TOKENS, W2: 2 * CHUNK_TOKENS}
    held.unwatch(watched.id)
    assert carrier.lookup.in_tree_for is None
    assert not carrier.lookup.in_tree
    assert held.match(watched) == {W1: 3 * CHUNK_TOKENS, W2: 2 * CHUNK_TOKENS}


@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("insert"), st.sampled_from(["x", "xyx", "xyxyx", "y"]), workers),
            st.tuples(st.just("evict"), st.integers(1, 3), workers),
            st.tuples(st.just("learn"), st.sampled_from(["x", "xyxyxyx"]), st.sampled_from([1, 500])),
            st.tuples(st.just("cache"), st.sampled_from([1, 48]), st.sampled_from([WORKERS, (W1,)])),
        ),
        max_size=20,
    ),
    exact=st.booleans(),
)
def test_a_watched_request_matches_as_one_that_is_not_watched(steps: list[tuple[str, Any, Any]], exact: bool) -> None:
    """What a watch knows of a request gives the match that looking it up gives, whatever is inserted, evicted, learned
    or reported in between.
    """
    watched, other = [Request(RequestId(f"r{n}"), ClientId("ada"), MODEL, (key("xyxy", exact=exact),)) for n in (1, 2)]
    estimates = Estimates()
    held = PrefixMap(40, estimates, 0, live={watched.id: Carrier(watched)})
    able = dict.fromkeys((W1, W2, WorkerId("w3")))
    held.watch(watched, able)
    for step, value, where in steps:
        match step:
            case "insert":
                held.insert(MODEL, [key(value, exact=False)], where, 0.0)
            case "evict":
                held.mirror.evict(where, value * CHUNK_TOKENS)
            case "learn":
                estimates.learn(
                    Request(RequestId("r3"), ClientId("ada"), MODEL, (key(value, exact=False),)), Usage(where, 1, 0)
                )
            case "cache":
                for worker in where:
                    held.mirror.apply_report(worker, CacheReport(value), 0.0)
        assert held.match(watched) == held.match(other)


def test_a_live_request_keeps_its_size_until_something_is_learned() -> None:
    """A change of the tree alone does not measure its prompt again."""
    live = Request(RequestId("r1"), ClientId("ada"), MODEL, (key("doc!", exact=False),))
    carrier, estimates = Carrier(live), Estimates()
    held = PrefixMap(100, estimates, 0, live={live.id: carrier})
    size, version = held.input_tokens(live), carrier.lookup.size_version
    held.insert(MODEL, [key("doc!", exact=False)], W1, 0.0)
    assert (held.input_tokens(live), carrier.lookup.size_version) == (size, version)
    estimates.learn(live, Usage(4 * size, 1))
    assert held.input_tokens(live) > size


def test_an_oracle_is_asked_anew_once_another_request_was_looked_up() -> None:
    """The oracle is asked again after every other request, because it does not report when its answers change."""
    live, asked = [request("doc!", number=number) for number in (1, 2)], list[RequestId]()

    def oracle(request: Request) -> dict[WorkerId, int]:
        asked.append(request.id)
        return {}

    held = PrefixMap(100, Estimates(), 0, oracle=oracle, live={each.id: Carrier(each) for each in live})
    for each in (live[0], live[0], live[1], live[0]):
        held.match(each)
    assert asked == ["r1", "r2", "r1"]


def test_evicted_and_dropped_prefixes_match_no_more() -> None:
    """An eviction removes the tokens that the worker reported, and a drop removes all, both at that worker alone."""
    held = prefixes()
    for worker in WORKERS:
        held.insert(MODEL, [key("doc?")], worker, 0.0)
    held.mirror.evict(W1, 2 * CHUNK_TOKENS)
    assert held.match(request("doc!")) == {W1: 2 * CHUNK_TOKENS, W2: 3 * CHUNK_TOKENS}
    held.drop(W1)
    assert held.match(request("doc!")) == {W2: 3 * CHUNK_TOKENS}


def test_a_broken_index_is_found() -> None:
    """The check fails if a chunk is indexed at which no match ends."""
    held = prefixes()
    watch(held, request("doc"), W1)
    held._indexes[W1]._lacked[b"12345678"] = {MatchGroup(b"", HeldChunks({})): None}
    with pytest.raises(AssertionError, match="indexed wrongly"):
        held.check_integrity()

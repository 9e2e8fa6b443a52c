"""What workers are believed to hold, in tokens; and the watch on what waits."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from scenario import CHUNK_TOKENS, MODEL, key

from router.core.estimates import Estimates
from router.core.model import ClientId, Request, RequestId, Usage, WorkerId
from router.core.prefix_map import PrefixMap
from router.core.prefix_tree import PrefixTree

W1, W2 = WorkerId("w1"), WorkerId("w2")
WORKERS = (W1, W2)

texts = st.text("xy", max_size=6)
workers = st.sampled_from(WORKERS)


def request(*prompts: str, number: int = 1) -> Request:
    return Request(RequestId(f"r{number}"), ClientId("ada"), MODEL, tuple(key(prompt) for prompt in prompts))


def prefixes(limit: int = 1000, minimum: int = 0) -> PrefixMap:
    return PrefixMap(PrefixTree(limit), Estimates(), minimum)


class Watches(RuleBasedStateMachine):
    """Watches on requests of one or two prompts, while prefixes come, go and are evicted for lack of room."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree(limit=12)
        self.map = PrefixMap(self.tree, Estimates(), minimum=0)
        self.arrivals = 0
        self.told: dict[tuple[WorkerId, Request], int] = {}

    def matched(self, worker: WorkerId, request: Request) -> int:
        return sum(self.tree.match(prompt.hashes).get(worker, 0) for prompt in request.prompts)

    @rule(worker=workers, prompts=st.lists(texts, min_size=1, max_size=2))
    def watch(self, worker: WorkerId, prompts: list[str]) -> None:
        self.arrivals += 1
        watched = request(*prompts, number=self.arrivals)
        self.told[worker, watched] = self.map.watch(watched, worker)
        assert self.told[worker, watched] == self.matched(worker, watched)

    @precondition(lambda self: self.told)
    @rule(data=st.data(), again=st.booleans())
    def look_again(self, data: st.DataObject, again: bool) -> None:
        worker, watched = data.draw(st.sampled_from(list(self.told)))
        if again:
            self.told[worker, watched] = self.map.watch(watched, worker)
        else:
            self.map.unwatch(watched.id, worker)
            del self.told[worker, watched]

    @rule(worker=workers, prompts=st.lists(texts, max_size=2))
    def insert(self, worker: WorkerId, prompts: list[str]) -> None:
        grown = self.map.insert(MODEL, [key(prompt) for prompt in prompts], worker, 0.0)
        assert len(set(grown)) == len(grown)
        there = {watched.id: watched for at, watched in self.told if at == worker}
        assert set(grown) <= there.keys()
        for watched in there.values():
            if self.matched(worker, watched) > self.told[worker, watched]:
                assert watched.id in grown
            if watched.id in grown:
                self.told[worker, watched] = self.map.watch(watched, worker)

    @rule(worker=workers, chunks=st.integers(0, 4))
    def evict(self, worker: WorkerId, chunks: int) -> None:
        self.map.evict(worker, chunks * CHUNK_TOKENS)

    @rule(worker=workers)
    def drop(self, worker: WorkerId) -> None:
        self.map.drop(worker)

    @invariant()
    def nothing_is_missed(self) -> None:
        """What was told of a watched request is never less than its match, and the index holds the watches alone."""
        assert all(self.matched(*watch) <= told for watch, told in self.told.items())
        assert self.map.watched == len(self.told)
        self.map.check_integrity()


TestWatches = Watches.TestCase
TestWatches.settings = settings(max_examples=40)


def test_a_match_is_told_in_tokens_by_worker() -> None:
    """Each worker's longest common prefix, at what a chunk is worth."""
    held = prefixes()
    held.insert(MODEL, [key("doc?")], W1, 0.0)
    held.insert(MODEL, [key("do")], W2, 0.0)
    assert held.match(request("doc!")) == {W1: 3 * CHUNK_TOKENS, W2: 2 * CHUNK_TOKENS}
    assert held.match(request("else")) == {}


def test_a_held_prompt_still_costs_its_last_token() -> None:
    """An engine computes at least one token, though it has seen the whole prompt before."""
    held = prefixes()
    held.insert(MODEL, [key("doc")], W1, 0.0)
    assert held.match(request("doc")) == {W1: 3 * CHUNK_TOKENS - 1}


def test_the_matches_of_several_prompts_add_up() -> None:
    """A call with a list of prompts matches with each of them."""
    held = prefixes()
    held.insert(MODEL, [key("ab"), key("xyz")], W1, 0.0)
    assert held.match(request("ab!", "xyz!", "else")) == {W1: 5 * CHUNK_TOKENS}


def test_a_short_match_is_no_match() -> None:
    """Below the minimum neither the match nor the watch finds anything; growth beyond it is still reported."""
    held = prefixes(minimum=3 * CHUNK_TOKENS)
    held.insert(MODEL, [key("do")], W1, 0.0)
    assert (held.match(request("doc!")), held.watch(request("doc!"), W1)) == ({}, 0)
    assert held.insert(MODEL, [key("doc")], W1, 1.0) == ["r1"]
    assert (held.match(request("doc!")), held.watch(request("doc!"), W1)) == ({W1: 3 * CHUNK_TOKENS}, 3)


def test_growth_is_reported_where_it_happened_and_to_whom_it_concerns() -> None:
    """An insertion at another worker, of another prefix, or of nothing new, is no growth."""
    held = prefixes()
    held.watch(request("doc!"), W1)
    assert held.insert(MODEL, [key("doc?")], W2, 0.0) == []
    assert held.insert(MODEL, [key("else")], W1, 0.0) == []
    assert held.insert(MODEL, [key("doc?")], W1, 0.0) == ["r1"]
    held.watch(request("doc!"), W1)
    assert held.insert(MODEL, [key("doc?")], W1, 0.0) == []


@pytest.mark.parametrize("prompts", [("doc", "doc"), ("doc!", "doc?")])
def test_prompts_that_lack_the_same_chunk_are_one_watch(prompts: tuple[str, ...]) -> None:
    """A list of prompts that begin alike is watched once, reported once and leaves nothing behind."""
    held = prefixes()
    held.watch(request(*prompts), W1)
    assert held.insert(MODEL, [key("doc")], W1, 0.0) == ["r1"]
    held.unwatch(RequestId("r1"), W1)
    held.check_integrity()
    assert held.watched == 0


def test_a_watch_is_not_moved_by_what_the_estimates_learn() -> None:
    """Matches that were told at different times are compared, so they are told in a unit that stays."""
    estimates = Estimates()
    held = PrefixMap(PrefixTree(100), estimates, minimum=0)
    held.insert(MODEL, [key("doc?", exact=False)], W1, 0.0)
    watched = Request(RequestId("r1"), ClientId("ada"), MODEL, (key("doc!", exact=False),))
    before, tokens = held.watch(watched, W1), held.match(watched)[W1]
    estimates.learn(watched, Usage(4 * 128, 1))
    assert held.watch(watched, W1) == before
    assert held.match(watched)[W1] > tokens


def test_a_worker_is_believed_to_hold_no_more_than_it_can() -> None:
    """Beyond its capacity the least recently used goes; within it nothing does."""
    held = prefixes()
    held.insert(MODEL, [key("old")], W1, 0.0)
    held.insert(MODEL, [key("new")], W1, 1.0)
    held.trim(W1, 6 * CHUNK_TOKENS)
    assert held.match(request("old!")) == {W1: 3 * CHUNK_TOKENS}
    held.trim(W1, 4 * CHUNK_TOKENS)
    assert held.match(request("old!")) == {W1: CHUNK_TOKENS}
    assert held.match(request("new!")) == {W1: 3 * CHUNK_TOKENS}


def test_evicted_and_dropped_prefixes_match_no_more() -> None:
    """An eviction takes the tokens that the worker said, a drop everything, both of that worker alone."""
    held = prefixes()
    for worker in WORKERS:
        held.insert(MODEL, [key("doc?")], worker, 0.0)
    held.evict(W1, 2 * CHUNK_TOKENS)
    assert held.match(request("doc!")) == {W1: 2 * CHUNK_TOKENS, W2: 3 * CHUNK_TOKENS}
    held.drop(W1)
    assert held.match(request("doc!")) == {W2: 3 * CHUNK_TOKENS}


def test_a_broken_index_is_found() -> None:
    """The check fails when a chunk is indexed that nobody waits for."""
    held = prefixes()
    held.watch(request("doc"), W1)
    held._waiting_for[W1][b"12345678"] = {RequestId("r9"): None}
    with pytest.raises(AssertionError, match="watches"):
        held.check_integrity()

"""The prefix tree equals a naive dictionary of prefixes, and its integrity check finds planted damage."""

import hashlib
from collections.abc import Callable
from functools import cache
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router.core.cache.prefix_node import Node
from router.core.cache.prefix_tree import PrefixTree
from router.core.model.prompt_key import HASH_BYTES
from router.core.model.request import WorkerId

A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")

documents = st.text("xy", max_size=9)
workers = st.sampled_from([A, B, C])


@cache
def chain(document: str) -> bytes:
    """Hash a document of one letter per chunk as prompt keys are: each hash covers all before it.

    Equal documents have one object, as a request has: by that the tree knows what it matched last.
    """
    ends = range(1, len(document) + 1)
    return b"".join(hashlib.sha256(document[:end].encode()).digest()[:HASH_BYTES] for end in ends)


class NaiveTree:
    """Keeps what the tree promises, prefix by prefix: each worker's prefixes and when each was last touched."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.prefixes: dict[WorkerId, dict[str, tuple[float, int, int]]] = {}
        self.turn = 0

    @property
    def distinct(self) -> set[str]:
        return {prefix for held in self.prefixes.values() for prefix in held}

    def match(self, document: str) -> dict[WorkerId, int]:
        ends = range(1, len(document) + 1)
        lengths = {worker: sum(document[:end] in held for end in ends) for worker, held in self.prefixes.items()}
        return {worker: length for worker, length in lengths.items() if length}

    def insert(self, document: str, worker: WorkerId, now: float) -> int:
        document = document[: self.limit]
        if not document:
            return 0
        known = self.match(document).get(worker, 0)
        self.turn += 1
        held = self.prefixes.setdefault(worker, {})
        held.update({document[:end]: (now, self.turn, -end) for end in range(1, len(document) + 1)})
        while (excess := len(self.distinct) - self.limit) > 0:
            spare = {each: len(held) - len(document) * (each == worker) for each, held in self.prefixes.items()}
            most = max(spare, key=lambda each: spare[each])
            self.evict(most, min(excess, spare[most]))
        return len(document) - known

    def evict(self, worker: WorkerId, chunks: int) -> int:
        held = self.prefixes.get(worker, {})
        victims = sorted(held, key=lambda prefix: held[prefix])[:chunks]
        for prefix in victims:
            del held[prefix]
        return len(victims)


def last_touched(tree: PrefixTree, hashes: bytes, worker: WorkerId) -> float | None:
    """Return when a worker last touched the whole prefix; None if it does not hold all of it."""
    touches = tree.touches(hashes, worker)
    return touches[-1][1] if touches and touches[-1][0] * HASH_BYTES == len(hashes) else None


class TreeAgainstNaive(RuleBasedStateMachine):
    """Any sequence of calls gives what the naive tree gives, eviction order and limit included."""

    @initialize(limit=st.integers(1, 30))
    def begin(self, limit: int) -> None:
        self.gained: list[tuple[WorkerId, bytes, int]] = []
        self.tree = PrefixTree(limit, on_gained=lambda *gained: self.gained.append(gained))
        self.naive = NaiveTree(limit)
        self.now = 0.0

    @rule(document=documents, worker=workers, wait=st.sampled_from([0.0, 1.0]))
    def insert(self, document: str, worker: WorkerId, wait: float) -> None:
        self.now += wait
        new = self.naive.insert(document, worker, self.now)
        kept = chain(document[: self.naive.limit])
        self.tree.insert(chain(document), worker, self.now)
        assert self.gained == ([(worker, kept, new * HASH_BYTES)] if new else [])
        self.gained.clear()

    @rule(document=documents, worker=workers)
    def look(self, document: str, worker: WorkerId) -> None:
        assert self.tree.match(chain(document)) == self.naive.match(document)
        touch = self.naive.prefixes.get(worker, {}).get(document)
        assert last_touched(self.tree, chain(document), worker) == (touch[0] if touch else None)

    @rule(worker=workers, chunks=st.integers(0, 6))
    def evict(self, worker: WorkerId, chunks: int) -> None:
        assert self.tree.evict(worker, chunks) == self.naive.evict(worker, chunks)

    @rule(worker=workers)
    def drop(self, worker: WorkerId) -> None:
        self.tree.drop(worker)
        self.naive.prefixes.pop(worker, None)

    @precondition(lambda self: hasattr(self, "tree"))
    @invariant()
    def agree(self) -> None:
        self.tree.check_integrity()
        assert self.tree.chunks == len(self.naive.distinct) <= self.naive.limit
        for worker in (A, B, C):
            held = self.naive.prefixes.get(worker, {})
            assert self.tree.held_chunks(worker) == len(held)
            assert all(self.tree.match(chain(prefix))[worker] == len(prefix) for prefix in held)


TestTreeAgainstNaive = TreeAgainstNaive.TestCase


def tree_of(*held: tuple[str, WorkerId], limit: int = 1000) -> PrefixTree:
    tree = PrefixTree(limit)
    for now, (document, worker) in enumerate(held):
        tree.insert(chain(document), worker, float(now))
    return tree


def nodes(tree: PrefixTree) -> list[Node]:
    return list(tree.root.below())


def test_a_match_is_as_long_as_each_worker_holds() -> None:
    """Each worker is matched as far as it holds the prefix; one that holds nothing is absent."""
    tree = tree_of(("xxxxxx", A), ("xxxy", B), ("yy", C))
    assert tree.match(chain("xxxxxyy")) == {A: 5, B: 3}


def test_a_match_changes_nothing() -> None:
    """A match that ends inside a node changes neither the nodes nor the order of eviction."""
    tree = tree_of(("xxxx", A), ("yy", A))
    before = [(node.key, [residency.touch for residency in node.residencies.values()]) for node in nodes(tree)]
    tree.match(chain("xxy"))
    assert [(node.key, [residency.touch for residency in node.residencies.values()]) for node in nodes(tree)] == before


@given(document=documents, known=documents)
def test_what_an_insertion_adds_is_what_the_worker_did_not_hold(document: str, known: str) -> None:
    """An insertion ends where it is found afterwards, whether it was matched before or not."""
    hashes = chain(document)
    tree, unseen = tree_of((known, A), (document, B)), tree_of((known, A), (document, B))
    tree.match(hashes)
    for each in (tree, unseen):
        end = each.insert(hashes, A, 2.0)
        assert each.root.find(hashes) == (end, len(end.key), len(hashes))
        each.check_integrity()
    assert [node.key for node in nodes(tree)] == [node.key for node in nodes(unseen)]


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: tree.evict(A, 4),
        lambda tree: tree.insert(chain("xy"), B, 1.0),
        lambda tree: tree.prune(chain("xxyy"), A, 2, before=0.0),
    ],
    ids=["gone", "split by another prefix", "split by a pruning that takes nothing"],
)
def test_a_match_is_not_reused_after_a_change(change: Callable[[PrefixTree], object]) -> None:
    """A match is found again after any change, since the nodes at its end may have changed."""
    tree, hashes = PrefixTree(1000), chain("xxyxx")
    tree.insert(chain("xxyy"), A, 0.0, seal=True)
    assert tree.match(hashes) == {A: 3}
    change(tree)
    tree.insert(hashes, A, 2.0)
    tree.check_integrity()
    assert tree.match(hashes)[A] == 5
    assert tree.match(chain("xxyyxx"))[A] <= 4


def test_eviction_takes_the_stalest_leaf_first_and_cuts_it_to_measure() -> None:
    """An eviction of five chunks takes a whole stale leaf of two and the last three of the next; prefixes touched since
    stay.
    """
    tree = tree_of(("xxyy", A), ("xxxxxx", A), ("xx", A))
    assert tree.evict(A, 5) == 5
    assert tree.match(chain("xxxxxx")) == {A: 3}
    assert tree.match(chain("xxyy")) == {A: 2}


def test_what_one_worker_loses_of_a_shared_node_splits_nothing() -> None:
    """However many workers hold a node, one that loses the end of it, or gets it back, costs the others nothing."""
    tree = tree_of(*[("document", WorkerId(f"w{number}")) for number in range(9)])
    (node,), loser = nodes(tree), WorkerId("w3")
    others = {worker: residency for worker, residency in node.residencies.items() if worker != loser}
    for left in (6, 3, 1):
        tree.evict(loser, tree.held_chunks(loser) - left)
        assert nodes(tree) == [node]
        assert tree.match(chain("document")) == dict.fromkeys(others, 8) | {loser: left}
    tree.insert(chain("document"), loser, 9.0)
    tree.check_integrity()
    assert nodes(tree) == [node]
    assert {worker: node.residencies[worker] for worker in others} == others


def test_a_cut_becomes_a_branch_where_its_holder_goes_on_otherwise() -> None:
    """The node is split where prefixes part, and each part has the chunks that its workers hold."""
    tree = tree_of(("document", A), ("document", B), ("document", C))
    tree.evict(A, 2)
    tree.evict(B, 5)
    tree.insert(chain("docks"), A, 3.0)
    tree.check_integrity()
    assert tree.match(chain("document")) == {A: 6, B: 3, C: 8}
    assert tree.match(chain("docks")) == {A: 5, B: 3, C: 3}
    tree.evict(C, 8)
    tree.check_integrity()
    assert tree.match(chain("document")) == {A: 6, B: 3}


def test_cuts_last_until_they_matter() -> None:
    """Where the last worker that holds all of a node loses some, or the tree is saved, or others are pruned, a node is
    split in two at most, however many workers have lost how much of its end: no step pays for all of them.
    """

    def cut_tree() -> PrefixTree:
        tree = tree_of(*[("document", WorkerId(f"w{number}")) for number in range(8)])
        for number in range(1, 8):
            tree.evict(WorkerId(f"w{number}"), number)
        return tree

    w0 = WorkerId("w0")
    kept = {WorkerId(f"w{number}"): 8 - number for number in range(1, 8)}
    changes: list[Callable[[PrefixTree], object]] = [
        lambda tree: tree.evict(w0, 2),
        lambda tree: tree.evict_older(w0, 0.5),
        lambda tree: tree.prune(chain("document"), w0, 6, before=9.0),
        lambda tree: tree.split_at_cut(node_of(tree, "do").residencies[WorkerId("w4")], WorkerId("w4")),
    ]
    for left, change in zip((6, 0, 6, 8), changes, strict=True):
        change(tree := cut_tree())
        tree.check_integrity()
        assert tree.match(chain("document")) == kept | ({w0: left} if left else {})
        assert len(nodes(tree)) <= 2


def test_eviction_ends_when_nothing_is_left() -> None:
    """Asked for more than a worker holds, eviction takes all and returns how many; an unknown worker loses nothing."""
    tree = tree_of(("xxx", A), ("xx", B))
    assert tree.evict(A, 99) == 3
    assert tree.evict(C, 1) == 0
    assert (tree.held_chunks(A), tree.held_chunks(B), tree.chunks) == (0, 2, 2)


def test_a_dropped_worker_leaves_no_trace() -> None:
    """After the drop the tree is as if the worker had never held anything."""
    tree = tree_of(("xxxyy", A), ("xxx", B), ("xxxyx", A), ("y", B))
    tree.drop(B)
    without = tree_of(("xxxyy", A), ("xxxyx", A))
    assert [node.key for node in nodes(tree)] == [node.key for node in nodes(without)]
    assert tree._holdings.keys() == {A}


def test_the_worker_that_holds_most_makes_room() -> None:
    """At the limit the largest holder loses its stalest chunks, and others keep theirs."""
    tree = tree_of(("xxxxxx", A), ("yyy", B), limit=10)
    tree.insert(chain("yxx"), C, 9.0)
    assert (tree.held_chunks(A), tree.held_chunks(B), tree.held_chunks(C), tree.chunks) == (5, 3, 3, 10)


def test_a_prefix_longer_than_the_limit_keeps_its_front() -> None:
    """The tail that does not fit is not held."""
    tree = tree_of(("y", A), limit=4)
    assert tree.insert(chain("xxxxxx"), A, 1.0).key == chain("xxxx")
    assert tree.match(chain("xxxxxx")) == {A: 4}


def test_a_conversation_that_grows_is_one_node() -> None:
    """Successive turns at one worker do not fragment the tree, whatever branched off meanwhile."""
    tree = PrefixTree(10_000)
    for turn in range(1, 50):
        tree.insert(chain("xy" * turn), A, float(turn))
        tree.insert(chain("xy" * turn + "yyy"), B, float(turn))
    tree.drop(B)
    assert [node.key for node in nodes(tree)] == [chain("xy" * 49)]


def test_hashes_need_not_differ_between_branches() -> None:
    """If two branches happen to have the same hash, both stay in the tree as they were inserted."""
    tree = PrefixTree(100)
    one, other = chain("xx"), chain("y") + chain("xx")[HASH_BYTES:]
    tree.insert(one, A, 0.0)
    tree.insert(other, B, 1.0)
    tree.check_integrity()
    assert (tree.match(one), tree.match(other)) == ({A: 2}, {B: 2})


def test_a_branch_is_not_found_from_inside_its_parent() -> None:
    """If a branch's first hash happens to be in its parent's run too, the path ends where it leaves the run."""
    tree = tree_of(("xxx", A), ("xxy", A))
    strange = chain("x") + chain("xxx")[-HASH_BYTES:]
    assert tree.match(strange) == {A: 1}
    tree.insert(strange, B, 2.0)
    tree.check_integrity()
    assert tree.match(strange) == {A: 1, B: 2}


@pytest.mark.parametrize("limit", [0, -1])
def test_a_tree_without_room_is_refused(limit: int) -> None:
    """A limit below one chunk raises ValueError."""
    with pytest.raises(ValueError, match="limit must be at least 1"):
        PrefixTree(limit)


def node_of(tree: PrefixTree, document: str) -> Node:
    return tree.root.find(chain(document))[0]


def hold_the_root(tree: PrefixTree) -> None:
    tree._root.residencies = node_of(tree, "xx").residencies


def miscount_chunks(tree: PrefixTree) -> None:
    tree._chunks += 1


def pass_the_limit(tree: PrefixTree) -> None:
    tree._limit = tree.chunks - 1


def empty_a_node(tree: PrefixTree) -> None:
    node = node_of(tree, "y")
    node.key, tree._chunks = b"", tree._chunks - 1


def cut_a_hash(tree: PrefixTree) -> None:
    node = node_of(tree, "y")
    node.key += b"\0"
    node.parent.children[node.first] = node


def misplace_a_node(tree: PrefixTree) -> None:
    node_of(tree, "xxyy").parent = tree._root


def leave_a_node_unheld(tree: PrefixTree) -> None:
    node_of(tree, "y").residencies.clear()


def hold_without_the_parent(tree: PrefixTree) -> None:
    del node_of(tree, "xx").residencies[A]


def leave_two_nodes_that_are_one(tree: PrefixTree) -> None:
    node_of(tree, "xxyy").split(HASH_BYTES)


def forget_a_worker(tree: PrefixTree) -> None:
    del tree._holdings[B]


def break_a_link(tree: PrefixTree) -> None:
    entry = node_of(tree, "xx").residencies[A]
    entry.older = entry


def list_another_residency(tree: PrefixTree) -> None:
    node_of(tree, "xxyy").residencies[A].node = node_of(tree, "xx")


def list_by_another_order(tree: PrefixTree) -> None:
    entry = node_of(tree, "xxyy").residencies[A]
    entry.unlink()
    entry.link_after(tree._holdings[A].free.newest)


def list_a_child_as_fresher(tree: PrefixTree) -> None:
    leaf, above = node_of(tree, "xxxx").residencies[A], node_of(tree, "xx").residencies[A]
    leaf.unlink()
    leaf.link_after(above)


def unlist_a_residency(tree: PrefixTree) -> None:
    node_of(tree, "xxyy").residencies[A].unlink()


def miscount_a_worker(tree: PrefixTree) -> None:
    tree._holdings[A].chunks += 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (hold_the_root, "the root is held"),
        (miscount_chunks, "count of distinct chunks"),
        (pass_the_limit, "more chunks than the limit"),
        (empty_a_node, "a node is empty"),
        (cut_a_hash, "ends inside a hash"),
        (misplace_a_node, "not where its parent would find it"),
        (leave_a_node_unheld, "held by nobody"),
        (hold_without_the_parent, "without its parent"),
        (leave_two_nodes_that_are_one, "should be one"),
        (forget_a_worker, "unknown worker"),
        (break_a_link, "not linked both ways"),
        (list_another_residency, "that its node does not have"),
        (list_by_another_order, "not listed by touch"),
        (list_a_child_as_fresher, "staler than what is below it"),
        (unlist_a_residency, "missing from its worker's list"),
        (miscount_a_worker, "count of a worker's chunks"),
    ],
)
def test_the_integrity_check_finds_damage(damage: Callable[[PrefixTree], None], message: str) -> None:
    """Each invariant, broken by hand in a sound tree, is named by the check."""
    tree = tree_of(("y", B), ("xxyy", A), ("xx", B), ("xxxx", A))
    tree.check_integrity()
    damage(tree)
    with pytest.raises(AssertionError, match=message):
        tree.check_integrity()


def test_pinned_prefixes_are_evicted_last() -> None:
    """A pin holds all of its prefix; when it is taken back, the prefix is the freshest."""
    tree = PrefixTree(1000)
    epoch = tree.holding(A).epoch
    end = tree.insert(chain("xxx"), A, 0.0, pin=True)
    tree.insert(chain("yyy"), A, 1.0)
    assert tree.evict(A, 2) == 2
    assert (tree.match(chain("xxx"))[A], tree.match(chain("yyy"))[A]) == (3, 1)
    tree.unpin(end, A, 2.0, epoch)
    tree.check_integrity()
    assert tree.evict(A, 2) == 2
    assert tree.match(chain("xxx")) == {A: 2}


def test_pins_are_voided_if_nothing_else_is_left() -> None:
    """Voided pins are not taken back again: what was pinned since stays pinned."""
    tree = PrefixTree(1000)
    epoch = tree.holding(A).epoch
    void = tree.insert(chain("xxyy"), A, 0.0, pin=True)
    tree.insert(chain("xx"), A, 1.0, pin=True)
    assert tree.evict(A, 1) == 1
    tree.check_integrity()
    later = tree.holding(A).epoch
    end = tree.insert(chain("xxy"), A, 2.0, pin=True)
    tree.unpin(void, A, 3.0, epoch)
    tree.insert(chain("zz"), A, 4.0)
    tree.evict(A, 2)
    assert tree.match(chain("xxy")) == {A: 3}
    tree.unpin(end, A, 5.0, later)
    tree.check_integrity()
    assert tree.holding(A).pinned.oldest is None


@given(runs=st.lists(st.tuples(documents, workers), max_size=8), order=st.randoms(use_true_random=False))
def test_a_pinned_prefix_ends_with_the_node_that_it_was_inserted_with(
    runs: list[tuple[str, WorkerId]], order: Random
) -> None:
    """The prefix does so whatever is pinned, held, unpinned and evicted around it, and no pin is left once all are
    taken back.
    """
    tree = PrefixTree(1000)
    ends = [(tree.insert(chain(document), worker, 0.0, pin=True), worker, document) for document, worker in runs]
    order.shuffle(ends)
    while ends:
        assert all(tree.root.find(chain(document))[0] is end for end, _, document in ends)
        end, worker, document = ends.pop()
        tree.unpin(end, worker, 1.0, tree.holding(worker).epoch)
        tree.insert(chain(document + order.choice(["", "x", "xyx"])), order.choice([A, B, C]), 1.0)
        unpinned = sum(each.node.held_bytes(worker) for each in tree.holding(worker).free) // HASH_BYTES
        tree.evict(worker, min(order.randrange(3), unpinned))
        tree.check_integrity()
    assert all(tree.holding(worker).pinned.oldest is None for worker in (A, B, C))


def test_pruning_evicts_all_continuations_of_a_prefix() -> None:
    """Pruning evicts them at one worker only, and only those that are neither pinned nor fresh."""
    tree = tree_of(("xxyy", A), ("xxyy", B), ("xxyx", A), ("x", A), ("yy", A))
    tree.insert(chain("xxxx"), A, 9.0)
    tree.insert(chain("xxyyy"), A, 10.0, pin=True)
    assert tree.prune(chain("xxy"), A, 1, before=9.0) == 1
    tree.check_integrity()
    assert {text: tree.match(chain(text)).get(A) for text in ("xxyx", "xxyyy", "xxxx", "yy")} == {
        **{"xxyx": 3, "xxyyy": 5},
        **{"xxxx": 4, "yy": 2},
    }
    assert tree.match(chain("xxyy"))[B] == 4


def test_older_prefixes_can_be_evicted() -> None:
    """All prefixes last touched before a given time are evicted unless they are pinned."""
    tree = tree_of(("xx", A), ("yy", A), ("xy", A))
    tree.insert(chain("yyyy"), A, 3.0, pin=True)
    assert tree.evict_older(A, 2.0) == 1
    assert tree.evict_older(C, 2.0) == 0
    assert (tree.match(chain("xx"))[A], tree.match(chain("xy"))[A], tree.match(chain("yyyy"))[A]) == (1, 2, 4)


def test_sealed_nodes_are_evicted_as_a_whole() -> None:
    """A sealed node is evicted whole, as in an engine that never joins or splits its nodes; shared beginnings are nodes
    of their own.
    """
    tree = PrefixTree(1000)
    for now, document in enumerate(("xxx", "xxxyy")):
        tree.insert(chain(document), A, float(now), seal=True)
    tree.check_integrity()
    assert [node.chunks for node in nodes(tree)] == [3, 2]
    assert tree.evict(A, 1, whole=True) == 2
    assert tree.evict(A, 1, whole=True) == 3

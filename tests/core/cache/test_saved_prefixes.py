"""A prefix tree is restored at a cost in proportion to its size, and a too large one in part."""

import sys
import tracemalloc
from types import FrameType
from typing import Any

import pytest

from router.core.cache.prefix_tree import PrefixTree
from router.core.cache.saved_prefixes import restore_prefixes, saved_prefixes
from router.core.model.prompt_key import HASH_BYTES
from router.core.model.request import WorkerId
from router.core.model.saved import Prefixes, SavedNode, SavedTouch
from tests.core.cache.test_prefix_tree import A, B, last_touched


def run_of(start: int, end: int) -> bytes:
    """Return the hashes of one endless document, from one chunk to another."""
    return b"".join(number.to_bytes(HASH_BYTES) for number in range(start, end))


def deep(depth: int) -> list[Prefixes]:
    """Return the pieces of a document that two workers hold and that became shorter chunk by chunk: one
    node per chunk.
    """
    tree = PrefixTree(depth)
    for at, end in enumerate(range(depth, 0, -1)):
        for worker in (A, B):
            tree.insert(run_of(0, end), worker, float(at))
    pieces = list(saved_prefixes(tree, float(depth), 2 * depth, depth))
    assert sum(len(piece.nodes) for piece in pieces) == depth
    assert sum(len(piece.touches) for piece in pieces) == 2 * depth
    return pieces


def lines_of_restoring(pieces: list[Prefixes]) -> int:
    """Return how many lines of Python run while the pieces are restored."""
    lines = 0

    def watch(_frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        restore_prefixes(PrefixTree(100_000), pieces, 0.0)
    finally:
        sys.settrace(before)
    return lines


def bytes_of_restoring(pieces: list[Prefixes]) -> int:
    """Return the peak of memory while the pieces are restored."""
    tree = PrefixTree(100_000)
    tracemalloc.start()
    try:
        restore_prefixes(tree, pieces, 0.0)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.interpreted("the test counts lines as they run")
def test_a_chain_twice_as_deep_costs_twice_as_much() -> None:
    """Restoring takes lines run and bytes in proportion to the depth: no work is repeated for each node below."""
    short, long = deep(300), deep(600)
    assert lines_of_restoring(long) < 2.1 * lines_of_restoring(short)
    assert bytes_of_restoring(long) < 2.3 * bytes_of_restoring(short)


def test_nodes_that_may_join_are_restored_as_one() -> None:
    """Such nodes become one node although they were saved in several pieces, in the order of their touches."""
    nodes = tuple(SavedNode(number - 1, run_of(number, number + 1)) for number in range(50))
    tree = PrefixTree(1000)
    restore_prefixes(
        tree, [Prefixes(nodes, (SavedTouch(A, 49, 5.0), SavedTouch(A, 9, 2.0), SavedTouch(A, 0, 9.0)))], 9.0
    )
    tree.check_integrity()
    (first,) = tree.root.children.values()
    (second,) = first.children.values()
    assert (first.chunks, second.chunks, dict(second.children)) == (10, 40, {})
    assert last_touched(tree, run_of(0, 1), A) == 7.0
    assert last_touched(tree, run_of(0, 50), A) == 4.0


def test_chunks_saved_twice_are_restored_once() -> None:
    """Chunks are saved twice if a node was split while the tree was saved."""
    nodes = (
        SavedNode(-1, run_of(0, 8)),
        SavedNode(-1, run_of(0, 3)),
        SavedNode(1, run_of(3, 6)),
        SavedNode(0, b"branch!!"),
    )
    touches = (SavedTouch(A, 0, 1.0), SavedTouch(B, 2, 2.0), SavedTouch(B, 3, 3.0))
    tree = PrefixTree(1000)
    restore_prefixes(tree, [Prefixes(nodes, touches)], 10.0)
    tree.check_integrity()
    assert tree.chunks == 9
    assert tree.match(run_of(0, 8) + b"branch!!") == {A: 8, B: 9}
    assert [last_touched(tree, run_of(0, end), B) for end in (6, 8)] == [8.0, 7.0]


def test_the_most_recent_part_of_a_too_large_tree_is_restored() -> None:
    """A smaller limit after a restart keeps the most recent part of the saved tree."""
    documents = [run_of(100 * number, 100 * number + 5) for number in range(1, 9)]
    nodes = tuple(SavedNode(-1, document) for document in documents)
    touches = tuple(SavedTouch(WorkerId("w"), number, float(number)) for number in range(8))
    tree = PrefixTree(12)
    restore_prefixes(tree, [Prefixes(nodes, touches)], 0.0)
    tree.check_integrity()
    assert [tree.match(document).get(WorkerId("w"), 0) for document in documents] == [5, 5, 2, 0, 0, 0, 0, 0]

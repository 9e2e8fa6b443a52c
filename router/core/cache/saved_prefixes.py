"""The most recent part of a prefix tree as data, read piece by piece while the tree goes on changing.

Between two pieces, a node may be split, or join its child. But the prefix that ends with a node stays the same as long
as the node exists. So a saved node can be named later; if boundaries have moved meanwhile, some chunks are saved twice.
What is evicted in between may be missing, or may be saved although it is gone.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from operator import attrgetter
from typing import Final

from router.core.cache.prefix_node import Holding, Node, Residency, Touch
from router.core.cache.prefix_tree import PrefixTree
from router.core.model.prompt_key import HASH_BYTES
from router.core.model.request import WorkerId
from router.core.model.saved import ROOT, Prefixes, SavedNode, SavedTouch

PIECE_CHUNKS: Final = 4096
PIECE_TOUCHES: Final = 64
"""Approximate content of one piece, with `PIECE_CHUNKS`: a few milliseconds of work."""
POSITIONS_KEPT: Final = 256
"""Latest residencies of a worker that were saved and are kept, to continue from the last one that has not moved."""


def saved_prefixes(
    tree: PrefixTree, now: float, touches: int, chunks: int, piece_touches: int = PIECE_TOUCHES
) -> Iterator[Prefixes]:
    """Yield the newest insertions, each worker in turn: at most `touches` of them, and `chunks` distinct chunks."""
    builder = _PieceBuilder(now, tree.root)
    for worker, residency in islice(_recent_insertions(tree), touches):
        tree.split_at_cut(residency, worker)
        node = residency.node
        path = builder.unsaved_path(node)
        chunks -= sum([each.chunks for each in path])
        if chunks < 0:
            break
        number = builder.number(path, node)
        builder.touches.append(SavedTouch(worker, number, now - residency.touch.now))
        if len(builder.touches) == piece_touches or builder.chunks >= PIECE_CHUNKS:
            yield builder.piece()
    if builder.touches:
        yield builder.piece()


def _recent_insertions(tree: PrefixTree) -> Iterator[tuple[WorkerId, Residency]]:
    """Yield the deepest residency of each insertion, the newest first, each worker in turn."""
    iterators = deque((worker, _insertions(worker, holding)) for worker, holding in tree.holdings.items())
    while iterators:
        worker, ends = iterators.popleft()
        if (residency := next(ends, None)) is not None:
            yield worker, residency
            iterators.append((worker, ends))


def _insertions(worker: WorkerId, holding: Holding) -> Iterator[Residency]:
    """Yield the deepest residency of each of a worker's insertions: the last one on the way from the fresh end."""
    for ring in (holding.pinned, holding.free):
        yielded: deque[tuple[Residency, Touch]] = deque(maxlen=POSITIONS_KEPT)
        residency = ring.newest
        while residency is not ring.end:
            older = residency.older
            if older is ring.end or older.touch is not residency.touch:
                yielded.append((residency, residency.touch))
                yield residency
                older = _resume(worker, yielded) or ring.end
            residency = older


def _resume(worker: WorkerId, yielded: deque[tuple[Residency, Touch]]) -> Residency | None:
    """Return the residency next to the last one yielded that has not moved; None if all have."""
    while yielded:
        residency, touch = yielded[-1]
        if residency.touch is touch and residency.node.residencies.get(worker) is residency:
            return residency.older
        yielded.pop()
    return None


class _PieceBuilder:
    """Numbers the nodes saved so far and gathers the next piece."""

    def __init__(self, now: float, root: Node) -> None:
        self.now = now
        self.touches: list[SavedTouch] = []
        self.chunks = 0
        self._nodes: list[SavedNode] = []
        self._numbers: dict[Node, int] = {root: ROOT}

    def unsaved_path(self, end: Node) -> list[Node]:
        """Return the nodes from this one up that are not saved yet."""
        path = []
        node = end
        while node not in self._numbers:
            path.append(node)
            node = node.parent
        return path

    def number(self, path: list[Node], end: Node) -> int:
        """Save the nodes of a path. Returns the number of the path's end."""
        for node in reversed(path):
            self._nodes.append(SavedNode(self._numbers[node.parent], node.key))
            self._numbers[node] = len(self._numbers) - 1
            self.chunks += node.chunks
        return self._numbers[end]

    def piece(self) -> Prefixes:
        """Return what has been gathered as a piece, and begin the next."""
        piece = Prefixes(tuple(self._nodes), tuple(self.touches))
        self._nodes, self.touches, self.chunks = [], [], 0
        return piece


def restore_prefixes(tree: PrefixTree, pieces: Iterable[Prefixes], now: float) -> None:
    """Restore saved prefixes into a tree that holds nothing yet.

    Raises ValueError if the pieces contradict themselves; the tree is unchanged then.
    """
    nodes: list[SavedNode] = []
    touches: list[SavedTouch] = []
    for piece in pieces:
        for node in piece.nodes:
            if not ROOT <= node.parent < len(nodes) or not node.key or len(node.key) % HASH_BYTES:
                raise ValueError("a node of the prefix tree is invalid")
            nodes.append(node)
        if not all(0 <= touch.node < len(nodes) for touch in piece.touches):
            raise ValueError("a touch of the prefix tree is invalid")
        touches += piece.touches
    touches.sort(key=attrgetter("age"))  # a stable sort: of two at the same time, the later one was saved first
    tree.restore(nodes, [(worker, node, now - max(0.0, age)) for worker, node, age in touches])

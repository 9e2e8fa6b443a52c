"""The most recent part of a prefix tree as data, made little by little while the tree goes on to change.

A node may be split, or become one with its child, between two pieces. But the prefix that ends with it stays the same
as long as the node lives; so one that is saved can be referred to for good, and where the cuts have moved meanwhile,
some chunks are saved twice. What is evicted in between may be missing, or saved although it is gone.
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
"""In one piece, about: a few milliseconds' work."""
POSITIONS_KEPT: Final = 256
"""Of a worker's insertions the last ones saved: from the last of them that has not moved it goes on."""


def saved_prefixes(
    tree: PrefixTree, now: float, touches: int, chunks: int, piece_touches: int = PIECE_TOUCHES
) -> Iterator[Prefixes]:
    """The newest insertions, of each worker in turn: so many `touches`, and distinct `chunks`, at most."""
    saving = _PieceBuilder(now, tree.root)
    for worker, residency in islice(_recent(tree), touches):
        node = residency.node
        path = saving.new_on_path(node)
        chunks -= sum([each.chunks for each in path])
        if chunks < 0:
            break
        number = saving.number(path, node)
        saving.touches.append(SavedTouch(worker, number, now - residency.touch.now))
        if len(saving.touches) == piece_touches or saving.chunks >= PIECE_CHUNKS:
            yield saving.piece()
    if saving.touches:
        yield saving.piece()


def _recent(tree: PrefixTree) -> Iterator[tuple[WorkerId, Residency]]:
    """The deepest residency of each insertion, the newest first, of each worker in turn."""
    turns = deque((worker, _ends(worker, holding)) for worker, holding in tree.holdings.items())
    while turns:
        worker, ends = turns.popleft()
        if (residency := next(ends, None)) is not None:
            yield worker, residency
            turns.append((worker, ends))


def _ends(worker: WorkerId, holding: Holding) -> Iterator[Residency]:
    """Of what one insertion touched, the deepest is the last on the way from the fresh end."""
    for ring in (holding.pinned, holding.free):
        passed: deque[tuple[Residency, Touch]] = deque(maxlen=POSITIONS_KEPT)
        residency = ring.newest
        while residency is not ring.end:
            older = residency.older
            if older is ring.end or older.touch is not residency.touch:
                passed.append((residency, residency.touch))
                yield residency
                older = _older(worker, passed) or ring.end
            residency = older


def _older(worker: WorkerId, passed: deque[tuple[Residency, Touch]]) -> Residency | None:
    """The next one after the last of those passed that is where it was; None where none is any more."""
    while passed:
        residency, touch = passed[-1]
        if residency.touch is touch and residency.node.residencies.get(worker) is residency:
            return residency.older
        passed.pop()
    return None


class _PieceBuilder:
    """The nodes saved so far, and the piece that is being made."""

    def __init__(self, now: float, root: Node) -> None:
        self.now = now
        self.touches: list[SavedTouch] = []
        self.chunks = 0
        self._nodes: list[SavedNode] = []
        self._numbers: dict[Node, int] = {root: ROOT}

    def new_on_path(self, end: Node) -> list[Node]:
        """The nodes from this one up that are not saved yet."""
        path = []
        node = end
        while node not in self._numbers:
            path.append(node)
            node = node.parent
        return path

    def number(self, path: list[Node], end: Node) -> int:
        """Save these; the number of the path's end."""
        for node in reversed(path):
            self._nodes.append(SavedNode(self._numbers[node.parent], node.key))
            self._numbers[node] = len(self._numbers) - 1
            self.chunks += node.chunks
        return self._numbers[end]

    def piece(self) -> Prefixes:
        """What has gathered."""
        made = Prefixes(tuple(self._nodes), tuple(self.touches))
        self._nodes, self.touches, self.chunks = [], [], 0
        return made


def restore_prefixes(tree: PrefixTree, pieces: Iterable[Prefixes], now: float) -> None:
    """Put what was saved into a tree that holds nothing yet.

    Raises ValueError where the pieces contradict themselves; the tree is as it was then.
    """
    nodes: list[SavedNode] = []
    touches: list[SavedTouch] = []
    for piece in pieces:
        for node in piece.nodes:
            if not ROOT <= node.parent < len(nodes) or not node.key or len(node.key) % HASH_BYTES:
                raise ValueError("a node of the prefix tree is broken")
            nodes.append(node)
        if not all(0 <= touch.node < len(nodes) for touch in piece.touches):
            raise ValueError("a touch of the prefix tree is broken")
        touches += piece.touches
    touches.sort(key=attrgetter("age"))  # of two at the same time the later one was saved first
    tree.restore(nodes, [(worker, node, now - max(0.0, age)) for worker, node, age in touches])

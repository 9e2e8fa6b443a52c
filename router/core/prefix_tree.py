"""Which worker is believed to hold which prefix: one compressed radix tree over chained chunk hashes.

Theory of operation. A node is a run of chunks; each worker that holds it has a residency there. Whoever holds a node
holds its parent. Each worker's residencies form a list in the order of their last touch; a touched path goes to its
fresh end deepest node first, so a node is always staler than its ancestors, the stale end is a leaf for that worker,
and eviction takes exactly the least recently touched chunks. Moving, evicting and finding the victim cost O(1) a node.

- A node is split where its chunks come to differ in a holder, in a touch, or by a branch. The new upper part follows
  the lower one in every holder's list.
- A node joins its only child again as soon as both have the same holders and each of these touched both last in the
  same insertion (they are then neighbours in every list). So a conversation that grows turn by turn stays one node,
  and there are no more nodes than the branches, holders and touches in force require.

Counts are in chunks. Dictionaries are iterated in insertion order only: the same calls give the same tree.
"""

from collections import Counter
from collections.abc import Callable, Iterator

from router.core.model import WorkerId
from router.core.prompt_key import HASH_BYTES
from router.core.radix_node import Holding, Node, Residency, Touch


class PrefixTree:
    """The prefixes believed to be cached, of at most `limit` distinct chunks over all workers.

    Hashes are 8 bytes per chunk, each covering all before it (`PromptKey.hashes`).
    """

    def __init__(self, limit: int, lost: Callable[[WorkerId, bytes], None] = lambda _worker, _hashes: None) -> None:
        """`lost` is told of every run of chunks that a worker does not hold any more, while the tree changes."""
        if limit < 1:
            raise ValueError(f"limit must be at least 1 chunk, not {limit}")
        self._limit = limit
        self._lost = lost
        self._root = Node(b"")
        self._holdings: dict[WorkerId, Holding] = {}
        self._chunks = 0

    @property
    def chunks(self) -> int:
        """Distinct chunks in all."""
        return self._chunks

    def held(self, worker: WorkerId) -> int:
        holding = self._holdings.get(worker)
        return 0 if holding is None else holding.chunks

    def match(self, hashes: bytes) -> dict[WorkerId, int]:
        """Return how many chunks of this prefix each worker holds, for those that hold any; changes nothing.

        O(nodes on the path), and O(workers) where some of them end.
        """
        found: dict[WorkerId, int] = {}
        at = 0
        holders = self._root.residencies
        node = self._root.children.get(hashes[:HASH_BYTES])
        while node is not None:
            # Holders only become fewer on the way down, so an equal count means the same ones.
            if len(node.residencies) < len(holders):
                found.update(dict.fromkeys(holders, at // HASH_BYTES))
            holders = node.residencies
            shared = node.shared(hashes, at)
            at += shared
            if shared < len(node.key):
                break
            node = node.children.get(hashes[at : at + HASH_BYTES])
        found.update(dict.fromkeys(holders, at // HASH_BYTES))
        return found

    def last_touched(self, hashes: bytes, worker: WorkerId) -> float | None:
        """Return when this worker last touched the whole prefix; None where it does not hold it all."""
        node, _, at = self._find(hashes)
        residency = node.residencies.get(worker)
        return residency.touch.now if residency is not None and at == len(hashes) else None

    def insert(self, hashes: bytes, worker: WorkerId, now: float) -> bytes:
        """Note that a worker holds this prefix, touched at `now`; return the hashes, a suffix, that it did not hold.

        Of a prefix longer than the limit, the front is kept. Where the limit would be passed, the worker that holds
        the most, this prefix aside, loses as many of its stalest chunks, until all is within the limit; `now` never
        goes back.
        """
        hashes = hashes[: self._limit * HASH_BYTES]
        if not hashes:
            return b""
        end = self._grow(hashes)
        new_chunks = self._touch_path(end, worker, now)
        self._join_path(end)
        self._shrink_to_limit(worker, len(hashes) // HASH_BYTES)
        return hashes[len(hashes) - new_chunks * HASH_BYTES :]

    def evict(self, worker: WorkerId, chunks: int) -> int:
        """Take this many chunks from a worker, or all that it holds: the least recently touched, deepest first.

        Returns how many.
        """
        holding = self._holdings.get(worker)
        if holding is None:
            return 0
        taken = left = min(chunks, holding.chunks)
        while left > 0:
            node = holding.oldest.node
            if node.chunks > left:
                self._split(node, len(node.key) - left * HASH_BYTES)
            left -= node.chunks
            self._release(node, worker)
        return taken

    def drop(self, worker: WorkerId) -> None:
        """Forget a worker and all that it holds; O(nodes held by it)."""
        self.evict(worker, self.held(worker))
        self._holdings.pop(worker, None)

    def _find(self, hashes: bytes) -> tuple[Node, int, int]:
        """Return the deepest node on this path, the bytes of its key on the path, and the bytes of the path found."""
        node, shared, at = self._root, 0, 0
        while (child := node.children.get(hashes[at : at + HASH_BYTES])) is not None:
            node, shared = child, child.shared(hashes, at)
            at += shared
            if shared < len(node.key):
                break
        return node, shared, at

    def _grow(self, hashes: bytes) -> Node:
        """Make these hashes end with a node, held by nobody yet where it is new, and return it."""
        node, shared, at = self._find(hashes)
        if shared < len(node.key):
            node = self._split(node, shared)
        if at == len(hashes):
            return node
        end = Node(hashes[at:], node)
        node.children[end.first] = end
        self._chunks += end.chunks
        return end

    def _split(self, node: Node, at: int) -> Node:
        """Cut the first `at` bytes of a node's key off into a new parent, and return that."""
        upper = Node(node.key[:at], node.parent)
        upper.parent.children[upper.first] = upper
        node.key, node.parent = node.key[at:], upper
        upper.children[node.first] = node
        for worker, lower in node.residencies.items():
            residency = Residency(upper, lower.touch)
            residency.link_after(lower)
            upper.residencies[worker] = residency
        return upper

    def _touch_path(self, end: Node, worker: WorkerId, now: float) -> int:
        """Make a worker hold the path to this node, at the fresh end of its list; return how many chunks are new."""
        holding = self._holdings.setdefault(worker, Holding())
        touch = Touch(now)
        before = holding.chunks
        node = end
        while node is not self._root:
            residency = node.residencies.get(worker)
            if residency is None:
                residency = node.residencies[worker] = Residency(node, touch)
                holding.chunks += node.chunks
            else:
                residency.unlink()
                residency.touch = touch
            residency.link_after(holding.newest)
            node = node.parent
        return holding.chunks - before

    def _join_path(self, end: Node) -> None:
        node = end
        while node is not self._root:
            if _may_join_child(node.parent):
                _join_child(node.parent)
            else:
                node = node.parent

    def _shrink_to_limit(self, worker: WorkerId, kept: int) -> None:
        """Evict until the limit is kept; of this worker the `kept` freshest chunks stay."""
        while (excess := self._chunks - self._limit) > 0:
            spare = {each: holding.chunks for each, holding in self._holdings.items()}
            spare[worker] -= kept
            most = max(spare, key=spare.__getitem__)
            self.evict(most, min(excess, spare[most]))

    def _release(self, node: Node, worker: WorkerId) -> None:
        """Take a leaf of this worker from it; the node goes when nobody holds it any more."""
        node.residencies.pop(worker).unlink()
        self._holdings[worker].chunks -= node.chunks
        self._lost(worker, node.key)
        changed = node
        if not node.residencies:
            changed = node.parent
            del changed.children[node.first]
            self._chunks -= node.chunks
        if _may_join_child(changed):
            _join_child(changed)

    def check_integrity(self) -> None:
        """Raise AssertionError, naming the broken invariant, where the tree contradicts itself; O(nodes x workers)."""
        assert not self._root.residencies, "the root is held by a worker"
        nodes = list(self._nodes())
        assert sum(node.chunks for node in nodes) == self._chunks, "the count of distinct chunks is wrong"
        assert self._chunks <= self._limit, "there are more chunks than the limit"
        for node in nodes:
            self._check_node(node)
        residencies = Counter(worker for node in nodes for worker in node.residencies)
        assert residencies.keys() <= self._holdings.keys(), "an unknown worker holds a node"
        for worker, holding in self._holdings.items():
            _check_holding(worker, holding, residencies[worker])

    def _nodes(self) -> Iterator[Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _check_node(self, node: Node) -> None:
        parent = node.parent
        assert node.key, "a node is empty"
        assert len(node.key) % HASH_BYTES == 0, "a node ends inside a hash"
        assert parent.children.get(node.first) is node, "a node is not where its parent would find it"
        assert node.residencies, "a node is held by nobody"
        if parent is not self._root:
            assert node.residencies.keys() <= parent.residencies.keys(), "a worker holds a node without its parent"
        assert not _may_join_child(node), "a node and its only child should be one"


def _may_join_child(node: Node) -> bool:
    """Whether a node has one child only, which differs from it in no holder and in no touch."""
    if len(node.children) != 1:
        return False
    (child,) = node.children.values()
    if len(node.residencies) != len(child.residencies):
        return False
    return all(child.residencies[worker].touch is above.touch for worker, above in node.residencies.items())


def _join_child(node: Node) -> None:
    """Put a node's key in front of its only child's; the child remains."""
    (child,) = node.children.values()
    child.key, child.parent = node.key + child.key, node.parent
    child.parent.children[child.first] = child
    for residency in node.residencies.values():
        residency.unlink()
    node.residencies.clear()  # a node and its residencies refer to each other


def _check_holding(worker: WorkerId, holding: Holding, residencies: int) -> None:
    chunks = 0
    seen: set[Node] = set()
    entry = holding.ring
    while True:
        assert entry.newer.older is entry, "a list of residencies is not linked both ways"
        if (newer := entry.newer) is holding.ring:
            break
        assert newer.node.residencies.get(worker) is newer, "a residency is listed that its node does not have"
        assert entry is holding.ring or entry.touch.now <= newer.touch.now, "residencies are not listed by touch"
        assert newer.node.parent not in seen, "a node is listed as staler than what is below it"
        seen.add(newer.node)
        chunks += newer.node.chunks
        entry = newer
    assert len(seen) == residencies, "a residency is missing from its worker's list"
    assert chunks == holding.chunks, "the count of a worker's chunks is wrong"

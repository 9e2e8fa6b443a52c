"""Which worker is believed to hold which prefix: one compressed radix tree over chained chunk hashes.

Theory of operation. A node is a run of chunks; each worker that holds it has a residency there. Whoever holds a node
holds its parent. Each worker's residencies form a list in the order of their last touch; a touched path goes to its
fresh end deepest node first, so a node is always staler than its ancestors, the stale end is a leaf for that worker,
and eviction takes exactly the least recently touched chunks. Moving, evicting and finding the victim cost O(1) a node.
What running requests pin is in a list of its own, in the same order, and is evicted only where nothing else is left.
Whoever pins a node pins its parent; so what is not pinned is below what is, and the stale end is still a leaf.

- A node is split where its chunks come to differ in a holder, in a touch, or by a branch. The new upper part follows
  the lower one in every holder's list.
- A node joins its only child again as soon as both have the same holders and each of these touched both last in the
  same insertion (they are then neighbours in every list) and pins both equally often. So a conversation that grows
  turn by turn stays one node, and there are no more nodes than the branches, holders and touches in force require.
  Only where an engine's own nodes matter, because it evicts none in part, are they sealed, and stay as they came.

Counts are in chunks. Dictionaries are iterated in insertion order only: the same calls give the same tree.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from router.core.cache.prefix_node import Holding, Node, PathEnd
from router.core.model.prompt_key import HASH_BYTES
from router.core.model.request import WorkerId


class PrefixTree:
    """The prefixes believed to be cached, of at most `limit` distinct chunks over all workers.

    Hashes are 8 bytes per chunk, each covering all before it (`PromptKey.hashes`).
    """

    def __init__(
        self,
        limit: int,
        lost: Callable[[WorkerId, bytes], None] = lambda _worker, _hashes: None,
        gained: Callable[[WorkerId, bytes, int], None] = lambda _worker, _hashes, _gained: None,
    ) -> None:
        """`lost` is told of every run of chunks that a worker does not hold any more, while the tree changes.

        `gained` is told of every prefix of which a worker holds more, and how many bytes of hashes more, afterwards.
        """
        if limit < 1:
            raise ValueError(f"limit must be at least 1 chunk, not {limit}")
        self._limit = limit
        self._lost = lost
        self._gained = gained
        self._root = Node(b"")
        self._holdings: dict[WorkerId, Holding] = {}
        self._chunks = 0
        self._matched: tuple[bytes, int, dict[WorkerId, int], PathEnd] = (b"", -1, {}, (self._root, 0, 0))
        """What was matched last, after how many changes, and how: one decision asks several times about it."""
        self.changes = 0
        """Rises with whatever may change a match, or the nodes that it leads to."""

    @property
    def chunks(self) -> int:
        """Distinct chunks in all."""
        return self._chunks

    @property
    def root(self) -> Node:
        """The empty prefix; to be looked at only."""
        return self._root

    @property
    def holdings(self) -> Mapping[WorkerId, Holding]:
        """What each worker holds; to be looked at only."""
        return self._holdings

    def held_chunks(self, worker: WorkerId) -> int:
        holding = self._holdings.get(worker)
        return 0 if holding is None else holding.chunks

    def match(self, hashes: bytes) -> Mapping[WorkerId, int]:
        """Return how many chunks of this prefix each worker holds, for those that hold any; changes nothing.

        O(nodes on the path), and O(workers) where some of them end.
        """
        last, changes, found, _ = self._matched
        if last is hashes and changes == self.changes:
            return found
        found = {}
        node, shared, at = self._root, 0, 0
        holders = node.residencies
        while (child := node.children.get(hashes[at : at + HASH_BYTES])) is not None:
            # Holders only become fewer on the way down, so an equal count means the same ones.
            if len(child.residencies) < len(holders):
                found.update(dict.fromkeys(holders, at // HASH_BYTES))
            node, holders = child, child.residencies
            shared = node.shared(hashes, at)
            at += shared
            if shared < len(node.key):
                break
        found.update(dict.fromkeys(holders, at // HASH_BYTES))
        self._matched = hashes, self.changes, found, (node, shared, at)
        return found

    def touches(self, hashes: bytes, worker: WorkerId) -> list[tuple[int, float | None]]:
        """Of each node along this prefix that a worker holds, from the first on: up to which chunk, and when touched.

        None for when, where it is pinned. Changes nothing.
        """
        node, shared, at = self._find(hashes)
        found: list[tuple[int, float | None]] = []
        while node is not self._root:
            if (residency := node.residencies.get(worker)) is not None:
                found.append((at // HASH_BYTES, None if residency.pins else residency.touch.now))
            at -= shared
            node = node.parent
            shared = len(node.key)
        found.reverse()
        return found

    def holding(self, worker: WorkerId) -> Holding:
        """All that a worker holds; another object once the worker was dropped."""
        holding = self._holdings.get(worker)
        if holding is None:
            holding = self._holdings[worker] = Holding()
        return holding

    def last_touched(self, hashes: bytes, worker: WorkerId) -> float | None:
        """Return when this worker last touched the whole prefix; None where it does not hold it all."""
        node, _, at = self._root.find(hashes)
        residency = node.residencies.get(worker)
        return residency.touch.now if residency is not None and at == len(hashes) else None

    def insert(self, hashes: bytes, worker: WorkerId, now: float, *, pin: bool = False, seal: bool = False) -> Node:
        """Note that a worker holds this prefix, touched at `now`; return the node that it ends with.

        Of a prefix longer than the limit, the front is kept. Where the limit would be passed, the worker that holds
        the most, this prefix aside, loses as many of its stalest chunks, until all is within the limit; `now` never
        goes back. `pin`: until it is unpinned, it is evicted only where nothing else is left. `seal`: its nodes stay
        as they are now, for an engine that never joins its own.
        """
        hashes = hashes[: self._limit * HASH_BYTES]
        if not hashes:
            return self._root
        end = self._grow(self._find(hashes), hashes, seal=seal)
        excessive = self._chunks > self._limit
        holding = self.holding(worker)
        epoch = holding.epoch
        self.changes += 1
        new_chunks = holding.touch_path(end, worker, now, pins=1 if pin or excessive else 0)
        if excessive:
            self._shrink_to_limit(worker, len(hashes) // HASH_BYTES)
            if not pin and holding.epoch is epoch:
                holding.touch_path(end, worker, now, pins=-1)
        end.join_path()
        if new_chunks:
            self._gained(worker, hashes, new_chunks * HASH_BYTES)
        return end

    def restore(self, nodes: Sequence[tuple[int, bytes]], touches: Iterable[tuple[WorkerId, int, float]]) -> None:
        """Be what was saved: each touch, the newest first, is a worker that holds all down to a node, and a time.

        `nodes`: by number, the number of the one above it, below its own or -1, and its hashes. To be asked of an empty
        tree; nobody is told. No hash and no residency is looked at again for each node below it: the cost is linear.
        """
        ends = {-1: self._root}
        for worker, end, now in touches:
            path, number = [], end
            while number not in ends:
                path.append(number)
                number = nodes[number][0]
            for below in reversed(path):
                hashes = nodes[below][1]
                ends[below] = self._grow(ends[number].find(hashes), hashes, seal=False)
                number = below
            self.holding(worker).hold_stalest(ends[end], worker, now)
        self._shrink_to_limit()
        self._root.join_below()
        self.changes += 1

    def unpin(self, end: Node, worker: WorkerId, now: float, epoch: object) -> None:
        """Take back one pin of a prefix that was pinned in this epoch; where it was the last, that is a touch.

        `end`: what `insert` returned. Until the epoch is over or this pin taken back, the prefix ends with this node:
        it is not evicted, keeps the lower part where it is split, and is pinned more often than a child it might join.
        """
        if end is not self._root and (holding := self.holding(worker)).epoch is epoch:
            self.changes += 1
            holding.touch_path(end, worker, now, pins=-1)
            if end.may_join_child():
                (child,) = end.children.values()
                end.join_child()
                end = child
            end.join_path()

    def evict(self, worker: WorkerId, chunks: int, *, whole: bool = False) -> int:
        """Take this many chunks from a worker, or all that it holds: the least recently touched, deepest first.

        What is pinned goes last: where there is nothing else, all pins are void. `whole`: of a node all or nothing, so
        that more than this may go. Returns how many.
        """
        holding = self._holdings.get(worker)
        if holding is None:
            return 0
        before = holding.chunks
        left = min(chunks, before)
        while left > 0:
            stalest = holding.free.oldest
            if stalest is None:
                holding.void_pins()
                continue
            node = stalest.node
            chunks = node.chunks
            if chunks > left and not whole:
                node.split(len(node.key) - left * HASH_BYTES)
                chunks = left
            left -= chunks
            self._release(node, worker)
        return before - holding.chunks

    def evict_older(self, worker: WorkerId, than: float) -> int:
        """Take what a worker touched before this time and has not pinned; returns how many chunks."""
        holding = self._holdings.get(worker)
        if holding is None:
            return 0
        before = holding.chunks
        while (oldest := holding.free.oldest) is not None and oldest.touch.now < than:
            self._release(oldest.node, worker)
        return before - holding.chunks

    def prune(self, hashes: bytes, worker: WorkerId, kept: int, before: float) -> int:
        """Take what a worker holds beyond a prefix's first `kept` chunks, however it goes on from there.

        What is pinned, or was touched at `before` or later, stays. Returns how many chunks went.
        """
        holding = self._holdings.get(worker)
        if holding is None:
            return 0
        held = holding.chunks
        node, shared, at = self._root.find(hashes[: (kept + 1) * HASH_BYTES])
        if at > kept * HASH_BYTES and worker in node.residencies:
            upper = node.split(shared - HASH_BYTES) if shared > HASH_BYTES else None
            self._prune(node, worker, before)
            if upper is not None and upper.may_join_child():
                upper.join_child()
        return held - holding.chunks

    def drop(self, worker: WorkerId) -> None:
        """Forget a worker and all that it holds; O(nodes held by it)."""
        self.evict(worker, self.held_chunks(worker))
        self._holdings.pop(worker, None)

    def _find(self, hashes: bytes) -> PathEnd:
        """Where the path of this prefix ends; what was matched last is not looked for again."""
        last, changes, _, end = self._matched
        return end if last is hashes and changes == self.changes else self._root.find(hashes)

    def _grow(self, path: PathEnd, hashes: bytes, *, seal: bool) -> Node:
        """Make these hashes, found as far as `path`, end with a node, held by nobody yet if it is new; return it."""
        node, shared, at = path
        if shared < len(node.key):
            node = node.split(shared)
        node.sealed = node.sealed or seal
        if at == len(hashes):
            return node
        end = Node(hashes[at:], node)
        end.sealed = seal
        node.children[end.first] = end
        self._chunks += end.chunks
        return end

    def _shrink_to_limit(self, worker: WorkerId | None = None, kept: int = 0) -> None:
        """Evict until the limit is kept; of this worker the `kept` freshest chunks stay."""
        while (excess := self._chunks - self._limit) > 0:
            most, spare = None, 0
            for each, holding in self._holdings.items():
                chunks = holding.chunks - kept if each == worker else holding.chunks
                if chunks > spare:
                    most, spare = each, chunks
            assert most is not None, "chunks that nobody holds"
            self.evict(most, min(excess, spare))

    def _prune(self, top: Node, worker: WorkerId, before: float) -> None:
        """Take what may go of a subtree from a worker, leaves first."""
        order = [top]
        for node in order:
            order += [child for child in node.children.values() if worker in child.residencies]
        for node in reversed(order):
            residency = node.residencies.get(worker)  # None where the node has become one with another that stays
            if residency is None or residency.pins or residency.touch.now >= before:
                continue
            if node.is_leaf_of(worker):
                self._release(node, worker)

    def _release(self, node: Node, worker: WorkerId) -> None:
        """Take a leaf of this worker from it; the node goes when nobody holds it any more."""
        node.residencies.pop(worker).unlink()
        chunks = node.chunks
        self._holdings[worker].chunks -= chunks
        self.changes += 1
        self._lost(worker, node.key)
        changed = node
        if not node.residencies:
            changed = node.parent
            del changed.children[node.first]
            self._chunks -= chunks
        if changed.may_join_child():
            changed.join_child()

    def check_integrity(self) -> None:
        """Raise AssertionError, naming the broken invariant, where the tree contradicts itself; O(nodes x workers)."""
        assert not self._root.residencies, "the root is held by a worker"
        nodes = list(self._root.below())
        assert sum(node.chunks for node in nodes) == self._chunks, "the count of distinct chunks is wrong"
        assert self._chunks <= self._limit, "there are more chunks than the limit"
        for node in nodes:
            node.check()
        residencies = Counter(worker for node in nodes for worker in node.residencies)
        assert residencies.keys() <= self._holdings.keys(), "an unknown worker holds a node"
        for worker, holding in self._holdings.items():
            for ring in (holding.free, holding.pinned):
                assert all(entry.node.residencies.get(worker) is entry for entry in ring), (
                    "a residency is listed that its node does not have"
                )
            holding.check(residencies[worker])

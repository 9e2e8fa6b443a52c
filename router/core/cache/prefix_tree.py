"""Which worker is believed to hold which prefix: one compressed radix tree over chained chunk hashes.

Theory of operation. A node is a run of chunks; each worker that holds it has a residency there, and holds the node's
parent as well. The residencies of one worker form a list in the order of their last touch. A touched path goes to the
fresh end, deepest node first, so a node is always staler than its ancestors, the stale end is a leaf for that worker,
and eviction takes exactly the least recently touched chunks. Touching, evicting and finding the victim cost O(1) per
node. What running requests pin is in a separate list, in the same order, and is evicted only if nothing else is left. A
request that pins a node pins its parent as well, so unpinned nodes are below pinned ones, and the stale end is still a
leaf.

- A node is split where its chunks come to differ in a touch or by a branch. The new upper part follows the lower one in
  every holder's list.
- Where they come to differ in a holder, because one has lost the end of a node that others hold, the node notes a *cut*
  instead: it is split there as soon as it matters, because the last worker that holds all of it loses some, or an
  engine evicts whole nodes.
- A node joins its only child again as soon as both have the same holders and each holder touched both last in the same
  insertion (so they are neighbours in every list) and pins both equally often. So a conversation that grows turn by
  turn stays one node, and there are no more nodes than branches, holders and touches require. Only if an engine's own
  nodes matter, because it never evicts a part of one, are nodes sealed and left as they were inserted.

Counts are in chunks. Dictionaries are iterated in insertion order only: the same calls give the same tree.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from sys import maxsize
from typing import Final, NamedTuple

from router.core.cache.prefix_node import Holding, Node, PathEnd, Residency
from router.core.model.prompt_key import HASH_BYTES
from router.core.model.request import WorkerId


class HoldingSize(NamedTuple):
    """What a worker holds, the largest first; of equals, the one that began first."""

    chunks: int
    """Negative."""
    serial: int
    worker: WorkerId


NO_HOLDING: Final = HoldingSize(0, maxsize, WorkerId(""))


class PrefixTree:
    """The prefixes believed to be cached, of at most `limit` distinct chunks over all workers.

    Hashes are 8 bytes per chunk, each covering all before it (`PromptKey.hashes`).
    """

    def __init__(
        self,
        limit: int,
        on_lost: Callable[[WorkerId, bytes], None] = lambda _worker, _hashes: None,
        on_gained: Callable[[WorkerId, bytes, int], None] = lambda _worker, _hashes, _gained: None,
    ) -> None:
        """`on_lost` is called, while the tree changes, for every run of chunks that a worker no longer holds.

        `on_gained` is called, after the change, for every prefix of which a worker holds more than before, with the
        number of bytes of hashes gained. Raises ValueError if `limit` is below 1.
        """
        if limit < 1:
            raise ValueError(f"limit must be at least 1 chunk, not {limit}")
        self._limit = limit
        self._on_lost = on_lost
        self._on_gained = on_gained
        self._root = Node(b"")
        self._holdings: dict[WorkerId, Holding] = {}
        self.holdings: Final[Mapping[WorkerId, Holding]] = self._holdings
        """What each worker holds. Read-only."""
        self._largest: list[HoldingSize] = []
        """A heap of the holdings' sizes. For each holding, one entry has at least its current size."""
        self._serial = count()
        self._chunks = 0
        self._matched: tuple[bytes, int, dict[WorkerId, int]] = (b"", -1, {})
        """The latest match: its hashes, the value of `changes`, and the result. One decision often asks for it
        again.
        """
        self._found: tuple[bytes, int, PathEnd] = (b"", -1, (self._root, 0, 0))
        """The same for the end of a path, also if only that was sought."""
        self.changes = 0
        """Rises with whatever may change a match, or the nodes to which it leads."""

    @property
    def chunks(self) -> int:
        """Distinct chunks over all workers."""
        return self._chunks

    @property
    def root(self) -> Node:
        """The empty prefix. Read-only."""
        return self._root

    def held_chunks(self, worker: WorkerId) -> int:
        """Return how many chunks a worker holds."""
        holding = self._holdings.get(worker)
        return 0 if holding is None else holding.chunks

    def match(self, hashes: bytes) -> Mapping[WorkerId, int]:
        """Return how many chunks of this prefix each worker holds, for the workers that hold any. Changes nothing.

        O(nodes on the path), plus O(workers) at each node where some of them end.
        """
        last, changes, found = self._matched
        if last is hashes and changes == self.changes:
            return found
        found = {}
        cut: dict[WorkerId, int] = {}
        node, shared, at = self._root, 0, 0
        holders = node.residencies
        while (child := node.children.get(hashes[at : at + HASH_BYTES])) is not None:
            # Holders only become fewer on the way down, so an equal count means the same ones.
            if len(child.residencies) < len(holders):
                found.update(dict.fromkeys(holders, at // HASH_BYTES))
            node, holders = child, child.residencies
            shared = node.shared_bytes(hashes, at)
            for worker, left in node.cuts.items():
                cut[worker] = (at + min(left, shared)) // HASH_BYTES
            at += shared
            if shared < len(node.key):
                break
        found.update(dict.fromkeys(holders, at // HASH_BYTES))
        found.update(cut)
        self._matched = hashes, self.changes, found
        self._found = hashes, self.changes, (node, shared, at)
        return found

    def touches(self, hashes: bytes, worker: WorkerId) -> list[tuple[int, float | None]]:
        """For each node along this prefix that a worker holds, return up to which chunk it goes and when it was last
        touched.

        The time is None for a pinned node. Changes nothing.
        """
        node, shared, at = self._find(hashes)
        found: list[tuple[int, float | None]] = []
        while node is not self._root:
            if (residency := node.residencies.get(worker)) is not None:
                held = at - shared + min(shared, node.held_bytes(worker))
                found.append((held // HASH_BYTES, None if residency.pins else residency.touch.now))
            at -= shared
            node = node.parent
            shared = len(node.key)
        found.reverse()
        return found

    def holding(self, worker: WorkerId) -> Holding:
        """Return all that a worker holds; this is another object once the worker was dropped."""
        holding = self._holdings.get(worker)
        if holding is None:
            holding = self._holdings[worker] = Holding(next(self._serial))
        return holding

    def insert(self, hashes: bytes, worker: WorkerId, now: float, *, pin: bool = False, seal: bool = False) -> Node:
        """Insert a prefix that a worker holds, touched at `now`, and return the node with which it ends.

        Of a prefix longer than the limit, the front is kept. If the limit is exceeded, the worker that holds most,
        apart from this prefix, loses its stalest chunks, until all is within the limit. `now` must never decrease.

        `pin`: until it is unpinned, the prefix is evicted only if nothing else is left. `seal`: its nodes stay as they
        are now, for an engine that never joins its own.
        """
        hashes = hashes[: self._limit * HASH_BYTES]
        if not hashes:
            return self._root
        end = self._grow(self._find(hashes), hashes, seal=seal)
        over_limit = self._chunks > self._limit
        holding = self.holding(worker)
        epoch = holding.epoch
        self.changes += 1
        new_chunks = holding.touch_path(end, worker, now, pins=1 if pin or over_limit else 0)
        if new_chunks:
            self._note_growth(worker, holding)
        if over_limit:
            self._shrink_to_limit(worker, len(hashes) // HASH_BYTES)
            if not pin and holding.epoch is epoch:
                holding.touch_path(end, worker, now, pins=-1)
        end.join_path()
        if new_chunks:
            self._on_gained(worker, hashes, new_chunks * HASH_BYTES)
        return end

    def split_at_cut(self, residency: Residency, worker: WorkerId) -> None:
        """Split the node of a worker's residency if the worker has lost its end, so that it holds all of a node. No
        match changes.
        """
        if (left := residency.node.cuts.get(worker)) is not None:
            residency.node.split(left)
            self.changes += 1

    def restore(self, nodes: Sequence[tuple[int, bytes]], touches: Iterable[tuple[WorkerId, int, float]]) -> None:
        """Fill an empty tree with saved data; no callback is called.

        `touches`: the newest first; each is a worker that holds everything down to a node, and a time. `nodes`: by
        number; the number of the parent, which is smaller, or -1 for the root, and the hashes. No hash and no residency
        is examined again for each node below it, so the cost is linear.
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
        for worker, holding in self._holdings.items():
            self._note_growth(worker, holding)
        self._shrink_to_limit()
        self._root.join_below()
        self.changes += 1

    def unpin(self, end: Node, worker: WorkerId, now: float, epoch: object) -> None:
        """Take back one pin of a prefix that was pinned in this epoch. Taking back the last one touches the prefix.

        `end`: what `insert` returned. Until the epoch is over or this pin taken back, the prefix ends with this node:
        it is not evicted, it keeps the lower part when it is split, and it is pinned more often than a child it might
        join.
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
        """Evict this many chunks of a worker, or all that it holds: the least recently touched, deepest first.

        Pinned chunks go last: if there is nothing else, all pins are void. `whole`: a node is evicted entirely or not
        at all, so more chunks than asked for may go. Returns how many went.
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
            if whole:
                splits = self._split_at_cuts(node.parent) or self._split_at_cuts(node)
            else:
                splits = self._must_split(node, worker)
            if splits:
                continue
            chunks = node.held_bytes(worker) // HASH_BYTES
            if chunks <= left or whole:
                self._release(node, worker)
            elif node.held_whole_beside(worker):
                self._cut(node, worker, chunks - left)
            else:
                node.split(len(node.key) - left * HASH_BYTES)
                self._release(node, worker)
            left -= chunks
        return before - holding.chunks

    def _must_split(self, node: Node, worker: WorkerId) -> bool:
        """Split a node behind the last of its cuts, if it has any and no other worker than this one, which is to lose
        some of it, holds all of it. Returns whether it did.
        """
        if not node.cuts or node.held_whole_beside(worker):
            return False
        node.split(max(node.cuts.values()))
        self.changes += 1
        return True

    def _split_at_cuts(self, node: Node) -> bool:
        """Split a node at its cuts. Returns whether it had any."""
        if not node.cuts:
            return False
        node.split_at_cuts()
        self.changes += 1
        return True

    def _cut(self, node: Node, worker: WorkerId, chunks: int) -> None:
        """Take from a worker what it holds of a leaf beyond this many chunks. Costs the same for any number of holders,
        unlike a split.
        """
        lost = node.cut(worker, chunks * HASH_BYTES)
        self._holdings[worker].chunks -= len(lost) // HASH_BYTES
        self.changes += 1
        self._on_lost(worker, lost)

    def evict_older(self, worker: WorkerId, than: float) -> int:
        """Evict what a worker touched before this time and has not pinned. Returns how many chunks went."""
        holding = self._holdings.get(worker)
        if holding is None:
            return 0
        before = holding.chunks
        while (oldest := holding.free.oldest) is not None and oldest.touch.now < than:
            self._take(oldest.node, worker)
        return before - holding.chunks

    def prune(self, hashes: bytes, worker: WorkerId, kept: int, before: float) -> int:
        """Evict what a worker holds beyond a prefix's first `kept` chunks, on every branch that continues from there.

        What is pinned, or was touched at `before` or later, stays. Returns how many chunks went.
        """
        holding = self._holdings.get(worker)
        if holding is None:
            return 0
        held = holding.chunks
        node, shared, at = self._root.find(hashes[: (kept + 1) * HASH_BYTES])
        if at > kept * HASH_BYTES and worker in node.residencies and node.held_bytes(worker) >= shared:
            upper = None
            if shared > HASH_BYTES:
                upper = node.split(shared - HASH_BYTES)
                (node,) = upper.children.values()  # the rest may have joined its only child
                self.changes += 1
            self._prune(node, worker, before)
            if upper is not None and upper.may_join_child():
                upper.join_child()
        return held - holding.chunks

    def drop(self, worker: WorkerId) -> None:
        """Forget a worker and all that it holds. O(nodes held by it)."""
        self.evict(worker, self.held_chunks(worker))
        if self._holdings.pop(worker, None) is not None:
            self._largest = [entry for entry in self._largest if entry.worker != worker]
            heapify(self._largest)

    def _find(self, hashes: bytes) -> PathEnd:
        """Return where the path of this prefix ends, without a search if it was sought last."""
        last, changes, end = self._found
        if last is not hashes or changes != self.changes:
            end = self._root.find(hashes)
            self._found = hashes, self.changes, end
        return end

    def _grow(self, path: PathEnd, hashes: bytes, *, seal: bool) -> Node:
        """Return the node with which these hashes end, found as far as `path`; a new node has no holder yet."""
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
        """Evict until the limit holds; the `kept` freshest chunks of `worker` stay."""
        while (excess := self._chunks - self._limit) > 0:
            largest, spare = self._find_largest(worker, kept)
            assert spare > 0, "chunks that no worker holds"
            self.evict(largest, min(excess, spare))

    def _find_largest(self, worker: WorkerId | None, kept: int) -> tuple[WorkerId, int]:
        """Return who holds most, and how much that is; of `worker`, the `kept` freshest chunks do not count."""
        best, own = self._first_largest(), None
        while worker is not None and best.worker == worker:  # there may be several entries of it
            own = heappop(self._largest)
            best = self._first_largest()
        if own is not None:
            heappush(self._largest, own)
            best = min(best, own._replace(chunks=own.chunks + kept))
        return best.worker, -best.chunks

    def _first_largest(self) -> "HoldingSize":
        """Return the first entry of the heap of holdings that is up to date, once all before it are."""
        heap, holdings = self._largest, self._holdings
        while heap:
            known, serial, worker = entry = heap[0]
            chunks = -holdings[worker].chunks
            if chunks == known:
                return entry
            heapreplace(heap, HoldingSize(chunks, serial, worker))
        return NO_HOLDING

    def _note_growth(self, worker: WorkerId, holding: Holding) -> None:
        """Take in that a worker holds more."""
        heappush(self._largest, HoldingSize(-holding.chunks, holding.serial, worker))
        if len(self._largest) > 2 * len(self._holdings) + 16:
            self._largest = [HoldingSize(-each.chunks, each.serial, name) for name, each in self._holdings.items()]
            heapify(self._largest)

    def _prune(self, top: Node, worker: WorkerId, before: float) -> None:
        """Evict from a subtree what a worker may lose, leaves first."""
        order = [top]
        for node in order:
            order += [child for child in node.children.values() if worker in child.residencies]
        for node in reversed(order):
            residency = node.residencies.get(worker)  # None if the node was joined with one that stays
            if residency is None or residency.pins or residency.touch.now >= before:
                continue
            if node.is_leaf_of(worker):
                self._take(node, worker)

    def _take(self, leaf: Node, worker: WorkerId) -> None:
        """Take from this worker all that it holds of a leaf, whatever others hold of it."""
        if self._must_split(leaf, worker):
            upper = leaf.parent
            self._release(leaf, worker)
            leaf = upper
        self._release(leaf, worker)

    def _release(self, node: Node, worker: WorkerId) -> None:
        """Take a leaf from this worker, which is alone there or beside one that holds all of it. The node is removed if
        no worker holds it any more.
        """
        node.residencies.pop(worker).unlink()
        lost = node.key[: node.cuts.pop(worker)] if worker in node.cuts else node.key
        self._holdings[worker].chunks -= len(lost) // HASH_BYTES
        self.changes += 1
        self._on_lost(worker, lost)
        changed = node
        if not node.residencies:
            changed = node.parent
            del changed.children[node.first]
            self._chunks -= node.chunks
        if changed.may_join_child():
            changed.join_child()

    def check_integrity(self) -> None:
        """Raise AssertionError, naming the broken invariant, if the tree contradicts itself. O(nodes x workers)."""
        assert not self._root.residencies, "the root is held by a worker"
        nodes = list(self._root.below())
        assert sum(node.chunks for node in nodes) == self._chunks, "the count of distinct chunks is wrong"
        assert self._chunks <= self._limit, "there are more chunks than the limit"
        for node in nodes:
            node.check_integrity()
        residencies = Counter(worker for node in nodes for worker in node.residencies)
        assert residencies.keys() <= self._holdings.keys(), "an unknown worker holds a node"
        for worker, holding in self._holdings.items():
            for ring in (holding.free, holding.pinned):
                assert all(entry.node.residencies.get(worker) is entry for entry in ring), (
                    "a residency is listed that its node does not have"
                )
            holding.check_integrity(worker, residencies[worker])

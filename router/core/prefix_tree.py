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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from router.core.model import WorkerId
from router.core.prompt_key import HASH_BYTES
from router.core.radix_node import Holding, Node, Residency, Step, Touch


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
        self._matched: tuple[bytes, int, dict[WorkerId, int]] = (b"", -1, {})
        """What was matched last, after how many changes, and how: one decision asks several times about it."""
        self.changes = 0
        """Rises with whatever may change a match."""

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

    def held(self, worker: WorkerId) -> int:
        holding = self._holdings.get(worker)
        return 0 if holding is None else holding.chunks

    def match(self, hashes: bytes) -> Mapping[WorkerId, int]:
        """Return how many chunks of this prefix each worker holds, for those that hold any; changes nothing.

        O(nodes on the path), and O(workers) where some of them end.
        """
        last, changes, found = self._matched
        if last is hashes and changes == self.changes:
            return found
        found = {}
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
        self._matched = hashes, self.changes, found
        return found

    def path(self, hashes: bytes, worker: WorkerId) -> list[Step]:
        """The nodes along this prefix that a worker holds, from the first on; changes nothing."""
        found = []
        at = 0
        node = self._root.children.get(hashes[:HASH_BYTES])
        while node is not None and (residency := node.residencies.get(worker)) is not None:
            shared = node.shared(hashes, at)
            found.append(Step(at // HASH_BYTES, (at + shared) // HASH_BYTES, residency))
            at += shared
            if shared < len(node.key):
                break
            node = node.children.get(hashes[at : at + HASH_BYTES])
        return found

    def holding(self, worker: WorkerId) -> Holding:
        """All that a worker holds; another object once the worker was dropped."""
        holding = self._holdings.get(worker)
        if holding is None:
            holding = self._holdings[worker] = Holding()
        return holding

    def last_touched(self, hashes: bytes, worker: WorkerId) -> float | None:
        """Return when this worker last touched the whole prefix; None where it does not hold it all."""
        node, _, at = self._find(hashes)
        residency = node.residencies.get(worker)
        return residency.touch.now if residency is not None and at == len(hashes) else None

    def insert(self, hashes: bytes, worker: WorkerId, now: float, *, pin: bool = False, seal: bool = False) -> bytes:
        """Note that a worker holds this prefix, touched at `now`; return the hashes, a suffix, that it did not hold.

        Of a prefix longer than the limit, the front is kept. Where the limit would be passed, the worker that holds
        the most, this prefix aside, loses as many of its stalest chunks, until all is within the limit; `now` never
        goes back. `pin`: until it is unpinned, it is evicted only where nothing else is left. `seal`: its nodes stay
        as they are now, for an engine that never joins its own.
        """
        hashes = hashes[: self._limit * HASH_BYTES]
        if not hashes:
            return b""
        end = self._grow(hashes, seal=seal)
        excessive = self._chunks > self._limit
        epoch = self.holding(worker).epoch
        new_chunks = self._touch_path(end, worker, now, pins=1 if pin or excessive else 0)
        if excessive:
            self._shrink_to_limit(worker, len(hashes) // HASH_BYTES)
            if not pin and self.holding(worker).epoch is epoch:
                self._touch_path(end, worker, now, pins=-1)
        self._join_path(end)
        if new_chunks:
            self._gained(worker, hashes, new_chunks * HASH_BYTES)
        return hashes[len(hashes) - new_chunks * HASH_BYTES :]

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
                ends[below] = self._grow(nodes[below][1], seal=False, top=ends[number])
                number = below
            self._hold_stalest(ends[end], worker, Touch(now))
        self._shrink_to_limit()
        self._join_all()
        self.changes += 1

    def unpin(self, hashes: bytes, worker: WorkerId, now: float, epoch: object) -> None:
        """Take back one pin of a prefix that was pinned in this epoch; where it was the last, that is a touch."""
        end = self._end(hashes[: self._limit * HASH_BYTES], worker)
        if end is not self._root and self.holding(worker).epoch is epoch:
            self._touch_path(end, worker, now, pins=-1)
            if end.may_join_child():
                (child,) = end.children.values()
                end.join_child()
                end = child
            self._join_path(end)

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
                self._void_pins(holding)
                continue
            node = stalest.node
            chunks = node.chunks
            if chunks > left and not whole:
                self._split(node, len(node.key) - left * HASH_BYTES)
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
        beyond = next((step for step in self.path(hashes, worker) if step.end > kept), None)
        if beyond is not None:
            node, rest = beyond.residency.node, kept - beyond.start
            upper = self._split(node, rest * HASH_BYTES) if rest > 0 else None
            self._prune(node, worker, before)
            if upper is not None and upper.may_join_child():
                upper.join_child()
        return held - holding.chunks

    def drop(self, worker: WorkerId) -> None:
        """Forget a worker and all that it holds; O(nodes held by it)."""
        self.evict(worker, self.held(worker))
        self._holdings.pop(worker, None)

    def _end(self, hashes: bytes, worker: WorkerId) -> Node:
        """Return the deepest node along this prefix that a worker holds, if only in part; or else the root."""
        node, at = self._root, 0
        while (child := node.children.get(hashes[at : at + HASH_BYTES])) is not None and worker in child.residencies:
            node = child
            shared = node.shared(hashes, at)
            at += shared
            if shared < len(node.key):
                break
        return node

    def _find(self, hashes: bytes, top: Node | None = None) -> tuple[Node, int, int]:
        """Return the deepest node on this path, the bytes of its key on the path, and the bytes of the path found.

        `top`: where the path begins, if that is not the root.
        """
        node = top or self._root
        shared, at = len(node.key), 0
        while (child := node.children.get(hashes[at : at + HASH_BYTES])) is not None:
            node, shared = child, child.shared(hashes, at)
            at += shared
            if shared < len(node.key):
                break
        return node, shared, at

    def _grow(self, hashes: bytes, *, seal: bool, top: Node | None = None) -> Node:
        """Make these hashes end with a node, held by nobody yet where it is new, and return it. `top`: see `_find`."""
        node, shared, at = self._find(hashes, top)
        if shared < len(node.key):
            node = self._split(node, shared)
        node.sealed = node.sealed or seal
        if at == len(hashes):
            return node
        end = Node(hashes[at:], node)
        end.sealed = seal
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
            residency = Residency(upper, lower.touch, lower.pins)
            residency.link_after(lower)
            upper.residencies[worker] = residency
        return upper

    def _touch_path(self, end: Node, worker: WorkerId, now: float, pins: int) -> int:
        """Make a worker hold the path to this node, at the fresh end of its lists; return how many chunks are new.

        `pins`: so many more on each node. Where a pin is taken back and others are left, there is nothing to touch.
        """
        holding = self.holding(worker)
        touch = Touch(now)
        before = holding.chunks
        self.changes += 1
        node = end
        while node is not self._root:
            residency = node.residencies.get(worker)
            if residency is None:
                residency = node.residencies[worker] = Residency(node, touch)
                holding.chunks += len(node.key) // HASH_BYTES
            residency.pins += pins
            if pins >= 0 or not residency.pins:
                residency.touch = touch
                residency.move_to((holding.pinned if residency.pins else holding.free).end)
            node = node.parent
        return holding.chunks - before

    def _hold_stalest(self, end: Node, worker: WorkerId, touch: Touch) -> None:
        """Make a worker hold the path to this node, what it does not hold yet at the stale end of its list."""
        holding = self.holding(worker)
        path = []
        node = end
        while node is not self._root and worker not in node.residencies:
            path.append(node)
            node = node.parent
        for node in reversed(path):
            residency = node.residencies[worker] = Residency(node, touch)
            residency.link_after(holding.free.end)
            holding.chunks += node.chunks

    def _join_all(self) -> None:
        """Let all nodes join that may, each run of them at once."""
        stack = [*self._root.children.values()]
        while stack:
            run = [stack.pop()]
            while run[-1].may_join_child():
                run += run[-1].children.values()
            end = run.pop()
            if run:
                end.take_over(run)
            stack += end.children.values()

    def _join_path(self, end: Node) -> None:
        node = end
        while node is not self._root:
            if node.parent.may_join_child():
                node.parent.join_child()
            else:
                node = node.parent

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

    @staticmethod
    def _void_pins(holding: Holding) -> None:
        """Let all of it be evicted: an engine that should hold more than it can has not begun what is to run there."""
        holding.void_pins()
        for residency in [*holding.free]:
            if residency.node.may_join_child():
                residency.node.join_child()

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
        nodes = list(self._nodes())
        assert sum(node.chunks for node in nodes) == self._chunks, "the count of distinct chunks is wrong"
        assert self._chunks <= self._limit, "there are more chunks than the limit"
        for node in nodes:
            self._check_node(node)
        residencies = Counter(worker for node in nodes for worker in node.residencies)
        assert residencies.keys() <= self._holdings.keys(), "an unknown worker holds a node"
        for worker, holding in self._holdings.items():
            for ring in (holding.free, holding.pinned):
                assert all(entry.node.residencies.get(worker) is entry for entry in ring), (
                    "a residency is listed that its node does not have"
                )
            holding.check(residencies[worker])

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
            for worker, residency in node.residencies.items():
                assert residency.pins <= parent.residencies[worker].pins, "a node is pinned more often than its parent"
        assert not node.may_join_child(), "a node and its only child should be one"

"""The parts of the prefix tree: nodes, and which worker holds them and how recently."""

from collections.abc import Iterator, Sequence
from typing import Final, Self

from router.core.model.prompt_key import HASH_BYTES
from router.core.model.request import WorkerId


class Touch:
    """One insertion, shared by everything on its path; two insertions at the same time differ."""

    __slots__ = ("now",)

    def __init__(self, now: float) -> None:
        self.now = now


class Residency:
    """A worker's hold on one node: an entry in a list of that worker, from least to most recently touched."""

    __slots__ = ("newer", "node", "older", "pins", "touch")

    def __init__(self, node: "Node", touch: Touch, pins: int = 0) -> None:
        self.node = node
        self.touch = touch
        self.pins = pins
        """How many requests running there have this node in their prompt."""
        self.older: Residency = self
        self.newer: Residency = self

    def link_after(self, older: Self) -> None:
        newer = older.newer
        self.older, self.newer = older, newer
        older.newer = newer.older = self

    def move_to(self, end: Self) -> None:
        """Move to the newest position of the ring that `end` closes, from whichever list it was in."""
        self.older.newer, self.newer.older = self.newer, self.older
        older = end.older
        self.older, self.newer = older, end
        older.newer = end.older = self

    def unlink(self) -> None:
        self.older.newer, self.newer.older = self.newer, self.older


class Ring:
    """Residencies from least to most recently touched, closed by a sentinel that belongs to no node of the tree."""

    __slots__ = ("end",)

    def __init__(self) -> None:
        self.end = Residency(Node(b""), Touch(0.0))

    def __iter__(self) -> Iterator[Residency]:
        """Iterate from least to most recently touched."""
        entry = self.end.newer
        while entry is not self.end:
            yield entry
            entry = entry.newer

    @property
    def oldest(self) -> Residency | None:
        entry = self.end.newer
        return None if entry is self.end else entry

    @property
    def newest(self) -> Residency:
        """The entry after which the next one is linked: the newest residency, or the sentinel."""
        return self.end.older


class Holding:
    """All that one worker holds of one tree: what may be evicted, and what running requests pin."""

    __slots__ = ("chunks", "epoch", "free", "pinned", "serial")

    def __init__(self, serial: int) -> None:
        """`serial`: rises with each holding of a tree."""
        self.serial = serial
        self.chunks = 0
        self.epoch = object()
        """Replaced when all pins are voided; pins made in an earlier epoch are void."""
        self.free = Ring()
        self.pinned = Ring()

    def touch_path(self, end: "Node", worker: WorkerId, now: float, pins: int) -> int:
        """Touch the path down to this node: move it to the fresh end of the lists. Returns its new chunks.

        `pins`: the pins to add to each node. If a pin is taken back and others are left, the node is not touched.
        """
        touch = Touch(now)
        before = self.chunks
        node = end
        while (parent := node.parent) is not node:
            residency = node.residencies.get(worker)
            if residency is None:
                residency = node.residencies[worker] = Residency(node, touch)
                self.chunks += len(node.key) // HASH_BYTES
            elif node.cuts and (cut := node.cuts.pop(worker, 0)):
                self.chunks += (len(node.key) - cut) // HASH_BYTES
            residency.pins += pins
            if pins >= 0 or not residency.pins:
                residency.touch = touch
                residency.move_to((self.pinned if residency.pins else self.free).end)
            node = parent
        return self.chunks - before

    def hold_stalest(self, end: "Node", worker: WorkerId, now: float) -> None:
        """Add the path down to this node; what is not yet held goes to the stale end of what may be evicted."""
        touch = Touch(now)
        path = []
        node = end
        while node.parent is not node and worker not in node.residencies:
            path.append(node)
            node = node.parent
        for node in reversed(path):
            residency = node.residencies[worker] = Residency(node, touch)
            residency.link_after(self.free.end)
            self.chunks += node.chunks

    def void_pins(self) -> None:
        """Void all pins. Called only if nothing else is left to evict.

        An engine that would hold more than it can has not yet started the requests that are meant to run there.
        """
        self.epoch = object()
        self.free, self.pinned = self.pinned, self.free
        for residency in self.free:
            residency.pins = 0
        for residency in [*self.free]:
            if residency.node.may_join_child():
                residency.node.join_child()

    def check_integrity(self, worker: WorkerId, residencies: int) -> None:
        """Raise AssertionError, naming the broken invariant, if this worker's lists are inconsistent or have another
        length.
        """
        seen: set[Node] = set()
        chunks = 0
        for ring in (self.free, self.pinned):
            before = ring.end
            for entry in ring:
                assert entry.older is before, "a list of residencies is not linked both ways"
                assert before is ring.end or before.touch.now <= entry.touch.now, "residencies are not listed by touch"
                assert entry.node.parent not in seen, "a node is listed as staler than what is below it"
                assert (entry.pins > 0) is (ring is self.pinned), "a residency is in the wrong list"
                seen.add(entry.node)
                chunks += entry.node.held_bytes(worker) // HASH_BYTES
                before = entry
            assert ring.end.older is before, "a list of residencies is not linked both ways"
        assert len(seen) == residencies, "a residency is missing from its worker's list"
        assert chunks == self.chunks, "the count of a worker's chunks is wrong"


class Node:
    """A run of chunks that the same workers hold and last touched together, but for workers that have lost its end."""

    __slots__ = ("children", "cuts", "key", "parent", "residencies", "sealed")

    def __init__(self, key: bytes, parent: "Node | None" = None) -> None:
        self.key = key
        """The chained hashes of its chunks, one after the other."""
        self.parent = self if parent is None else parent
        """The root is its own parent."""
        self.children: dict[bytes, Node] = {}
        """By their first hash."""
        self.residencies: dict[WorkerId, Residency] = {}
        self.cuts: dict[WorkerId, int] = _NO_CUTS
        """How many bytes of the key are left to each worker that has lost the end of it; shared while there is none. At
        least one worker holds all of the key.
        """
        self.sealed = False
        """Whether an engine that evicts whole nodes has a node that ends here, too."""

    @property
    def chunks(self) -> int:
        return len(self.key) // HASH_BYTES

    @property
    def first(self) -> bytes:
        return self.key[:HASH_BYTES]

    def held_bytes(self, worker: WorkerId) -> int:
        """Return how many bytes of the key a worker holds that has a residency here."""
        return self.cuts.get(worker) or len(self.key)

    def held_whole_beside(self, worker: WorkerId) -> bool:
        """Return whether another worker holds all of the key."""
        return len(self.residencies) - len(self.cuts) > (worker not in self.cuts)

    def cut(self, worker: WorkerId, at: int) -> bytes:
        """Let a worker that holds no child, beside one that holds the whole key, keep its first `at` bytes only.
        Returns the hashes that it loses.
        """
        lost = self.key[at : self.held_bytes(worker)]
        if not self.cuts:
            self.cuts = {}
        self.cuts[worker] = at
        return lost

    def split_at_cuts(self) -> None:
        """Split the node so that each worker holds all of each part, or nothing."""
        node = self
        while node.cuts:
            node = node.split(max(node.cuts.values()))

    def shared_bytes(self, hashes: bytes, at: int) -> int:
        """Return how many bytes of the key are in `hashes` from `at` on, where its first hash is known to be.

        A chained hash covers all before it, so the point where the two part is found by bisection.
        """
        key = self.key
        if hashes.startswith(key, at):
            return len(key)
        same, different = 1, len(key) // HASH_BYTES  # in chunks; the last one is known to differ
        while different - same > 1:
            middle = (same + different) // 2
            start, end = (middle - 1) * HASH_BYTES, middle * HASH_BYTES
            if key[start:end] == hashes[at + start : at + end]:
                same = middle
            else:
                different = middle
        return same * HASH_BYTES

    def find(self, hashes: bytes) -> "PathEnd":
        """Return how far the nodes below this one follow a path that starts there. Changes nothing."""
        node, shared, at = self, len(self.key), 0
        while (child := node.children.get(hashes[at : at + HASH_BYTES])) is not None:
            node, shared = child, child.shared_bytes(hashes, at)
            at += shared
            if shared < len(node.key):
                break
        return node, shared, at

    def below(self) -> Iterator["Node"]:
        """Iterate over all nodes below this one, each before its children."""
        stack = [*self.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def is_leaf_of(self, worker: WorkerId) -> bool:
        """Return whether a worker that holds this node holds no node below it."""
        return all(worker not in child.residencies for child in self.children.values())

    def split(self, at: int) -> "Node":
        """Move the first `at` bytes of the key into a new parent, and return that. If the node has cuts, the rest may
        join its only child.
        """
        upper = Node(self.key[:at], self.parent)
        upper.parent.children[upper.first] = upper
        self.key, self.parent = self.key[at:], upper
        upper.children[self.first] = self
        cuts, self.cuts = self.cuts, _NO_CUTS
        for worker, lower in self.residencies.items():
            if worker in cuts and cuts[worker] <= at:
                residency, lower.node = lower, upper
            else:
                residency = Residency(upper, lower.touch, lower.pins)
                residency.link_after(lower)
            upper.residencies[worker] = residency
        for worker, left in cuts.items():
            if left <= at:
                del self.residencies[worker]
            if left != at:
                upper.cut(worker, left) if left < at else self.cut(worker, left - at)
        if cuts and self.may_join_child():
            self.join_child()
        return upper

    def may_join_child(self) -> bool:
        """Return whether the node has a single child, with the same holders, touches and pins."""
        if self.sealed or len(self.children) != 1:
            return False
        (child,) = self.children.values()
        if len(self.residencies) != len(child.residencies):
            return False
        for worker, above in self.residencies.items():
            below = child.residencies[worker]
            if below.touch is not above.touch or below.pins != above.pins:
                return False
        return True

    def join_child(self) -> None:
        """Merge the node into its only child: the child gets the longer key and remains."""
        (child,) = self.children.values()
        child.take_over([self])

    def take_over(self, above: Sequence["Node"]) -> None:
        """Put the keys of these nodes, a chain that ends at this node's parent, in front of the node's own key."""
        own = len(self.key)
        self.key = b"".join([*[node.key for node in above], self.key])
        if self.cuts:
            self.cuts = {worker: left + len(self.key) - own for worker, left in self.cuts.items()}
        self.parent = above[0].parent
        self.parent.children[self.first] = self
        for node in above:
            for residency in node.residencies.values():
                residency.unlink()
            node.residencies.clear()  # a node and its residencies refer to each other

    def join_path(self) -> None:
        """Join all nodes that may join, from this one up."""
        node = self
        while (parent := node.parent) is not parent.parent:  # the root stays
            if parent.may_join_child():
                parent.join_child()
            else:
                node = parent

    def join_below(self) -> None:
        """Join all nodes below this one that may join, each run of them at once."""
        stack = [*self.children.values()]
        while stack:
            run = [stack.pop()]
            while run[-1].may_join_child():
                run += run[-1].children.values()
            end = run.pop()
            if run:
                end.take_over(run)
            stack += end.children.values()

    def check_integrity(self) -> None:
        """Raise AssertionError, naming the broken invariant, if the node contradicts its neighbours in the tree."""
        parent = self.parent
        assert self.key, "a node is empty"
        assert len(self.key) % HASH_BYTES == 0, "a node ends inside a hash"
        assert parent.children.get(self.first) is self, "a node is not where its parent would find it"
        assert self.residencies, "a node is held by nobody"
        assert self.cuts.keys() < self.residencies.keys(), "no worker holds a whole node"
        assert all(0 < left < len(self.key) for left in self.cuts.values()), "a cut is no part of a node"
        assert all(self.is_leaf_of(worker) for worker in self.cuts), "a worker holds what is behind a cut"
        if parent.parent is not parent:
            assert self.residencies.keys() <= parent.residencies.keys(), "a worker holds a node without its parent"
            for worker, residency in self.residencies.items():
                assert residency.pins <= parent.residencies[worker].pins, "a node is pinned more often than its parent"
        assert not self.may_join_child(), "a node and its only child should be one"


_NO_CUTS: Final[dict[WorkerId, int]] = {}

PathEnd = tuple[Node, int, int]
"""How far nodes follow a prefix: the deepest node, how many bytes of its key match, and how many bytes match in all."""

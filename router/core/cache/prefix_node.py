"""What the prefix tree is made of: nodes, and who holds them how recently."""

from collections.abc import Iterator, Sequence
from typing import Self

from router.core.model.prompt_key import HASH_BYTES
from router.core.model.request import WorkerId


class Touch:
    """One insertion: everything on its path shares this object, which differs from others' at the same time."""

    __slots__ = ("now",)

    def __init__(self, now: float) -> None:
        self.now = now


class Residency:
    """That one worker holds one node: an entry in one of that worker's lists, from least to most recently touched."""

    __slots__ = ("newer", "node", "older", "pins", "touch")

    def __init__(self, node: "Node", touch: Touch, pins: int = 0) -> None:
        self.node = node
        self.touch = touch
        self.pins = pins
        """How many requests run there whose prompt it is a part of."""
        self.older: Residency = self
        self.newer: Residency = self

    def link_after(self, older: Self) -> None:
        newer = older.newer
        self.older, self.newer = older, newer
        older.newer = newer.older = self

    def move_to(self, end: Self) -> None:
        """Become the newest in the ring that this closes, wherever it was listed before."""
        self.older.newer, self.newer.older = self.newer, self.older
        older = end.older
        self.older, self.newer = older, end
        older.newer = end.older = self

    def unlink(self) -> None:
        self.older.newer, self.newer.older = self.newer, self.older


class Ring:
    """Residencies from least to most recently touched, closed by an entry that belongs to no node of the tree."""

    __slots__ = ("end",)

    def __init__(self) -> None:
        self.end = Residency(Node(b""), Touch(0.0))

    def __iter__(self) -> Iterator[Residency]:
        """From least to most recently touched."""
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
        """Where the next one is linked: the last one, or the closing entry."""
        return self.end.older


class Holding:
    """All that one worker holds of one tree: what may be evicted, and what running requests pin."""

    __slots__ = ("chunks", "epoch", "free", "pinned")

    def __init__(self) -> None:
        self.chunks = 0
        self.epoch = object()
        """Pins made in another one are void."""
        self.free = Ring()
        self.pinned = Ring()

    def touch_path(self, end: "Node", worker: WorkerId, now: float, pins: int) -> int:
        """Take in the path to this node, at the fresh end of the lists; return how many chunks of it are new.

        `pins`: so many more on each node. Where a pin is taken back and others are left, there is nothing to touch.
        """
        touch = Touch(now)
        before = self.chunks
        node = end
        while (parent := node.parent) is not node:
            residency = node.residencies.get(worker)
            if residency is None:
                residency = node.residencies[worker] = Residency(node, touch)
                self.chunks += len(node.key) // HASH_BYTES
            residency.pins += pins
            if pins >= 0 or not residency.pins:
                residency.touch = touch
                residency.move_to((self.pinned if residency.pins else self.free).end)
            node = parent
        return self.chunks - before

    def hold_stalest(self, end: "Node", worker: WorkerId, now: float) -> None:
        """Take in the path to this node, what of it is not yet held at the stale end of what may be evicted."""
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
        """Pin nothing any more; asked only where nothing is free.

        An engine that should hold more than it can has not begun what is to run there.
        """
        self.epoch = object()
        self.free, self.pinned = self.pinned, self.free
        for residency in self.free:
            residency.pins = 0
        for residency in [*self.free]:
            if residency.node.may_join_child():
                residency.node.join_child()

    def check(self, residencies: int) -> None:
        """Raise AssertionError, naming the broken invariant, where the lists are not those of so many residencies."""
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
                chunks += entry.node.chunks
                before = entry
            assert ring.end.older is before, "a list of residencies is not linked both ways"
        assert len(seen) == residencies, "a residency is missing from its worker's list"
        assert chunks == self.chunks, "the count of a worker's chunks is wrong"


class Node:
    """A run of chunks that the same workers hold and last touched together."""

    __slots__ = ("children", "key", "parent", "residencies", "sealed")

    def __init__(self, key: bytes, parent: "Node | None" = None) -> None:
        self.key = key
        """The chained hashes of its chunks, one after the other."""
        self.parent = self if parent is None else parent
        """The root is its own."""
        self.children: dict[bytes, Node] = {}
        """By their first hash."""
        self.residencies: dict[WorkerId, Residency] = {}
        self.sealed = False
        """Whether an engine that evicts whole nodes has one that ends here, too."""

    @property
    def chunks(self) -> int:
        return len(self.key) // HASH_BYTES

    @property
    def first(self) -> bytes:
        return self.key[:HASH_BYTES]

    def shared(self, hashes: bytes, at: int) -> int:
        """Return how many bytes of the key stand in `hashes` at `at`, where its first hash is known to stand.

        A chained hash covers all before it, so the place where the two part is found by bisection.
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
        """How far the nodes below this one go along a path that begins there; changes nothing."""
        node, shared, at = self, len(self.key), 0
        while (child := node.children.get(hashes[at : at + HASH_BYTES])) is not None:
            node, shared = child, child.shared(hashes, at)
            at += shared
            if shared < len(node.key):
                break
        return node, shared, at

    def below(self) -> Iterator["Node"]:
        """All nodes below this one, each before its children."""
        stack = [*self.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def is_leaf_of(self, worker: WorkerId) -> bool:
        """Whether a worker that holds this node holds nothing below it."""
        return all(worker not in child.residencies for child in self.children.values())

    def split(self, at: int) -> "Node":
        """Cut the first `at` bytes of its key off into a new parent, and return that."""
        upper = Node(self.key[:at], self.parent)
        upper.parent.children[upper.first] = upper
        self.key, self.parent = self.key[at:], upper
        upper.children[self.first] = self
        for worker, lower in self.residencies.items():
            residency = Residency(upper, lower.touch, lower.pins)
            residency.link_after(lower)
            upper.residencies[worker] = residency
        return upper

    def may_join_child(self) -> bool:
        """Whether it has one child only, which differs from it in no holder, in no touch and in no pin."""
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
        """Put its key in front of its only child's; the child remains."""
        (child,) = self.children.values()
        child.take_over([self])

    def take_over(self, above: Sequence["Node"]) -> None:
        """Put the keys of these in front of its own: each is the only child of the one before, and it of the last."""
        self.key = b"".join([*[node.key for node in above], self.key])
        self.parent = above[0].parent
        self.parent.children[self.first] = self
        for node in above:
            for residency in node.residencies.values():
                residency.unlink()
            node.residencies.clear()  # a node and its residencies refer to each other

    def join_path(self) -> None:
        """Let all nodes join that may, from this one up."""
        node = self
        while (parent := node.parent) is not parent.parent:  # the root stays
            if parent.may_join_child():
                parent.join_child()
            else:
                node = parent

    def join_below(self) -> None:
        """Let all nodes below this one join that may, each run of them at once."""
        stack = [*self.children.values()]
        while stack:
            run = [stack.pop()]
            while run[-1].may_join_child():
                run += run[-1].children.values()
            end = run.pop()
            if run:
                end.take_over(run)
            stack += end.children.values()

    def check(self) -> None:
        """Raise AssertionError, naming the broken invariant, where it contradicts what is next to it in its tree."""
        parent = self.parent
        assert self.key, "a node is empty"
        assert len(self.key) % HASH_BYTES == 0, "a node ends inside a hash"
        assert parent.children.get(self.first) is self, "a node is not where its parent would find it"
        assert self.residencies, "a node is held by nobody"
        if parent.parent is not parent:
            assert self.residencies.keys() <= parent.residencies.keys(), "a worker holds a node without its parent"
            for worker, residency in self.residencies.items():
                assert residency.pins <= parent.residencies[worker].pins, "a node is pinned more often than its parent"
        assert not self.may_join_child(), "a node and its only child should be one"


PathEnd = tuple[Node, int, int]
"""How far nodes go along a prefix: the deepest, how many bytes of its key are on the path, how many of the path there
are."""

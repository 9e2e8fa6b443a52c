"""What the prefix tree is made of: nodes, and who holds them how recently."""

from collections.abc import Iterator
from typing import Self

from router.core.model import WorkerId
from router.core.prompt_key import HASH_BYTES


class Touch:
    """One insertion: everything on its path shares this object, which differs from others' at the same time."""

    __slots__ = ("now",)

    def __init__(self, now: float) -> None:
        self.now = now


class Residency:
    """That one worker holds one node: an entry in that worker's list from least to most recently touched."""

    __slots__ = ("newer", "node", "older", "touch")

    def __init__(self, node: "Node", touch: Touch) -> None:
        self.node = node
        self.touch = touch
        self.older: Residency = self
        self.newer: Residency = self

    def link_after(self, older: Self) -> None:
        newer = older.newer
        self.older, self.newer = older, newer
        older.newer = newer.older = self

    def unlink(self) -> None:
        self.older.newer, self.newer.older = self.newer, self.older


class Holding:
    """All that one worker holds: a ring of residencies, closed by an entry that belongs to no node of the tree."""

    __slots__ = ("chunks", "ring")

    def __init__(self) -> None:
        self.chunks = 0
        self.ring = Residency(Node(b""), Touch(0.0))

    def __iter__(self) -> Iterator[Residency]:
        """From least to most recently touched."""
        entry = self.ring.newer
        while entry is not self.ring:
            yield entry
            entry = entry.newer

    @property
    def oldest(self) -> Residency:
        return self.ring.newer

    @property
    def newest(self) -> Residency:
        return self.ring.older


class Node:
    """A run of chunks that the same workers hold and last touched together."""

    __slots__ = ("children", "key", "parent", "residencies")

    def __init__(self, key: bytes, parent: "Node | None" = None) -> None:
        self.key = key
        """The chained hashes of its chunks, one after the other."""
        self.parent = self if parent is None else parent
        self.children: dict[bytes, Node] = {}
        """By their first hash."""
        self.residencies: dict[WorkerId, Residency] = {}

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

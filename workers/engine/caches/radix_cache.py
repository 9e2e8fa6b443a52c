"""SGLang's radix cache over a pool of KV tokens: page-aligned, locked by running requests, LRU by whole leaves.

After `sglang/srt/mem_cache/unified_radix_cache.py`. Matching splits nodes. It refreshes the access time of the nodes on
its way, and of the rest of a node that it splits. Eviction takes the least recently used unlocked leaf and drops the
whole node, so it may free more than was requested; a parent that loses its last child becomes a leaf. The pool is
represented only by counts: a token is available, in the tree, or private to one request.

Left out: host and disk tiers, the other eviction orders, LoRA and cache-salt namespaces.
"""

import heapq
from collections.abc import Iterator, Sequence
from itertools import chain, count

from workers.engine.block_log import ROOT_HASH, BlockLog, Removed, Stored, chained_hashes

Key = int | tuple[int, ...]


class Node:
    """An edge of the tree: the tokens between its parent and itself, and the locks held at or below it."""

    __slots__ = ("access", "children", "in_heap", "locks", "parent", "tokens")

    def __init__(self, tokens: Sequence[int], parent: "Node | None", access: int, locks: int = 0) -> None:
        self.tokens = tokens
        self.parent = parent
        self.children: dict[Key, Node] = {}
        self.access = access
        self.locks = locks
        self.in_heap = False  # has an entry in the eviction heap

    @property
    def evictable(self) -> bool:
        return not self.locks and not self.children and self.parent is not None


class RadixCache:
    """The tree and the pool of `capacity` tokens in pages of `page` tokens; capacity is rounded down to pages."""

    def __init__(self, capacity: int, page: int, log: BlockLog | None = None) -> None:
        """`log` receives what is stored and evicted, page by page."""
        self._log = log
        self.page = page
        self.capacity = capacity - capacity % page
        self.available = self.capacity
        self.evictable = 0
        self.protected = 0
        self.evicted = 0
        self._clock = 0
        self._serial = count()
        self._root = Node((), None, 0, locks=1)
        self._leaves: list[tuple[int, int, Node]] = []  # heap by access time when added, at most one entry per node

    @property
    def reclaimable(self) -> int:
        """Tokens available to an allocation, by eviction if need be."""
        return self.available + self.evictable

    @property
    def size(self) -> int:
        return self.evictable + self.protected

    def match(self, tokens: Sequence[int], limit: int) -> tuple[Node, int]:
        """Return the deepest node, and the length, of the cached prefix of `tokens[:limit]`.

        Splits nodes and refreshes their access time.
        """
        self._clock += 2  # two ticks: the rest of a split node counts as used just before the nodes on the way
        node, length = self._root, 0
        limit -= limit % self.page
        while length < limit and (child := node.children.get(self._key(tokens, length))):
            shared = self._shared(child.tokens, tokens, length, limit)
            if shared < len(child.tokens):
                child = self._split(child, shared)
            child.access = self._clock
            node, length = child, length + shared
        return node, length

    def peek(self, tokens: Sequence[int], limit: int) -> int:
        """Return the length of the cached prefix of `tokens[:limit]`; changes nothing."""
        node, length = self._root, 0
        limit -= limit % self.page
        while length < limit and (child := node.children.get(self._key(tokens, length))):
            shared = self._shared(child.tokens, tokens, length, limit)
            length += shared
            if shared < len(child.tokens):
                break
            node = child
        return length

    def insert(self, tokens: Sequence[int], length: int) -> tuple[Node, int]:
        """Add `tokens[:length]` (whole pages) to the tree. Returns the node that ends them, and how much was present.

        The tokens that were not present come from the caller's private share.
        """
        node, present = self.match(tokens, length)
        length -= length % self.page
        if present < length:
            leaf = Node(tokens[present:length], node, self._clock)
            node.children[self._key(tokens, present)] = leaf
            if self._log is not None:
                self._log.add(self._stored(tokens, present, length))
            self.evictable += length - present
            node = leaf
            self._offer(leaf)
        return node, present

    def lock(self, node: Node) -> None:
        """Protect `node` and its ancestors from eviction."""
        for above in self._path(node):
            if not above.locks:
                self.evictable -= len(above.tokens)
                self.protected += len(above.tokens)
            above.locks += 1

    def unlock(self, node: Node) -> None:
        for above in self._path(node):
            above.locks -= 1
            if not above.locks:
                self.protected -= len(above.tokens)
                self.evictable += len(above.tokens)
                self._offer(above)

    def allocate(self, tokens: int) -> None:
        """Take `tokens` from the pool, evicting as needed. Raises MemoryError beyond `reclaimable`."""
        if tokens > self.reclaimable:
            raise MemoryError(f"{tokens} tokens wanted, {self.reclaimable} reclaimable")
        self.make_room(tokens)
        self.available -= tokens

    def make_room(self, tokens: int) -> None:
        """Evict until `tokens` are available or nothing is left to evict."""
        while self.available < tokens and self.evictable:
            self._evict_leaf()

    def free(self, tokens: int) -> None:
        self.available += tokens

    def check_integrity(self) -> None:
        """Raise AssertionError unless counts, locks and links of the tree agree."""
        evictable = protected = 0
        for node in self._nodes():
            assert node.tokens
            assert len(node.tokens) % self.page == 0
            assert node.parent is not None
            assert node.parent.children[self._key(node.tokens, 0)] is node
            assert node.locks >= sum(child.locks for child in node.children.values())
            assert node.access >= max((child.access for child in node.children.values()), default=0)
            if node.locks:
                protected += len(node.tokens)
            else:
                evictable += len(node.tokens)
            assert node.in_heap or not node.evictable
        assert (evictable, protected) == (self.evictable, self.protected)
        assert 0 <= self.available <= self.capacity

    def _key(self, tokens: Sequence[int], start: int) -> Key:
        return tokens[start] if self.page == 1 else tuple(tokens[start : start + self.page])

    def _shared(self, edge: Sequence[int], tokens: Sequence[int], start: int, limit: int) -> int:
        """Return the page-aligned length of the common start of `edge` and `tokens[start:limit]`, by bisection."""
        low, high = 0, min(len(edge), limit - start)
        if edge[:high] == tokens[start : start + high]:
            return high - high % self.page
        while high - low > 1:
            middle = (low + high) // 2
            if edge[low:middle] == tokens[start + low : start + middle]:
                low = middle
            else:
                high = middle
        return low - low % self.page

    def _split(self, node: Node, length: int) -> Node:
        """Put a new node above `node` that takes the first `length` tokens of its edge; both count as used now."""
        parent = node.parent
        assert parent is not None
        node.access = self._clock - 1
        upper = Node(node.tokens[:length], parent, node.access, node.locks)
        parent.children[self._key(node.tokens, 0)] = upper
        node.tokens = node.tokens[length:]
        node.parent = upper
        upper.children[self._key(node.tokens, 0)] = node
        return upper

    def _offer(self, node: Node) -> None:
        if node.evictable and not node.in_heap:
            node.in_heap = True
            heapq.heappush(self._leaves, (node.access, next(self._serial), node))

    def _evict_leaf(self) -> None:
        """Evict the oldest leaf; if it was locked, extended or used since it was added, only refresh its heap entry."""
        access, _, leaf = heapq.heappop(self._leaves)
        leaf.in_heap = False
        parent = leaf.parent
        if parent is None or not leaf.evictable or leaf.access != access:
            self._offer(leaf)
            return
        if self._log is not None:
            self._log.add(self._removed(leaf))
        del parent.children[self._key(leaf.tokens, 0)]
        leaf.parent = None
        freed = len(leaf.tokens)
        self.evictable -= freed
        self.available += freed
        self.evicted += freed
        self._offer(parent)

    def _stored(self, tokens: Sequence[int], present: int, length: int) -> Stored:
        """Return the event that the tree now has these tokens from `present` to `length`."""
        hashes = chained_hashes(ROOT_HASH, tokens[:length], self.page)
        pages = present // self.page
        return Stored(hashes[pages:], hashes[pages - 1] if pages else None, tokens[present:length])

    def _removed(self, leaf: Node) -> Removed:
        edges = [node.tokens for node in self._path(leaf)]
        tokens = list(chain.from_iterable(reversed(edges)))
        hashes = chained_hashes(ROOT_HASH, tokens, self.page)
        return Removed(hashes[-(len(leaf.tokens) // self.page) :])

    def _path(self, node: Node) -> Iterator[Node]:
        while node.parent is not None:
            yield node
            node = node.parent

    def _nodes(self) -> Iterator[Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

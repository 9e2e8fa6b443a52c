"""vLLM's block pool: full blocks found by a chained hash, and one free list that is also the LRU order.

After `vllm/v1/core/block_pool.py` and `kv_cache_utils.py`. Blocks without references stay findable until the free list
hands them out again: eviction happens at allocation, one block at a time. Blocks are freed in reverse order, so the
tail of a prompt is evicted before its head; blocks without a hash go to the front and are reused first. Two blocks may
hold the same content if two requests computed it at the same time.

Left out: the digests (a chained 64-bit hash of integers stands in for SHA-256), cache salts, LoRA and multimodal keys.
"""

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from workers.engine.block_log import BlockLog, Removed


class BlockPool:
    """`blocks` usable blocks with reference counts; all sizes are in blocks."""

    def __init__(self, blocks: int, log: BlockLog | None = None) -> None:
        """`log` receives evictions only; the engine logs what is stored."""
        self._log = log
        self._references = [0] * blocks
        self._hashes: list[int | None] = [None] * blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        self._by_hash: dict[int, int] = {}
        self._duplicates: dict[int, list[int]] = {}  # further blocks of a hash, in order of arrival
        self._times_taken = [0] * blocks
        self.evicted = 0

    @property
    def size(self) -> int:
        return len(self._references)

    @property
    def free(self) -> int:
        """Blocks without references, cached ones included."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Distinct block contents that a request could hit."""
        return len(self._by_hash)

    def find(self, hashes: Iterable[int]) -> list[int]:
        """Return the blocks of the longest cached prefix of `hashes`; changes nothing."""
        return list(iter(map(self._by_hash.get, hashes).__next__, None))  # ends before the first None

    def count_found(self, hashes: Sequence[int], limit: int) -> int:
        """Return how many of the first `limit` hashes of one prompt `find` would find; O(log limit).

        Bisects: no block of a prompt is cached without those before it, because every request holds them together and
        frees, and so loses, them from the last to the first.
        """
        known = self._by_hash
        return bisect_left(hashes, True, hi=limit, key=lambda each: each not in known)

    def allocate(self, new: int, hits: Sequence[int] = ()) -> list[int] | None:
        """Reference `hits` and take `new` blocks from the free list, evicting what they cached.

        Returns hits and new blocks in order. If the free list is too short, changes nothing and returns None.
        """
        if not self.can_allocate(new, hits):
            return None
        references = self._references
        for block in hits:
            if references[block] == 0:
                del self._free[block]
            references[block] += 1
        return [*hits, *(self._take() for _ in range(new))]

    def can_allocate(self, new: int, hits: Sequence[int] = ()) -> bool:
        """True if `allocate` would succeed."""
        if new > len(self._free):
            return False
        references = self._references
        return new + [references[block] for block in hits].count(0) <= len(self._free)

    def remember(self, block: int, key: int) -> None:
        """Make a full, referenced block findable under `key`; called once per block."""
        self._hashes[block] = key
        if self._by_hash.setdefault(key, block) != block:
            self._duplicates.setdefault(key, []).append(block)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block; a block without references goes to the free list."""
        references, hashes, free = self._references, self._hashes, self._free
        for block in reversed(blocks):
            references[block] -= 1
            if references[block] == 0:
                free[block] = None
                if hashes[block] is None:
                    free.move_to_end(block, last=False)

    def versions(self, blocks: Iterable[int]) -> list[int]:
        """Return how often each block has been handed out: as long as that is the same, so is its content."""
        return [self._times_taken[block] for block in blocks]

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the references are exactly those of `held`, and free lists and hashes agree."""
        references = Counter(block for blocks in held for block in blocks)
        assert all(count == references[block] for block, count in enumerate(self._references))
        assert self._free.keys() == {block for block, count in enumerate(self._references) if count == 0}
        findable = {block: key for key, block in self._by_hash.items()}
        findable |= {block: key for key, blocks in self._duplicates.items() for block in blocks}
        assert findable == {block: key for block, key in enumerate(self._hashes) if key is not None}
        assert all(self._duplicates.values())
        assert self._duplicates.keys() <= self._by_hash.keys()

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        self._references[block] = 1
        self._times_taken[block] += 1
        key = self._hashes[block]
        if key is not None:
            self._hashes[block] = None
            self._forget(block, key)
            self.evicted += 1
            if self._log is not None:
                self._log.add(Removed((key,)))
        return block

    def _forget(self, block: int, key: int) -> None:
        others = self._duplicates.get(key)
        if others is None:
            del self._by_hash[key]
            return
        if self._by_hash[key] == block:
            self._by_hash[key] = others.pop(0)
        else:
            others.remove(block)
        if not others:
            del self._duplicates[key]

"""The two block caches: which blocks can be hit, which are evicted first, and that no token of the pool is lost."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.engine.block_log import ROOT_HASH, chained_hashes
from workers.engine.caches.block_pool import BlockPool
from workers.engine.caches.radix_cache import RadixCache


def remembered(pool: BlockPool, keys: list[int]) -> list[int]:
    """Allocate one block per key and make each findable."""
    blocks = pool.allocate(len(keys))
    assert blocks is not None
    for block, key in zip(blocks, keys, strict=True):
        pool.remember(block, key)
    return blocks


def test_block_hashes_are_chained() -> None:
    """Equal tokens behind different parents are different blocks, and a partial block has no hash."""
    first, second = chained_hashes(ROOT_HASH, [1, 2, 3, 3, 4], 2)
    assert [first] == chained_hashes(ROOT_HASH, (1, 2), 2)
    assert [second] == chained_hashes(first, [3, 3], 2)
    others = [*chained_hashes(ROOT_HASH, [2, 1], 2), *chained_hashes(ROOT_HASH, [3, 3], 2)]
    assert len({first, second, *others}) == 4


def test_the_tail_of_a_prompt_is_evicted_before_its_head() -> None:
    """Blocks freed together are evicted in reverse order, so that the remaining ones are still a prefix."""
    pool = BlockPool(4)
    pool.release(remembered(pool, [11, 12, 13, 14]))
    assert pool.allocate(2) is not None
    assert len(pool.find([11, 12, 13, 14])) == 2
    assert pool.evicted == 2


def test_the_least_recently_freed_prompt_is_evicted_first() -> None:
    """The free list keeps the LRU order across prompts."""
    pool = BlockPool(4)
    old, new = remembered(pool, [1, 2]), remembered(pool, [3, 4])
    pool.release(old)
    pool.release(new)
    assert pool.allocate(2) is not None
    assert pool.find([1, 2]) == []
    assert pool.find([3, 4]) == new


def test_blocks_without_a_hash_are_reused_first() -> None:
    """A block that caches nothing goes to the front of the free list, before older cached ones."""
    pool = BlockPool(3)
    pool.release(remembered(pool, [1, 2]))
    bare = pool.allocate(1)
    assert bare is not None
    pool.release(bare)
    assert pool.allocate(1) == bare
    assert pool.evicted == 0


def test_a_hit_leaves_the_free_list() -> None:
    """A touched block cannot be evicted, and counts against what can be allocated."""
    pool = BlockPool(3)
    blocks = remembered(pool, [1, 2])
    pool.release(blocks)
    assert pool.allocate(2, pool.find([1, 2])) is None
    assert pool.free == 3
    assert pool.allocate(1, pool.find([1, 2])) == [*blocks, 2]
    assert pool.free == 0


def test_a_duplicate_survives_the_eviction_of_its_twin() -> None:
    """Content that two requests computed at the same time is found until both copies are gone."""
    pool = BlockPool(2)
    first, twin = remembered(pool, [7]), remembered(pool, [7])
    pool.release(first)
    assert pool.allocate(1) == first
    assert pool.find([7]) == twin
    assert pool.cached == 1


@given(st.randoms(use_true_random=False), st.integers(1, 12))
def test_blocks_are_neither_lost_nor_held_twice(choose: random.Random, size: int) -> None:
    """References, free list and index agree, whatever is allocated, hit and released."""
    pool, held = BlockPool(size), list[list[int]]()
    for _ in range(40):
        if held and choose.random() < 0.4:
            pool.release(held.pop(choose.randrange(len(held))))
        else:
            keys = list(range(choose.randint(1, 4)))
            hits = pool.find(keys)
            blocks = pool.allocate(len(keys) - len(hits), hits)
            if blocks is not None:
                held.append(blocks)
                for block, key in list(zip(blocks, keys, strict=True))[len(hits) :]:
                    pool.remember(block, key)
        pool.check_integrity(held)


def grow(cache: RadixCache, tokens: list[int]) -> None:
    """Compute `tokens` for a request that ends at once."""
    cache.allocate(len(tokens))
    _, present = cache.insert(tokens, len(tokens))
    cache.free(present + len(tokens) % cache.page)


def test_the_cache_holds_what_was_inserted_up_to_the_last_whole_page() -> None:
    """A tail that fills no page is not cached."""
    cache = RadixCache(100, page=4)
    grow(cache, [*range(10)])
    assert cache.peek([*range(10)], 10) == 8
    assert cache.size == 8
    assert cache.available == 92


def test_a_match_stops_at_its_limit_and_at_the_first_difference() -> None:
    """Matching splits the node where the prompts diverge, and finds the same prefix again."""
    cache = RadixCache(100, page=1)
    grow(cache, [1, 2, 3, 4, 5])
    assert cache.match([1, 2, 3, 9], 4)[1] == 3
    assert cache.match([1, 2, 3, 4, 5], 4)[1] == 4
    assert cache.match([1, 2, 3, 4, 5], 5)[1] == 5
    assert cache.match([9], 1)[1] == 0
    cache.check_integrity()


def test_the_least_recently_used_leaf_is_evicted_whole() -> None:
    """Eviction removes the whole oldest leaf, and keeps what was matched since."""
    cache = RadixCache(20, page=1)
    grow(cache, [1] * 10)
    grow(cache, [2] * 10)
    cache.match([1] * 10, 10)
    cache.allocate(1)
    assert cache.peek([2] * 10, 10) == 0
    assert cache.peek([1] * 10, 10) == 10
    assert (cache.available, cache.evicted) == (9, 10)


def test_a_parent_is_evicted_after_its_last_child() -> None:
    """A shared prefix becomes a leaf once everything that followed it is evicted."""
    cache = RadixCache(8, page=1)
    grow(cache, [1, 2, 3, 4])
    grow(cache, [1, 2, 5, 6])
    cache.allocate(6)
    assert cache.peek([1, 2, 3, 4], 4) == 2
    cache.allocate(2)
    assert cache.size == 0


def test_locked_nodes_are_not_evicted() -> None:
    """The nodes that a running request uses are not evicted, nor is any ancestor of these."""
    cache = RadixCache(10, page=1)
    grow(cache, [1, 2, 3])
    node, _ = cache.match([1, 2, 3], 2)
    cache.lock(node)
    cache.allocate(8)
    assert cache.peek([1, 2, 3], 3) == 2
    with pytest.raises(MemoryError):
        cache.allocate(1)
    cache.unlock(node)
    cache.allocate(2)
    assert cache.size == 0


sequences = st.lists(st.integers(0, 2), min_size=1, max_size=20)


@given(st.lists(sequences, max_size=12), sequences, st.sampled_from([1, 2, 4]))
def test_a_match_is_the_longest_common_prefix_in_whole_pages(
    inserted: list[list[int]], wanted: list[int], page: int
) -> None:
    """Without eviction the tree finds exactly what a search through all inserted sequences finds."""
    cache = RadixCache(1000, page)
    for tokens in inserted:
        grow(cache, tokens)
        cache.check_integrity()
    best = 0
    for tokens in inserted:
        whole = tokens[: len(tokens) - len(tokens) % page]
        while best + page <= min(len(whole), len(wanted)) and whole[: best + page] == wanted[: best + page]:
            best += page
    before = cache.size
    assert cache.peek(wanted, len(wanted)) == best
    assert cache.match(wanted, len(wanted))[1] == best
    assert cache.size == before
    cache.check_integrity()


@given(st.lists(sequences, max_size=30), st.sampled_from([1, 2]))
def test_eviction_keeps_the_pool_whole(inserted: list[list[int]], page: int) -> None:
    """With a pool that is far too small, every token is either available or in the tree."""
    cache = RadixCache(24, page)
    for tokens in inserted:
        grow(cache, tokens)
        cache.check_integrity()
        assert cache.available + cache.size == cache.capacity

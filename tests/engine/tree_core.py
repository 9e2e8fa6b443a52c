"""Applies operations to SGLang's own prefix tree. The SGLang environment's Python runs this file.

Standard input: for each of several trees its page size and a list of operations, as JSON. Standard output: the result
of each operation. `insert` inserts tokens; `match` matches tokens and locks the match; `unlock` releases the oldest
lock; `evict` evicts a number of tokens, and its result is the evicted leaves.
"""

import json
import sys
from array import array

import torch  # type: ignore[import-not-found]
from sglang.srt.mem_cache.rust_tree_core.extension import bindings  # type: ignore[import-not-found]

FULL = 0
"""The component of the tree that holds KV."""


class Tree:
    """The tree without a memory pool: the value of a token is the token itself."""

    def __init__(self, page: int) -> None:
        settings = {
            **{"eviction_policy": "lru", "page_size": page, "device": "cpu", "is_write_back": False},
            **{"slru_protected_threshold": 2, "tlru_tail_budget": 0, "tlru_float_config": None},
            **{"enable_hicache": False, "write_through_threshold": 256, "swa_sliding_window_size": None},
            **{"swa_req_ring": False, "enable_kv_cache_events": False, "dynamo_kv_event_format": False},
            **{"mamba_cache_chunk_size": None, "mamba_max_states_per_path": None},
        }
        self._core = bindings.RustUnifiedTreeCoreBinding(bindings.TreeCoreInitParamsBinding(**settings), [FULL])
        self._locks: list[int] = []

    def insert(self, tokens: list[int]) -> None:
        settings = {
            **{"key": array("q", tokens), "value": torch.tensor(tokens, dtype=torch.int64), "extra_key": None},
            **{"cache_salt": None, "session_id": None, "mamba_value": None, "prev_prefix_len": 0, "inserted_len": 0},
            **{"swa_evicted_seqlen": 0, "swa_branching_seqlen": None, "priority": 0, "track_adopted_ranges": False},
            "rotation_base": None,
        }
        self._core.begin_insert(bindings.InsertParamsBinding(**settings))
        while self._core.has_ongoing_insert():
            self._core.resume_insert()
        self._core.end_insert()

    def match(self, tokens: list[int]) -> int:
        key = bindings.MatchParamsBinding(key=array("q", tokens), extra_key=None, cache_salt=None)
        found = self._core.match_prefix(key)
        self._core.inc_lock_ref(found.last_device_node_id, [])
        self._locks.append(found.last_device_node_id)
        return int(found.device_prefix_len)

    def unlock(self) -> None:
        node = self._locks.pop(0)
        params = bindings.DecLockRefParamsBinding(
            node_id=node, skipped_lock_components=[], component_lock_uuids={}, component_host_lock_uuids={}
        )
        self._core.dec_lock_ref(node, params, False)

    def evict(self, tokens: int) -> list[list[int]]:
        leaves: list[list[int]] = []
        freed = 0
        self._core.evict_device_start(FULL, tokens)
        while (leaf := self._core.evict_device_next_node(FULL, {FULL: freed}).node_id) is not None:
            values = self._core.evict_device_leaf(leaf).new_device_frees[FULL]
            leaves.append([int(token) for value in values for token in value.tolist()])
            freed += len(leaves[-1])
        self._core.evict_device_end(FULL)
        return leaves


def results(page: int, program: list[list[object]]) -> list[object]:
    """Return the result of each operation."""
    tree = Tree(page)
    return [getattr(tree, str(name))(*arguments) for name, *arguments in program]


if __name__ == "__main__":
    print(json.dumps([results(page, program) for page, program in json.load(sys.stdin)]))

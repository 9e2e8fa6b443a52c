"""Targets for the reports of engines: metrics, models, loads, and KV events."""

from collections.abc import Callable
from random import Random
from typing import Any, Final

import msgpack

from router.core.kv_blocks.block_names import BlockNames, TooManyBlocks
from router.core.kv_blocks.kv_events import read_batch
from router.core.model.block_key import BlockHasher
from router.errors import WorkerBroke
from router.upstream.dialects import SGLANG, VLLM, context_tokens, detect_dialect, read_engine_info, read_models
from router.upstream.kv_endpoints import READERS as SOURCES

from .engine import Target
from .mutation import Mutator

METRICS: Final = (
    b"""# HELP vllm:num_requests_running x
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="6251"} 1.0
vllm:prompt_tokens_created{engine="0"} 1.7e+09
vllm:prompt_tokens_total{engine="0"} 1000.0
vllm:prefix_cache_hits_total{engine="0"} 10.0
vllm:kv_block_idle_before_evict_seconds_sum{engine="0"} 1.5
vllm:kv_block_idle_before_evict_seconds_count{engine="0"} 2.0
vllm:engine_sleep_state{sleep_state="awake"} 1.0
""",
    b"""sglang:num_running_reqs{dp_rank="0",tp_rank="0"} 3.0
sglang:num_queue_reqs{dp_rank="0",tp_rank="0"} 1.0
sglang:max_total_num_tokens{dp_rank="0",tp_rank="0"} 100000.0
sglang:page_size{dp_rank="0"} 16.0
sglang:prompt_tokens_created{dp_rank="0"} 1.7e+09
sglang:prompt_tokens_total{dp_rank="0"} 1000.0
sglang:cached_tokens_total{dp_rank="0"} 10.0
sglang:evicted_tokens_total{dp_rank="0"} 10.0
""",
)
PAGE_TOKENS: Final = (
    *(
        b"vllm:",
        b"sglang:",
        b"num_requests_running",
        b"{",
        b"}",
        b'"',
        b"\\",
        b" ",
        b"\n",
        b"NaN",
        b"+Inf",
        b"-1.0",
        b"1e400",
    ),
    *(b"9" * 5000, "²".encode(), b'block_size="', b'dp_rank="1"', b"#", b"\0", b"\xff", b"_total", b"1_0"),
)
DOCUMENTS: Final[tuple[Any, ...]] = (
    {"object": "list", "data": [{"id": "m", "owned_by": "vllm", "max_model_len": 4096}, {"id": "l", "parent": "m"}]},
    {"object": "list", "data": [{"id": "m", "owned_by": "sglang"}]},
    {"loads": [{"num_running_reqs": 1, "num_waiting_reqs": 0, "max_total_num_tokens": 1000}, {}]},
    {
        **{"schedule_policy": "lpm", "chunked_prefill_size": 8192},
        "kv_events": {"publisher": "zmq", "endpoint_port_base": 5557, "dp_size": 2, "replay_endpoint_port_base": 6000},
    },
    {"0": {"publisher": "zmq", "enable_kv_cache_events": True, "endpoint": "tcp://*:5557", "replay_endpoint": None}},
)
NAMES: Final = (
    *("data", "id", "owned_by", "max_model_len", "loads", "num_running_reqs", "schedule_policy", "kv_events", "²"),
    *("publisher", "endpoint", "replay_endpoint", "topic", "dp_size", "endpoint_port_base", "endpoint_host", "1", "x"),
)
ADDRESSES: Final = (
    "tcp://[::1]:5557",
    "tcp://x:99999",
    "tcp://[:1",
    "ipc://x",
    "tcp://\0:1",
    "tcp://h:²",
    "http://x:1",
)
READERS: Final[tuple[Callable[[bytes], object], ...]] = (
    *(read_models, context_tokens, detect_dialect, read_engine_info, VLLM.read_cache, SGLANG.read_cache),
    *VLLM.load_readers.values(),
    *SGLANG.load_readers.values(),
    *(lambda body, read=read: read(body, "host") for read in SOURCES.values()),
)


def make_report(random: Random) -> bytes:
    """A page of metrics or a JSON document, mutated."""
    if random.random() < 0.5:
        return Mutator(random, PAGE_TOKENS).damaged(random.choice(METRICS))
    mutator = Mutator(random, PAGE_TOKENS, NAMES)
    document = mutator.tree(random.choice(DOCUMENTS))
    if random.random() < 0.1:
        document = {"0": {**DOCUMENTS[-1]["0"], "endpoint": random.choice(ADDRESSES)}}
    data = mutator.json(document)
    return mutator.damaged(data) if random.random() < 0.3 else data


def read_report(data: bytes, random: Random) -> bool:  # noqa: ARG001 - the signature of a target
    """Each reader accepts the report or raises WorkerBroke."""
    understood = 0
    for read in READERS:
        try:
            read(data)
            understood += 1
        except WorkerBroke:
            pass
    return understood > 0


STORED: Final = {
    **{"type": "BlockStored", "block_hashes": [b"abc", 7], "parent_block_hash": None, "token_ids": [1, 2, 3, 4]},
    **{"block_size": 2, "lora_id": None, "medium": "GPU", "extra_keys": None, "group_idx": 0},
}
BATCHES: Final[tuple[Any, ...]] = (
    [1.5, [STORED, {"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU"}, {"type": "AllBlocksCleared"}], 0],
    [1.5, [STORED, {**STORED, "block_hashes": [9], "parent_block_hash": 7, "token_ids": [5, 6]}], None],
    [1.5, [["BlockStored", [1, 2], None, [1, 2, 3, 4], 2, None, "GPU"], ["BlockRemoved", [1]], ["AllBlocksCleared"]]],
)
EVENT_NAMES: Final = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "x")
PACKED_TOKENS: Final = (
    *(b"\xc0", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 600),
    *(
        b"\xd6\xff\x00\x00\x00\x00",
        b"\xcf" + b"\xff" * 8,
        b"\xcb\x7f\xf8" + bytes(6),
        b"\xabBlockStored",
        b"\x00",
        b"\xff",
    ),
)


def _packable(value: Any) -> Any:
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return 2**64 - 1
    if isinstance(value, dict):
        return {_packable(name): _packable(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_packable(each) for each in value]
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


def make_events(random: Random) -> bytes:
    """A message of KV events, mutated."""
    mutator = Mutator(random, PACKED_TOKENS, EVENT_NAMES)
    data = msgpack.packb(_packable(mutator.tree(random.choice(BATCHES))))
    assert isinstance(data, bytes)
    return mutator.damaged(data) if random.random() < 0.4 else data


def read_events(data: bytes, random: Random) -> bool:
    """A message is invalid or a batch without its bad events. Clearing removes all stored blocks."""
    try:
        batch = read_batch(msgpack.unpackb(data, strict_map_key=False))
    except (ValueError, TypeError, RecursionError):
        return False
    names = BlockNames(BlockHasher(b"secret"), random.choice((1, 1000)))
    try:
        names.apply(batch.events)
    except TooManyBlocks:
        return False
    assert len(names) <= 1000
    names.clear()
    assert not len(names)
    return True


REPORT: Final = Target("report", make_report, read_report)
EVENTS: Final = Target("events", make_events, read_events)

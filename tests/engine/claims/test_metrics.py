"""The metrics that the router reads and the emulation exposes: their names, labels, and what each counts when."""

import pytest

from router.upstream.dialects import SGLANG, VLLM

from ..processes import Server, wait_until
from ..wire import COMPLETIONS, WORKER_KEY, Json, call, get, listed, mapped
from .leaving import leave_amid_a_stream
from .metrics import Page, read
from .shapes import shape
from .sides import KV_TOKENS, Sides

pytestmark = pytest.mark.engine

OUTPUT = 24
FIXED: Json = {"model": "tiny", "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True}
INFO = "vllm:cache_config_info"
"""A metric whose content is in its labels."""
READ = {
    "vllm": {
        *("vllm:num_requests_running", "vllm:num_requests_waiting", INFO, "vllm:engine_sleep_state"),
        *("vllm:prompt_tokens_total", "vllm:prompt_tokens_created", "vllm:prefix_cache_hits_total"),
        *("vllm:kv_block_idle_before_evict_seconds_sum", "vllm:kv_block_idle_before_evict_seconds_count"),
    },
    "sglang": {
        *("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:max_total_num_tokens", "sglang:page_size"),
        *("sglang:prompt_tokens_total", "sglang:cached_tokens_total"),
    },
}
"""Metrics that the router reads of an engine that has answered twice, the second time from its cache."""
EVENTUALLY = {
    "sglang:evicted_tokens_total",
    "sglang:num_retracted_input_tokens_total",
    "sglang:num_retracted_output_tokens_total",
    "sglang:num_aborted_requests_total",
}
"""SGLang's counters that do not exist before their first count."""


def twice(server: Server, what: str) -> tuple[Page, Page]:
    """Send the same prompt twice. Returns the metrics before and after."""
    before = read(server)
    body = {**FIXED, "prompt": f"{what} is said twice here, and found the second time, because it is long enough " * 8}
    for _ in range(2):
        assert call(server.url, COMPLETIONS, body).status == 200
    finished = f"{'vllm' if VLLM.name in str(before.names) else 'sglang'}:generation_tokens_total"
    wait_until(lambda: read(server).total(finished) >= before.total(finished) + 2 * OUTPUT, 60, "both are counted")
    return before, read(server)


def test_names_types_and_labels(sides: Sides) -> None:
    """The real engine has every metric of the emulation, with equal type and labels, and all that the router reads."""
    for server in sides.each():
        twice(server, "names")
    real, emulated = (read(server) for server in sides.each())
    assert real.names >= READ[sides.dialect]
    assert emulated.names - real.names <= EVENTUALLY
    exposed = {name for name in emulated.names & real.names if name.startswith(("vllm:", "sglang:"))}
    for name in exposed:
        declared = [page.types.get(name) or page.types.get(name.removesuffix("_total")) for page in (real, emulated)]
        assert (name, declared[1]) == (name, declared[0])
        if name != INFO:
            bare = {labels - {"pid"} for labels in real.labels(name)}
            assert (name, emulated.labels(name)) <= (name, bare)
    if sides.dialect == "vllm":
        labels = [next(iter(page.labels(INFO))) for page in (emulated, real)]
        assert labels[0] - {"model_name"} <= labels[1]


def test_counters_of_a_restart(sides: Sides, server: Server) -> None:
    """Each counter of vLLM reports when it began; none of SGLang's does."""
    created = {name for name in read(server).names if name.startswith(f"{sides.dialect}:") and "_created" in name}
    assert bool(created) == (sides.dialect == "vllm")


def test_what_two_calls_count(sides: Sides, server: Server) -> None:
    """Prompts count whole, cached or not; hits count once; each generated token counts."""
    before, after = twice(server, f"counted by {server.name}")
    usage = mapped(call(server.url, COMPLETIONS, {**FIXED, "prompt": "x"}).json["usage"])
    assert usage["completion_tokens"] == OUTPUT
    name = sides.dialect
    prompt = after.total(f"{name}:prompt_tokens_total") - before.total(f"{name}:prompt_tokens_total")
    output = after.total(f"{name}:generation_tokens_total") - before.total(f"{name}:generation_tokens_total")
    hits = "vllm:prefix_cache_hits_total" if name == "vllm" else "sglang:cached_tokens_total"
    found = after.total(hits) - before.total(hits)
    assert output == 2 * OUTPUT
    assert prompt / 2 - 32 <= found < prompt / 2
    if name == "vllm":
        asked = "vllm:prefix_cache_queries_total"
        assert after.total(asked) - before.total(asked) == prompt
        assert found == after.total("vllm:prompt_tokens_cached_total") - before.total("vllm:prompt_tokens_cached_total")
    else:
        computed = {mode: after.total("sglang:realtime_tokens_total", mode=mode) for mode in MODES}
        already = {mode: before.total("sglang:realtime_tokens_total", mode=mode) for mode in MODES}
        assert computed["prefill_cache"] - already["prefill_cache"] == found
        assert computed["prefill_compute"] - already["prefill_compute"] == prompt - found


MODES = ("prefill_compute", "prefill_cache", "decode")


def test_a_stream_that_is_left(sides: Sides, server: Server) -> None:
    """An abandoned stream ends in the engine; vLLM counts neither its end nor its tokens, SGLang counts an abort."""
    before = read(server)
    leave_amid_a_stream(server)
    running = "vllm:num_requests_running" if sides.dialect == "vllm" else None

    def ended() -> bool:
        if running is not None:
            return read(server).total(running) == 0
        return read(server).total("sglang:num_aborted_requests_total") > before.total(
            "sglang:num_aborted_requests_total"
        )

    wait_until(ended, 60, "the engine has ended it")
    after = read(server)
    if sides.dialect == "vllm":
        assert after.total("vllm:request_success_total") == before.total("vllm:request_success_total")


def test_the_routers_reading(sides: Sides, server: Server) -> None:
    """From each engine's page the router reads its capacity, its block size, and that nothing waits."""
    twice(server, f"read of {server.name}")
    engine = VLLM if sides.dialect == "vllm" else SGLANG
    page = get(f"{server.url}/metrics").body
    load, cache = engine.load_readers["/metrics"](page), engine.read_cache(page)
    assert load.waiting == 0  # SGLang reports running requests as of its last batch with new requests
    assert load.kv_tokens == KV_TOKENS
    assert cache.block_tokens == (32 if sides.dialect == "vllm" else 16)
    assert cache.hit_tokens
    assert (cache.born is not None) == (sides.dialect == "vllm")


def test_loads_of_sglang(sides: Sides) -> None:
    """The real /v1/loads has all fields of the emulation, of equal type, and all that the router reads."""
    if sides.dialect == "vllm":
        assert [get(f"{server.url}/v1/loads", WORKER_KEY).status for server in sides.each()] == [404, 404]
        return
    real, emulated = (get(f"{server.url}/v1/loads", WORKER_KEY) for server in sides.each())
    (real_rank,), (emulated_rank,) = (listed(answer.json["loads"]) for answer in (real, emulated))
    assert emulated.json.keys() == real.json.keys()
    exposed = {name: shape(value) for name, value in emulated_rank.items()}
    assert exposed == {name: shape(real_rank[name]) for name in exposed}
    for answer in (real, emulated):
        load = SGLANG.load_readers["/v1/loads"](answer.body)
        assert (load.running, load.waiting, load.kv_tokens) == (0, 0, KV_TOKENS)


def test_server_info_of_sglang(sides: Sides) -> None:
    """The emulation has no field that the real engine lacks, and the router's fields are in both."""
    if sides.dialect == "vllm":
        assert get(f"{sides.emulated.url}/server_info", WORKER_KEY).status == 404
        return
    real, emulated = (get(f"{server.url}/server_info", WORKER_KEY).json for server in sides.each())
    read_by_us = {"version", "schedule_policy", "chunked_prefill_size", "page_size", "kv_events"}
    assert read_by_us <= emulated.keys() <= real.keys()
    differ = {name for name in emulated if shape(emulated[name]) != shape(real[name])}
    assert differ == {"internal_states"}
    assert (emulated["page_size"], emulated["schedule_policy"]) == (real["page_size"], real["schedule_policy"])

import pytest

from router.core.model.events import CacheReport, WorkReport
from router.core.model.request import Role
from router.errors import WorkerBroke
from router.upstream.dialects import (
    GENERIC,
    SGLANG,
    VLLM,
    Dialect,
    ReportedLoad,
    detect_dialect,
    read_engine_info,
    read_models,
    read_parents,
)

VLLM_METRICS = b"""\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a } b"} 3.0
vllm:num_requests_running{engine="1",model_name="a } b"} 4.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="a } b"} 5.0
vllm:num_requests_waiting{engine="1",model_name="a } b"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="a } b",reason="capacity"} 99.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="a } b",reason="deferred"} 99.0
vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="0",num_gpu_blocks="600",sliding_window="None"} 1.0
vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="1",num_gpu_blocks="101",sliding_window="None"} 1.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="a } b"} 1e+06
"""

SGLANG_METRICS = b"""\
sglang:num_running_reqs{dp_rank="0",engine_type="unified",model_name="m",priority="",tp_rank="0"} 3.0
sglang:num_running_reqs{dp_rank="0",engine_type="unified",model_name="m",priority="",tp_rank="1"} 3.0
sglang:num_running_reqs{dp_rank="0",engine_type="unified",model_name="m",priority="7",tp_rank="0"} 2.0
sglang:num_running_reqs{dp_rank="1",engine_type="unified",model_name="m",priority="",tp_rank="0"} 1.0
sglang:num_queue_reqs{dp_rank="0",model_name="m",tp_rank="0"} 5.0
sglang:max_total_num_tokens{dp_rank="0",model_name="m",tp_rank="0"} 1000.0
sglang:max_total_num_tokens{dp_rank="1",model_name="m",tp_rank="0"} 1000.0
sglang:page_size{dp_rank="0",model_name="m",tp_rank="0"} 16.0
"""

SGLANG_LOADS = b"""{"timestamp": "2026-01-01T00:00:00+00:00", "version": "0.5.23", "num_accelerators": 1, "loads": [
    {"dp_rank": 0, "num_running_reqs": 3, "num_waiting_reqs": 1,
     "max_total_num_tokens": 1000, "max_running_requests": 8, "token_usage": 0.5},
    {"dp_rank": 1, "num_running_reqs": 4, "num_waiting_reqs": 0,
     "max_total_num_tokens": 2000, "max_running_requests": 4, "token_usage": 0.1}]}"""


def models(*cards: str) -> bytes:
    return ('{"object": "list", "data": [' + ",".join(cards) + "]}").encode()


@pytest.mark.parametrize(
    ("dialect", "path", "body", "load"),
    [
        (VLLM, "/metrics", VLLM_METRICS, ReportedLoad(7, 5, 599 * 32 + 100 * 32)),
        (SGLANG, "/metrics", SGLANG_METRICS, ReportedLoad(4, 5, 2000)),
        (SGLANG, "/v1/loads", SGLANG_LOADS, ReportedLoad(7, 1, 3000, 12)),
    ],
)
def test_load_is_summed_over_ranks_and_nothing_else(
    dialect: Dialect, path: str, body: bytes, load: ReportedLoad
) -> None:
    """Load is the sum over data-parallel ranks; tensor ranks, priorities and metrics with longer names are not
    added.
    """
    assert dialect.load_readers[path](body) == load


def test_capacity_may_be_missing() -> None:
    """An engine that does not report its capacity still reports its load."""
    lines = [line for line in VLLM_METRICS.splitlines(keepends=True) if b"cache_config" not in line]
    unready = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0\n'
    for body in (b"".join(lines), b"".join([*lines, unready])):
        assert VLLM.load_readers["/metrics"](body) == ReportedLoad(7, 5)
    loads = b'{"loads": [{"num_running_reqs": 1, "num_waiting_reqs": 2}]}'
    assert SGLANG.load_readers["/v1/loads"](loads) == ReportedLoad(1, 2)


def test_metric_may_stand_first_last_and_without_labels() -> None:
    """The metric is found anywhere in the page, with or without labels."""
    body = b"vllm:num_requests_running 1.0\nvllm:num_requests_waiting 2.0"
    assert VLLM.load_readers["/metrics"](body) == ReportedLoad(1, 2)


@pytest.mark.parametrize("reader", [read for dialect in (VLLM, SGLANG) for read in dialect.load_readers.values()])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>Bad Gateway</html>",
        b"\xff\x00",
        b"[" * 5000,
        b"{}",
        b'{"loads": []}',
        b'{"loads": [1]}',
        b'{"loads": [{"num_running_reqs": "3", "num_waiting_reqs": 0}]}',
        b'{"loads": [{"num_running_reqs": true, "num_waiting_reqs": 0}]}',
        b"vllm:num_requests_running{} 1.0\n",
        b"vllm:num_requests_running x\nvllm:num_requests_waiting 1\n",
        b"vllm:num_requests_running NaN\nvllm:num_requests_waiting 1\n",
        b"vllm:num_requests_running -1\nvllm:num_requests_waiting 1\n",
        b"vllm:num_requests_running{\nvllm:num_requests_waiting{\n",
        b"sglang:num_running_reqs +Inf\nsglang:num_queue_reqs 1\n",
    ],
)
def test_garbage_is_one_kind_of_error(reader: object, body: bytes) -> None:
    """Any invalid answer raises WorkerBroke, the only error that a poller handles."""
    assert callable(reader)
    with pytest.raises(WorkerBroke):
        reader(body)


def test_engine_is_detected_by_the_owner_of_its_models() -> None:
    """Each engine is named as owner in its list of models; with another owner it is a generic OpenAI server."""
    assert detect_dialect(models('{"id": "a", "owned_by": "vllm"}', '{"id": "b", "owned_by": "me"}')) is VLLM
    assert detect_dialect(models('{"id": "a", "owned_by": "sglang"}')) is SGLANG
    assert detect_dialect(models('{"id": "a", "owned_by": "openai"}')) is GENERIC
    assert detect_dialect(models('{"id": "a", "owned_by": ["vllm"]}')) is GENERIC
    assert detect_dialect(models()) is GENERIC


def test_models_are_read_with_their_adapters() -> None:
    """Every listed id is a name that the engine serves; entries that are not model cards are skipped."""
    assert read_models(models('{"id": "base"}', '{"id": "lora", "parent": "base"}', "7", "{}")) == {"base", "lora"}
    assert read_parents(models('{"id": "base", "parent": null}', '{"id": "lora", "parent": "base"}')) == {
        "lora": "base"
    }


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"data": {}}', b'{"data": null}'])
def test_no_list_of_models_is_an_error(body: bytes) -> None:
    """An answer that is not a list of models is an error, and not an engine without models."""
    with pytest.raises(WorkerBroke):
        read_models(body)
    with pytest.raises(WorkerBroke):
        detect_dialect(body)


def test_sglang_is_asked_in_the_cheap_way() -> None:
    """SGLang is not polled at /health, which computes a token, nor first at /metrics, which may be stale or
    disabled.
    """
    assert SGLANG.health_path != "/health"
    assert list(SGLANG.load_readers) == ["/v1/loads", "/metrics"]


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight", "hrrn"])
def test_an_engine_that_reorders_is_detected(policy: str) -> None:
    """Any order but first-come-first-served counts as reordering, since it works against the router's order."""
    assert read_engine_info(b'{"schedule_policy":"%s"}' % policy.encode()).reorders
    assert not read_engine_info(b'{"schedule_policy":"fcfs"}').reorders
    with pytest.raises(WorkerBroke):
        read_engine_info(b"[]")


@pytest.mark.parametrize(("value", "version"), [(b'"0.5.23"', "0.5.23"), (b"5", None), (b"null", None)])
def test_the_version_is_read_where_there_is_one(value: bytes, version: str | None) -> None:
    """The version is a string; any other value gives None."""
    assert read_engine_info(b'{"version": ' + value + b"}").version == version


@pytest.mark.parametrize(
    ("mode", "role"),
    [(b'"prefill"', Role.PREFILL), (b'"decode"', Role.DECODE), (b'"null"', Role.BOTH), (b"7", Role.BOTH)],
)
def test_the_role_of_a_disaggregated_server_is_read(mode: bytes, role: Role) -> None:
    """SGLang reports "null" for a worker that does both prefill and decode."""
    assert read_engine_info(b'{"disaggregation_mode": ' + mode + b"}").role is role


VLLM_CACHE = b"""\
vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="600"} 1.0
vllm:prompt_tokens_total{engine="0"} 1000.0
vllm:prompt_tokens_total{engine="1"} 500.0
vllm:prompt_tokens_created{engine="0"} 1.5e+09
vllm:prefix_cache_hits_total{engine="0"} 300.0
vllm:kv_block_idle_before_evict_seconds_bucket{engine="0",le="+Inf"} 4.0
vllm:kv_block_idle_before_evict_seconds_sum{engine="0"} 50.5
vllm:kv_block_idle_before_evict_seconds_count{engine="0"} 4.0
vllm:engine_sleep_state{engine="0",sleep_state="awake"} 0.0
vllm:engine_sleep_state{engine="0",sleep_state="weights_offloaded"} 1.0
"""
SGLANG_CACHE = b"""\
sglang:page_size{dp_rank="0",tp_rank="0"} 16.0
sglang:prompt_tokens_total{is_streaming="false",model_name="m"} 900.0
sglang:prompt_tokens_total{is_streaming="true",model_name="m"} 100.0
sglang:cached_tokens_total{cache_source="device",model_name="m"} 200.0
sglang:cached_tokens_total{cache_source="host",model_name="m"} 100.0
sglang:evicted_tokens_total{cache_type="UnifiedRadixCache",dp_rank="0",pp_rank="0",tp_rank="0"} 64.0
sglang:evicted_tokens_total{cache_type="UnifiedRadixCache",dp_rank="0",pp_rank="0",tp_rank="1"} 64.0
sglang:evicted_tokens_total{cache_type="UnifiedRadixCache",dp_rank="1",pp_rank="0",tp_rank="0"} 16.0
"""
SGLANG_BEGINS = b"""\
sglang:page_size{tp_rank="0"} 16.0
sglang:max_total_num_tokens{tp_rank="0"} 19168.0
"""


@pytest.mark.parametrize(
    ("dialect", "body", "report"),
    [
        (VLLM, VLLM_CACHE, CacheReport(32, 1.5e9, 1500.0, 300.0, None, 50.5, 4.0, asleep=True)),
        (SGLANG, SGLANG_CACHE, CacheReport(16, None, 1000.0, 300.0, 80.0)),
        (SGLANG, SGLANG_BEGINS, CacheReport(16, None, 0.0, 0.0, 0.0)),
        (SGLANG, SGLANG_BEGINS + b"sglang:cac", CacheReport(16)),
        (VLLM, b"", CacheReport()),
        (SGLANG, b"", CacheReport()),
    ],
)
def test_reports_about_the_cache_are_read(dialect: Dialect, body: bytes, report: CacheReport) -> None:
    """Each engine reports other fields, or none; SGLang shows a counter only after its first increment."""
    assert dialect.read_cache(body) == report


def test_an_sglang_that_has_computed_nothing_has_nothing_to_do() -> None:
    """An SGLang lacks its request gauges before its first batch; counted as unknown load, it would never get a
    batch.
    """
    assert SGLANG.load_readers["/metrics"](SGLANG_BEGINS) == ReportedLoad(0, 0, 19168)


def test_a_number_that_was_cut_off_is_not_taken_for_a_smaller_one() -> None:
    """A truncated counter would look like a smaller one, and so like a restart of the engine."""
    assert VLLM.read_cache(b"vllm:prompt_tokens_total 123\nvllm:prefix_cache_hits_total 4").hit_tokens is None


@pytest.mark.parametrize("value", [b"NaN", b"+Inf", b"-1.0", b"many", b""])
def test_a_value_that_is_not_a_count_is_refused(value: bytes) -> None:
    """A value that is not a count raises an error before it reaches the cache mirror."""
    with pytest.raises(WorkerBroke):
        VLLM.read_cache(b"vllm:prompt_tokens_total " + value + b"\n")


@pytest.mark.parametrize(
    ("size", "tokens"), [(b"8192", 8192), (b"-1", None), (b"null", None), (b'"8192"', None), (b"true", None)]
)
def test_the_size_of_a_batch_is_read_where_there_is_one(size: bytes, tokens: int | None) -> None:
    """An absurd block size is ignored, and the rest of the report is still read."""
    assert read_engine_info(b'{"chunked_prefill_size": ' + size + b"}").batch_tokens == tokens


@pytest.mark.parametrize("size", ["9" * 5000, "²", "-1", "1.5", ""])
def test_an_absurd_size_is_ignored(size: str) -> None:
    """An absurd batch size is ignored, and the rest of the report is still read."""
    page = VLLM_METRICS.replace(b'block_size="32"', b'block_size="%b"' % size.encode())
    assert VLLM.load_readers["/metrics"](page) == ReportedLoad(7, 5, None)
    assert VLLM.read_cache(page).block_tokens is None


@pytest.mark.parametrize(
    ("labels", "caches"),
    [(b'enable_prefix_caching="False"', False), (b'enable_prefix_caching="True"', True), (b"", None)],
)
def test_vllm_metrics_show_whether_it_keeps_a_prefix_cache(labels: bytes, caches: bool | None) -> None:
    """The answer is unknown if the metrics do not say whether prefixes are cached."""
    body = b'vllm:cache_config_info{block_size="16",%b} 1.0\n' % labels
    assert VLLM.read_cache(body).caches is caches


@pytest.mark.parametrize(("disabled", "caches"), [(b"true", False), (b"false", True), (b"null", True)])
def test_sglang_reports_whether_it_keeps_a_prefix_cache(disabled: bytes, caches: bool) -> None:
    """An SGLang keeps a prefix cache unless it reports that the cache is disabled."""
    assert read_engine_info(b'{"disable_radix_cache": ' + disabled + b"}").caches is caches


VLLM_WORK = b"""\
vllm:prompt_tokens_total{engine="0"} 1000.0
vllm:prompt_tokens_total{engine="1"} 500.0
vllm:prefix_cache_hits_total{engine="0"} 300.0
vllm:generation_tokens_total{engine="0"} 70.0
vllm:generation_tokens_total{engine="1"} 7.0
"""
VLLM_SOURCES = b"""\
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 650.0
vllm:prompt_tokens_by_source_total{engine="0",source="local_cache_hit"} 350.0
"""
SGLANG_WORK = b"""\
sglang:realtime_tokens_total{dp_rank="0",mode="prefill_compute",tp_rank="0"} 900.0
sglang:realtime_tokens_total{dp_rank="0",mode="prefill_compute",tp_rank="1"} 900.0
sglang:realtime_tokens_total{dp_rank="1",mode="prefill_compute",tp_rank="0"} 90.0
sglang:realtime_tokens_total{dp_rank="0",mode="prefill_cache",tp_rank="0"} 5.0
sglang:realtime_tokens_total{dp_rank="0",mode="decode",tp_rank="0"} 44.0
sglang:generation_tokens_total{is_streaming="true"} 11.0
"""


@pytest.mark.parametrize(
    ("dialect", "body", "report"),
    [
        (VLLM, VLLM_WORK, WorkReport(1200.0, 77.0)),
        (VLLM, VLLM_WORK + VLLM_SOURCES, WorkReport(650.0, 77.0)),
        (SGLANG, SGLANG_WORK, WorkReport(990.0, 44.0)),
        (VLLM, b"", WorkReport()),
        (SGLANG, b"", WorkReport()),
    ],
)
def test_reports_about_computed_tokens_are_read(dialect: Dialect, body: bytes, report: WorkReport) -> None:
    """The report has computed input, without cached tokens, and output, summed over all ranks."""
    assert dialect.read_work(body) == report

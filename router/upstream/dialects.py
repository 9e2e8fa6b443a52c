"""How vLLM and SGLang report health, load and cache, where they differ. Pure: answers in, facts out.

Taken from the sources of vLLM 0.33 and SGLang 0.5.23. Every function that reads an answer raises WorkerBroke if the
answer is not what that engine sends.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Final

import orjson

from router.api.body.json_object import read_object
from router.core.model.events import CacheReport, WorkReport
from router.core.model.request import Role
from router.errors import WorkerBroke

MODELS_PATH: Final = "/v1/models"
COMPLETIONS_PATH: Final = "/v1/completions"
LOADS_PATH: Final = "/v1/loads"
MOST_RANKS: Final = 1024
"""Data-parallel ranks behind one URL."""
ROLES: Final = {"prefill": Role.PREFILL, "decode": Role.DECODE}
"""What an SGLang's --disaggregation-mode says."""
_RANGE: Final = re.compile(rb"logit_bias[^\[\]]{0,40}\[0, (\d{1,18})\]")


@dataclass(frozen=True, slots=True)
class ReportedLoad:
    """An engine's current load, summed over its data-parallel ranks."""

    running: int
    waiting: int
    kv_tokens: int | None = None
    """Capacity of the KV cache in tokens; None if not reported."""
    places: int | None = None
    """The most requests that run at a time; None if not reported."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """An engine's version and start flags. Anything not reported is assumed to be the engine's default."""

    version: str | None = None
    reorders: bool = False
    """True if it serves requests in another order than that of arrival."""
    batch_tokens: int | None = None
    """The most prompt tokens that it computes in one step."""
    role: Role = Role.BOTH
    """What it was started to compute, as far as it reports that. With another role than both, a call to it alone may
    hang, and a prefill server with several ranks dies of it."""
    bootstrap_port: int | None = None
    """Where decode servers ask a prefill server for prompts."""
    caches: bool = True
    """True if it keeps a prefix cache; vLLM reports this in its metrics instead."""
    embeds: bool = False
    """True if it computes embeddings only; such an SGLang crashes on a chat or completion."""
    ranks: frozenset[int] | None = None
    """Its data-parallel ranks; None if it does not report them here."""
    lockstep: bool | None = None
    """Whether its ranks step together; None if it does not report that."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """The paths and answer formats of one kind of engine."""

    name: str
    health_path: str
    """Answers 200 at once, and computes nothing, if the engine can serve."""
    load_readers: Mapping[str, Callable[[bytes], ReportedLoad]]
    """Paths that report the load, best first, with the reader of each; after a 404 the next path is tried."""
    info_path: str | None = None
    """The path that reports its version and start flags, for `read_engine_info`."""
    cache_path: str | None = None
    """The path that reports on its prefix cache, for `read_cache`."""
    read_cache: Callable[[bytes], CacheReport] = lambda _body: CacheReport()
    read_work: Callable[[bytes], WorkReport] = lambda _body: WorkReport()
    """Reads the tokens computed so far from the same answer."""
    refusal_names_vocabulary: bool = False
    """True if it refuses `out_of_vocabulary_call` and names the range of token ids; False if it checks every id itself,
    so that the router need not."""
    rank_label: bytes = b""
    """The label of its metrics that tells the data-parallel rank."""
    counts_prompts_by_rank: bool = True
    """Whether its counts of prompts and of hits have this label, too."""
    flush_path: str | None = None
    """A POST to this path empties its prefix cache, if the operator has allowed that."""
    flush_needs: str | None = None
    """What allows that; None if it is always allowed."""


def read_models(body: bytes) -> frozenset[str]:
    """Return the model names, adapters included, in the answer to `MODELS_PATH`."""
    return frozenset(card["id"] for card in _model_cards(body))


def read_cards(body: bytes) -> dict[str, dict[str, Any]]:
    """Return what the answer to `MODELS_PATH` says of each model, by name."""
    return {card["id"]: card for card in _model_cards(body)}


def read_parents(body: bytes) -> dict[str, str]:
    """Return the adapters in the answer to `MODELS_PATH`, each with its base model."""
    cards = [(card["id"], card.get("parent")) for card in _model_cards(body)]
    return {name: parent for name, parent in cards if isinstance(parent, str) and parent}


def context_tokens(body: bytes) -> int | None:
    """Return the most tokens of prompt and answer together in the answer to `MODELS_PATH`: the least of all models."""
    lengths = [length for card in _model_cards(body) if type(length := card.get("max_model_len")) is int]
    return min(lengths, default=None)


def detect_dialect(body: bytes) -> Dialect:
    """Recognize the engine by the answer to `MODELS_PATH`, where it puts its name in `owned_by`."""
    owners = [card.get("owned_by") for card in _model_cards(body)]
    return next((dialect for dialect in (VLLM, SGLANG) if dialect.name in owners), GENERIC)


def read_engine_info(body: bytes) -> EngineInfo:
    """Read the answer to an engine's `info_path`."""
    info = read_object(body)
    version, batch = info.get("version"), info.get("chunked_prefill_size")
    count, lockstep = info.get("dp_size"), info.get("enable_dp_attention")
    port = info.get("disaggregation_bootstrap_port")
    return EngineInfo(
        version=version if isinstance(version, str) else None,
        reorders=info.get("schedule_policy", "fcfs") != "fcfs",
        batch_tokens=batch if type(batch) is int and batch > 0 else None,
        role=ROLES.get(str(info.get("disaggregation_mode")), Role.BOTH),
        bootstrap_port=port if type(port) is int else None,
        caches=info.get("disable_radix_cache") is not True,
        embeds=info.get("is_embedding") is True,
        ranks=frozenset(range(count)) if type(count) is int and 0 < count <= MOST_RANKS else None,
        lockstep=lockstep if isinstance(lockstep, bool) else None,
    )


def reported_ranks(body: bytes, label: bytes) -> frozenset[int] | None:
    """Return the data-parallel ranks that an answer with metrics has series of; None if it has none with this label."""
    found = {_rank(labels, label) for labels, _ in _samples(b"\n" + body, RANKED_METRICS[label][0])}
    return frozenset([rank for rank in found if rank is not None]) or None


def pages_by_rank(path: str, body: bytes, label: bytes) -> dict[int, bytes]:
    """Split an answer with loads or metrics into one answer for each data-parallel rank, with only what is read."""
    if path == LOADS_PATH:
        loads = read_object(body).get("loads")
        ranks = [load for load in loads if isinstance(load, dict)] if isinstance(loads, list) else []
        return {load["dp_rank"]: orjson.dumps({"loads": [load]}) for load in ranks if type(load.get("dp_rank")) is int}
    text, pages = _whole_lines(body), dict[int, list[bytes]]()
    for name in RANKED_METRICS[label]:
        for labels, value in _samples(text, name):
            if (rank := _rank(labels, label)) is not None:
                pages.setdefault(rank, []).append(b"%b%b %b\n" % (name, labels, value))
    return {rank: b"".join(lines) for rank, lines in pages.items()}


def _rank(labels: bytes, label: bytes) -> int | None:
    rank = _whole(_labels(labels).get(label))
    return rank if rank is not None and rank < MOST_RANKS else None


def out_of_vocabulary_call(model: str) -> bytes:
    """Return a completion call with a token id outside any vocabulary, refused before anything is computed."""
    return orjson.dumps({"model": model, "prompt": "Hi", "max_tokens": 1, "logit_bias": {"-1": 0.0}})


def read_vocabulary(refusal: bytes) -> int | None:
    """Return the number of token ids, from the range named in the refusal of such a call; None if it names none."""
    found = _RANGE.search(refusal)
    return int(found[1]) + 1 if found is not None else None


def _model_cards(body: bytes) -> list[dict[str, Any]]:
    cards = read_object(body).get("data")
    if not isinstance(cards, list):
        raise WorkerBroke("A worker's list of models has no `data`.")
    return [card for card in cards if isinstance(card, dict) and isinstance(card.get("id"), str)]


def _vllm_metrics(body: bytes) -> ReportedLoad:
    text = b"\n" + body
    capacity = 0
    for labels, _ in _samples(text, b"vllm:cache_config_info"):
        config = _labels(labels)
        blocks, size = _whole(config.get(b"num_gpu_blocks")), _whole(config.get(b"block_size"))
        if blocks and size:
            capacity += (blocks - 1) * size  # block 0 of each rank is never allocated
    return ReportedLoad(
        running=_total(text, b"vllm:num_requests_running"),
        waiting=_total(text, b"vllm:num_requests_waiting"),
        kv_tokens=capacity or None,
    )


def _sglang_metrics(body: bytes) -> ReportedLoad:
    """Read gauges that may be seconds old: they are updated with prefill batches and every 40th decode step.

    The gauges of requests appear with the first request; the gauge of the capacity is always present.
    """
    text = b"\n" + body
    capacity = _by_rank(text, b"sglang:max_total_num_tokens")
    running = _by_rank(text, b"sglang:num_running_reqs")
    waiting = _by_rank(text, b"sglang:num_queue_reqs")
    if not capacity and not (running and waiting):
        raise WorkerBroke("A worker's metrics lack sglang:num_running_reqs or sglang:num_queue_reqs.")
    return ReportedLoad(
        running=sum(running.values()),
        waiting=sum(waiting.values()),
        kv_tokens=sum(capacity.values()) or None,
    )


def _sglang_loads(body: bytes) -> ReportedLoad:
    ranks = read_object(body).get("loads")
    if not isinstance(ranks, list) or not ranks or not all(isinstance(rank, dict) for rank in ranks):
        raise WorkerBroke("A worker's loads have no ranks.")
    return ReportedLoad(
        running=sum(_count(rank.get("num_running_reqs")) for rank in ranks),
        waiting=sum(_count(rank.get("num_waiting_reqs")) for rank in ranks),
        kv_tokens=sum(_count(rank.get("max_total_num_tokens", 0)) for rank in ranks) or None,
        places=sum(_count(rank.get("max_running_requests", 0)) for rank in ranks) or None,
    )


def _vllm_cache(body: bytes) -> CacheReport:
    text = _whole_lines(body)
    configs = [_labels(labels) for labels, _ in _samples(text, b"vllm:cache_config_info")]
    sizes = [_whole(config.get(b"block_size")) for config in configs]
    caching = {config.get(b"enable_prefix_caching") for config in configs}
    idle = b"vllm:kv_block_idle_before_evict_seconds"  # present only with --kv-cache-metrics
    states = [(_labels(labels), value) for labels, value in _samples(text, b"vllm:engine_sleep_state")]
    return CacheReport(
        block_tokens=sizes[0] if sizes else None,
        born=_sum(text, b"vllm:prompt_tokens_created"),
        computed_tokens=_sum(text, b"vllm:prompt_tokens_total"),
        hit_tokens=_sum(text, b"vllm:prefix_cache_hits_total"),
        idle_seconds=_sum(text, idle + b"_sum"),
        idle_blocks=_sum(text, idle + b"_count"),
        asleep=any(labels.get(b"sleep_state") != b"awake" and _amount(value) > 0 for labels, value in states),
        caches=caching != {b"False"} if caching <= {b"True", b"False"} and caching else None,
    )


def _vllm_work(body: bytes) -> WorkReport:
    """Read the tokens computed so far.

    vLLM counts a prompt with its first output token, so one aborted before that is never counted, and outputs as they
    are generated. Older versions do not count prompts by source; there, cache hits are subtracted, which vLLM counts
    when a prompt is scheduled, and so a little earlier.
    """
    text = _whole_lines(body)
    sources = _samples(text, b"vllm:prompt_tokens_by_source_total")
    local = [_amount(value) for labels, value in sources if _labels(labels).get(b"source") == b"local_compute"]
    prompts, hits = _sum(text, b"vllm:prompt_tokens_total"), _sum(text, b"vllm:prefix_cache_hits_total")
    computed = None if prompts is None or hits is None else max(0.0, prompts - hits)
    return WorkReport(sum(local) if local else computed, _sum(text, b"vllm:generation_tokens_total"))


def _sglang_work(body: bytes) -> WorkReport:
    """Read the tokens computed so far.

    `realtime_tokens_total` is updated as tokens are computed; `prompt_tokens_total` and `generation_tokens_total` only
    at the end of a call. Each tensor-parallel rank repeats the count of its data-parallel rank. The first token of an
    answer is produced by the prefill and does not count as decoded.
    """
    by_mode: dict[bytes, dict[bytes, float]] = {b"prefill_compute": {}, b"decode": {}}
    for labels, value in _samples(_whole_lines(body), b"sglang:realtime_tokens_total"):
        named = _labels(labels)
        ranks = by_mode.get(named.get(b"mode", b""))
        if ranks is not None:
            rank = named.get(b"dp_rank", b"")
            ranks[rank] = max(ranks.get(rank, 0.0), _amount(value))
    computed, decoded = by_mode[b"prefill_compute"], by_mode[b"decode"]
    return WorkReport(sum(computed.values()) if computed else None, sum(decoded.values()) if decoded else None)


def _sglang_cache(body: bytes) -> CacheReport:
    """Read the cache metrics of the schedulers, which every tensor-parallel rank repeats, and of the tokenizer, whose
    series add up.
    """
    text = _whole_lines(body)
    pages = _by_rank(text, b"sglang:page_size")
    # A counter is absent until its first increment; gauges are always present.
    uncounted = 0.0 if pages and body.endswith(b"\n") else None
    prompts = _sum(text, b"sglang:prompt_tokens_total")  # one series for streamed calls, one for others
    hits = _sum(text, b"sglang:cached_tokens_total")  # one series each for device, host and storage
    evicted = _by_rank(text, b"sglang:evicted_tokens_total")
    return CacheReport(
        block_tokens=max(pages.values(), default=0) or None,
        born=_sum(text, b"sglang:prompt_tokens_created"),
        computed_tokens=uncounted if prompts is None else prompts,
        hit_tokens=uncounted if hits is None else hits,
        evicted_tokens=sum(evicted.values()) if evicted else uncounted,
    )


VLLM: Final = Dialect(
    "vllm",
    "/health",
    {"/metrics": _vllm_metrics},
    info_path="/version",
    cache_path="/metrics",
    read_cache=_vllm_cache,
    read_work=_vllm_work,
    rank_label=b"engine",
    flush_path="/reset_prefix_cache",
    flush_needs="VLLM_SERVER_DEV_MODE=1",
)
SGLANG: Final = Dialect(
    "sglang",
    "/ready",  # its /health generates a token and sleeps a second
    {LOADS_PATH: _sglang_loads, "/metrics": _sglang_metrics},
    info_path="/server_info",
    cache_path="/metrics",
    read_cache=_sglang_cache,
    read_work=_sglang_work,
    refusal_names_vocabulary=True,
    rank_label=b"dp_rank",
    counts_prompts_by_rank=False,
    flush_path="/flush_cache",
)
GENERIC: Final = Dialect("generic", MODELS_PATH, {})
"""An engine that speaks OpenAI's API and reports nothing about its load."""


RANKED_METRICS: Final[Mapping[bytes, tuple[bytes, ...]]] = {
    VLLM.rank_label: (
        b"vllm:num_requests_running",
        b"vllm:cache_config_info",
        b"vllm:num_requests_waiting",
        b"vllm:engine_sleep_state",
        b"vllm:prompt_tokens_created",
        b"vllm:prompt_tokens_total",
        b"vllm:prompt_tokens_by_source_total",
        b"vllm:prefix_cache_hits_total",
        b"vllm:generation_tokens_total",
        b"vllm:kv_block_idle_before_evict_seconds_sum",
        b"vllm:kv_block_idle_before_evict_seconds_count",
    ),
    SGLANG.rank_label: (
        b"sglang:max_total_num_tokens",
        b"sglang:num_running_reqs",
        b"sglang:num_queue_reqs",
        b"sglang:page_size",
        b"sglang:evicted_tokens_total",
        b"sglang:realtime_tokens_total",
    ),
}
"""The metrics that are read and have a label with the rank, by this label; the first is always present."""


# Prometheus text. Engines send hundreds of kilobytes of histograms, several times a second for each worker, so only
# the few lines that are needed are searched for and parsed.

_LABEL: Final = re.compile(rb'(\w+)="((?:[^"\\]|\\.)*+)"')


def _samples(text: bytes, name: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield labels and value of each line of this metric; `text` must begin with a newline."""
    needle = b"\n" + name
    at = text.find(needle)
    while at >= 0:
        end = text.find(b"\n", at + 1)
        line = text[at + len(needle) : end if end >= 0 else len(text)]
        if line.startswith((b"{", b" ")):  # otherwise the line is of a metric with a longer name
            labels, _, value = line.rpartition(b" ")
            yield labels, value
        at = text.find(needle, at + len(needle))


def _labels(labels: bytes) -> dict[bytes, bytes]:
    return dict(_LABEL.findall(labels))


def _whole(digits: bytes | None) -> int | None:
    """Parse a whole number in a label; None if it is not one or absurdly large."""
    return int(digits) if digits and digits.isdigit() and len(digits) < 20 else None


def _whole_lines(body: bytes) -> bytes:
    """Drop a last line that was cut off: a number without its last digits is a wrong one."""
    return b"\n" + body[: body.rfind(b"\n") + 1]


def _sum(text: bytes, name: bytes) -> float | None:
    """Sum all series of this metric; None if there is none."""
    values = [_amount(value) for _, value in _samples(text, name)]
    return sum(values) if values else None


def _amount(value: bytes) -> float:
    try:
        amount = float(value)
    except ValueError:
        raise WorkerBroke("A worker's metrics contain a value that is not a number.") from None
    if not isfinite(amount) or amount < 0:
        raise WorkerBroke("A worker's metrics contain a value that is negative or not finite.")
    return amount


def _total(text: bytes, name: bytes) -> int:
    values = [_number(value) for _, value in _samples(text, name)]
    if not values:
        raise WorkerBroke(f"A worker's metrics lack {name.decode()}.")
    return sum(values)


def _by_rank(text: bytes, name: bytes) -> dict[bytes, int]:
    """Return the largest value of each data-parallel rank: tensor-parallel ranks repeat the value, and the series of
    single priorities are parts of it.
    """
    found: dict[bytes, int] = {}
    for labels, value in _samples(text, name):
        rank = _labels(labels).get(b"dp_rank", b"")
        found[rank] = max(found.get(rank, 0), _number(value))
    return found


def _number(value: bytes) -> int:
    try:
        return _count(int(float(value)))
    except (ValueError, OverflowError):
        raise WorkerBroke("A worker's metrics contain a value that is not a number.") from None


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise WorkerBroke("A worker reported a load that is not a count.")
    return value

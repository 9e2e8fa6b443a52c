"""How vLLM and SGLang differ where the router asks them about themselves. Pure: answers in, facts out.

Read in the sources of vLLM 0.33 and SGLang 0.5.23. Every function that reads an answer raises WorkerBroke where it is
not what that engine sends.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Final

import orjson

from router.api.body.json_object import read_object
from router.core.model.events import CacheReport, WorkReport
from router.errors import WorkerBroke

MODELS_PATH: Final = "/v1/models"
COMPLETIONS_PATH: Final = "/v1/completions"
_RANGE: Final = re.compile(rb"logit_bias[^\[\]]{0,40}\[0, (\d{1,18})\]")


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine has to do at this moment, over all its data-parallel ranks."""

    running: int
    waiting: int
    kv_tokens: int | None = None
    """Capacity of its KV cache in tokens, where it tells."""
    places: int | None = None
    """The most requests that it runs at a time, where it tells."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """How an engine was built and started. What it does not say is as by default."""

    version: str | None = None
    reorders: bool = False
    """Whether it serves in another order than that of arrival."""
    batch_tokens: int | None = None
    """The most prompt tokens that it computes in one step."""
    disaggregated: bool = False
    """Whether it does the prefill or the decode alone, so that a call to it by itself may hang."""
    caches: bool = True
    """Whether it keeps a prefix cache; a vLLM says so in its metrics instead."""
    embeds: bool = False
    """Whether it makes embeddings alone; an SGLang that does dies of a chat or completion."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """What one kind of engine calls things."""

    name: str
    health_path: str
    """Answers 200 at once, and computes nothing, where the engine can serve."""
    load_readers: Mapping[str, Callable[[bytes], Load]]
    """Where it tells its load, best first; the next one is for engines that answer 404."""
    info_path: str | None = None
    """Where it tells its version, and with what it was started, for `read_engine_info`."""
    cache_path: str | None = None
    """Where it tells about its prefix cache, for `read_cache`."""
    read_cache: Callable[[bytes], CacheReport] = lambda _body: CacheReport()
    read_work: Callable[[bytes], WorkReport] = lambda _body: WorkReport()
    """What it has computed, by the same page."""
    refusal_names_vocabulary: bool = False
    """Whether it refuses `out_of_vocabulary_call` and names the range; one that looks at every id itself need not."""
    flush_path: str | None = None
    """A POST there empties its prefix cache, where that is allowed."""


def read_models(body: bytes) -> frozenset[str]:
    """Names, adapters included, in the answer to `MODELS_PATH`."""
    return frozenset(card["id"] for card in _model_cards(body))


def read_parents(body: bytes) -> dict[str, str]:
    """The adapters in that answer, each with the model that it is on."""
    cards = [(card["id"], card.get("parent")) for card in _model_cards(body)]
    return {name: parent for name, parent in cards if isinstance(parent, str) and parent}


def context_tokens(body: bytes) -> int | None:
    """How long prompt and answer together may be, by the answer to `MODELS_PATH`; of several models the least."""
    told = [length for card in _model_cards(body) if type(length := card.get("max_model_len")) is int]
    return min(told, default=None)


def detect_dialect(body: bytes) -> Dialect:
    """Which engine it is, by the answer to `MODELS_PATH`: each signs its models in `owned_by`."""
    owners = [card.get("owned_by") for card in _model_cards(body)]
    return next((dialect for dialect in (VLLM, SGLANG) if dialect.name in owners), GENERIC)


def read_engine_info(body: bytes) -> EngineInfo:
    """What an engine says of itself, by the answer to its `about_path`."""
    told = read_object(body)
    version, batch = told.get("version"), told.get("chunked_prefill_size")
    return EngineInfo(
        version=version if isinstance(version, str) else None,
        reorders=told.get("schedule_policy", "fcfs") != "fcfs",
        batch_tokens=batch if type(batch) is int and batch > 0 else None,
        disaggregated=told.get("disaggregation_mode") in ("prefill", "decode"),
        caches=told.get("disable_radix_cache") is not True,
        embeds=told.get("is_embedding") is True,
    )


def out_of_vocabulary_call(model: str) -> bytes:
    """A completion that is refused before anything is computed, for a token id that is in no vocabulary."""
    return orjson.dumps({"model": model, "prompt": "Hi", "max_tokens": 1, "logit_bias": {"-1": 0.0}})


def read_vocabulary(refusal: bytes) -> int | None:
    """How many token ids there are, by the refusal of such a call, which names their range; None where it does not."""
    found = _RANGE.search(refusal)
    return int(found[1]) + 1 if found is not None else None


def _model_cards(body: bytes) -> list[dict[str, Any]]:
    cards = read_object(body).get("data")
    if not isinstance(cards, list):
        raise WorkerBroke("A worker's list of models has no `data`.")
    return [card for card in cards if isinstance(card, dict) and isinstance(card.get("id"), str)]


def _vllm_metrics(body: bytes) -> Load:
    text = b"\n" + body
    capacity = 0
    for labels, _ in _samples(text, b"vllm:cache_config_info"):
        config = _labels(labels)
        blocks, size = _whole(config.get(b"num_gpu_blocks")), _whole(config.get(b"block_size"))
        if blocks and size:
            capacity += (blocks - 1) * size  # block 0 of each rank is never given out
    return Load(
        running=_total(text, b"vllm:num_requests_running"),
        waiting=_total(text, b"vllm:num_requests_waiting"),
        kv_tokens=capacity or None,
    )


def _sglang_metrics(body: bytes) -> Load:
    """Gauges that may be seconds old: they change with prefill batches and every 40th decode step.

    Those of requests are not there before the first of these; that of the capacity always is.
    """
    text = b"\n" + body
    capacity = _by_rank(text, b"sglang:max_total_num_tokens")
    running = _by_rank(text, b"sglang:num_running_reqs")
    waiting = _by_rank(text, b"sglang:num_queue_reqs")
    if not capacity and not (running and waiting):
        raise WorkerBroke("A worker's metrics lack sglang:num_running_reqs or sglang:num_queue_reqs.")
    return Load(
        running=sum(running.values()),
        waiting=sum(waiting.values()),
        kv_tokens=sum(capacity.values()) or None,
    )


def _sglang_loads(body: bytes) -> Load:
    ranks = read_object(body).get("loads")
    if not isinstance(ranks, list) or not ranks or not all(isinstance(rank, dict) for rank in ranks):
        raise WorkerBroke("A worker's loads have no ranks.")
    return Load(
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
    idle = b"vllm:kv_block_idle_before_evict_seconds"  # only there with --kv-cache-metrics
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
    """Prompts are counted with their first token, so that one left before it never is; outputs as they come.

    Older versions do not tell prompts apart by where they came from. Their hits are counted when a prompt is scheduled,
    and so a little earlier.
    """
    text = _whole_lines(body)
    sources = _samples(text, b"vllm:prompt_tokens_by_source_total")
    local = [_amount(value) for labels, value in sources if _labels(labels).get(b"source") == b"local_compute"]
    prompts, hits = _sum(text, b"vllm:prompt_tokens_total"), _sum(text, b"vllm:prefix_cache_hits_total")
    computed = None if prompts is None or hits is None else max(0.0, prompts - hits)
    return WorkReport(sum(local) if local else computed, _sum(text, b"vllm:generation_tokens_total"))


def _sglang_work(body: bytes) -> WorkReport:
    """Counted as it is computed; `prompt_tokens_total` and `generation_tokens_total` count at the end of a call.

    Each tensor rank repeats what its data-parallel rank counts. The first token of an answer comes of its prefill, and
    is not among those of decoding.
    """
    by_mode: dict[bytes, dict[bytes, float]] = {b"prefill_compute": {}, b"decode": {}}
    for labels, value in _samples(_whole_lines(body), b"sglang:realtime_tokens_total"):
        told = _labels(labels)
        ranks = by_mode.get(told.get(b"mode", b""))
        if ranks is not None:
            rank = told.get(b"dp_rank", b"")
            ranks[rank] = max(ranks.get(rank, 0.0), _amount(value))
    computed, decoded = by_mode[b"prefill_compute"], by_mode[b"decode"]
    return WorkReport(sum(computed.values()) if computed else None, sum(decoded.values()) if decoded else None)


def _sglang_cache(body: bytes) -> CacheReport:
    """Of its schedulers, each rank of which repeats what it counts, and of its tokenizer, whose series are parts."""
    text = _whole_lines(body)
    pages = _by_rank(text, b"sglang:page_size")
    # A counter is shown from its first increment on; gauges are always there.
    uncounted = 0.0 if pages and body.endswith(b"\n") else None
    prompts = _sum(text, b"sglang:prompt_tokens_total")  # streamed ones apart from others
    hits = _sum(text, b"sglang:cached_tokens_total")  # of device, host and storage
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
    flush_path="/reset_prefix_cache",
)
SGLANG: Final = Dialect(
    "sglang",
    "/ready",  # its /health generates a token and sleeps a second
    {"/v1/loads": _sglang_loads, "/metrics": _sglang_metrics},
    info_path="/server_info",
    cache_path="/metrics",
    read_cache=_sglang_cache,
    read_work=_sglang_work,
    refusal_names_vocabulary=True,
    flush_path="/flush_cache",
)
GENERIC: Final = Dialect("generic", MODELS_PATH, {})
"""An engine that speaks OpenAI's API and tells nothing about its load."""


# Prometheus text. Engines send hundreds of kilobytes of histograms, several times a second for each worker, so only
# the few lines that are needed are looked for and parsed.

_LABEL: Final = re.compile(rb'(\w+)="((?:[^"\\]|\\.)*+)"')


def _samples(text: bytes, name: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Labels and value of each line of this metric; `text` begins with a line end."""
    needle = b"\n" + name
    at = text.find(needle)
    while at >= 0:
        end = text.find(b"\n", at + 1)
        line = text[at + len(needle) : end if end >= 0 else len(text)]
        if line.startswith((b"{", b" ")):  # else it is a longer name
            labels, _, value = line.rpartition(b" ")
            yield labels, value
        at = text.find(needle, at + len(needle))


def _labels(labels: bytes) -> dict[bytes, bytes]:
    return dict(_LABEL.findall(labels))


def _whole(digits: bytes | None) -> int | None:
    """A number in a label; None where it is none, or beyond all sense."""
    return int(digits) if digits and digits.isdigit() and len(digits) < 20 else None


def _whole_lines(body: bytes) -> bytes:
    """The page without a last line that was cut off: a number that lost its end is a smaller one."""
    return b"\n" + body[: body.rfind(b"\n") + 1]


def _sum(text: bytes, name: bytes) -> float | None:
    """Of all series of this metric; None where there is none."""
    values = [_amount(value) for _, value in _samples(text, name)]
    return sum(values) if values else None


def _amount(value: bytes) -> float:
    try:
        amount = float(value)
    except ValueError:
        raise WorkerBroke("A worker's metrics hold a value that is no number.") from None
    if not isfinite(amount) or amount < 0:
        raise WorkerBroke("A worker's metrics hold a value that is no amount.")
    return amount


def _total(text: bytes, name: bytes) -> int:
    values = [_number(value) for _, value in _samples(text, name)]
    if not values:
        raise WorkerBroke(f"A worker's metrics lack {name.decode()}.")
    return sum(values)


def _by_rank(text: bytes, name: bytes) -> dict[bytes, int]:
    """The largest value of each data-parallel rank: its tensor ranks repeat it, and its priorities are parts of it."""
    found: dict[bytes, int] = {}
    for labels, value in _samples(text, name):
        rank = _labels(labels).get(b"dp_rank", b"")
        found[rank] = max(found.get(rank, 0), _number(value))
    return found


def _number(value: bytes) -> int:
    try:
        return _count(int(float(value)))
    except (ValueError, OverflowError):
        raise WorkerBroke("A worker's metrics hold a value that is no number.") from None


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise WorkerBroke("A worker reported a load that is no count.")
    return value

"""Whether a worker's flags fit what the router reads of it. Pure: answers in, findings out.

Read in the sources of vLLM 0.33 and SGLang 0.5.23; see `engines`.
"""

import re
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import orjson

from router.errors import WorkerBroke
from router.upstream.accepted_fields import unsalted_paths
from router.upstream.dialects import SGLANG, VLLM, Dialect, read_engine_info

BLOCK_TOKENS: Final = 16
"""Tokens of a block in which few are lost at the end of a common prefix, and events are not too many."""
_CACHE_OFF: Final = re.compile(rb'^vllm:cache_config_info\{[^}]*\benable_prefix_caching="False"', re.MULTILINE)


class Finding(NamedTuple):
    """Something at a worker that costs fairness or locality."""

    seen: str
    change: str
    """What to do about it, with the exact flag."""


class RouterNeeds(NamedTuple):
    """What the router's settings want of its workers."""

    match_minimum: int
    """Tokens of a common prefix that the router takes for a match."""
    isolated: bool = False
    """Whether clients' prefixes are to be kept apart."""


@dataclass(frozen=True, slots=True)
class WorkerAnswers:
    """What one worker says of itself."""

    dialect: Dialect
    metrics: bytes | None
    """None where there are none."""
    about: bytes | None = None
    """How it was built and started."""
    usage: object = None
    """Of a prompt that was sent before, as the engine puts it; None where that was not asked."""


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """What is told of a worker that fits, too."""

    block_tokens: int | None
    kv_tokens: int | None


def cache_sizes(answers: WorkerAnswers) -> CacheSizes:
    """Sizes of its cache, as far as its metrics tell them."""
    dialect, page = answers.dialect, answers.metrics
    reader = dialect.load_readers.get("/metrics")
    if page is None or reader is None:
        return CacheSizes(None, None)
    try:
        return CacheSizes(dialect.read_cache(page).block_tokens, reader(page).kv_tokens)
    except WorkerBroke:
        return CacheSizes(None, None)


def findings(answers: WorkerAnswers, wanted: RouterNeeds) -> list[Finding]:
    """What does not fit."""
    match answers.dialect:
        case dialect if dialect is VLLM:
            found = _check_vllm(answers)
        case dialect if dialect is SGLANG:
            found = _check_sglang(answers)
        case _:
            found = [_UNKNOWN_ENGINE]
    return [
        *found,
        *_check_block_size(answers, wanted.match_minimum),
        *(_check_isolation(answers) if wanted.isolated else ()),
    ]


_UNKNOWN_ENGINE: Final = Finding(
    "is neither vLLM nor SGLang, and tells neither load nor cache",
    "set kv_tokens_default to the tokens that its cache holds; clients are charged by what is predicted",
)


def _check_vllm(answers: WorkerAnswers) -> list[Finding]:
    found = []
    if not _metrics_readable(answers):
        found.append(
            Finding("tells no metrics, so neither its load nor its cache", "start it without --disable-log-stats")
        )
    elif answers.metrics is not None and _CACHE_OFF.search(answers.metrics):
        found.append(Finding("keeps no prefix cache", "start it with --enable-prefix-caching"))
    if _lacks_cached_tokens(answers.usage):
        found.append(Finding(_NO_CACHED_TOKENS, "start it with --enable-prompt-tokens-details"))
    return found


def _check_sglang(answers: WorkerAnswers) -> list[Finding]:
    found = []
    if b"sglang:" not in (answers.metrics or b""):  # its gauges are not there before its first prompt
        found.append(Finding("tells no metrics, so not what it evicts", "start it with --enable-metrics"))
    told = _object(answers.about)
    if told is None:
        found.append(Finding("does not tell with what it was started", "let the router read its /server_info"))
        told = {}
    if (order := told.get("schedule_policy", "fcfs")) != "fcfs":
        found.append(
            Finding(
                f"does not serve in order of arrival but by {order}, which can hold up what the router sends for long",
                "start it with --schedule-policy fcfs: the router orders by prefix itself",
            )
        )
    if told.get("disable_radix_cache") is True:
        found.append(Finding("keeps no prefix cache", "start it without --disable-radix-cache"))
    if told.get("enable_cache_report") is False or _lacks_cached_tokens(answers.usage):
        found.append(Finding(_NO_CACHED_TOKENS, "start it with --enable-cache-report"))
    if told.get("kv_events") and told.get("page_size") == 1:
        found.append(Finding("publishes a KV event for each token", f"start it with --page-size {BLOCK_TOKENS}"))
    return found


_NO_CACHED_TOKENS: Final = "does not tell what of a prompt was cached, so clients are charged by what is predicted"


def _check_block_size(answers: WorkerAnswers, match_minimum: int) -> list[Finding]:
    size = cache_sizes(answers).block_tokens
    if size is None or size <= max(match_minimum, BLOCK_TOKENS):
        return []
    flag = "--block-size" if answers.dialect is VLLM else "--page-size"
    return [
        Finding(
            f"finds prefixes only in whole blocks of {size} tokens, where {match_minimum} count as a match",
            f"start it with {flag} {BLOCK_TOKENS}, or set min_match_tokens to {size}",
        )
    ]


def _check_isolation(answers: WorkerAnswers) -> list[Finding]:
    """Paths on which the engine does not keep prefixes apart."""
    try:
        version = None if answers.about is None else read_engine_info(answers.about).version
    except WorkerBroke:
        version = None
    return [
        Finding(
            f"passes over cache_salt on {path}, so clients find each other's prefixes there in spite of --isolate",
            f"start a version that keeps them apart, or let nobody reach {path}",
        )
        for path in unsalted_paths(answers.dialect.name, version)
    ]


def _metrics_readable(answers: WorkerAnswers) -> bool:
    """Whether the metrics are those of its dialect."""
    if answers.metrics is None:
        return False
    try:
        answers.dialect.load_readers["/metrics"](answers.metrics)
    except WorkerBroke:
        return False
    return True


def _lacks_cached_tokens(usage: object) -> bool:
    """Whether this is a usage without what was cached."""
    if not isinstance(usage, dict):
        return False
    details = usage.get("prompt_tokens_details")
    return not isinstance(details, dict) or type(details.get("cached_tokens")) is not int


def _object(body: bytes | None) -> dict[str, Any] | None:
    if body is None:
        return None
    try:
        told = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return told if isinstance(told, dict) else None

"""The rules by which a worker's flags fit the router. Pure: answers in, findings out.

Taken from the sources of vLLM 0.33 and SGLang 0.5.23, like `router.upstream.dialects`.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import orjson

from router.core.model.request import Connector, Role
from router.errors import WorkerBroke
from router.upstream.accepted_fields import unsalted_paths
from router.upstream.dialects import SGLANG, VLLM, Dialect, EngineInfo, read_engine_info
from router.upstream.ranks.rank_rules import RankRules

BLOCK_TOKENS: Final = 16
"""The recommended block size: few tokens of a shared prefix are lost in its last block, and KV events stay few."""
DEFAULT_LEASE: Final = 30.0
"""Seconds for which a vLLM with NixlConnector keeps a prompt, unless its kv_lease_duration says otherwise."""
LEASE_MARGIN: Final = 5.0
"""Seconds that a lease must be longer than the greatest age of a hand-off."""
_CACHE_OFF: Final = re.compile(rb'^vllm:cache_config_info\{[^}]*\benable_prefix_caching="False"', re.MULTILINE)


class Finding(NamedTuple):
    """A property of a worker that costs fairness or locality."""

    seen: str
    change: str
    """The remedy, with the exact flag."""


class RouterNeeds(NamedTuple):
    """What the router's settings require of its workers."""

    match_minimum: int
    """The least tokens of a shared prefix that count as a match."""
    isolated: bool = False
    """Whether clients must not share prefixes (--isolate)."""
    ranks: RankRules = RankRules()
    """Which ranks of an engine are used."""
    handoff_seconds: float = 20.0
    """How old a prompt may be that a decode worker fetches."""


@dataclass(frozen=True, slots=True)
class WorkerAnswers:
    """What one worker reports about itself."""

    dialect: Dialect
    metrics: bytes | None
    """The body of its /metrics; None if it has none."""
    about: bytes | None = None
    """The answer to its `Dialect.info_path`: version and start flags."""
    usage: object = None
    """The usage of a prompt sent for the second time, as the engine returns it; None if no prompt was sent."""


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """The size of a worker's KV cache, shown even if nothing is wrong."""

    block_tokens: int | None
    kv_tokens: int | None


def cache_sizes(answers: WorkerAnswers) -> CacheSizes:
    """Return the sizes of the worker's cache, as far as its metrics report them."""
    dialect, page = answers.dialect, answers.metrics
    reader = dialect.load_readers.get("/metrics")
    if page is None or reader is None:
        return CacheSizes(None, None)
    try:
        return CacheSizes(dialect.read_cache(page).block_tokens, reader(page).kv_tokens)
    except WorkerBroke:
        return CacheSizes(None, None)


class WorkerPart(NamedTuple):
    """What one worker computes of requests, as far as it matters to those that compute other parts."""

    role: Role = Role.BOTH
    connector: Connector | None = None
    """None if it needs none."""
    models: frozenset[str] = frozenset()


def connector_of(role: Role, dialect: Dialect | None, named: Connector) -> Connector | None:
    """Return what carries KV caches from or to a worker; None if it computes whole requests. `named`: for vLLM."""
    if role is Role.BOTH:
        return None
    return Connector.SGLANG if dialect is SGLANG else named


def role_finding(named: Role, dialect: Dialect | None, info: EngineInfo) -> Finding | None:
    """Return why a worker cannot do its part of requests; None if nothing speaks against it. Such a worker is sent
    nothing.

    `named`: its role by the settings.
    """
    if dialect is not SGLANG or named in (Role.BOTH, info.role):
        return None
    if info.role is Role.BOTH:
        return Finding(
            f"has the role {named}, and is an SGLang that computes whole requests",
            f"start it with --disaggregation-mode {named}, or give it no role",
        )
    return Finding(
        f"has the role {named}, and is an SGLang with --disaggregation-mode {info.role}",
        "correct its role, or give it none: the router asks the engine",
    )


def connector_finding(part: WorkerPart, others: Iterable[WorkerPart]) -> Finding | None:
    """Return why a worker and those of its models, which are in use, cannot exchange KV caches; None if they can."""
    for other in others:
        differ = None not in (part.connector, other.connector) and part.connector is not other.connector
        if differ and part.models & other.models:
            return Finding(
                f"exchanges KV caches by {part.connector}, and other workers of its model by {other.connector}",
                "use one engine and one connector for all prefill and decode workers of a model",
            )
    return None


def tier_findings(parts: Collection[WorkerPart]) -> Iterator[Finding]:
    """Yield the models of which one part is computed by nobody."""
    for model in sorted({model for part in parts for model in part.models}):
        roles = {part.role for part in parts if model in part.models}
        if Role.PREFILL in roles and Role.DECODE not in roles:
            yield Finding(f"{model} has prefill workers and no decode worker", "start one, or name some under decode")
        elif Role.DECODE in roles and Role.PREFILL not in roles:
            alone = [part.connector for part in parts if model in part.models and part.role is Role.DECODE]
            whole = "which compute whole requests" if Connector.SGLANG not in alone else "which are of no use alone"
            yield Finding(
                f"{model} has decode workers, {whole}, and no prefill worker", "start one, or name some under prefill"
            )


def handoff_findings(role: Role, connector: Connector, answers: WorkerAnswers, needs: RouterNeeds) -> list[Finding]:
    """Return what should be changed at a prefill or decode worker. `connector`: for vLLM, by the settings."""
    if role is Role.BOTH or answers.dialect is not VLLM or connector is not Connector.NIXL:
        return []
    found = []
    if answers.metrics is not None and b"vllm:nixl_" not in answers.metrics:
        change = """start it with --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'"""
        found.append(Finding(f"has the role {role} and shows no metrics of NixlConnector", change))
    if needs.handoff_seconds > DEFAULT_LEASE - LEASE_MARGIN:
        lease = needs.handoff_seconds + LEASE_MARGIN
        change = f"start it with a kv_lease_duration of {lease:g} at least, or lower handoff_seconds"
        found.append(Finding(f"keeps prompts for {DEFAULT_LEASE:g} s by default, less than they may wait", change))
    return found


def findings(answers: WorkerAnswers, needs: RouterNeeds) -> list[Finding]:
    """Return everything that should be changed at the worker."""
    match answers.dialect:
        case dialect if dialect is VLLM:
            found = _check_vllm(answers)
        case dialect if dialect is SGLANG:
            found = _check_sglang(answers)
        case _:
            found = [_UNKNOWN_ENGINE]
    return [
        *found,
        *_check_block_size(answers, needs.match_minimum),
        *(_check_isolation(answers) if needs.isolated else ()),
    ]


_UNKNOWN_ENGINE: Final = Finding(
    "is neither vLLM nor SGLang, and reports neither load nor cache",
    "set kv_tokens_default to the tokens that its cache holds; clients are charged by predicted tokens",
)


def _check_vllm(answers: WorkerAnswers) -> list[Finding]:
    found = []
    if not _metrics_readable(answers):
        found.append(Finding("reports no metrics, so neither load nor cache", "start it without --disable-log-stats"))
    elif answers.metrics is not None and _CACHE_OFF.search(answers.metrics):
        found.append(Finding("keeps no prefix cache", "start it with --enable-prefix-caching"))
    if _lacks_cached_tokens(answers.usage):
        found.append(Finding(_NO_CACHED_TOKENS, "start it with --enable-prompt-tokens-details"))
    return found


def _check_sglang(answers: WorkerAnswers) -> list[Finding]:
    found = []
    if b"sglang:" not in (answers.metrics or b""):  # some gauges are absent before its first prompt
        found.append(Finding("reports no metrics, so no evictions", "start it with --enable-metrics"))
    info = _object(answers.about)
    if info is None:
        found.append(Finding("does not report its start flags", "let the router read its /server_info"))
        info = {}
    if (order := info.get("schedule_policy", "fcfs")) != "fcfs":
        found.append(
            Finding(
                f"serves by {order} and not in order of arrival, which can delay requests for a long time",
                "start it with --schedule-policy fcfs: the router itself orders by prefix",
            )
        )
    if info.get("disable_radix_cache") is True:
        found.append(Finding("keeps no prefix cache", "start it without --disable-radix-cache"))
    if info.get("enable_cache_report") is False or _lacks_cached_tokens(answers.usage):
        found.append(Finding(_NO_CACHED_TOKENS, "start it with --enable-cache-report"))
    if info.get("kv_events") and info.get("page_size") == 1:
        found.append(Finding("publishes a KV event for each token", f"start it with --page-size {BLOCK_TOKENS}"))
    return found


_NO_CACHED_TOKENS: Final = "does not report the cached tokens of a prompt, so clients are charged by predicted tokens"


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
    """Find the paths on which the engine lets clients share prefixes."""
    try:
        version = None if answers.about is None else read_engine_info(answers.about).version
    except WorkerBroke:
        version = None
    return [
        Finding(
            f"ignores cache_salt on {path}, so clients share each other's prefixes there in spite of --isolate",
            f"start a version that honors cache_salt there, or block {path}",
        )
        for path in unsalted_paths(answers.dialect.name, version)
    ]


def _metrics_readable(answers: WorkerAnswers) -> bool:
    """True if the metrics are those of its dialect."""
    if answers.metrics is None:
        return False
    try:
        answers.dialect.load_readers["/metrics"](answers.metrics)
    except WorkerBroke:
        return False
    return True


def _lacks_cached_tokens(usage: object) -> bool:
    """True if this is a usage that lacks the number of cached tokens."""
    if not isinstance(usage, dict):
        return False
    details = usage.get("prompt_tokens_details")
    return not isinstance(details, dict) or type(details.get("cached_tokens")) is not int


def _object(body: bytes | None) -> dict[str, Any] | None:
    if body is None:
        return None
    try:
        info = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return info if isinstance(info, dict) else None

"""Asks an engine what it is: its flags, vocabulary, ranks and transfer engines. What it does not say is unknown."""

import logging
from collections.abc import Mapping
from http import HTTPStatus

from router.api.handoff.mooncake import read_engine_ids
from router.core.model.request import Connector, Role
from router.errors import WorkerBroke
from router.upstream.dialects import (
    COMPLETIONS_PATH,
    SGLANG,
    Dialect,
    EngineInfo,
    out_of_vocabulary_call,
    read_engine_info,
    read_vocabulary,
    reported_ranks,
)
from router.upstream.directory import WorkerEndpoint, bootstrap_url
from router.upstream.polling.poll_client import PollClient

log = logging.getLogger(__name__)


async def ask_info(client: PollClient, endpoint: WorkerEndpoint, dialect: Dialect | None) -> EngineInfo:
    """Return its version and start flags."""
    if dialect is None or dialect.info_path is None:
        return EngineInfo()
    try:
        return read_engine_info(await client.fetch(endpoint.url + dialect.info_path, endpoint.authorization))
    except WorkerBroke as error:
        log.debug("%s: %s", endpoint.id, error)
        return EngineInfo()


async def ask_vocabulary(
    client: PollClient,
    endpoint: WorkerEndpoint,
    dialect: Dialect | None,
    models: frozenset[str],
    info: EngineInfo,
) -> int | None:
    """Return the vocabulary size, which SGLang reveals only in its refusal of a call; the call computes nothing."""
    if dialect is None or not dialect.refusal_names_vocabulary or info.embeds or not models:
        return None
    if info.role is not Role.BOTH:
        return None  # alone, it may not even refuse it
    headers = {"content-type": "application/json", **endpoint.authorization}
    post = out_of_vocabulary_call(min(models - endpoint.parents.keys(), default=min(models)))
    try:
        reply = await client.fetch_any_status(endpoint.url + COMPLETIONS_PATH, headers, post=post)
    except WorkerBroke as error:
        log.debug("%s: %s", endpoint.id, error)
        return None
    return read_vocabulary(reply.body) if reply.status == HTTPStatus.BAD_REQUEST else None


async def ask_ranks(
    client: PollClient, endpoint: WorkerEndpoint, dialect: Dialect, info: EngineInfo
) -> frozenset[int] | None:
    """Return the engine's data-parallel ranks; None if it does not say."""
    if info.ranks is not None or dialect.cache_path is None:
        return info.ranks
    try:
        page = await client.fetch(endpoint.url + dialect.cache_path, endpoint.authorization)
        return reported_ranks(page, dialect.rank_label)
    except WorkerBroke as error:
        log.debug("%s: %s", endpoint.id, error)
        return None


async def ask_transfer_engines(
    client: PollClient, endpoint: WorkerEndpoint, dialect: Dialect | None, bootstrap_port: int
) -> Mapping[int, str]:
    """Return the ids of a prefill worker's engines by rank, which decode workers with Mooncake need; else none."""
    if endpoint.named_role is not Role.PREFILL or endpoint.named_connector is not Connector.MOONCAKE:
        return {}
    if dialect is SGLANG:
        return {}
    try:
        return read_engine_ids(await client.fetch(f"{bootstrap_url(endpoint.url, bootstrap_port)}/query", {}))
    except WorkerBroke as error:
        log.debug("%s: %s", endpoint.id, error)
        return {}

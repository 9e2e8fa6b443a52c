"""A look at the workers before the scheduler exists: whether ranks of them step together decides its policy."""

import asyncio
from collections.abc import Sequence
from typing import Final

from router.errors import WorkerBroke
from router.upstream.dialects import MODELS_PATH, EngineInfo, detect_dialect, read_engine_info, reported_ranks
from router.upstream.directory import WorkerEndpoint
from router.upstream.polling.poll_client import PollClient
from router.upstream.ranks.rank_rules import RankRules

LOOK_SECONDS: Final = 2.0
"""Time in which a worker must answer."""


async def any_step_together(endpoints: Sequence[WorkerEndpoint], rules: RankRules) -> bool:
    """Return whether the settings say, or any engine says now, that ranks step together.

    An engine that does not answer in time has none as far as is known.
    """
    if any(rules.barrier_of(each.id, each.group, several=False, lockstep=None) is not None for each in endpoints):
        return True
    if rules.barrier == "off" or rules.ranks == "off":
        return False
    async with PollClient() as client:
        return any(await asyncio.gather(*(_steps_together(each, client, rules) for each in endpoints)))


async def _steps_together(endpoint: WorkerEndpoint, client: PollClient, rules: RankRules) -> bool:
    if endpoint.rank is not None:
        return False  # no group is named, so it waits for no other
    try:
        async with asyncio.timeout(LOOK_SECONDS):
            reported, lockstep = await _ask(endpoint, client)
    except (WorkerBroke, TimeoutError):
        reported = lockstep = None
    used = rules.used(reported)
    barrier = rules.barrier_of(endpoint.id, endpoint.group, several=len(used) > 1, lockstep=lockstep)
    return barrier is not None


async def _ask(endpoint: WorkerEndpoint, client: PollClient) -> tuple[frozenset[int] | None, bool | None]:
    """Return an engine's ranks, and whether they step together; each None if it does not say."""

    async def get(path: str) -> bytes:
        return await client.fetch(endpoint.url + path, endpoint.authorization)

    dialect = detect_dialect(await get(MODELS_PATH))
    info = EngineInfo() if dialect.info_path is None else read_engine_info(await get(dialect.info_path))
    if info.ranks is not None or dialect.cache_path is None or not dialect.rank_label:
        return info.ranks, info.lockstep
    return reported_ranks(await get(dialect.cache_path), dialect.rank_label), info.lockstep

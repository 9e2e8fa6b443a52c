"""Checks that nothing is left after all calls: in the router's counts, in its sockets, at the workers and in the
scheduler.
"""

import asyncio
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import aiohttp

from router.cli.replay import replay_file
from router.core.scheduler import Scheduler

from .processes import get_json, sockets

SOON: Final = 60.0
"""Seconds in which all must be at rest: engines close unused connections after 5, and SGLang aborts after 2."""
GAUGES: Final = re.compile(
    r"^(d2lpm_(?:client_queued_requests|client_running_requests|worker_queued_requests|worker_running_requests"
    r"|worker_unstarted_tokens|client_unread_bytes|handoff_pool_requests)"
    r"|vllm:(?:num_requests_(?:running|waiting)|kv_cache_usage_perc)) *(?:\{[^}]*\})? (\S+)$",
    re.MULTILINE,
)
"""Metrics of the router and of vLLM that must become zero."""
LOADS: Final = re.compile(r'"(num_(?:running|waiting)_reqs)":(\d+)')
"""Fields of SGLang's loads that must become zero; its metrics long show the last step."""


async def left_over(http: aiohttp.ClientSession, url: str, pid: int, before: int, workers: Iterable[str]) -> list[str]:
    """Return what is not at rest after `SOON`: counts of the router and the workers, and additional sockets."""
    deadline = time.monotonic() + SOON
    left = [""]
    while left and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
        left = await _under_way(http, url, workers)
        if (there := sockets(pid)) > before:
            left.append(f"{there} sockets instead of {before}")
    return left


async def at_rest(http: aiohttp.ClientSession, url: str, workers: Iterable[str]) -> list[str]:
    """Return what is not at rest after `SOON`: counts of a router of several processes, and of the workers."""
    deadline = time.monotonic() + SOON
    while (left := await _under_way(http, url, workers)) and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.2)
    return left


async def _under_way(http: aiohttp.ClientSession, url: str, workers: Iterable[str]) -> list[str]:
    """Return what a router and its workers count as waiting or running."""
    left = _busy(await get_json(http, f"{url}/fairness"))
    for page in (url, *workers):
        left += await busy_workers(http, page)
    return left


def _busy(report: dict[str, Any]) -> list[str]:
    """Return the entries of /fairness that count a request."""
    entries = [*report["clients"].items(), *report["workers"].items()]
    return [
        f"{name}: {count} {entry[count]}"
        for name, entry in entries
        for count in ("queued", "running", "unstarted_tokens")
        if entry.get(count)
    ]


async def busy_workers(http: aiohttp.ClientSession, url: str) -> list[str]:
    """Return what a worker, or a router, counts as in flight."""
    async with http.get(f"{url}/v1/loads") as response:
        found = LOADS.findall(await response.text())
    if not found:
        async with http.get(f"{url}/metrics") as response:
            found = GAUGES.findall(await response.text())
    if not found:
        return [f"{url}: none of the gauges is there"]
    return [f"{url}: {name} {value}" for name, value in found if float(value)]


def left_in_core(journal: Path) -> list[str]:
    """Return what a scheduler still holds after the events of the journal, or where the journal differs from it."""
    replayed = replay_file(journal)
    if replayed.difference is not None:
        return [f"the journal does not replay: {replayed.difference}"]
    scheduler = replayed.scheduler
    assert scheduler is not None, "a router writes its header first"
    return counts(scheduler)


def counts(scheduler: Scheduler) -> list[str]:
    """Return the counts that are not zero and must be, once no call is in flight."""
    found = {
        "live requests": scheduler.live,
        "waiting requests": scheduler.waiting,
        "watched prompts": scheduler.prefixes.watched,
        "bills": len(scheduler.attempts),
        **{f"requests at {state.worker.id}": state.load.requests for state in scheduler.fleet},
        **{f"unstarted tokens at {state.worker.id}": state.load.unstarted_tokens for state in scheduler.fleet},
    }
    scheduler.ledger.check_conservation()
    return [f"{count} {what}" for what, count in found.items() if count]

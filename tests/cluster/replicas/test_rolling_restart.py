"""A rolling restart of three replicas under load, behind a load balancer that is configured as the document says."""

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path
from signal import SIGTERM

import aiohttp
import pytest

from tests.chaos.clients import Crowd, ask_all, make_clients
from tests.chaos.kills import accounts
from tests.chaos.leftovers import at_rest
from tests.chaos.processes import get_json, running_workers, until
from tests.chaos.reading import Ending
from tests.cluster.replicas.load_balancers import load_balancer
from tests.cluster.replicas.replicas import free_port, running_cluster

CLIENTS = 24
MORE = 40
"""Calls that are to be completed between two restarts."""
DELAY = "2"
"""Seconds of `--drain-delay` that the document names."""


@pytest.mark.parametrize("balancer", ["nginx", "haproxy"])
async def test_a_rolling_restart_loses_no_call_and_cuts_no_stream(balancer: str, tmp_path: Path) -> None:
    """Each replica in turn, the leader last, is ended by SIGTERM and started again. Every call is answered in full, and
    charged once.
    """
    async with AsyncExitStack() as stack:
        workers = await stack.enter_async_context(running_workers(2, 0.2, 4))
        urls = [worker.url for worker in workers]
        ports = [await free_port() for _ in range(3)]
        cluster = await stack.enter_async_context(running_cluster(tmp_path, urls, "--drain-delay", DELAY, ports=ports))
        addresses = [f"127.0.0.1:{port}" for port in ports]
        url = await stack.enter_async_context(load_balancer(balancer, addresses, await free_port(), tmp_path))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        began = time.monotonic()
        crowd = Crowd(url, lambda: time.monotonic() - began)
        stack.push_async_callback(crowd.close)
        clients = make_clients(1, CLIENTS, CLIENTS // 2)
        calling = asyncio.create_task(ask_all(crowd, clients, 2, 1.0))
        try:
            await _served(crowd, MORE)
            leader = await cluster.leader()
            for replica in [*(each for each in cluster.replicas if each is not leader), leader]:
                assert await replica.server.end(SIGTERM) == 0
                await _served(crowd, MORE)
                await replica.server.start()
                await cluster.whole()
                await _served(crowd, MORE)
        finally:
            crowd.over.set()
            await calling
        print(len(crowd.outcomes), "calls")
        assert not [each for each in crowd.outcomes if each.verdict.ending is not Ending.COMPLETE]
        assert not await at_rest(http, cluster.replicas[0].server.url, urls)
        report = await get_json(http, f"{cluster.replicas[0].server.url}/fairness")
        assert not [each for account in accounts(report, crowd.outcomes, []) for each in account.objections]


async def _served(crowd: Crowd, more: int) -> None:
    """Wait until so many more calls have ended."""
    goal = len(crowd.outcomes) + more

    async def reached() -> bool:
        return len(crowd.outcomes) >= goal

    await until(reached)

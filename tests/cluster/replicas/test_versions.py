"""A rolling update from the version before to this one: they refuse each other clearly, and the books go on."""

import asyncio
from pathlib import Path
from random import Random
from signal import SIGTERM

import aiohttp
import pytest

from tests.chaos.asks import Asks
from tests.chaos.clients import Client, Crowd, Outcome, make_clients
from tests.chaos.kills import accounts
from tests.chaos.processes import get_json, running_workers
from tests.chaos.reading import Ending
from tests.cluster.replicas.earlier_version import NoHistoryError, version_before
from tests.cluster.replicas.replicas import OPERATOR, Replica, running_cluster
from tests.support.workers_http import eventually


class Caller:
    """One client that calls replicas in turn."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self._client: Client = make_clients(1, 1, 0)[0]
        self._asks = Asks(self._client.name, Random(1), shared=False)

    async def call(self, replica: Replica) -> Ending:
        """Make a call at a replica. Returns how it ended."""
        crowd = Crowd(replica.server.url, lambda: 0.0)
        try:
            return await crowd.ask(self._client, self._asks.next(), f"call-{len(self.outcomes)}", None)
        finally:
            self.outcomes += crowd.outcomes
            await crowd.close()


async def test_a_rolling_update_keeps_the_books(tmp_path: Path) -> None:
    """The leader is replaced last. Until then it serves its clients, and replicas of this version wait; then one of
    these leads, with what clients were served before.
    """
    try:
        before = await asyncio.to_thread(version_before, tmp_path)
    except NoHistoryError as reason:
        pytest.skip(f"the version before is not there: {reason}")
    caller = Caller()
    async with (
        running_workers(1, 1.0, 8) as workers,
        running_cluster(tmp_path, [worker.url for worker in workers], source=before) as cluster,
        aiohttp.ClientSession(headers=OPERATOR) as http,
    ):
        leader, epoch = await cluster.leader(), await cluster.epoch()
        others = [replica for replica in cluster.replicas if replica is not leader]
        for replica in cluster.replicas:
            assert await caller.call(replica) is Ending.COMPLETE
        starting = []
        for replica in others:
            assert await replica.server.end(SIGTERM) == 0
            replica.server.source = None
            starting.append(asyncio.create_task(replica.server.start()))
        for number, replica in enumerate(cluster.replicas, 1):
            if replica is not leader:
                await refused(tmp_path / f"log-{number}")
        assert await caller.call(leader) is Ending.COMPLETE
        assert await leader.server.end(SIGTERM) == 0
        await asyncio.gather(*starting)
        await cluster.higher(epoch, others[0])
        for replica in others:
            assert await caller.call(replica) is Ending.COMPLETE
        leader.server.source = None
        await leader.server.start()
        await cluster.whole()
        for replica in cluster.replicas:
            assert await caller.call(replica) is Ending.COMPLETE
        report = await get_json(http, f"{leader.server.url}/fairness")
        assert not [each for account in accounts(report, caller.outcomes, []) for each in account.objections]


async def refused(log: Path) -> None:
    """Wait until a replica says in its log that it waits for a leader of its own version."""

    async def told() -> bool:
        return "waits for a leader of its own version" in await asyncio.to_thread(log.read_text, "utf-8")

    await eventually(told)

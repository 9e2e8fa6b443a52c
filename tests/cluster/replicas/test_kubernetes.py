"""Replicas whose lease is in Kubernetes, and whose state is in a real store."""

from pathlib import Path
from random import Random
from signal import SIGKILL

import aiohttp

from tests.chaos.asks import Asks
from tests.chaos.clients import Crowd, make_clients
from tests.chaos.processes import get_json, running_workers, until
from tests.chaos.reading import Ending
from tests.cluster.replicas.replicas import running_cluster
from tests.support.lease_api import lease_api


async def test_replicas_follow_a_lease_of_kubernetes(tmp_path: Path) -> None:
    """The death of a leader, a hand-over, and an API that does not answer: one leads, the state goes on, and calls are
    served.
    """
    async with (
        lease_api() as api,
        running_workers(1, 1.0, 8) as workers,
        running_cluster(tmp_path, [worker.url for worker in workers], kubernetes=api.url) as cluster,
        aiohttp.ClientSession() as http,
    ):
        (client,) = make_clients(1, 1, 0)
        url = cluster.replicas[0].server.url
        asks, crowd = Asks(client.name, Random(1), shared=False), Crowd(url, lambda: 0.0)

        async def call() -> None:
            assert await crowd.ask(client, asks.next(), f"call-{len(crowd.outcomes)}", None) is Ending.COMPLETE

        async def degraded() -> bool:
            return (await get_json(http, f"{url}/ready")).get("degraded") == "store unreachable"

        try:
            await call()
            leader, epoch = await cluster.leader(), await cluster.epoch()
            assert api.spec("tests")["holderIdentity"] == (await cluster.whole())["leader"]
            leader.signal("scheduler", SIGKILL)
            await cluster.higher(epoch)
            epoch = await cluster.epoch()
            await call()
            await cluster.hand_over()
            await cluster.higher(epoch)
            await call()
            epoch = await cluster.epoch()
            api.down = True
            await until(degraded)
            await call()
            api.down = False
            assert (await cluster.whole())["epoch"] == epoch
        finally:
            await crowd.close()
        report = await get_json(http, f"{url}/fairness")
        assert len(report["clients"]) == 1
        assert len(crowd.outcomes) == 4

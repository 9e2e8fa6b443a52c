"""Shares over failovers: two clients that always wait are served by their weights, whoever leads."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from random import Random
from signal import SIGKILL, SIGSTOP
from typing import Any, NamedTuple

import aiohttp

from tests.chaos.clients import Client, Crowd, Outcome
from tests.chaos.kills import accounts
from tests.chaos.leftovers import at_rest
from tests.chaos.processes import LOOK, get_json, running_workers
from tests.cluster.replicas.network import Network
from tests.cluster.replicas.replicas import LOOPBACK, OPERATOR, Cluster, running_cluster

ROUNDS = int(os.environ.get("CLUSTER_ROUNDS", "1"))
"""How often each fault is repeated in the run of a test."""
WEIGHTS: Mapping[str, float] = {"one": 1.0, "two": 2.0}
NAMED_BY = "x-client"
"""The header that names a client."""
CALLS = 16
"""Calls that each client has open at each replica: more than workers take, so that both always wait."""
TIMES = 40
"""How often a prompt says its question: for some 500 tokens, so that a call costs the machine little for its charge."""
QUANTUM = 2_000.0
"""Q^u: a few calls, so that a short run shows the shares. It makes the bound ten times as tight as by default."""
SERVED = 50_000.0
"""Cost units for the client of weight 1 between two faults."""
SERVED_SECONDS = 600.0
"""Seconds in which a busy machine must serve that."""
RATIO, TOLERANCE = 2.0, 0.03


class Sample(NamedTuple):
    """What /fairness said at one moment."""

    service: Mapping[str, float]
    """Of each client since the beginning, in cost units."""
    queued: int
    """Requests of the client with fewer that wait."""
    gap: float
    bound: float

    @property
    def lead(self) -> float:
        """How much more the one client was served than the other, in cost units per weight."""
        one, two = (self.service[name] / weight for name, weight in WEIGHTS.items())
        return two - one


def sample(report: Mapping[str, Any]) -> Sample:
    """Return the sample of a report of /fairness."""
    clients, workers = report["clients"], report["workers"].values()
    return Sample(
        {name: clients[name]["service"]["cost"] for name in WEIGHTS},
        min(clients[name]["queued"] for name in WEIGHTS),
        max(worker["service_gap"] for worker in workers),
        max(worker["service_gap_bound"] for worker in workers),
    )


class Scene:
    """A cluster, and two clients that always have calls waiting at each replica."""

    def __init__(self, cluster: Cluster, http: aiohttp.ClientSession) -> None:
        self.cluster = cluster
        self._http = http
        self._began = time.monotonic()
        self.crowds = [
            (Client(name, Random(f"{name} {number}"), greedy=True, times=TIMES), self._crowd(name, replica.server.url))
            for number, replica in enumerate(cluster.replicas)
            for name in WEIGHTS
        ]

    def _crowd(self, name: str, url: str) -> Crowd:
        return Crowd(url, lambda: time.monotonic() - self._began, {NAMED_BY: name})

    async def run(self) -> None:
        """Call until `end`. The clients begin together: what runs before both wait would count as the first one's."""
        try:
            calling = [client.call_repeatedly(crowd, 0.0) for _ in range(CALLS) for client, crowd in self.crowds]
            await asyncio.gather(*calling)
        finally:
            for _, crowd in self.crowds:
                await crowd.close()

    def end(self) -> None:
        """Begin no more calls."""
        for _, crowd in self.crowds:
            crowd.over.set()

    @property
    def outcomes(self) -> list[Outcome]:
        return [outcome for _, crowd in self.crowds for outcome in crowd.outcomes]

    async def look(self, replica: int = 0) -> Sample | None:
        """Return what a replica says now; None if no leader answers it, or has not heard of both clients yet."""
        with suppress(aiohttp.ClientError, TimeoutError, KeyError):
            async with asyncio.timeout(2.0):
                return sample(await get_json(self._http, f"{self.cluster.replicas[replica].server.url}/fairness"))
        return None

    async def served(self, more: float, replica: int = 0) -> list[Sample]:
        """Watch until the client of weight 1 was served so much more. Returns what was seen on the way."""
        seen: list[Sample] = []

        async def reached() -> bool:
            if (found := await self.look(replica)) is not None:
                seen.append(found)
            return bool(seen) and seen[-1].service["one"] >= seen[0].service["one"] + more

        async with asyncio.timeout(SERVED_SECONDS):
            while not await reached():  # noqa: ASYNC110 - nobody is there to set an event
                await asyncio.sleep(LOOK)
        return seen


@asynccontextmanager
async def backlogged(folder: Path, net: Network | None = None) -> AsyncIterator[Scene]:
    """A cluster with both clients waiting. In the end, checks that each was charged what its answers say."""
    clients = folder / "clients.yaml"
    clients.write_text("clients:\n" + "".join(f"  {name}: {{weight: {weight}}}\n" for name, weight in WEIGHTS.items()))
    flags = [*("--clients", str(clients)), *("--trusted-header", NAMED_BY), *("--dlpm-home.quantum", str(QUANTUM))]
    if net is not None:
        flags += ["--trusted-proxy", net.workers]
    async with AsyncExitStack() as stack:
        at = LOOPBACK if net is None else net.workers
        workers = await stack.enter_async_context(running_workers(2, 2.0, 4, at))
        urls = [worker.url for worker in workers]
        cluster = await stack.enter_async_context(running_cluster(folder, urls, *flags, network=net))
        http = await stack.enter_async_context(aiohttp.ClientSession(headers=OPERATOR))
        scene = Scene(cluster, http)
        calling = asyncio.create_task(scene.run())
        try:
            yield scene
        finally:
            scene.end()
            await calling
        await cluster.whole()
        url = cluster.replicas[0].server.url
        assert not await at_rest(http, url, urls)
        report = await get_json(http, f"{url}/fairness")
        assert not [each for account in accounts(report, scene.outcomes, []) for each in account.objections]


def check_gap(seen: Sequence[Sample], bound: float) -> None:
    """Check that in no interval of what was seen the clients' services came apart by more than the bound."""
    leads = [each.lead for each in seen]
    queued = min(each.queued for each in seen)
    print(f"gap {max(leads) - min(leads):.0f} of {bound:.0f} over {len(seen)} looks, {queued} or more waited")
    assert max(leads) - min(leads) <= bound
    assert all(each.gap <= each.bound for each in seen)


def check_ratio(first: Sample, last: Sample) -> None:
    """Check that between two moments the clients were served by their weights."""
    one, two = (last.service[name] - first.service[name] for name in WEIGHTS)
    print(f"served {one:.0f} and {two:.0f}, a ratio of {two / one:.3f}")
    assert abs(two / one - RATIO) <= TOLERANCE * RATIO


async def test_shares_hold_while_leaders_die_hang_and_hand_over(tmp_path: Path) -> None:
    """Over each failover the gap stays within the bound, and over the whole run service is as the weights are."""
    async with backlogged(tmp_path) as scene:
        seen = await scene.served(SERVED)
        first = seen[0]
        for fault in (SIGKILL, SIGSTOP, None) * ROUNDS:
            leader, epoch = await scene.cluster.leader(), await scene.cluster.epoch()
            if fault is None:
                await scene.cluster.hand_over()
            else:
                leader.signal("scheduler", fault)
            print(f"epoch {epoch} is followed after {await scene.cluster.higher(epoch):.2f} s")
            before, seen = seen, await scene.served(SERVED)
            check_gap([*before, *seen], max(each.bound for each in (*before, *seen)))
        check_ratio(first, seen[-1])


async def test_shares_hold_while_a_leader_is_parted_from_the_rest(tmp_path: Path, net: Network) -> None:
    """Each half serves by the weights; afterwards the halves' services together are within the sum of their bounds."""
    async with backlogged(tmp_path, net) as scene:
        seen = await scene.served(SERVED)
        first = seen[0]
        for _ in range(ROUNDS):
            leader, epoch = await scene.cluster.leader(), await scene.cluster.epoch()
            alone = list(scene.cluster.replicas).index(leader)
            among = (alone + 1) % len(scene.cluster.replicas)
            await net.part(alone + 1)
            await scene.cluster.higher(epoch, scene.cluster.replicas[among])
            halves = await asyncio.gather(scene.served(SERVED / 3, alone), scene.served(SERVED / 3, among))
            for half in halves:
                check_gap(half, max(each.bound for each in half))
            await net.heal(alone + 1)
            await scene.cluster.whole()
            before, seen = seen, await scene.served(SERVED)
            check_gap([*before, *seen], sum(max(each.bound for each in half) for half in halves))
        check_ratio(first, seen[-1])

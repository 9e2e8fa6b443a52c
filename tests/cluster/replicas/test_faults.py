"""Faults of a cluster under load: what runs and what waits goes on, and the books are exact afterwards."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.cluster.state_in_store import stored_state
from router.cluster.store import ClusterStore, store_address
from tests.chaos.clients import Crowd, Outcome, ask_all, make_clients
from tests.chaos.kills import accounts
from tests.chaos.leftovers import at_rest
from tests.chaos.processes import get_json, running_workers, runs, until
from tests.chaos.reading import Ending
from tests.cluster.replicas.network import Network
from tests.cluster.replicas.replicas import LOOPBACK, OPERATOR, Cluster, Replica, cut_connections, running_cluster

CLIENTS = int(os.environ.get("CLUSTER_CLIENTS", "24"))
"""Clients of all replicas together, half of them greedy."""
ROUNDS = int(os.environ.get("CLUSTER_ROUNDS", "1"))
"""How often each test is repeated."""
DOWN_SECONDS = float(os.environ.get("CLUSTER_STORE_SECONDS", "3"))
"""For how long the store is down."""
PARTED_SECONDS = 10.0
CUT_SECONDS = 1.0
"""Seconds after a kill in which the clients of a killed front notice it."""


@pytest.fixture(autouse=True, params=range(ROUNDS))
def repetition(request: pytest.FixtureRequest) -> object:
    """Which repetition of a test this is."""
    return request.param


class Load:
    """Clients of all replicas, and what became of their calls."""

    def __init__(self, cluster: Cluster) -> None:
        self.began = time.monotonic()
        self.cut: list[tuple[int, float, float]] = []
        """Which replica's front was killed, when, and when it was gone: until then its clients sent it calls."""
        self.faults: list[tuple[float, float]] = []
        """When each fault began, and when the cluster was whole again."""
        self.crowds = [Crowd(replica.server.url, self.now) for replica in cluster.replicas]

    def now(self) -> float:
        return time.monotonic() - self.began

    @contextmanager
    def fault(self) -> Iterator[None]:
        """While the cluster is not whole, new calls may be refused."""
        began = self.now()
        yield
        self.faults.append((began, self.now()))

    async def run(self) -> None:
        """Call until `end`."""
        clients = make_clients(1, CLIENTS, 0)
        for number, client in enumerate(clients):
            client.greedy = number % 2 == 0
        shares = [clients[number :: len(self.crowds)] for number in range(len(self.crowds))]
        try:
            await asyncio.gather(
                *(ask_all(crowd, share, 2, 1.0) for crowd, share in zip(self.crowds, shares, strict=True))
            )
        finally:
            for crowd in self.crowds:
                await crowd.close()

    def end(self) -> None:
        """Begin no more calls."""
        for crowd in self.crowds:
            crowd.over.set()

    @property
    def outcomes(self) -> list[Outcome]:
        return [outcome for crowd in self.crowds for outcome in crowd.outcomes]

    def broken(self) -> list[Outcome]:
        """The calls that a killed front took with it."""
        return [
            outcome
            for number, killed, gone in self.cut
            for outcome in self.crowds[number].outcomes
            if outcome.verdict.ending is Ending.WRONG
            if killed <= outcome.ended <= gone + CUT_SECONDS
            if outcome.sent <= gone or outcome.reused  # a client may not have noticed yet that a connection is cut
        ]

    def refused(self) -> list[Outcome]:
        """The calls that were refused while the cluster was not whole."""
        return [
            outcome
            for outcome in self.outcomes
            if outcome.verdict.ending is Ending.ERROR
            if any(began <= outcome.sent <= ended for began, ended in self.faults)
        ]

    def lost(self) -> list[str]:
        """The calls that did not complete, and neither a refusal nor a killed front explains it."""
        explained = {id(outcome) for outcome in (*self.broken(), *self.refused())}
        return [
            f"{outcome.request} {outcome.sent:.2f}-{outcome.ended:.2f} reused={outcome.reused}: {outcome.verdict.why}"
            for outcome in self.outcomes
            if outcome.verdict.ending is not Ending.COMPLETE and id(outcome) not in explained
        ]


@asynccontextmanager
async def loaded(folder: Path, net: Network | None = None) -> AsyncIterator[tuple[Cluster, Load]]:
    """A cluster under load. At the end, checks that no call is lost and that charged equals served."""
    async with AsyncExitStack() as stack:
        at = LOOPBACK if net is None else net.workers
        workers = await stack.enter_async_context(running_workers(2, 0.2, 4, at))
        urls = [worker.url for worker in workers]
        cluster = await stack.enter_async_context(running_cluster(folder, urls, network=net))
        http = await stack.enter_async_context(aiohttp.ClientSession(headers=OPERATOR))
        load = Load(cluster)
        calling = asyncio.create_task(load.run())
        try:
            await served(load, 20)
            yield cluster, load
            await served(load, 20)
        finally:
            load.end()
            await calling
        await cluster.whole()
        url = cluster.replicas[0].server.url
        assert not await at_rest(http, url, urls)
        report = await get_json(http, f"{url}/fairness")
        print(len(load.outcomes), "calls,", len(load.broken()), "cut,", len(load.refused()), "refused")
        assert not load.lost()
        assert not [each for account in accounts(report, load.outcomes, load.broken()) for each in account.objections]


async def served(load: Load, more: int) -> None:
    """Wait until each replica has completed so many more calls."""
    goals = [len(crowd.outcomes) + more for crowd in load.crowds]
    while any(len(crowd.outcomes) < goal for crowd, goal in zip(load.crowds, goals, strict=True)):  # noqa: ASYNC110
        await asyncio.sleep(0.05)


async def another_leads(cluster: Cluster, epoch: int, asked: Replica) -> None:
    """Wait until another leader answers, and then until the cluster is whole again."""
    print(f"epoch {epoch} is followed after {await cluster.higher(epoch, asked):.2f} s")
    await cluster.whole()


def other(cluster: Cluster, leader: Replica) -> Replica:
    """A replica that does not lead."""
    return next(replica for replica in cluster.replicas if replica is not leader)


async def test_the_death_and_the_stop_of_a_leader_lose_nothing(tmp_path: Path) -> None:
    """Another scheduler leads with a higher epoch, what runs and waits goes on, and all is charged once."""
    async with loaded(tmp_path) as (cluster, load):
        for number in (SIGKILL, SIGSTOP):
            leader, epoch = await cluster.leader(), await cluster.epoch()
            with load.fault():
                leader.signal("scheduler", number)
                await another_leads(cluster, epoch, other(cluster, leader))
            await served(load, 5)


async def test_two_leaders_for_a_moment_and_a_hand_over_lose_nothing(tmp_path: Path) -> None:
    """A leader that was stopped, and goes on while another leads, is left by the fronts, and ends."""
    async with loaded(tmp_path) as (cluster, load):
        leader, epoch = await cluster.leader(), await cluster.epoch()
        pid = leader.pid("scheduler")
        with load.fault():
            leader.signal("scheduler", SIGSTOP)
            await cluster.higher(epoch, other(cluster, leader))
            leader.signal("scheduler", SIGCONT)
            await cluster.whole()
        assert leader.pid("scheduler") != pid
        epoch = await cluster.epoch()
        await cluster.hand_over()
        await another_leads(cluster, epoch, other(cluster, await cluster.leader()))
        await served(load, 5)


async def test_a_store_that_dies_and_comes_back_empty_loses_nothing(tmp_path: Path) -> None:
    """Calls are served without it, `/ready` and the metric of the alert say so, and then the same leader goes on with
    its epoch, and the whole state is there again.
    """
    async with loaded(tmp_path) as (cluster, load), aiohttp.ClientSession(headers=OPERATOR) as http:
        url, epoch, began = cluster.replicas[0].server.url, await cluster.epoch(), load.now()
        await cluster.store.end()
        await served(load, 10)
        await until(partial(is_degraded, http, url))
        await asyncio.sleep(max(0.0, began + DOWN_SECONDS - load.now()))
        await until(partial(says_unreachable, http, url, 1.0))
        await served(load, 5)
        await cluster.store.start()
        back = load.now()
        async with ClusterStore(store_address(cluster.store.url)) as store:

            async def saved() -> bool:
                return stored_state(await store.load()) is not None

            await until(saved)
        print(f"down for {back - began:.0f} s, the state is there again after {load.now() - back:.2f} s")
        assert (await cluster.whole())["epoch"] == epoch
        await until(partial(says_unreachable, http, url, 0.0))


async def has_ended(pid: int) -> bool:
    """Return whether a process has ended, with all its connections."""
    return not runs(pid)


async def is_degraded(http: aiohttp.ClientSession, url: str) -> bool:
    """Return whether `/ready` says that the store does not answer."""
    async with http.get(f"{url}/ready") as response:
        return response.status == 200 and (await response.json()).get("degraded") == "store unreachable"


async def says_unreachable(http: aiohttp.ClientSession, url: str, value: float) -> bool:
    """Return whether the metric that the alert D2lpmClusterStoreUnreachable watches has this value."""
    async with http.get(f"{url}/metrics") as response:
        if response.status != 200:
            return False
        families = text_string_to_metric_families(await response.text())
    return [each.samples[0].value for each in families if each.name == "d2lpm_cluster_store_unreachable"] == [value]


async def test_connections_to_a_living_leader_that_break_cost_no_stream(tmp_path: Path) -> None:
    """No front ends. On a machine that is too busy to renew the lease in time, another replica may lead meanwhile."""
    async with loaded(tmp_path) as (cluster, load):
        leader = await cluster.leader()
        fronts = [replica.pid("front-1") for replica in cluster.replicas]
        with load.fault():
            for _ in range(3):
                if not await cut_connections(leader.host):
                    pytest.skip("this kernel cuts no connections for this user, or another replica leads")
                await served(load, 5)
            await cluster.whole()
        assert [replica.pid("front-1") for replica in cluster.replicas] == fronts


async def test_a_leader_that_is_parted_from_the_rest_serves_its_own_clients(tmp_path: Path, net: Network) -> None:
    """The others get another leader; afterwards there is one, and the books are exact."""
    async with loaded(tmp_path, net) as (cluster, load):
        leader, epoch = await cluster.leader(), await cluster.epoch()
        number = list(cluster.replicas).index(leader) + 1
        with load.fault():
            began = load.now()
            await net.part(number)
            await cluster.higher(epoch, other(cluster, leader))
            await served(load, 10)
            await asyncio.sleep(max(0.0, began + PARTED_SECONDS - load.now()))
            alone = await cluster.report(leader)
            assert alone is not None
            assert alone["epoch"] == epoch
            await net.heal(number)
            await cluster.whole()
        assert await cluster.epoch() > epoch
        await served(load, 5)


async def test_the_death_of_a_front_harms_only_its_own_calls(tmp_path: Path) -> None:
    """Its streams break off and are charged as far as they came; the other replicas' calls go on."""
    async with loaded(tmp_path) as (cluster, load):
        leader = await cluster.leader()
        victim = other(cluster, leader)
        number, pid = list(cluster.replicas).index(victim), victim.pid("front-1")
        with load.fault():
            killed = load.now()
            os.kill(pid, SIGKILL)
            await until(partial(has_ended, pid))
            load.cut.append((number, killed, load.now()))
            await cluster.whole()

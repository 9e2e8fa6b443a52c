"""How often fronts, and replicas that wait, read the lease."""

import asyncio
from typing import cast

import pytest

from router.channel.socket import ChannelClosed, Hello, connect_front
from router.cluster.leader_route import LeaderRoute
from router.cluster.lease import POLL_SECONDS, LeaderRecord, StoreView
from router.cluster.store import ClusterStore
from router.process.replica.candidate import _win
from tests.cluster.fixed_lease import FixedLease
from tests.cluster.replicas.replicas import free_port
from tests.support.running import until


class LongLease(StoreView):
    """A lease that need not be read again while a test runs."""

    @property
    def looks_again_after(self) -> float:
        return 3600.0


def long_lease(address: str) -> FixedLease:
    """A lease of a leader at this address."""
    return FixedLease(LongLease(LeaderRecord(1, "a", "run", address, 0.0), 1))


async def test_a_front_that_has_lost_the_leader_reads_the_lease_soon() -> None:
    """Otherwise a leader that is started again would be found late."""
    lease = long_lease(f"127.0.0.1:{await free_port()}")
    async with LeaderRoute(cast("ClusterStore", lease), b"a secret") as route:
        assert lease.looks == 1
        with pytest.raises(ChannelClosed):
            await connect_front(route, Hello("a version"), lambda _: None)
        await until(lambda: lease.looks == 2)


async def test_a_front_with_a_leader_leaves_a_lease_alone_that_lasts() -> None:
    """What it would read is known. Here that is so for an hour."""
    lease = long_lease("127.0.0.1:7")
    async with LeaderRoute(cast("ClusterStore", lease), b"a secret"):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(4 * POLL_SECONDS):
                await until(lambda: lease.looks > 1)


async def test_a_replica_that_waits_leaves_a_lease_alone_that_lasts() -> None:
    """It says that it waits, and sleeps until something may have changed."""
    lease = long_lease("127.0.0.1:7")
    waiting = asyncio.create_task(_win(cast("ClusterStore", lease), "b", "127.0.0.1:8"))
    await until(lambda: lease.waits == ["b"])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(4 * POLL_SECONDS):
            await until(lambda: lease.looks > 1)
    waiting.cancel()

"""How often fronts, and replicas that wait, read the lease."""

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self, cast

import pytest

from router.channel.socket import ChannelClosed, Hello, connect_front
from router.cluster.leader_route import LeaderRoute
from router.cluster.lease import POLL_SECONDS, LeaderRecord, StoreView
from router.cluster.store import ClusterStore
from router.process.replica.candidate import _win
from tests.cluster.replicas.replicas import free_port
from tests.support.running import until


class LongLease(StoreView):
    """A lease that need not be read again while a test runs."""

    @property
    def looks_again_after(self) -> float:
        return 3600.0


class Lease:
    """A store that counts how often it was read."""

    def __init__(self, address: str) -> None:
        self._view = LongLease(LeaderRecord(1, "a", "run", address, 0.0), 1)
        self.looks = 0
        self.waits: list[str] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """There is nothing to close."""

    async def view(self) -> StoreView:
        self.looks += 1
        return self._view

    async def manifest(self) -> None:
        """There is no state."""

    async def waiting(self, replica: str) -> Sequence[str]:
        self.waits.append(replica)
        return self.waits


async def test_a_front_that_has_lost_the_leader_reads_the_lease_soon() -> None:
    """Otherwise a leader that is started again would be found late."""
    lease = Lease(f"127.0.0.1:{await free_port()}")
    async with LeaderRoute(cast("ClusterStore", lease), b"a secret") as route:
        assert lease.looks == 1
        with pytest.raises(ChannelClosed):
            await connect_front(route, Hello("a version"), lambda _: None)
        await until(lambda: lease.looks == 2)


async def test_a_front_with_a_leader_leaves_a_lease_alone_that_lasts() -> None:
    """What it would read is known. Here that is so for an hour."""
    lease = Lease("127.0.0.1:7")
    async with LeaderRoute(cast("ClusterStore", lease), b"a secret"):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(4 * POLL_SECONDS):
                await until(lambda: lease.looks > 1)


async def test_a_replica_that_waits_leaves_a_lease_alone_that_lasts() -> None:
    """It says that it waits, and sleeps until something may have changed."""
    lease = Lease("127.0.0.1:7")
    waiting = asyncio.create_task(_win(cast("ClusterStore", lease), "b", "127.0.0.1:8"))
    await until(lambda: lease.waits == ["b"])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(4 * POLL_SECONDS):
            await until(lambda: lease.looks > 1)
    waiting.cancel()

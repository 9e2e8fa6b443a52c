"""How often fronts read the lease."""

from types import TracebackType
from typing import Self, cast

import pytest

from router.channel.socket import ChannelClosed, Hello, connect_front
from router.cluster.leader_route import LeaderRoute
from router.cluster.lease import LeaderRecord, StoreView
from router.cluster.store import ClusterStore
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

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """There is nothing to close."""

    async def view(self) -> StoreView:
        self.looks += 1
        return self._view


async def test_a_front_that_has_lost_the_leader_reads_the_lease_soon() -> None:
    """Otherwise a leader that is started again would be found late; while there is one, the lease is read rarely."""
    lease = Lease(f"127.0.0.1:{await free_port()}")
    async with LeaderRoute(cast("ClusterStore", lease), b"a secret") as route:
        assert lease.looks == 1
        with pytest.raises(ChannelClosed):
            await connect_front(route, Hello("a version"), lambda _: None)
        await until(lambda: lease.looks == 2)

"""When a leader gives the lease up."""

import asyncio
from typing import cast

from router.channel.socket import ChannelServer
from router.cluster.leadership import Leadership
from router.cluster.lease import LeaderRecord, Renewal
from router.cluster.state_in_store import StateInStore
from router.cluster.store import ClusterStore
from tests.support.running import until

RECORD = LeaderRecord(3, "a", "run", "127.0.0.1:7", 0.0)


class Steps:
    """A store and a state that note what is asked of them."""

    def __init__(self) -> None:
        self.taken: list[str] = []

    async def renew(self, record: LeaderRecord) -> Renewal:  # noqa: ARG002
        self.taken.append("renew")
        return Renewal.KEPT

    async def waiting(self) -> list[str]:
        return ["b"]

    async def release(self, record: LeaderRecord) -> None:  # noqa: ARG002
        self.taken.append("release")

    async def save(self) -> None:
        self.taken.append("save")


async def test_a_hand_over_waits_until_the_run_serves() -> None:
    """SIGTERM may come while a run takes over; a state that is saved before would not say what it covers."""
    steps = Steps()
    leadership = Leadership(cast("ClusterStore", steps), RECORD, cast("ChannelServer", None))
    leadership.saves(cast("StateInStore", steps))
    leadership.begin_hand_over()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not steps.taken
    async with leadership:
        await until(lambda: "release" in steps.taken)
        assert steps.taken == ["renew", "save", "release"]

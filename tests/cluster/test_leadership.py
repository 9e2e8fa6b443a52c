"""When a leader gives the lease up."""

import asyncio
from typing import cast

from router.channel.socket import ChannelServer
from router.cluster.leadership import Leadership, StartOfTerm
from router.cluster.lease import START_SECONDS, LeaderRecord, Renewal
from router.cluster.state_in_store import StateInStore
from router.cluster.store import ClusterStore
from tests.support.running import until

RECORD = LeaderRecord(3, "a", "run", "127.0.0.1:7", 0.0)


class Steps:
    """A store and a state that note what is asked of them."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.held_for: list[float] = []

    async def renew(self, record: LeaderRecord, seconds: float) -> Renewal:  # noqa: ARG002 - the signature of LeaseStore
        self.taken.append("renew")
        self.held_for.append(seconds)
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


async def test_a_run_holds_the_lease_until_it_serves() -> None:
    """On a busy machine a start takes longer than a lease lasts; one that never serves does not hold it for good."""
    steps = Steps()
    async with StartOfTerm(cast("ClusterStore", steps), RECORD, seconds=0.001, most=3):
        await until(lambda: len(steps.held_for) == 3)
        await asyncio.sleep(0.01)
    assert steps.held_for == [START_SECONDS] * 3


async def test_a_run_that_serves_renews_by_itself() -> None:
    """What has held the lease until then would take it again after a hand-over."""
    steps = Steps()
    start = StartOfTerm(cast("ClusterStore", steps), RECORD, seconds=0.001, most=1000)
    leadership = Leadership(cast("ClusterStore", steps), RECORD, cast("ChannelServer", None))
    leadership.on_serving = start.end
    async with start:
        await until(lambda: START_SECONDS in steps.held_for)
        async with leadership:
            count = steps.held_for.count(START_SECONDS)
            await asyncio.sleep(0.01)
            assert steps.held_for.count(START_SECONDS) == count

"""A connection between a front and a living leader breaks: both go on with what they have."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from router.channel.client import SchedulerClient
from router.channel.front_channel import FrontChannel
from router.channel.socket import ChannelClosed, UnixRoute
from router.core.model.events import Fault, Finished, Returned, WorkerJoined
from router.core.model.request import ClientId, Request, RequestId, Usage, Worker, WorkerId
from tests.channel.test_epochs import REQUEST, Leader
from tests.support.running import until

NEXT = Request(RequestId("b"), ClientId("bob"), "m", REQUEST.prompts)


class Front:
    """A front, whose connection the test breaks."""

    def __init__(self, leader: Leader, number: int = 1) -> None:
        self.channel = FrontChannel(UnixRoute(leader.path), number, "replica")
        self.client = SchedulerClient(asyncio.get_running_loop().time)

    async def open(self) -> None:
        await self.channel.open()
        self.channel.attach(self.client)

    def break_off(self) -> None:
        """Break the connection; what was sent in this turn is lost."""
        assert self.channel._end is not None
        self.channel._end.abort()

    def leave(self) -> None:
        """Close the connection as the end of the process does."""
        assert self.channel._end is not None
        self.channel._end.leave()


@asynccontextmanager
async def leader_of(folder: Path) -> AsyncIterator[Leader]:
    leader = Leader(folder, 1)
    async with leader.server:
        yield leader


async def two_fronts(leader: Leader, stack: AsyncExitStack) -> tuple[Front, Front]:
    """Open two fronts, of which the second connects again whenever its connection breaks."""
    first, second = Front(leader, 1), Front(leader, 2)
    await first.open()
    await second.open()
    await stack.enter_async_context(second.channel)
    return first, second


async def test_what_was_on_its_way_arrives_over_the_next_connection(tmp_path: Path) -> None:
    """The end of the running request and the arrival of another one are sent again, and each is handled once."""
    async with leader_of(tmp_path) as leader, AsyncExitStack() as stack:
        front = Front(leader)
        await front.open()
        await stack.enter_async_context(front.channel)
        await front.client.submit(REQUEST)
        front.client.settle(Finished(REQUEST.id, Usage(5, 3)))
        waiting = front.client.submit(NEXT)
        front.break_off()
        assert (await waiting).worker == "w"
        front.client.settle(Finished(NEXT.id, Usage(7, 1)))
        await until(lambda: leader.host.at_rest)
        accounts = leader.host.scheduler.ledger.accounts
        served = [accounts[request.client].served for request in (REQUEST, NEXT)]
        assert [(tokens.extend + tokens.cached, tokens.output) for tokens in served] == [(5, 3), (7, 1)]


async def test_what_waits_is_sent_nowhere_while_its_front_is_away(tmp_path: Path) -> None:
    """What runs goes on, others are served meanwhile, and what waited is queued again when the front is back."""
    async with leader_of(tmp_path) as leader, AsyncExitStack() as stack:
        away, _ = await two_fronts(leader, stack)
        await away.client.submit(REQUEST)
        waiting = away.client.submit(NEXT)
        await until(lambda: leader.host.scheduler.waiting == 1)
        away.break_off()
        await until(lambda: leader.host.scheduler.waiting == 0)
        assert leader.host.scheduler.attempts.keys() == {REQUEST.id}
        assert leader.host.open_requests == 2
        await stack.enter_async_context(away.channel)  # it connects again from now on
        await until(lambda: leader.host.scheduler.waiting == 1)
        away.client.settle(Finished(REQUEST.id, Usage(5, 3)))
        assert (await waiting).worker == "w"
        away.client.settle(Finished(NEXT.id, Usage(7, 1)))
        await until(lambda: leader.host.at_rest)


async def test_the_calls_of_a_front_that_is_away_for_long_hold_no_room(tmp_path: Path) -> None:
    """A worker whose only place such a call has takes the call of another front. Both are charged, also the first once
    its front is back, which takes its place again until it ends.
    """
    async with leader_of(tmp_path) as leader, AsyncExitStack() as stack:
        away, other = await two_fronts(leader, stack)
        await away.client.submit(REQUEST)
        waiting = other.client.submit(NEXT)
        await until(lambda: leader.host.scheduler.waiting == 1)
        away.break_off()
        assert (await waiting).worker == "w"
        other.client.settle(Finished(NEXT.id, Usage(7, 1)))
        await until(lambda: leader.host.open_requests == 1)
        await stack.enter_async_context(away.channel)
        await until(lambda: leader.server.fronts == 2)
        third = other.client.submit(replace(NEXT, id=RequestId("c")))
        await until(lambda: leader.host.scheduler.waiting == 1)
        away.client.settle(Finished(REQUEST.id, Usage(5, 3)))
        assert (await third).worker == "w"
        other.client.settle(Finished(RequestId("c"), Usage(7, 1)))
        await until(lambda: leader.host.at_rest)
        accounts = leader.host.scheduler.ledger.accounts
        assert [accounts[each.client].served.output for each in (REQUEST, NEXT)] == [3, 2]


async def test_a_retry_of_a_front_that_is_away_for_long_holds_no_room(tmp_path: Path) -> None:
    """A call that its worker has returned is sent again while its front is away, and leaves the place to others."""
    async with leader_of(tmp_path) as leader, AsyncExitStack() as stack:
        away, other = await two_fronts(leader, stack)
        leader.host.feed(WorkerJoined(Worker(WorkerId("v"), frozenset({"m"}))))
        returned = (await away.client.submit(REQUEST)).worker
        held = (await other.client.submit(NEXT)).worker
        retry = asyncio.ensure_future(away.client.resubmit(Returned(REQUEST.id, accepted=False, fault=Fault.ERROR)))
        await until(lambda: leader.host.scheduler.waiting == 1)
        away.break_off()
        third = other.client.submit(replace(NEXT, id=RequestId("c")))
        assert (await third).worker == returned
        await until(lambda: leader.host._links[0].is_set_aside)
        fourth = other.client.submit(replace(NEXT, id=RequestId("d")))
        other.client.settle(Finished(NEXT.id, Usage(7, 1)))
        assert (await fourth).worker == held
        assert REQUEST.id in leader.host.scheduler.attempts, "the front was given up instead"
        retry.cancel()


async def test_a_front_whose_place_is_taken_is_settled_and_does_not_come_back(tmp_path: Path) -> None:
    """Its process was started again; should it live on all the same, it ends."""
    async with leader_of(tmp_path) as leader:
        front, successor = Front(leader), Front(leader)
        await front.open()
        await front.client.submit(REQUEST)
        front.break_off()
        await until(lambda: not leader.server.fronts)
        assert leader.host.open_requests == 1
        await successor.open()
        assert leader.host.at_rest
        async with front.channel:
            with pytest.raises(ChannelClosed, match="which lives"):
                await front.channel.lost()
        successor.break_off()


async def test_a_repeated_call_waits_until_it_is_known_whether_its_front_is_dead(tmp_path: Path) -> None:
    """Then it is dispatched, and its client pays once for what it did not receive the first time."""
    call = replace(REQUEST, streamed=False, retry_key=b"key")
    async with leader_of(tmp_path) as leader, AsyncExitStack() as stack:
        dead, other = Front(leader, 1), Front(leader, 2)
        await dead.open()
        await other.open()
        await stack.enter_async_context(other.channel)
        await dead.client.submit(call)
        dead.leave()
        await until(lambda: leader.server.fronts == 1)
        again = other.client.submit(replace(call, id=RequestId("again")))
        await until(lambda: leader.host.open_requests == 2)
        assert leader.host.scheduler.live == 1
        successor = Front(leader, 1)
        await successor.open()
        assert (await again).worker == "w"
        other.client.settle(Finished(RequestId("again"), Usage(50, 7, 0)))
        await until(lambda: leader.host.at_rest)
        served = leader.host.scheduler.ledger.accounts[call.client].served
        assert served.extend + served.cached <= 50
        assert served.output == 7
        successor.break_off()

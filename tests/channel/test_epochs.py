"""Two schedulers of a cluster: a front obeys the one with the higher epoch, and tells the other."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random

import msgspec
import pytest

from router.channel.client import SchedulerClient
from router.channel.front_channel import FrontChannel
from router.channel.host import FrontLink, NoServices, SchedulerHost
from router.channel.messages import Fact, Superseded
from router.channel.socket import (
    ChannelClosed,
    ChannelServer,
    FrontEnd,
    Hello,
    Route,
    UnixRoute,
    connect_front,
    frame,
)
from router.core.fleet.window import FixedWindow
from router.core.model.events import Cancelled, Finished, WorkerJoined
from router.core.model.prompt_key import PromptHasher
from router.core.model.request import ClientId, Request, RequestId, Usage, Worker, WorkerId
from router.core.policies.context import Parameters
from router.core.policies.registry import POLICIES
from router.core.scheduler import Scheduler
from router.core.scheduler_settings import SchedulerSettings
from tests.support.running import until

SECRET = b"s" * 16
REQUEST = Request(RequestId("a"), ClientId("ann"), "m", (PromptHasher(SECRET).prompt(b"x" * 200).key,))


class LastWords(NoServices):
    """Keeps what fronts say when they leave."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def take(self, front: FrontLink, fact: Fact) -> None:  # noqa: ARG002
        assert isinstance(fact, Superseded)
        self.epochs.append(fact.epoch)


class Leader:
    """A scheduler with an epoch and one worker."""

    def __init__(self, folder: Path, epoch: int) -> None:
        scheduler = Scheduler(
            POLICIES["rr+fcfs"], SchedulerSettings(window=FixedWindow(1, 1000)), Parameters(), Random(0)
        )
        self.host = SchedulerHost(scheduler, [], lambda: time.monotonic() + 1000.0, traced=True)
        self.host.feed(WorkerJoined(Worker(WorkerId("w"), frozenset({"m"}))))
        self.path = str(folder / f"channel-{epoch}")
        self.last_words = LastWords()
        self.host.set_services(self.last_words)
        self.server = ChannelServer(self.host, SECRET, self.path, epoch)
        self.heard: list[int] = []
        self.server.on_superseded = self.heard.append


class Signpost(Route):
    """Leads where the test says."""

    patience = 60.0

    def __init__(self, path: str, epoch: int) -> None:
        self.point(path, epoch)

    def point(self, path: str, epoch: int) -> None:
        self._path, self._epoch = path, epoch

    async def connect(self, end: FrontEnd) -> None:
        await UnixRoute(self._path).connect(end)

    async def superseded(self, epoch: int) -> None:
        await until(lambda: self._epoch > epoch)


@asynccontextmanager
async def front_of(route: Route) -> AsyncIterator[SchedulerClient]:
    """A front that follows the route."""
    channel = FrontChannel(route, 1, "replica")
    await channel.open()
    client = SchedulerClient(asyncio.get_running_loop().time)
    channel.attach(client)
    async with channel:
        yield client
    client.close()
    await channel.close()


async def test_a_front_moves_to_the_higher_epoch_with_what_it_has(tmp_path: Path) -> None:
    """The scheduler that it leaves hears of the other one; the request that runs is settled at that one, once."""
    old, new = Leader(tmp_path, 1), Leader(tmp_path, 2)
    signpost = Signpost(old.path, 1)
    async with old.server, new.server, front_of(signpost) as client:
        await client.submit(REQUEST)
        signpost.point(new.path, 2)
        await until(lambda: new.host.open_requests == 1)
        await until(lambda: not old.server.fronts)
        assert old.last_words.epochs == [2]
        assert new.server.replicas == {"replica": 1}
        client.settle(Finished(REQUEST.id, Usage(5, 3)))
        await until(lambda: new.host.at_rest)
        served = new.host.scheduler.ledger.accounts[REQUEST.client].served
        assert (served.extend + served.cached, served.output) == (5, 3)


async def test_a_front_stays_until_the_higher_epoch_can_be_reached(tmp_path: Path) -> None:
    """The present scheduler goes on to decide for it, so a planned hand-over makes nobody wait."""
    old, new = Leader(tmp_path, 1), Leader(tmp_path, 2)
    signpost = Signpost(old.path, 1)
    async with old.server, front_of(signpost) as client:
        signpost.point(new.path, 2)
        assert (await client.submit(REQUEST)).worker == "w"
        client.settle(Cancelled(REQUEST.id))
        await until(lambda: old.host.at_rest)
        async with new.server:
            await until(lambda: new.server.fronts == 1)
            await until(lambda: not old.server.fronts)


async def test_a_scheduler_with_a_lower_epoch_is_told_so_and_obeyed_by_no_front(tmp_path: Path) -> None:
    """Even if its address is the only one that is known."""
    high, low = Leader(tmp_path, 7), Leader(tmp_path, 1)
    signpost = Signpost(high.path, 7)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(low.server)
        await high.server.__aenter__()
        client = await stack.enter_async_context(front_of(signpost))
        await client.submit(REQUEST)
        signpost.point(low.path, 1)
        await high.server.__aexit__()
        await until(lambda: low.heard[:1] == [7])
        assert not low.host.open_requests
        assert low.server.replicas.get("replica", 0) == 0


@pytest.mark.parametrize("epoch", [7, 8])
async def test_the_same_epoch_or_a_higher_one_is_obeyed_after_a_death(tmp_path: Path, epoch: int) -> None:
    """The front reports what it has to the scheduler that follows."""
    first = Leader(tmp_path, 7)
    folder = tmp_path / "next"
    folder.mkdir()
    second = Leader(folder, epoch)
    signpost = Signpost(first.path, 7)
    await first.server.__aenter__()
    async with second.server, front_of(signpost) as client:
        await client.submit(REQUEST)
        signpost.point(second.path, epoch)
        await first.server.__aexit__()
        await until(lambda: second.host.open_requests == 1)


async def test_a_front_waits_for_a_leader_of_its_own_version(tmp_path: Path) -> None:
    """During a rolling update another version may lead for longer than a front waits for a scheduler: its connection is
    closed, and tried again.
    """
    met = asyncio.Event()
    meetings = 0

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal meetings
        writer.write(frame(msgspec.msgpack.encode(Hello("another version", epoch=1))))
        await reader.read()
        writer.close()
        meetings += 1
        if meetings == 3:
            met.set()

    leader = Leader(tmp_path, 2)
    other = str(tmp_path / "other")
    signpost = Signpost(other, 0)
    async with leader.server, await asyncio.start_unix_server(greet, other):
        channel = FrontChannel(signpost, 1, "replica")
        opening = asyncio.create_task(channel.open(0.0))
        await met.wait()
        assert not opening.done()
        signpost.point(leader.path, 0)
        assert await opening == SECRET


async def test_a_leader_that_hangs_after_it_was_reached_is_left_for_the_next(tmp_path: Path) -> None:
    """It was stopped right after the handshake: the front does not wait for it while another leads."""

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    class Impatient(Signpost):
        answers_within = 0.05

    leader = Leader(tmp_path, 2)
    silent = str(tmp_path / "silent")
    signpost = Impatient(silent, 0)
    async with leader.server, await asyncio.start_unix_server(hang, silent):
        with pytest.raises(ChannelClosed, match="does not answer"):
            await connect_front(signpost, Hello(""), lambda _: None)
        signpost.answers_within = 60.0
        signpost.point(leader.path, 0)
        assert await FrontChannel(signpost, 1, "replica").open() == SECRET


async def test_a_front_that_finds_no_scheduler_says_why() -> None:
    """So that an operator sees whether nobody leads, or this replica has another secret."""

    class Nowhere(Signpost):
        async def connect(self, end: FrontEnd) -> None:  # noqa: ARG002
            raise ConnectionError("no replica leads")

    with pytest.raises(ChannelClosed, match="no replica leads"):
        await connect_front(Nowhere("", 0), Hello(""), lambda _: None)


async def test_a_decision_has_a_time_of_the_front_s_own_clock(tmp_path: Path) -> None:
    """The monotonic clock of the leader's machine may be ahead of it by any time."""
    leader = Leader(tmp_path, 1)
    async with leader.server, front_of(Signpost(leader.path, 1)) as client:
        placement = (await client.submit(REQUEST)).placement
        assert placement is not None
        assert placement.decided <= time.monotonic()
        client.settle(Cancelled(REQUEST.id))
        await until(lambda: leader.host.at_rest)

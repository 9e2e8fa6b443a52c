"""The channel over a Unix socket: frames survive any split, and what a lost front leaves is settled once."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.channel.client import SchedulerClient
from router.channel.codec import channel_version
from router.channel.front_channel import FrontChannel
from router.channel.host import SchedulerHost
from router.channel.messages import UnreachableWorker, WorkerCard, WorkerChanged
from router.channel.socket import (
    LATE_PROBES,
    MAX_FRAME_BYTES,
    ChannelClosed,
    ChannelServer,
    FrameCutter,
    FrontEnd,
    Hello,
    UnixRoute,
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
from router.errors import Refused
from tests.channel.test_channel import Recorder, WorkerRecorder
from tests.support.running import until

KEY = PromptHasher(b"0123456789abcdef").prompt(b"Hello").key
SECRET = b"secret of the hashes"
CARD = WorkerCard(WorkerId("w0"), "http://w0")


def pieces(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    """Split bytes at these places."""
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    yield from (data[start:end] for start, end in pairwise(places))


@given(st.lists(st.binary(max_size=300), max_size=8), st.lists(st.integers(min_value=0), max_size=20))
def test_frames_survive_any_split(payloads: list[bytes], cuts: list[int]) -> None:
    """Wherever the stream is split, the same frames come out, each as soon as its last byte has arrived."""
    cutter, stream, found = FrameCutter(), b"".join(map(frame, payloads)), list[bytes]()
    received = 0
    for piece in pieces(stream, cuts):
        found += cutter.feed(piece)
        received += len(piece)
        assert sum(len(frame(payload)) for payload in found) <= received
    assert found == payloads


def test_a_frame_that_is_too_long_is_refused() -> None:
    """Its length alone is enough, so that nothing is kept for it."""
    with pytest.raises(ValueError, match="bytes"):
        list(FrameCutter().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "big")))


def request(name: str) -> Request:
    return Request(RequestId(name), ClientId("ann"), "m", (KEY,))


class SocketScene:
    """A scheduler at a Unix socket, with workers that have room for one request each."""

    def __init__(self, path: Path, workers: int) -> None:
        self.path = str(path / "channel")
        self.recorder = Recorder()
        clock = asyncio.get_running_loop().time
        scheduler = Scheduler(
            POLICIES["rr+fcfs"], SchedulerSettings(window=FixedWindow(1, 1000)), Parameters(), Random(0)
        )
        self.host = SchedulerHost(scheduler, [self.recorder], clock)
        self.host.announce(WorkerChanged(CARD))
        for number in range(workers):
            self.host.feed(WorkerJoined(Worker(WorkerId(f"w{number}"), frozenset({"m"}))))
        self.server = ChannelServer(self.host, SECRET, self.path)

    async def front(self, number: int) -> tuple[FrontEnd, SchedulerClient]:
        """Connect a front."""
        channel = FrontChannel(UnixRoute(self.path), number)
        assert await channel.open() == SECRET
        client = SchedulerClient(self.host.clock)
        channel.attach(client)
        assert channel._end is not None
        return channel._end, client

    def ends(self) -> list[RequestId]:
        """The requests that have ended, in order."""
        return [event.request for event in self.recorder.events if isinstance(event, Finished | Cancelled)]

    async def check_at_rest(self) -> None:
        """Assert that nothing is left of any request."""
        await until(lambda: self.host.at_rest)
        assert self.host.scheduler.live == 0
        self.host.scheduler.ledger.check_conservation()


@asynccontextmanager
async def socket_scene(path: Path, workers: int = 1) -> AsyncIterator[SocketScene]:
    scene = SocketScene(path, workers)
    async with scene.server:
        yield scene
    scene.host.close()


async def test_a_request_is_placed_and_settled_over_the_socket(tmp_path: Path) -> None:
    """A second one of another front waits until the first has ended."""
    async with socket_scene(tmp_path) as scene:
        (_, one), (_, two) = await scene.front(1), await scene.front(2)
        assert (await one.submit(request("a"))).worker == "w0"
        waiting = two.submit(request("b"))
        await until(lambda: scene.host.scheduler.waiting == 1)
        one.settle(Finished(RequestId("a"), Usage(5, 1)))
        assert (await waiting).worker == "w0"
        two.settle(Finished(RequestId("b"), Usage(5, 1)))
        await scene.check_at_rest()
        assert scene.ends() == ["a", "b"]


async def test_a_front_learns_of_the_workers_before_it_has_a_client(tmp_path: Path) -> None:
    """What arrives between the welcome and the client is kept for the client."""
    async with socket_scene(tmp_path) as scene:
        channel = FrontChannel(UnixRoute(scene.path), 1)
        await channel.open()
        await until(lambda: bool(channel._early))
        client, recorder = SchedulerClient(scene.host.clock), WorkerRecorder()
        client.follow_workers(recorder)
        channel.attach(client)
        assert recorder.changes == [WorkerChanged(CARD)]


async def test_what_is_sent_in_one_turn_goes_out_in_one_write(tmp_path: Path) -> None:
    """A hundred requests of one turn are one system call."""
    async with socket_scene(tmp_path) as scene:
        end, client = await scene.front(1)
        await asyncio.sleep(0)  # one turn, so that what was sent for the connection is written
        assert end._probe_timer is not None
        end._probe_timer.cancel()  # a probe would be written, too
        writes = list[bytes]()
        transport = end._transport
        assert transport is not None

        class CountedTransport(asyncio.Transport):
            def is_closing(self) -> bool:
                return False

            def write(self, data: bytes | bytearray | memoryview) -> None:
                writes.append(bytes(data))

        end._transport = CountedTransport()
        for number in range(100):
            client.submit(request(f"{number}"))
        assert not writes
        await asyncio.sleep(0)  # the turn ends
        assert len(list(FrameCutter().feed(writes[0]))) == 100
        assert len(writes) == 1
        end._transport = transport


async def test_the_requests_of_a_lost_front_are_cancelled_once(tmp_path: Path) -> None:
    """The waiting ones end first, so that none of them is dispatched; those of other fronts go on."""
    async with socket_scene(tmp_path) as scene:
        (end, lost), (_, other) = await scene.front(1), await scene.front(2)
        await lost.submit(request("running"))
        for name in ("next", "after"):
            lost.submit(request(name))
        await until(lambda: scene.host.scheduler.waiting == 2)
        survivor = other.submit(request("other"))
        await until(lambda: scene.host.scheduler.waiting == 3)
        end.abort()
        assert (await survivor).worker == "w0"
        assert scene.ends() == ["next", "after", "running"]
        assert scene.server.fronts == 1
        other.settle(Finished(RequestId("other")))
        await scene.check_at_rest()
        assert scene.ends() == ["next", "after", "running", "other"]


async def test_a_front_that_leaves_in_order_has_all_its_ends_counted(tmp_path: Path) -> None:
    """What was sent right before the close arrives."""
    async with socket_scene(tmp_path) as scene:
        end, client = await scene.front(1)
        await client.submit(request("a"))
        client.settle(Finished(RequestId("a"), Usage(5, 1)))
        await end.close()
        await scene.check_at_rest()
        assert [type(event) for event in scene.recorder.events[-1:]] == [Finished]


async def test_two_fronts_may_use_the_same_id(tmp_path: Path) -> None:
    """The later request gets an id of its own, which its front is told; both end under their own."""
    async with socket_scene(tmp_path, workers=2) as scene:
        (_, one), (_, two) = await scene.front(1), await scene.front(2)
        first, second = await one.submit(request("same")), await two.submit(request("same"))
        assert (first.request, first.known_as) == ("same", None)
        assert second.request == "same"
        assert second.known_as not in (None, "same")
        two.start_stream(RequestId("same"), lambda: 7)
        two.settle(Cancelled(RequestId("same")))
        await until(lambda: scene.host.scheduler.live == 1)
        one.settle(Finished(RequestId("same")))
        await scene.check_at_rest()
        assert scene.ends() == [second.known_as, "same"]
        again = await two.submit(request("same"))
        assert again.known_as is None
        two.settle(Cancelled(RequestId("same")))


async def test_a_late_assignment_is_not_taken_for_that_of_a_later_request(tmp_path: Path) -> None:
    """The id of a cancelled request counts as in use until the reply to it can no longer come."""
    async with socket_scene(tmp_path) as scene:
        _, client = await scene.front(1)
        client.submit(request("dispatched"))
        client.settle(Cancelled(RequestId("dispatched")))
        client.submit(request("running"))
        client.submit(request("waiting"))
        client.settle(Cancelled(RequestId("waiting")))
        settled = [RequestId("dispatched"), RequestId("waiting")]
        assert all(name in client for name in settled)
        for name in settled:
            await until(partial(lambda name: name not in client, name))
        assert RequestId("running") in client
        client.settle(Cancelled(RequestId("running")))
        await until(lambda: client.at_rest)
        await scene.check_at_rest()


async def test_another_version_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither end takes a message of the other."""
    async with socket_scene(tmp_path) as scene:
        reader, writer = await asyncio.open_unix_connection(scene.path)
        writer.write(frame(msgspec.msgpack.encode(Hello("another version", 1))))
        received = b"".join([block async for block in reader])
        writer.close()
        assert len(list(FrameCutter().feed(received))) == 1
        assert "another version" in caplog.text

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frame(msgspec.msgpack.encode(Hello("another version"))))
        writer.close()

    async with await asyncio.start_unix_server(serve, tmp_path / "other"):
        with pytest.raises(ChannelClosed, match="another version"):
            await FrontChannel(UnixRoute(str(tmp_path / "other")), 1).open()


async def test_bytes_that_are_no_message_cut_the_channel(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The scheduler goes on with the other fronts."""
    caplog.set_level(logging.ERROR)
    async with socket_scene(tmp_path) as scene:
        _, writer = await asyncio.open_unix_connection(scene.path)
        writer.write(frame(msgspec.msgpack.encode(Hello(channel_version(), 1))) + frame(b"\xc1"))
        await until(lambda: "invalid message" in caplog.text)
        await until(lambda: not scene.server.fronts)
        writer.close()
        _, client = await scene.front(2)
        assert (await client.submit(request("a"))).worker == "w0"
        client.settle(Finished(RequestId("a")))
        await scene.check_at_rest()


async def test_a_front_refuses_new_calls_while_the_scheduler_lags(tmp_path: Path) -> None:
    """From the last of a few probes without an answer until the answer; a slow reader counts at once."""
    async with socket_scene(tmp_path) as scene:
        end, client = await scene.front(1)
        client.check_lag()
        end._probe()
        for _ in range(LATE_PROBES):
            client.check_lag()
            end._probe()
        with pytest.raises(Refused) as caught:
            client.check_lag()
        assert (caught.value.status, caught.value.retry_after) == (429, 2.0)
        await until(lambda: not end.behind)
        client.check_lag()
        assert end.delay > 0
        end.pause_writing()
        with pytest.raises(Refused):
            client.check_lag()
        end.resume_writing()
        client.check_lag()


async def test_a_message_that_the_scheduler_fails_on_ends_no_other_call(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Here a fact that nothing takes; it is logged, and the next request is served."""
    async with socket_scene(tmp_path) as scene:
        _, client = await scene.front(1)
        client.report(UnreachableWorker(WorkerId("w0")))
        assert (await client.submit(request("a"))).worker == "w0"
        assert "UnreachableWorker" in caplog.text
        client.settle(Finished(RequestId("a")))
        await scene.check_at_rest()

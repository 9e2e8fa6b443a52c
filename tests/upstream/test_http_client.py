"""Blocks that a worker's connection pushes: each is taken once, in the turn in which it arrives."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

import pytest

from router.errors import WorkerBroke, WorkerHung
from router.upstream.http_client import IdleTimeouts, WorkerClient, WorkerResponse
from tests.support.scripted_engine import TIMEOUT_S, Call, scripted_engine


class Sink:
    """Takes blocks while it accepts them, and lets a test wait for them."""

    def __init__(self) -> None:
        self.blocks: list[bytes] = []
        self.accepts = True
        self._arrived = asyncio.Event()

    def __call__(self, block: bytes) -> bool:
        if self.accepts:
            self.blocks.append(block)
            self._arrived.set()
        return self.accepts

    async def received(self, data: bytes) -> None:
        """Wait until the blocks taken so far are these bytes."""
        async with asyncio.timeout(TIMEOUT_S):
            while b"".join(self.blocks) != data:
                self._arrived.clear()
                await self._arrived.wait()


@asynccontextmanager
async def answering(
    timeouts: IdleTimeouts | None = None, first: bytes = b""
) -> AsyncIterator[tuple[Call, WorkerResponse]]:
    """Send a call to an engine that begins its answer, with a first block in the same packet if there is one."""
    async with scripted_engine() as engine:
        client = WorkerClient(engine.url, TIMEOUT_S)
        call_in_time = timeouts or IdleTimeouts()
        sending = asyncio.create_task(client.send("POST", "/v1/x", {}, b"{}", call_in_time, once=not first))
        call = await engine.call()
        block = b"%x\r\n%b\r\n" % (len(first), first) if first else b""
        await call.raw(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + block)
        response = await sending
        try:
            yield call, response
        finally:
            response.close()
            client.close()


async def test_the_headers_alone_wake_nobody() -> None:
    """A call that may be sent again returns with the first bytes of the body, and with whatever else ends the wait."""
    async with scripted_engine() as engine:
        client = WorkerClient(engine.url, TIMEOUT_S)
        for rest in (b"5\r\nfirst\r\n", b"0\r\n\r\n", None):
            sending = asyncio.create_task(client.send("POST", "/v1/x", {}, b"{}", IdleTimeouts()))
            call = await engine.call()
            await call.raw(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            done, _ = await asyncio.wait([sending], timeout=0.1)
            assert not done
            if rest is None:
                call.reset()
            else:
                await call.raw(rest)
            async with asyncio.timeout(TIMEOUT_S):
                response = await sending
                if rest is None:
                    with pytest.raises(WorkerBroke):
                        await response.read()
                else:
                    assert await response.read() == (b"first" if b"first" in rest else b"")
            response.close()
        client.close()


async def finished(pushing: "asyncio.Task[bytes | None]") -> bytes | None:
    """Return what the push returns; raises what it raises."""
    async with asyncio.timeout(TIMEOUT_S):
        return await pushing


async def test_blocks_are_pushed_until_the_last_which_is_returned() -> None:
    """The blocks before the last go to the sink, and not the one that arrives with the end of the answer."""
    async with answering() as (call, response):
        sink = Sink()
        pushing = asyncio.create_task(response.push(sink))
        for data in (b"one", b"onetwo"):
            await call.write(data[len(b"".join(sink.blocks)) :])
            await sink.received(data)
        await call.raw(b"4\r\nlast\r\n0\r\n\r\n")
        assert await finished(pushing) == b"last"
        assert b"".join(sink.blocks) == b"onetwo"
        assert await response.read() == b""


async def test_a_declined_block_is_returned() -> None:
    """A block that the sink declines is not lost, and the sink that comes after it gets the next one."""
    async with answering() as (call, response):
        sink = Sink()
        sink.accepts = False
        pushing = asyncio.create_task(response.push(sink))
        await call.write(b"declined")
        assert (sink.blocks, await finished(pushing)) == ([], b"declined")
        sink.accepts = True
        pushing = asyncio.create_task(response.push(sink))
        await call.write(b"taken")
        await sink.received(b"taken")
        response.stop_push()
        assert await finished(pushing) is None


async def test_nothing_is_pushed_while_a_block_waits_to_be_read() -> None:
    """A block that arrived before `push` comes first."""
    async with answering(first=b"first") as (_, response):
        sink = Sink()
        assert await finished(asyncio.create_task(response.push(sink))) == b"first"
        assert sink.blocks == []


async def test_an_error_of_the_sink_is_raised_by_push() -> None:
    """The task that waits fails, and not the connection's callback."""

    def fail(block: bytes) -> bool:
        raise WorkerBroke(block.decode())

    async with answering() as (call, response):
        pushing = asyncio.create_task(response.push(fail))
        await call.write(b"nonsense")
        with pytest.raises(WorkerBroke, match="nonsense"):
            await finished(pushing)


async def test_a_worker_that_breaks_off_ends_the_push() -> None:
    """`push` raises the error."""
    async with answering() as (call, response):
        sink = Sink()
        pushing = asyncio.create_task(response.push(sink))
        await call.write(b"part")
        await sink.received(b"part")
        call.reset()
        with pytest.raises(WorkerBroke):
            await finished(pushing)


async def test_silence_counts_from_the_last_pushed_block() -> None:
    """A stream can last longer than the time limit between two of its blocks."""
    async with answering(IdleTimeouts(None, 1.5)) as (call, response):
        response.begin_stream()
        sink = Sink()
        pushing = asyncio.create_task(response.push(sink))
        for number in range(4):
            await call.write(b"x")
            await sink.received(b"x" * (number + 1))
            await asyncio.wait([pushing], timeout=0.5)
        with pytest.raises(WorkerHung):
            await finished(pushing)


@pytest.mark.parametrize("block", [b"", b"first"], ids=["head", "block"])
async def test_an_answer_without_a_length_is_not_complete_when_it_times_out(block: bytes) -> None:
    """Only the worker ends such an answer by closing the connection. After a timeout the call fails."""
    async with scripted_engine() as engine:
        client = WorkerClient(engine.url, TIMEOUT_S)
        sending = asyncio.create_task(client.send("POST", "/v1/x", {}, b"{}", IdleTimeouts(0.2, 0.2)))
        call = await engine.call()
        await call.raw(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + block)
        async with asyncio.timeout(TIMEOUT_S):
            response = await sending
            response.begin_stream()
            if block:
                assert await response.read() == block
            with pytest.raises(WorkerHung):
                await response.read()
        response.close()
        client.close()


@pytest.mark.parametrize("leave", ["close", "stop_push"])
async def test_a_push_that_was_left_takes_nothing_more(leave: Literal["close", "stop_push"]) -> None:
    """After the call is closed or the push stopped, later blocks do not reach the sink."""
    async with answering() as (call, response):
        sink = Sink()
        pushing = asyncio.create_task(response.push(sink))
        await call.write(b"x")
        await sink.received(b"x")
        (response.close if leave == "close" else response.stop_push)()
        pushing.cancel()
        await asyncio.wait([pushing])
        await call.write(b"y")
        await asyncio.wait([asyncio.create_task(call.end())], timeout=1)
        assert sink.blocks == [b"x"]


async def test_an_interim_answer_and_trailers_add_no_headers() -> None:
    """The headers of an answer are those of its own head: what a 103 announced or a trailer adds is not passed on."""
    async with scripted_engine() as engine:
        client = WorkerClient(engine.url, TIMEOUT_S)
        sending = asyncio.create_task(client.send("POST", "/v1/x", {}, b"{}"))
        call = await engine.call()
        await call.raw(b"HTTP/1.1 103 Early Hints\r\nretry-after: 9\r\ncontent-length: 3\r\n\r\n")
        await call.raw(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nfirst\r\n0\r\nx: y\r\n\r\n")
        async with asyncio.timeout(TIMEOUT_S):
            response = await sending
            assert [await response.read(), await response.read()] == [b"first", b""]
        assert response.headers == {b"transfer-encoding": b"chunked"}
        response.close()
        client.close()


@pytest.mark.parametrize("endless", [b"x%d: y\r\n", b"%d"], ids=["trailers", "trailer"])
async def test_endless_trailers_break_the_answer_off(endless: bytes) -> None:
    """What a worker sends besides the body is bounded, also after the headers."""
    async with answering(first=b"first") as (call, response):

        async def send_endlessly() -> None:
            await call.raw(b"0\r\nx: ")
            for number in range(1 << 20):
                await call.raw(endless % number)

        sending = asyncio.create_task(send_endlessly())
        assert await response.read() == b"first"
        async with asyncio.timeout(TIMEOUT_S):
            with pytest.raises(WorkerBroke):
                await response.read()
            with pytest.raises(ConnectionError):
                await sending


async def test_a_connection_is_reused_only_once_the_worker_has_taken_its_call() -> None:
    """A worker that refuses a call before it has read its body may never read that; the next call would wait behind."""
    heads: list[bytes] = []
    over = asyncio.Event()

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 413 X\r\ncontent-length: 2\r\n\r\n{}")
        await over.wait()
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0, limit=1 << 10) as server:
        client = WorkerClient("http://{}:{}".format(*server.sockets[0].getsockname()), TIMEOUT_S)
        async with asyncio.timeout(TIMEOUT_S):
            for _ in range(2):
                response = await client.send("POST", "/v1/x", {}, bytes(1 << 24))
                assert (response.status, await response.read(), await response.read()) == (413, b"{}", b"")
                response.close()
        over.set()
        client.close()
    assert len(heads) == 2


async def test_a_second_answer_to_a_call_is_dropped_with_the_connection() -> None:
    """It may be about the connection, or meant for another call. Nothing of it joins the first, even in one packet."""
    async with scripted_engine() as engine:
        client = WorkerClient(engine.url, TIMEOUT_S)
        sending = asyncio.create_task(client.send("POST", "/v1/x", {}, b"{}"))
        call = await engine.call()
        first = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nfirst"
        await call.raw(first + b"HTTP/1.1 408 X\r\ncontent-length: 6\r\n\r\nsecond")
        async with asyncio.timeout(TIMEOUT_S):
            response = await sending
            assert (response.status, await response.read(), await response.read()) == (200, b"first", b"")
        response.close()
        await call.wait_closed()
        client.close()

"""Clients that disconnect or stall: their upstream call ends or waits at once, others are not affected, nothing leaks.

`running_router` checks at the end of every test that all counts are zero.
"""

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

import pytest

from tests.support.processes import process_count
from tests.support.running import CHAT, RunningRouter, chat, running_router, until
from tests.support.scripted_engine import DONE, Call, ScriptedEngine, chunk, scripted_engine, usage, usage_chunk

STREAMED = pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])


@asynccontextmanager
async def one_at_a_time() -> AsyncIterator[tuple[ScriptedEngine, RunningRouter]]:
    """An engine behind a router with a window of one request."""
    async with scripted_engine() as engine, running_router(engine.url, max_inflight=1, heartbeat=0.02) as router:
        yield engine, router


async def check_next_is_served(engine: ScriptedEngine, router: RunningRouter) -> None:
    """Assert that the worker's window has room again."""
    async with router.post(chat()) as post:
        await (await engine.call()).answer()
        assert (await post.response()).status == 200


async def service_of(router: RunningRouter, client: str) -> tuple[int, int]:
    """Return the extend and output tokens that a client was charged."""
    await router.check_at_rest()
    served = (await router.fairness())["clients"][client]["service"]
    return served["extend"], served["output"]


@STREAMED
async def test_disconnect_in_the_queue(stream: bool) -> None:
    """The request never reaches the engine and costs nothing; the next request is dispatched."""
    async with one_at_a_time() as (engine, router), router.post(chat(stream=True)) as first:
        running = await engine.call()
        async with router.post(chat("gone", stream=stream, user="gone")) as post:
            await router.until_waiting(1)
            if stream:
                await (await post.response()).content.readuntil(b"\n\n")  # a heartbeat
        await router.until_waiting(0)
        async with router.post(chat("next")) as post:
            await router.until_waiting(1)
            await running.answer()
            await first.read()
            call = await engine.call()
            assert "next" in str(call.json)
            await call.answer()
            assert (await post.response()).status == 200
        assert await service_of(router, "user-gone") == (0, 0)


@STREAMED
async def test_disconnect_before_the_engine_answers(stream: bool) -> None:
    """The request is dispatched, no head has arrived: the engine sees the connection close, and the window has room."""
    async with one_at_a_time() as (engine, router):
        async with router.post(chat(stream=stream)):
            call = await engine.call()
        await call.wait_closed()
        await check_next_is_served(engine, router)


async def test_disconnect_while_the_router_connects() -> None:
    """The request is dispatched, but the worker does not accept the connection."""
    async with scripted_engine() as engine, running_router(engine.url, poll_interval=3600) as router:
        await engine.stop()
        with socket.create_server(("127.0.0.1", engine.port), backlog=0), ExitStack() as fillers:
            for _ in range(4):
                filler = fillers.enter_context(socket.socket())
                filler.setblocking(False)
                filler.connect_ex(("127.0.0.1", engine.port))
            async with router.post(chat()):
                await until(lambda: bool(router.scheduler.attempts))
            await router.check_at_rest()


@STREAMED
async def test_disconnect_during_the_answer(stream: bool) -> None:
    """The head of the answer has arrived, the rest has not."""
    async with one_at_a_time() as (engine, router):
        async with router.post(chat(stream=stream)) as post:
            call = await engine.call()
            await call.begin()
            if stream:
                await call.write(chunk(""))
                await post.response()
        await call.wait_closed()
        await check_next_is_served(engine, router)


async def test_disconnect_while_tokens_stream() -> None:
    """The client pays for what the engine has computed, by the last usage it sent."""
    async with one_at_a_time() as (engine, router):
        async with router.post(chat(stream=True, user="ann")) as post:
            call = await engine.call()
            await call.begin()
            await call.write(chunk("a", usage=usage(9, 1)) + chunk("bc", usage=usage(9, 3)))
            await (await post.response()).content.readexactly(len(chunk("a") + chunk("bc")))
        await call.wait_closed()
        assert await service_of(router, "user-ann") == (9, 3)
        await check_next_is_served(engine, router)


def request_bytes(content: str, **more: object) -> bytes:
    body = json.dumps(chat(content, **more)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


@asynccontextmanager
async def connected(router: RunningRouter) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open a raw connection to the router."""
    reader, writer = await asyncio.open_connection(*router.address)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


@pytest.mark.parametrize("cut", [10, 60, -1], ids=["head", "head and body", "last byte"])
async def test_disconnect_within_the_request(cut: int) -> None:
    """An incomplete request never counts as one."""
    async with one_at_a_time() as (engine, router):
        async with connected(router) as (_, writer):
            writer.write(request_bytes("Hello")[:cut])
            await writer.drain()
        await check_next_is_served(engine, router)
        assert engine.calls.empty()


@STREAMED
@pytest.mark.parametrize("how", ["reset", "half-close"])
async def test_reset_and_half_close(stream: bool, how: str) -> None:
    """A reset and a half-close both count as a disconnect, as in other HTTP/1.1 servers."""
    async with one_at_a_time() as (engine, router), connected(router) as (_, writer):
        writer.write(request_bytes("Hello", stream=stream))
        call = await engine.call()
        if how == "reset":
            raw = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        else:
            writer.write_eof()
        await call.wait_closed()
        await check_next_is_served(engine, router)


async def test_many_disconnect_at_once() -> None:
    """Half of them are queued and half are running."""
    async with scripted_engine() as engine, running_router(engine.url, max_inflight=8) as router:
        async with asyncio.TaskGroup() as group:
            posts = [router.post(chat(f"{i}", stream=i % 3 > 0)) for i in range(16)]
            calls = [await engine.call() for _ in range(8)]
            await router.until_waiting(8)
            for post in posts:
                group.create_task(post.__aexit__())
        await asyncio.gather(*(call.wait_closed() for call in calls))
        await router.check_at_rest()


async def test_a_second_request_on_the_same_connection_waits_for_the_first() -> None:
    """Two requests are answered in order, although the second arrived before the first answer."""
    async with one_at_a_time() as (engine, router), connected(router) as (reader, writer):
        writer.write(request_bytes("one") + request_bytes("two"))
        for word in ("one", "two"):
            call = await engine.call()
            assert word in str(call.json)
            await call.answer(f"answer {word}")
            await reader.readuntil(f"answer {word}".encode())


async def test_disconnect_with_a_second_request_behind_the_first() -> None:
    """The server sees it only after the first answer; then nothing is left of either request. A front that asks a
    scheduler in another process may have sent the second by then, and gives it up.
    """
    async with one_at_a_time() as (engine, router):
        async with connected(router) as (_, writer):
            writer.write(request_bytes("one", stream=True) + request_bytes("two", stream=True))
            call = await engine.call()
        await call.answer()
        await router.check_at_rest()
        if process_count() == 1:
            assert engine.calls.empty()
        while not engine.calls.empty():
            await (await engine.call()).wait_closed()


BLOCK = chunk("x" * 16_000)
BLOCKS = 1500
"""Together, the blocks exceed the kernel buffers of both connections."""


async def flood(call: Call) -> None:
    await call.begin()
    for _ in range(BLOCKS):
        await call.write(BLOCK)
    await call.write(chunk("", "stop") + usage_chunk(9, BLOCKS) + DONE)
    await call.end()


async def check_others_are_served(engine: ScriptedEngine, router: RunningRouter) -> None:
    """Assert that another stream passes, block by block."""
    async with router.post(chat(stream=True)) as post:
        call = await engine.call()
        await call.begin()
        for index in range(500):
            await call.write(chunk(f"{index}"))
            client = (await post.response()).content
            assert await client.readexactly(len(chunk(f"{index}"))) == chunk(f"{index}")


async def test_a_client_that_does_not_read_stalls_only_its_own_engine() -> None:
    """Beyond its part of the budget its answer waits in the engine, while others go on; later it gets every byte."""
    async with (
        scripted_engine(send_buffer=1 << 16) as engine,
        running_router(engine.url, max_held_bytes=1 << 20) as router,
        router.post(chat(stream=True)) as slow,
    ):
        flooding = asyncio.create_task(flood(await engine.call()))
        await check_others_are_served(engine, router)
        assert not flooding.done(), "the router read on for a client that does not"
        assert await slow.read() == BLOCK * BLOCKS + chunk("", "stop") + DONE
        await flooding


async def test_a_client_that_does_not_read_can_disconnect() -> None:
    """The call to its engine ends although the router is waiting to write."""
    settings = {"max_held_bytes": 1 << 20}
    async with scripted_engine(send_buffer=1 << 16) as engine, running_router(engine.url, **settings) as router:
        async with router.post(chat(stream=True)):
            call = await engine.call()
            flooding = asyncio.create_task(flood(call))
            await check_others_are_served(engine, router)
            assert not flooding.done()
        await call.wait_closed()
        with pytest.raises(ConnectionError):
            await flooding

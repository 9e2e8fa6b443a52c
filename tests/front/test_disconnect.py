"""Clients that leave, stall or speak oddly: their upstream ends or waits at once, nobody else's does, nothing leaks.

`running_router` checks at the end of every test that all counts are zero.
"""

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

import pytest

from tests.support.running import CHAT, RunningRouter, chat, running_router, until
from tests.support.scripted_engine import DONE, Call, ScriptedEngine, chunk, scripted_engine, usage, usage_chunk

STREAMED = pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])


@asynccontextmanager
async def one_by_one() -> AsyncIterator[tuple[ScriptedEngine, RunningRouter]]:
    """An engine that is sent one request at a time."""
    async with scripted_engine() as engine, running_router(engine.url, max_inflight=1, heartbeat=0.02) as router:
        yield engine, router


async def check_next_is_served(engine: ScriptedEngine, router: RunningRouter) -> None:
    """The place is free again."""
    async with router.post(chat()) as post:
        await (await engine.call()).answer()
        assert (await post.response()).status == 200


async def service_of(router: RunningRouter, client: str) -> tuple[int, int]:
    """Extend and output tokens that a client was charged for."""
    await router.check_at_rest()
    served = (await router.fairness())["clients"][client]["service"]
    return served["extend"], served["output"]


@STREAMED
async def test_leaving_the_queue(stream: bool) -> None:
    """Whoever leaves before its turn takes nobody's turn, never reaches the engine, and pays nothing."""
    async with one_by_one() as (engine, router), router.post(chat(stream=True)) as first:
        running = await engine.call()
        async with router.post(chat("gone", stream=stream, user="gone")) as post:
            await until(lambda: router.scheduler.waiting == 1)
            if stream:
                await (await post.response()).content.readuntil(b"\n\n")  # a heartbeat
        await until(lambda: router.scheduler.waiting == 0)
        async with router.post(chat("next")) as post:
            await until(lambda: router.scheduler.waiting == 1)
            await running.answer()
            await first.read()
            call = await engine.call()
            assert "next" in str(call.json)
            await call.answer()
            assert (await post.response()).status == 200
        assert await service_of(router, "user-gone") == (0, 0)


@STREAMED
async def test_leaving_before_the_engine_answers(stream: bool) -> None:
    """Dispatched, but no header yet: the engine sees the connection close, and the place is free."""
    async with one_by_one() as (engine, router):
        async with router.post(chat(stream=stream)):
            call = await engine.call()
        await call.gone()
        await check_next_is_served(engine, router)


async def test_leaving_while_the_router_connects() -> None:
    """Dispatched, but the worker does not accept the connection."""
    async with scripted_engine() as engine, running_router(engine.url, poll_interval=3600) as router:
        await engine.stop()
        with socket.create_server(("127.0.0.1", engine.port), backlog=0), ExitStack() as fillers:
            for _ in range(4):
                filler = fillers.enter_context(socket.socket())
                filler.setblocking(False)
                filler.connect_ex(("127.0.0.1", engine.port))
            async with router.post(chat()):
                await until(lambda: bool(router.scheduler.ledger.bills))
            await router.check_at_rest()


@STREAMED
async def test_leaving_amid_the_answer(stream: bool) -> None:
    """The head of the answer is there and its rest is not."""
    async with one_by_one() as (engine, router):
        async with router.post(chat(stream=stream)) as post:
            call = await engine.call()
            await call.begin()
            if stream:
                await call.write(chunk(""))
                await post.response()
        await call.gone()
        await check_next_is_served(engine, router)


async def test_leaving_amid_the_tokens() -> None:
    """What the engine has computed until then is paid, by its own last count."""
    async with one_by_one() as (engine, router):
        async with router.post(chat(stream=True, user="ann")) as post:
            call = await engine.call()
            await call.begin()
            await call.write(chunk("a", usage=usage(9, 1)) + chunk("bc", usage=usage(9, 3)))
            await (await post.response()).content.readexactly(len(chunk("a") + chunk("bc")))
        await call.gone()
        assert await service_of(router, "user-ann") == (9, 3)
        await check_next_is_served(engine, router)


def request_bytes(content: str, **more: object) -> bytes:
    body = json.dumps(chat(content, **more)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


@asynccontextmanager
async def connected(router: RunningRouter) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A bare connection to the router."""
    reader, writer = await asyncio.open_connection(*router.address)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


@pytest.mark.parametrize("cut", [10, 60, -1], ids=["head", "head and body", "last byte"])
async def test_leaving_within_the_request(cut: int) -> None:
    """A request that does not come whole never counts as one."""
    async with one_by_one() as (engine, router):
        async with connected(router) as (_, writer):
            writer.write(request_bytes("Hello")[:cut])
            await writer.drain()
        await check_next_is_served(engine, router)
        assert engine.calls.empty()


@STREAMED
@pytest.mark.parametrize("how", ["reset", "half-close"])
async def test_other_ways_to_leave(stream: bool, how: str) -> None:
    """A reset, and a client that says it will send no more, which HTTP/1.1 servers take for a farewell."""
    async with one_by_one() as (engine, router), connected(router) as (_, writer):
        writer.write(request_bytes("Hello", stream=stream))
        call = await engine.call()
        if how == "reset":
            raw = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        else:
            writer.write_eof()
        await call.gone()
        await check_next_is_served(engine, router)


async def test_many_leave_at_once() -> None:
    """Half of them queued, half running, all at the same moment."""
    async with scripted_engine() as engine, running_router(engine.url, max_inflight=8) as router:
        async with asyncio.TaskGroup() as group:
            posts = [router.post(chat(f"{i}", stream=i % 3 > 0)) for i in range(16)]
            calls = [await engine.call() for _ in range(8)]
            await until(lambda: router.scheduler.waiting == 8)
            for post in posts:
                group.create_task(post.__aexit__())
        await asyncio.gather(*(call.gone() for call in calls))
        await router.check_at_rest()


async def test_a_second_request_on_the_same_connection_waits_for_the_first() -> None:
    """Both are answered, in their order, also when the second came before the first answer."""
    async with one_by_one() as (engine, router), connected(router) as (reader, writer):
        writer.write(request_bytes("one") + request_bytes("two"))
        for word in ("one", "two"):
            call = await engine.call()
            assert word in str(call.json)
            await call.answer(f"answer {word}")
            await reader.readuntil(f"answer {word}".encode())


async def test_leaving_with_a_second_request_behind_the_first() -> None:
    """The server cannot see it before the first answer's end, but nothing of either is left after that."""
    async with one_by_one() as (engine, router):
        async with connected(router) as (_, writer):
            writer.write(request_bytes("one", stream=True) + request_bytes("two", stream=True))
            call = await engine.call()
        await call.answer()
        await router.check_at_rest()
        assert engine.calls.empty()


BLOCK = chunk("x" * 16_000)
BLOCKS = 1500
"""Together more than the kernel buffers on both connections hold."""


async def flood(call: Call) -> None:
    await call.begin()
    for _ in range(BLOCKS):
        await call.write(BLOCK)
    await call.write(chunk("", "stop") + usage_chunk(9, BLOCKS) + DONE)
    await call.end()


async def others_go_on(engine: ScriptedEngine, router: RunningRouter) -> None:
    """Many blocks of another stream go through, one by one."""
    async with router.post(chat(stream=True)) as post:
        call = await engine.call()
        await call.begin()
        for index in range(500):
            await call.write(chunk(f"{index}"))
            client = (await post.response()).content
            assert await client.readexactly(len(chunk(f"{index}"))) == chunk(f"{index}")


async def test_a_client_that_does_not_read_stops_its_own_engine_only() -> None:
    """Beyond its part of the budget, its answer waits in the engine while another goes on; then it has every byte."""
    async with (
        scripted_engine(send_buffer=1 << 16) as engine,
        running_router(engine.url, max_held_bytes=1 << 20) as router,
        router.post(chat(stream=True)) as slow,
    ):
        flooding = asyncio.create_task(flood(await engine.call()))
        await others_go_on(engine, router)
        assert not flooding.done(), "the router read on for a client that does not"
        assert await slow.read() == BLOCK * BLOCKS + chunk("", "stop") + DONE
        await flooding


async def test_a_client_that_does_not_read_may_still_leave() -> None:
    """Its engine is let go although the router waits to write."""
    settings = {"max_held_bytes": 1 << 20}
    async with scripted_engine(send_buffer=1 << 16) as engine, running_router(engine.url, **settings) as router:
        async with router.post(chat(stream=True)):
            call = await engine.call()
            flooding = asyncio.create_task(flood(call))
            await others_go_on(engine, router)
            assert not flooding.done()
        await call.gone()
        with pytest.raises(ConnectionError):
            await flooding

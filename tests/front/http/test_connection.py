"""Clients that send too much, too slowly or too early, or do not read, on real sockets."""

import asyncio
import gc
import json
import os
import socket
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from random import Random

import pytest
import uvicorn
import uvloop
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from router.front.byte_budget import ByteBudget
from router.front.exchange import ClientGone, Exchange
from router.front.http.connection import ACCEPTS_PER_TURN, accept_sockets, connection_class
from router.front.http.connection_limits import Connections, FrontLimits
from tests.support.running import CHAT, TIMEOUT_S, RunningRouter, chat, running_router, until
from tests.support.scripted_engine import DONE, ScriptedEngine, chunk, scripted_engine, usage_chunk

SOON = 0.5
"""Timeouts in seconds. Tests wait for their effect, however long it takes, and others must be served meanwhile."""


@asynccontextmanager
async def served(**settings: object) -> AsyncIterator[tuple[ScriptedEngine, RunningRouter]]:
    """Run a router with one engine."""
    async with scripted_engine() as engine, running_router(engine.url, **settings) as router:
        yield engine, router


@asynccontextmanager
async def connected(
    router: RunningRouter, address: str = "127.0.0.1"
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open a raw connection to the router from this loopback address."""
    reader, writer = await asyncio.open_connection(*router.address, local_addr=(address, 0))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


@asynccontextmanager
async def serving(app: ASGIApp) -> AsyncIterator[tuple[str, int]]:
    """Serve an application without a router. Yields its address."""
    config = uvicorn.Config(app, ws="none", lifespan="off", log_config=None)
    config.load()
    connection: Callable[..., asyncio.Protocol] = connection_class(Connections(FrontLimits(), ByteBudget(2**20)))
    made = partial(connection, config=config, server_state=ServerState(), app_state={})
    async with await asyncio.get_running_loop().create_server(made, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()


async def read_to_end(reader: asyncio.StreamReader) -> bytes:
    """Read until the router closes the connection."""
    async with asyncio.timeout(TIMEOUT_S):
        return await reader.read()


def refused(answer: bytes, status: int, code: str | None = None) -> dict[str, object]:
    """Return the error object of a complete answer that closes the connection."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    assert b"connection: close" in head
    assert b"content-type: application/json" in head
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert code is None or error["code"] == code
    return error  # type: ignore[no-any-return]


def request_bytes(content: str = "Hello", **more: object) -> bytes:
    body = json.dumps(chat(content, **more)).encode()
    return b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        CHAT.encode(),
        len(body),
        body,
    )


async def check_another_is_served(engine: ScriptedEngine, router: RunningRouter) -> None:
    """Assert that another client is served."""
    async with router.post(chat()) as post:
        await (await engine.call()).answer()
        assert (await post.response()).status == 200


@pytest.mark.parametrize(
    ("head", "status", "code"),
    [
        (b"GET /health HTTP/1.1\r\nx: " + b"y" * 3000 + b"\r\n\r\n", 431, "headers_too_large"),
        (b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 500 + b"\r\n", 431, "headers_too_large"),
        (b"GET /health HTTP/1.1\r\nx: " + b"y" * 3000, 431, "headers_too_large"),
        (b"GET /health HTTP/1.1\r\n" + b"x" * 3000, 431, "headers_too_large"),
        (b"\r\n" * 2000, 431, "headers_too_large"),
        (b"GET /" + b"x" * 600 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n", 414, "url_too_long"),
        (b"GET /" + b"x" * 3000, 431, "headers_too_large"),
        (b"POST /health HTTP/1.1\r\ncontent-length: 2\r\ncontent-length: 2\r\n\r\n{}", 400, "invalid_http"),
        (b"POST /health HTTP/1.1\r\ncontent-length: 2, 2\r\n\r\n{}", 400, "invalid_http"),
        (b"POST /health HTTP/1.1\r\ntransfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n0\r\n\r\n", 400, None),
        (b"POST /health HTTP/1.1\r\ntransfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n", 400, "invalid_http"),
        (b"POST /health HTTP/1.1\r\ntransfer-encoding: xchunked\r\n\r\n0\r\n\r\n", 400, "invalid_http"),
        (b"POST /health HTTP/1.1\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400, "invalid_http"),
        (b"POST /health HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400, "invalid_http"),
        (b"GET /health HTTP/1.1\r\nx : y\r\n\r\n", 400, "invalid_http"),
        (b"GET /health HTTP/1.1\r\nx: a\x00b\r\n\r\n", 400, "invalid_http"),
        (b"GET /health HTTP/1.1\r\nx: a\r\n folded\r\n\r\n", 400, "invalid_http"),
    ],
)
async def test_a_head_that_is_too_large_or_ambiguous_is_refused(head: bytes, status: int, code: str | None) -> None:
    """The answer has an error object and closes the connection, whether the head is complete or endless."""
    async with served(header_limit=2048, url_limit=512) as (engine, router):
        async with connected(router) as (reader, writer):
            writer.write(head)
            refused(await read_to_end(reader), status, code)
        await check_another_is_served(engine, router)


@pytest.mark.parametrize(
    ("sent", "part"),
    [
        (b"GET /health HTTP/1.1\r\n", "headers"),
        (request_bytes()[:-1], "body"),
        (b"POST %b HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{" % CHAT.encode(), "body"),
    ],
)
async def test_a_request_that_is_not_complete_in_time_is_refused(sent: bytes, part: str) -> None:
    """A head or body that is late gets 408, with a declared length or in chunks."""
    async with served(header_timeout=SOON, body_timeout=SOON) as (engine, router):
        async with connected(router) as (reader, writer):
            writer.write(sent)
            error = refused(await read_to_end(reader), 408, "request_timeout")
            assert part in str(error["message"])
        await check_another_is_served(engine, router)


async def test_sending_byte_by_byte_gains_no_time() -> None:
    """A head has the same deadline however it is split."""
    async with served(header_timeout=SOON) as (_, router), connected(router) as (reader, writer):
        reading = asyncio.ensure_future(read_to_end(reader))
        writer.write(b"GET /health HTTP/1.1\r\nx: ")
        async with asyncio.timeout(TIMEOUT_S):
            while not reading.done():
                writer.write(b"y")
                await asyncio.sleep(0.01)
        refused(await reading, 408, "request_timeout")


async def test_a_body_that_arrives_steadily_can_take_longer() -> None:
    """Enough of the body must arrive in each period; here, one block is enough."""
    limit = 1.0  # long compared with the stalls of a busy machine
    async with served(body_timeout=limit) as (_, router), connected(router) as (reader, writer):
        writer.write(
            b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\n\r\n" % CHAT.encode()
        )
        until_then = asyncio.get_running_loop().time() + 2 * limit
        while asyncio.get_running_loop().time() < until_then:
            writer.write(b"1000\r\n" + b"x" * 4096 + b"\r\n")
            await asyncio.sleep(0.01)
        writer.write(b"0\r\n\r\n")
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 400 ")


async def test_a_silent_connection_is_closed() -> None:
    """A connection without a request is closed without an answer."""
    async with served(header_timeout=SOON) as (_, router), connected(router) as (reader, _):
        assert await read_to_end(reader) == b""


@pytest.mark.one_process("each front has its share of the connections")
async def test_too_many_connections_of_one_address_are_refused() -> None:
    """Connections above the limit get 429 and are counted, until one of the others is closed."""
    async with served(max_connections_per_address=2) as (engine, router):
        async with connected(router), connected(router), connected(router) as (reader, _):
            error = refused(await read_to_end(reader), 429)
            assert error["type"] == "rate_limit_error"
        await until(lambda: not len(router.connections))
        await check_another_is_served(engine, router)
        async with router.http.get("/metrics") as response:
            metrics = await response.text()
        assert 'd2lpm_refused_connections_total{status="429"} 1.0' in metrics
        assert "d2lpm_connections 1.0" in metrics


@pytest.mark.one_process("each front has its share of the connections")
async def test_a_flood_of_connections_costs_the_flooder() -> None:
    """When there are too many, the longest idle one of the address with most is cut, and no call is."""
    flooder = "127.0.0.2"
    async with served(max_connections=3, header_timeout=TIMEOUT_S) as (engine, router):
        async with connected(router, flooder) as (_, busy), connected(router, flooder) as (idle, was_busy):
            busy.write(request_bytes())
            call = await engine.call()
            was_busy.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            await idle.readuntil(b"}")
            async with connected(router, flooder), connected(router) as (reader, writer):
                assert await read_to_end(idle) == b""
                writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
                async with connected(router, flooder) as (surplus, _):
                    refused(await read_to_end(surplus), 429)
                await call.answer()
        await until(lambda: not len(router.connections))


async def test_it_does_not_matter_how_bytes_are_split() -> None:
    """Pipelined requests get the same answers however they are split."""
    random = Random(0)
    chunked = b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n1;x=y\r\n \r\n0\r\n\r\n"
    calls = [
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n", b"200"),
        (b"POST /health HTTP/1.1\r\nhost: localhost\r\ncontent-length: 3\r\n\r\nabc", b"405"),
        (b"POST %b HTTP/1.1\r\nhost: localhost\r\n%b" % (CHAT.encode(), chunked), b"400"),
        (b"\r\nGET /%20 HTTP/1.1\r\nhost: localhost\r\n\r\n", b"404"),
        (
            b"POST %b HTTP/1.1\r\nhost: localhost\r\nupgrade: h2c\r\nconnection: upgrade\r\n%b"
            % (CHAT.encode(), chunked),
            b"400",
        ),
    ]
    async with served() as (engine, router):
        for _ in range(30):
            chosen = random.choices(calls, k=random.randint(1, 6))
            sent = b"".join(call for call, _ in chosen)
            cuts = sorted(random.sample(range(len(sent)), random.randint(0, 8)))
            async with connected(router) as (reader, writer):
                for start, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
                    writer.write(sent[start:end])
                    await asyncio.sleep(0)
                for _, status in chosen:
                    head = await reader.readuntil(b"\r\n\r\n")
                    assert head.startswith(b"HTTP/1.1 " + status), (sent, cuts)
                    await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))
        assert engine.calls.empty()


async def test_half_a_call_behind_another_is_completed_later() -> None:
    """A second call is completed while the first is in flight, and is answered after it."""
    second = request_bytes("two")
    async with served() as (engine, router), connected(router) as (reader, writer):
        writer.write(request_bytes("one") + second[:-10])
        call = await engine.call()
        writer.write(second[-10:])
        await check_another_is_served(engine, router)  # and so the rest was read
        for word in ("one", "two"):
            assert word in str(call.json)
            await call.answer(f"answer {word}")
            await reader.readuntil(f"answer {word}".encode())
            if word == "one":
                call = await engine.call()


async def test_pipelined_calls_are_answered_in_order_however_they_are_split() -> None:
    """Three arrive at once, and a fourth byte by byte while the first is in flight."""
    async with served() as (engine, router), connected(router) as (reader, writer):
        writer.write(request_bytes("one") + request_bytes("two") + request_bytes("three"))
        call = await engine.call()
        for byte in request_bytes("four"):
            writer.write(bytes([byte]))
        await writer.drain()
        for word in ("one", "two", "three", "four"):
            assert word in str(call.json)
            await call.answer(f"answer {word}")
            await reader.readuntil(f"answer {word}".encode())
            if word != "four":
                call = await engine.call()


@pytest.mark.parametrize("early", [request_bytes("two"), request_bytes("two") * 3, request_bytes("two")[:30]])
@pytest.mark.parametrize("at_once", [True, False])
async def test_a_second_call_does_not_hide_a_disconnect(early: bytes, at_once: bool) -> None:
    """The first call ends on a disconnect, whatever was sent behind it; that is not started."""
    async with served() as (engine, router):
        async with connected(router) as (_, writer):
            writer.write(request_bytes("one", stream=True) + (early if at_once else b""))
            call = await engine.call()
            if not at_once:
                writer.write(early)
                await writer.drain()
        await call.wait_closed()
        await router.check_at_rest()
        assert engine.calls.empty()


@pytest.mark.parametrize(
    ("behind", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET /" + b"x" * 600 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 3000, 431),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
async def test_bad_input_behind_a_call_does_not_harm_the_call(behind: bytes, status: int, at_once: bool) -> None:
    """The call is answered, then the bad input, however they are split; then the connection closes."""
    async with served(header_limit=2048, url_limit=512) as (engine, router), connected(router) as (reader, writer):
        writer.write(request_bytes() + (behind if at_once else b""))
        call = await engine.call()
        if not at_once:
            writer.write(behind)
        writer.write(request_bytes("forged"))
        await check_another_is_served(engine, router)
        await call.answer("yes")
        assert (await reader.readuntil(b"}}}")).startswith(b"HTTP/1.1 200 ")
        refused(await read_to_end(reader), status)
        assert engine.calls.empty()


async def test_too_many_early_bytes_cut_the_connection() -> None:
    """Bytes behind a call are bounded."""
    async with served() as (engine, router), connected(router) as (reader, writer):
        writer.write(request_bytes("one", stream=True))
        call = await engine.call()
        writer.write(b"x" * 200_000)
        with suppress(ConnectionError):  # unless the router had read all that had arrived
            assert await read_to_end(reader) == b""
        await call.wait_closed()


async def test_the_rest_of_a_refused_body_is_read_for_a_limited_time() -> None:
    """The client can read the answer, also after sending a small rest."""
    async with served(body_limit=1000) as (_, router), connected(router) as (reader, writer):
        writer.write(
            b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 1500\r\n\r\n"
            % CHAT.encode()
        )
        answer = await reader.readuntil(b"}}")
        assert answer.startswith(b"HTTP/1.1 413 ")
        writer.write(b"x" * 1500 + b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")


BLOCK = chunk("x" * 16_000)


@contextmanager
def not_reading(router: RunningRouter) -> Iterator[socket.socket]:
    """Open a connection with a small receive buffer."""
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(router.address)
        raw.setblocking(False)
        yield raw


async def test_a_client_that_does_not_read_is_cut() -> None:
    """The bytes held for it are bounded, its engine stalls, and after the timeout the connection is cut."""
    settings = {"write_timeout": SOON, "max_held_bytes": 1 << 20}
    async with scripted_engine(send_buffer=1 << 14) as engine, running_router(engine.url, **settings) as router:
        with not_reading(router) as raw:
            await asyncio.get_running_loop().sock_sendall(raw, request_bytes(stream=True))
            call = await engine.call()
            flood = asyncio.ensure_future(call.stream(*[BLOCK] * 10_000))
            await call.wait_closed()
            with pytest.raises(ConnectionError):
                await flood
            await router.check_at_rest()


async def test_unread_bytes_are_bounded() -> None:
    """Beyond the client's part of the budget, the answer waits in the engine."""
    settings = {"max_held_bytes": 1 << 20}
    async with (
        scripted_engine(send_buffer=1 << 14) as engine,
        running_router(engine.url, **settings) as router,
    ):
        with not_reading(router) as raw:
            await asyncio.get_running_loop().sock_sendall(raw, request_bytes(stream=True))
            call = await engine.call()
            flood = asyncio.ensure_future(call.stream(*[BLOCK] * 10_000))
            await until(lambda: router.connections.unread_bytes > 0)
            most = 0
            async with router.post(chat(stream=True)) as post:
                other = await engine.call()
                await other.begin()
                for index in range(200):
                    await other.write(chunk(f"{index}"))
                    await (await post.response()).content.readexactly(len(chunk(f"{index}")))
                    most = max(most, router.connections.unread_bytes)
            assert 0 < most <= 1 << 19
            assert not flood.done()
        await call.wait_closed()
        with pytest.raises(ConnectionError):
            await flood


async def test_a_client_that_reads_slowly_is_not_cut() -> None:
    """A client that reads at least something in each period of the write timeout gets its whole answer."""
    async with served(write_timeout=5.0) as (engine, router), router.post(chat(stream=True)) as post:
        call = await engine.call()
        flood = asyncio.ensure_future(call.stream(*[BLOCK] * 300, chunk("", "stop"), usage_chunk(9, 300), DONE))
        content = (await post.response()).content
        got = 0
        while data := await content.read(1 << 20):
            got += len(data)
            await asyncio.sleep(0)
        await flood
        assert got == 300 * len(BLOCK) + len(chunk("", "stop") + DONE)


async def test_trailers_are_bounded_and_ignored() -> None:
    """A trailer is not a header, and an endless one closes the connection."""
    async with served(header_limit=2048) as (_, router):
        head = b"GET /health HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n0\r\n"
        async with connected(router) as (reader, writer):
            writer.write(head + b"x-client-id: forged\r\n\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        async with connected(router) as (reader, writer):
            lines = b"content-type: application/json\r\nexpect: 100-continue\r\ntransfer-encoding: chunked\r\n"
            head = b"POST %b HTTP/1.1\r\nhost: localhost\r\n%b\r\n" % (CHAT.encode(), lines)
            writer.write(head)
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"0\r\nx: " + b"y" * 5000)
            refused(await read_to_end(reader), 431)


async def test_white_space_after_a_header_is_no_part_of_it() -> None:
    """Such a header means what it means without it, also where a front passes it on to the scheduler's process."""
    async with served() as (_, router), connected(router) as (reader, writer):
        writer.write(b"GET /v1/models HTTP/1.1\r\nhost: localhost \r\nx: y \t\r\n\r\n")
        assert (await reader.readuntil(b"]}")).startswith(b"HTTP/1.1 200 ")
        lines = b"content-type: application/json \r\nexpect: 100-continue\t\r\ntransfer-encoding: chunked \r\n"
        writer.write(b"POST %b HTTP/1.1\r\nhost: localhost\r\n%b\r\n0\r\n\r\n" % (CHAT.encode(), lines))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        assert b'"invalid_json"' in await reader.readuntil(b"}}")


async def test_a_client_of_http_1_0_gets_no_interim_answer() -> None:
    """It would take that for the whole answer."""
    async with served() as (_, router), connected(router) as (reader, writer):
        writer.write(b"GET /health HTTP/1.0\r\nexpect: 100-continue\r\ncontent-length: 1\r\n\r\n")
        writer.write(b"x")
        assert (await read_to_end(reader)).startswith(b"HTTP/1.1 200 ")


async def test_a_client_of_http_1_0_gets_no_chunks() -> None:
    """That version has none: the stream ends with the connection."""
    async with served() as (engine, router), connected(router) as (reader, writer):
        writer.write(request_bytes(stream=True).replace(b"HTTP/1.1", b"HTTP/1.0"))
        call = await engine.call()
        await call.begin()
        await call.write(chunk("a"))
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"transfer-encoding" not in head
        assert await reader.readexactly(len(chunk("a"))) == chunk("a")
        for block in (chunk("b"), chunk("", "stop"), usage_chunk(9, 2), DONE):
            await call.write(block)
        await call.end()
        assert await read_to_end(reader) == chunk("b") + chunk("", "stop") + DONE


async def test_an_upgrade_to_another_protocol_is_ignored() -> None:
    """The call is answered with its body as if the upgrade had not been offered, and so is the next one."""
    offer = request_bytes().replace(b"host: localhost", b"host: localhost\r\nconnection: upgrade\r\nupgrade: h2c")
    async with served() as (engine, router), connected(router) as (reader, writer):
        for _ in range(2):
            writer.write(offer)
            call = await engine.call()
            assert call.json["messages"] == chat()["messages"]
            await call.answer("yes")
            await reader.readuntil(b"}}}")


async def test_an_idle_connection_is_closed() -> None:
    """A connection is closed after the keep-alive time, also if only line ends arrived meanwhile."""
    async with served(keep_alive=SOON) as (_, router), connected(router) as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await read_to_end(reader)).startswith(b"HTTP/1.1 200 ")


async def test_closed_connections_leave_nothing_behind() -> None:
    """Nothing is left, whatever the clients did."""
    async with served() as (_, router):
        for sent in (b"", b"GET ", b"nonsense\r\n\r\n", b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"):
            async with connected(router) as (_, writer):
                writer.write(sent)
        await until(lambda: not len(router.connections))


@pytest.mark.parametrize("waiting", [1, 160])
def test_many_connections_are_accepted_per_turn_of_the_loop(waiting: int) -> None:
    """One turn accepts as many connections as there are sockets; uvloop accepts one per socket."""

    async def turns() -> int:
        taken, count = 0, 0

        class Taken(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                nonlocal taken
                taken += 1
                transport.abort()  # type: ignore[attr-defined]

        listener = socket.create_server(("127.0.0.1", 0), backlog=waiting)
        loop = asyncio.get_running_loop()
        async with AsyncExitStack() as ending:
            for door in accept_sockets(listener):
                ending.enter_context(door)
                await ending.enter_async_context(await loop.create_server(Taken, sock=door, backlog=waiting))
            for _ in range(waiting):
                ending.enter_context(socket.create_connection(listener.getsockname()))
            while taken < waiting:
                await asyncio.sleep(0)
                count += 1
        return count

    assert uvloop.run(turns()) <= waiting / ACCEPTS_PER_TURN + 4


def test_a_front_that_begins_does_not_make_others_block_in_accept() -> None:
    """A listening socket that other fronts share, and that does not block, still does not after it was copied."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as ending:
        listener.setblocking(False)
        inherited = socket.socket(fileno=os.dup(listener.fileno()))
        for copy in accept_sockets(inherited):
            ending.enter_context(copy)
        assert not os.get_blocking(listener.fileno())


async def test_an_earlier_disconnect_is_reported_too() -> None:
    """A disconnect while a thread parses the call is reported when the application starts to wait."""
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        while (await receive())["type"] != "http.disconnect":
            pass
        try:
            with exchange.while_connected():
                await asyncio.Event().wait()
        except ClientGone:
            ended.set_result(None)

    async with serving(app) as address:
        _, writer = await asyncio.open_connection(*address)
        writer.write(request_bytes())
        writer.close()
        async with asyncio.timeout(TIMEOUT_S):
            await ended


async def test_reference_counts_free_a_call() -> None:
    """The garbage collector looks at old objects too rarely to free what calls leave. The next call lets go of one."""
    calls: list[weakref.ref[object]] = []

    class Called:
        """Lives as long as its call."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["called"] = called = Called()
        calls.append(weakref.ref(called))
        await Exchange(scope, receive, send).respond(200, [], b"{}")

    async with serving(app) as address:
        reader, writer = await asyncio.open_connection(*address)
        gc.disable()
        try:
            for _ in range(2):
                writer.write(request_bytes())
                async with asyncio.timeout(TIMEOUT_S):
                    await reader.readuntil(b"{}")
            assert [call() is None for call in calls] == [True, False]
        finally:
            gc.enable()
            writer.close()

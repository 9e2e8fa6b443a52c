"""The memory that one client can make the router hold, and for how long, on real sockets and before an engine of the
test's own.
"""

import asyncio
import json
import logging
import tracemalloc
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import cast

import pytest

from router.api.families import Reader
from router.auth.identity import Identifier
from router.errors import Refused
from router.front.answer_stream import AnswerStream
from router.front.byte_budget import ByteBudget
from router.front.http.response_writer import StreamWriter
from router.front.outgoing import HELD_BYTES
from router.front.parsing import NAME_BYTES
from router.upstream.http_client import SMALL_BLOCKS, WorkerClient, WorkerResponse
from tests.support.running import CHAT, TIMEOUT_S, RunningRouter, chat, running_router, until
from tests.support.scripted_engine import DONE, Call, ScriptedEngine, chunk, scripted_engine, usage, usage_chunk

FLOODER = "127.0.0.2"
LIMITED = "clients:\n  ann: {key: 'sha256:%s', limits: {%s}}\n"


@asynccontextmanager
async def served(**settings: object) -> AsyncIterator[tuple[ScriptedEngine, RunningRouter]]:
    async with scripted_engine() as engine, running_router(engine.url, **settings) as router:
        yield engine, router
        await until(lambda: not router.connections.budget.held)


@asynccontextmanager
async def connected(
    router: RunningRouter, address: str = "127.0.0.1"
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(*router.address, local_addr=(address, 0), limit=1 << 26)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def head(length: int, *lines: str) -> bytes:
    begin = [f"POST {CHAT} HTTP/1.1", "host: localhost", "content-type: application/json", f"content-length: {length}"]
    return "\r\n".join([*begin, *lines, "", ""]).encode()


async def status(reader: asyncio.StreamReader) -> int:
    async with asyncio.timeout(TIMEOUT_S):
        answer = await reader.readuntil(b"\r\n\r\n")
    return int(answer.split(b" ")[1])


# Names


@pytest.mark.parametrize("member", ["model", "user"])
async def test_a_name_that_would_be_kept_is_short(member: str) -> None:
    """A name up to its bound is served, and one that is a byte longer is refused, whatever the bytes are."""
    async with served() as (engine, router):
        engine.serve("m", "é" * (NAME_BYTES // 2))
        await until(lambda: router.worker_connections.served("é" * (NAME_BYTES // 2)) is not None)
        async with router.post({**chat(), member: "é" * (NAME_BYTES // 2)}) as post:
            await (await engine.call()).answer()
            assert (await post.response()).status == 200
        async with router.post({**chat(), member: "é" * (NAME_BYTES // 2) + "x"}) as post:
            response = await post.response()
            assert (response.status, (await response.json())["error"]["param"]) == (400, member)


def test_nothing_is_kept_of_long_keys_and_headers() -> None:
    """Long keys and headers name their client by a digest, computed anew for each call."""
    identifier = Identifier(trusted_headers=["x-client"])
    tracemalloc.start()
    try:
        for number in range(200):
            name = b"%d-" % number + b"%" * 60_000
            identifier.identify({b"x-client": name}, None, "127.0.0.1")
            identifier.identify({b"x-api-key": name}, None, "127.0.0.1")
            identifier.identify({}, name.decode(), "127.0.0.1")
        assert tracemalloc.get_traced_memory()[0] < 2**20
    finally:
        tracemalloc.stop()


# Bodies


@pytest.mark.parametrize("limit", ["in_flight: 1", "requests_per_minute: 1"])
async def test_a_keys_limits_come_before_its_bodies(limit: str, tmp_path: Path) -> None:
    """While one body of a key is arriving, or after one in the minute, another is refused before any of its bytes
    are read.
    """
    clients = tmp_path / "clients.yaml"
    clients.write_text(LIMITED % (sha256(b"sk-ann").hexdigest(), limit))
    async with served(clients=clients) as (_, router):
        key = "authorization: Bearer sk-ann"
        async with connected(router) as (_, first), connected(router) as (second, writer):
            first.write(head(1000, key) + b"{")
            await until(lambda: router.connections.budget.held == 1)
            writer.write(head(1000, key))
            assert await status(second) == 429


@pytest.mark.one_process("each front has its share of the memory")
async def test_a_body_is_held_to_the_end_of_its_answer() -> None:
    """Bytes that one address holds count against that address alone, and are free when its calls end."""
    megabyte = chat("x" * 2**20, stream=True)
    async with served(max_held_bytes=5 * 2**20, window="off") as (engine, router):
        async with router.post(megabyte) as one, router.post(megabyte) as two:
            calls = [await engine.call(), await engine.call()]
            async with router.post(megabyte) as three:
                refused = await three.response()
                assert (refused.status, refused.headers["retry-after"]) == (429, "1")
                assert refused.headers["x-d2lpm-dropped-reason"] == "rejected-client-memory"
            async with connected(router, FLOODER) as (reader, writer):
                body = json.dumps(megabyte).encode()
                writer.write(head(len(body)) + body)
                await (await engine.call()).answer()
                assert await status(reader) == 200
            for call in calls:
                await call.answer()
            await one.read()
            await two.read()
        await until(lambda: not router.connections.budget.held)
        async with router.post(megabyte) as three:
            await (await engine.call()).answer()
            assert (await three.response()).status == 200


async def test_heads_and_what_comes_early_are_counted_too() -> None:
    """Heads and early bytes on a connection whose call is under way count in the budget."""
    async with served() as (engine, router), connected(router) as (_, writer):
        body = json.dumps(chat()).encode()
        writer.write(head(len(body), "x-junk: " + "x" * 20_000) + body)
        call = await engine.call()
        assert router.connections.budget.held > 20_000
        writer.write(b"x" * 30_000)
        await until(lambda: router.connections.budget.held > 50_000)
        await call.answer()


# Answers


def long_answer(text: str, entries: int) -> tuple[bytes, bytes, bytes]:
    """A chat with log probabilities: what is before these, these, and what is behind."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "logprobs": [], "finish_reason": "stop"}
    body = json.dumps({"id": "c", "object": "chat.completion", "choices": [choice], "usage": usage(700, entries)})
    before, after = body.encode().split(b"[], ", 1)
    entry = b'{"token":"x","logprob":-0.5,"bytes":[120],"top_logprobs":[]}'
    return before + b'{"content":[', b",".join([entry] * entries), b"]}, " + after


async def test_a_long_answer_is_passed_on_as_it_comes() -> None:
    """A long answer is passed on byte for byte before it ends, and its usage and text count like those of a short
    one.
    """
    before, entries, after = long_answer("word " * 400, 40_000)
    async with served() as (engine, router):
        async with router.post(chat("Hello " * 400), x_client="a") as post:
            call = await engine.call()
            length = len(before) + len(entries) + len(after)
            await call.raw(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % length)
            await call.raw(before + entries)
            response = await post.response()
            assert response.headers["content-length"] == str(length)
            got = await response.content.readexactly(2 * HELD_BYTES)
            await call.raw(after)
            assert got + await response.read() == before + entries + after
        said = {"role": "assistant", "content": "word " * 400}
        asked = chat("Hello " * 400)
        turns = [*asked["messages"], said, {"role": "user", "content": "more"}]  # type: ignore[misc]
        async with router.post({**asked, "messages": turns}) as post:
            await (await engine.call()).answer()
            cached = int((await post.response()).headers["x-d2lpm-predicted-cached-tokens"])
        assert cached > 1000, "the prompt alone has 600"
        await router.until_all_ended()
        (client,) = (await router.fairness())["clients"].values()
        assert client["service"]["output"] == 40_000 + 1


async def test_a_long_answer_that_breaks_off_is_seen_to() -> None:
    """The connection to the client is closed, since a whole answer has no place for an error."""
    before, entries, _ = long_answer("word", 40_000)
    async with served() as (engine, router), connected(router) as (reader, writer):
        body = json.dumps(chat()).encode()
        writer.write(head(len(body)) + body)
        call = await engine.call()
        await call.begin(content_type="application/json")
        await call.write(before + entries)
        await reader.readexactly(2**20)
        call.reset()
        async with asyncio.timeout(TIMEOUT_S):
            rest = await reader.read()
        assert not rest.endswith(b"0\r\n\r\n")
        assert b"worker_broke" not in rest
        await router.check_at_rest()


async def test_a_long_answer_that_nobody_reads_waits_in_its_engine() -> None:
    """The router holds no more of an unread answer than its reader's part of the budget."""
    before, entries, _ = long_answer("word", 10_000)
    async with served(max_held_bytes=4 * 2**20) as (engine, router):
        async with connected(router) as (_, writer):
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            body = json.dumps(chat()).encode()
            writer.write(head(len(body)) + body)
            call = await engine.call()
            await call.begin(content_type="application/json")
            await call.write(before)
            sending = asyncio.ensure_future(_send_on(call, b"," + entries))
            budget = router.connections.budget
            await until(lambda: budget.held > 2**20)
            async with router.post(chat(stream=True)) as post:  # others are served meanwhile
                other = await engine.call()
                await other.stream(*[chunk(f"{number}") for number in range(500)], chunk("", "stop"), DONE)
                await post.read()
            assert budget.held <= 3 * 2**20
            assert not sending.done()
        with pytest.raises(ConnectionError):
            await sending


async def _send_on(call: Call, block: bytes) -> None:
    for _ in range(500):
        await call.write(block)


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_slow_reader_holds_no_place_that_its_engine_has_freed(streamed: bool) -> None:
    """The next call is dispatched while megabytes are unread; these count as the reader's, which then gets every
    byte.
    """
    before, entries, after = long_answer("word", 300_000)
    whole = before + entries + after
    events = [chunk("x" * 16_000)] * 400
    settings = {"window": "fixed", "max_inflight": 1}
    async with served(**settings) as (engine, router), router.post(chat(stream=streamed)) as slow:
        call = await engine.call()
        if streamed:
            await call.stream(*events, chunk("", "stop"), usage_chunk(9, 400), DONE)
        else:
            await call.respond(200, whole)
        async with router.post(chat()) as post:
            await (await engine.call()).answer()
            assert (await post.response()).status == 200
        assert router.connections.budget.held > 2**20
        assert await slow.read() == (b"".join([*events, chunk("", "stop"), DONE]) if streamed else whole)


# Connections, and what workers send


async def test_a_connection_whose_body_does_not_come_gives_way() -> None:
    """Connections of the address that has most of them are closed; a call that has arrived as a whole goes on."""
    async with served(max_connections=3, header_timeout=TIMEOUT_S) as (engine, router):
        body = json.dumps(chat()).encode()
        async with (
            connected(router, FLOODER) as (_, busy),
            connected(router, FLOODER) as (slow, writer),
            connected(router, FLOODER) as (_, also_slow),
        ):
            busy.write(head(len(body)) + body)
            call = await engine.call()
            for each in (writer, also_slow):
                each.write(head(1000) + b"{")
            await until(lambda: router.connections.budget.held == len(body) + 2)
            async with connected(router) as (reader, polite):
                polite.write(head(len(body)) + body)
                await (await engine.call()).answer()
                assert await status(reader) == 200
                with suppress(ConnectionError):
                    assert not await slow.read(1)
            await call.answer()


@pytest.mark.parametrize("status", [101, 600, 999])
@pytest.mark.one_process("the test reads the router's log")
async def test_a_status_that_there_is_not_is_the_workers_fault(status: int, caplog: pytest.LogCaptureFixture) -> None:
    """The client of an invalid status receives 502, and nothing fails inside the router."""
    async with served(tries=1) as (engine, router):
        with caplog.at_level(logging.ERROR):
            async with router.post(chat()) as post:
                await (await engine.call()).respond(status, b"{}", "connection: upgrade", "upgrade: x")
                assert (await post.response()).status == 502
        assert not caplog.records


async def test_a_stream_in_crumbs_comes_whole() -> None:
    """A stream that is sent byte by byte, each in its own packet, arrives unchanged."""
    event = chunk("x" * 300)
    async with served() as (engine, router), router.post(chat(stream=True)) as post:
        call = await engine.call()
        await call.begin()
        for byte in event:
            await call.write(bytes([byte]))
            await asyncio.sleep(0)
        await call.write(chunk("", "stop") + DONE)
        await call.end()
        assert await post.read() == event + chunk("", "stop") + DONE


async def test_crumbs_are_gathered_before_they_are_read() -> None:
    """Many tiny blocks cost as much as one large block."""
    async with scripted_engine() as engine:
        worker = WorkerClient(engine.url, connect_timeout=5.0)
        pending = asyncio.ensure_future(worker.send("POST", "/x", {}, b"{}", once=True))  # returns with the headers
        call = await engine.call()
        await call.begin()
        upstream = await pending
        gathering = asyncio.ensure_future(upstream.gather(1.0))
        await asyncio.sleep(0)
        for _ in range(200):
            await call.write(b"x")
            await asyncio.sleep(0)
        await gathering
        assert await upstream.read() == b"x" * 200
        upstream.close()
        worker.close()


class CrumblingWorker:
    """Sends an answer in blocks of two bytes, and counts the pauses to gather more of them."""

    def __init__(self, blocks: Sequence[bytes]) -> None:
        self._blocks = list(blocks)
        self.gathered = self.pushed = 0

    async def read(self) -> bytes:
        return self._blocks.pop(0) if self._blocks else b""

    async def gather(self) -> None:
        self.gathered += 1

    async def push(self, _sink: Callable[[bytes], bool]) -> None:
        """Return nothing, as if the push was stopped at once."""
        self.pushed += 1


class WholeEvents:
    """A reader for which only a block `event` completes an event."""

    def feed(self, block: bytes) -> bytes:
        return block if block == b"event" else b""


@pytest.mark.interpreted("the test puts an object of its own for the worker's answer")
async def test_blocks_without_an_event_are_gathered_and_counted_in_the_budget() -> None:
    """After many such blocks the router waits for more bytes at a time, until an event is complete."""
    hold = ByteBudget(10_000).hold("owner")
    worker = CrumblingWorker([b"xx"] * (SMALL_BLOCKS + 2) + [b"event", b"x" * 9000])
    stream = AnswerStream(cast(WorkerResponse, worker), cast(Reader, WholeEvents()), None, hold)
    assert [await stream.read() for _ in range(SMALL_BLOCKS + 2)] == [b""] * (SMALL_BLOCKS + 2)
    assert (worker.gathered, hold.amount) == (1, 2 * (SMALL_BLOCKS + 2))
    assert (await stream.read(), worker.gathered, hold.amount) == (b"event", 2, 0)
    with pytest.raises(Refused):
        await stream.read()
    assert worker.gathered == 2


@pytest.mark.interpreted("the test puts an object of its own for the worker's answer")
async def test_blocks_are_read_and_not_pushed_while_an_event_is_incomplete() -> None:
    """Such blocks are read, since otherwise every second one of many small blocks would pass without a wait for more
    bytes.
    """
    worker, writer = CrumblingWorker([b"xx", b"event"]), cast(StreamWriter, object())
    stream = AnswerStream(
        cast(WorkerResponse, worker), cast(Reader, WholeEvents()), None, ByteBudget(10_000).hold("owner")
    )
    assert await stream.read() == b""
    assert (await stream.read(writer), worker.pushed) == (b"event", 0)
    assert (await stream.read(writer), worker.pushed) == (b"", 1)

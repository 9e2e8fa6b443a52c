"""The writes to a client, one by one, on a transport in memory and on a real socket."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from router.front.byte_budget import ByteBudget
from router.front.exchange import Exchange
from router.front.http.connection import connection_class
from router.front.http.connection_limits import Connections, FrontLimits
from router.front.http.response_writer import JOINED_BYTES, CorkedTransport
from tests.support.running import TIMEOUT_S, until

HEAD_END = b"\r\n\r\n"
GET = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"


class Wire(asyncio.Transport):
    """A transport that records what is written, and how it was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.end = ""
        self.unsent = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.end, "it has ended"
        self.writes.append(bytes(data))

    def get_extra_info(self, name: str, default: object = None) -> object:  # noqa: ARG002 - a transport's
        return default

    def is_closing(self) -> bool:
        return self.end in ("close", "abort")

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def write_eof(self) -> None:
        self.end = "write_eof"

    def close(self) -> None:
        self.end = "close"

    def abort(self) -> None:
        self.end = "abort"


class Turns:
    """The `call_soon` of an event loop whose turns the test runs."""

    def __init__(self) -> None:
        self._next: list[Callable[[], None]] = []

    def call_soon(self, call: Callable[[], None]) -> None:
        self._next.append(call)

    def turn(self) -> None:
        calls, self._next = self._next, []
        for call in calls:
            call()


def corked() -> tuple[CorkedTransport, Wire, Turns]:
    wire, turns = Wire(), Turns()
    return CorkedTransport(wire, turns.call_soon), wire, turns


def test_a_head_is_sent_with_the_block_that_follows() -> None:
    """The head and the block after it are one write, and later blocks are written separately."""
    transport, wire, turns = corked()
    transport.holds_next = True
    for data in (b"head", b"block", b"more"):
        transport.write(data)
    turns.turn()
    assert wire.writes == [b"headblock", b"more"]


def test_a_head_alone_is_sent_at_the_end_of_the_turn() -> None:
    """Later writes are not held either."""
    transport, wire, turns = corked()
    transport.holds_next = True
    transport.write(b"head")
    assert not wire.writes
    turns.turn()
    transport.write(b"block")
    assert wire.writes == [b"head", b"block"]


def test_a_large_block_is_not_copied() -> None:
    """A large block is written by itself, after its head."""
    transport, wire, _ = corked()
    transport.holds_next = True
    transport.write(b"head")
    transport.write(b"x" * (JOINED_BYTES + 1))
    assert [len(data) for data in wire.writes] == [4, JOINED_BYTES + 1]


def test_a_held_write_counts_as_unsent() -> None:
    """Bytes of a held write are added to those that the socket has not accepted."""
    transport, wire, turns = corked()
    wire.unsent = 3
    transport.holds_next = True
    transport.write(b"head")
    assert transport.get_write_buffer_size() == 7
    turns.turn()
    assert transport.get_write_buffer_size() == 3


@pytest.mark.parametrize("end", ["write_eof", "close", "abort"])
def test_closing_sends_the_held_write(end: str) -> None:
    """The held write is sent first."""
    transport, wire, turns = corked()
    transport.holds_next = True
    transport.write(b"head")
    getattr(transport, end)()
    turns.turn()
    assert (wire.writes, wire.end) == ([b"head"], end)


def test_nothing_is_written_after_the_connection_is_lost() -> None:
    """If the connection breaks in the same turn, the held write is dropped."""
    transport, wire, turns = corked()
    transport.holds_next = True
    transport.write(b"head")
    wire.end = "close"
    turns.turn()
    assert (wire.writes, transport.get_write_buffer_size()) == ([], 0)


@given(steps=st.lists(st.sampled_from(["hold", "turn", "", "a", "bc", "def"])))
def test_writes_arrive_in_order_and_in_their_turn(steps: list[str]) -> None:
    """The order holds whatever is held in between."""
    transport, wire, turns = corked()
    written = b""
    for step in steps:
        match step:
            case "hold":
                transport.holds_next = True
            case "turn":
                turns.turn()
                assert b"".join(wire.writes) == written
            case _:
                written += step.encode()
                transport.write(step.encode())
        assert len(b"".join(wire.writes)) + transport.get_write_buffer_size() == len(written)


App = Callable[[Exchange], Awaitable[None]]


def served(app: App) -> Callable[[], asyncio.Protocol]:
    """Return a factory of server connections for this application."""

    async def asgi(scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        await receive()
        await app(exchange)

    config = uvicorn.Config(asgi, ws="none", lifespan="off", log_config=None, access_log=False)
    config.load()
    kind: Callable[..., asyncio.Protocol] = connection_class(Connections(FrontLimits(), ByteBudget(2**20)))
    return lambda: kind(config=config, server_state=ServerState(), app_state={})


async def whole(exchange: Exchange) -> None:
    await exchange.respond(200, [], b"hello")


async def streamed(exchange: Exchange) -> None:
    await exchange.begin(200, [])
    await exchange.write(b"one")
    await exchange.write(b"two")
    await exchange.end(b"three")


async def later(exchange: Exchange) -> None:
    await exchange.begin(200, [])
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await exchange.end(b"late")


async def empty(exchange: Exchange) -> None:
    await exchange.respond(200, [], b"")


async def broken(exchange: Exchange) -> None:
    await exchange.begin(200, [])
    raise ValueError


@pytest.mark.parametrize(
    ("app", "request_bytes", "ends"),
    [
        (whole, GET, [b"hello"]),
        (streamed, GET, [HEAD_END + b"3\r\none\r\n", b"3\r\ntwo\r\n", b"5\r\nthree\r\n0\r\n\r\n"]),
        (later, GET, [b"chunked" + HEAD_END, b"4\r\nlate\r\n0\r\n\r\n"]),
        (empty, GET, [HEAD_END]),
        (broken, GET, [HEAD_END]),
        (whole, GET.replace(b"GET", b"HEAD"), [HEAD_END]),
        (whole, GET.replace(b"1.1", b"1.0"), [b"connection: close" + HEAD_END + b"hello"]),
        (whole, GET * 2, [HEAD_END, b"hello", HEAD_END + b"hello"]),
        (whole, GET.replace(b"GET", b"HEAD") + GET, [HEAD_END, b"hello"]),
        (whole, GET + b"nonsense\r\n\r\n", [b"hello", b"}}"]),
        (whole, GET.replace(b"GET", b"HEAD") + b"nonsense\r\n\r\n", [b"}}"]),
        (whole, GET[:-2] + b"expect: 100-continue\r\ncontent-length: 9\r\n\r\n", [b"HTTP/1.1 100 Continue" + HEAD_END]),
    ],
)
async def test_an_answer_takes_one_write_per_turn(app: App, request_bytes: bytes, ends: list[bytes]) -> None:
    """The head's write includes the first block if it comes in the same turn and no call is pipelined."""
    wire, protocol = Wire(), served(app)()
    protocol.connection_made(wire)
    protocol.data_received(request_bytes)
    await until(lambda: len(wire.writes) >= len(ends))
    await asyncio.sleep(0)
    assert len(wire.writes) == len(ends)
    for data, end in zip(wire.writes, ends, strict=True):
        assert data.endswith(end), data
    assert wire.writes[0].startswith(b"HTTP/1.1 ")
    protocol.connection_lost(None)


class Watched:
    """Wraps a real transport and records what is written."""

    def __init__(self, transport: Any, writes: list[bytes]) -> None:
        self._transport = transport
        self._writes = writes

    def write(self, data: bytes) -> None:
        self._writes.append(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Between(asyncio.Protocol):
    """Gives a protocol a watched transport in place of its own."""

    def __init__(self, protocol: asyncio.Protocol, writes: list[bytes]) -> None:
        self._protocol = protocol
        self._writes = writes
        self.data_received = protocol.data_received  # type: ignore[method-assign]
        self.connection_lost = protocol.connection_lost  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._protocol.connection_made(Watched(transport, self._writes))  # type: ignore[arg-type]


def test_a_head_and_its_block_are_one_write_to_the_socket() -> None:
    """For each call, kept alive or not, head and block are one write, and the client reads the whole answer."""
    writes: list[bytes] = []

    async def answers() -> None:
        made = served(whole)
        loop = asyncio.get_running_loop()
        listening = await loop.create_server(lambda: Between(made(), writes), "127.0.0.1", 0)
        async with listening, asyncio.timeout(TIMEOUT_S):
            reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
            for _ in range(3):
                writer.write(GET)
                await reader.readuntil(b"hello")
            writer.write(GET.replace(b"1.1", b"1.0"))
            assert (await reader.read()).endswith(b"hello")
            writer.close()

    uvloop.run(answers())
    assert len(writes) == 4

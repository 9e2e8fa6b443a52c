"""TLS handshakes count as connections from their accept on, and have a deadline."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trustme
import uvicorn
from uvicorn.server import ServerState

from router.front.byte_budget import ByteBudget
from router.front.http.connection import connection_class
from router.front.http.connection_limits import Connections, FrontLimits
from router.front.http.tls_handshake import TlsHandshake
from router.runtime.tls import Tls
from tests.support.running import until

REQUEST = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
ATTACKER, POLITE = "127.0.0.2", "127.0.0.1"


class Served(NamedTuple):
    """A running server, and the context of a client that trusts it."""

    port: int
    connections: Connections
    state: ServerState
    client: ssl.SSLContext


async def application(scope: Any, _receive: Any, send: Any) -> None:
    """Answer each call with its path."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]})
    await send({"type": "http.response.body", "body": scope["path"].encode()})


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tls, ssl.SSLContext]:
    """Return the certificate of a server and the context of a client that trusts it."""
    folder: Path = tmp_path_factory.mktemp("tls")
    made: Any = trustme.CA()
    issued = made.issue_cert("localhost")
    issued.cert_chain_pems[0].write_to_path(folder / "cert")
    issued.private_key_pem.write_to_path(folder / "key")
    client = ssl.create_default_context()
    made.configure_trust(client)
    return Tls(folder / "cert", folder / "key"), client


@asynccontextmanager
async def serving(authority: tuple[Tls, ssl.SSLContext], limits: FrontLimits) -> AsyncIterator[Served]:
    """Serve the application with these limits."""
    tls, client = authority
    connections = Connections(limits, ByteBudget(1 << 20))
    config = uvicorn.Config(application, http=connection_class(connections, tls), lifespan="off", log_config=None)
    config.load()
    state = ServerState()
    accepted: Any = config.http_protocol_class
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: accepted(config, state, {}), POLITE, 0)
    try:
        yield Served(server.sockets[0].getsockname()[1], connections, state, client)
    finally:
        server.close()
        for each in list(state.connections):
            each.transport.abort()
        await until(lambda: len(connections) == 0)


def connected(port: int, address: str) -> socket.socket:
    """Return a connection from this address that says nothing."""
    return socket.create_connection((POLITE, port), source_address=(address, 0))


@pytest.fixture
def sockets() -> Iterator[ExitStack]:
    """Close what is entered."""
    with ExitStack() as entered:
        yield entered


async def answer(served: Served, address: str = POLITE) -> bytes:
    """Return the last byte of the answer to a call, in a connection of its own."""
    reader, writer = await asyncio.open_connection(
        POLITE, served.port, ssl=served.client, server_hostname="localhost", local_addr=(address, 0)
    )
    writer.write(REQUEST)
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    body = await reader.readexactly(1)
    writer.transport.abort()
    return body


async def test_unfinished_handshakes_keep_nobody_out(authority: tuple[Tls, ssl.SSLContext], sockets: ExitStack) -> None:
    """Of a thousand connections without a handshake, as many stay as the limit allows, and another address is served:
    one of them is closed for it.
    """
    async with serving(authority, FrontLimits(connections=100)) as served:
        for _ in range(1_000):
            sockets.enter_context(connected(served.port, ATTACKER))
            await asyncio.sleep(0)
        await until(lambda: served.connections.refused[429] == 900)
        await until(lambda: len(served.connections) == 100)
        assert await answer(served) == b"/"
        await until(lambda: len(served.connections) == 99)
        sockets.close()


async def test_a_handshake_has_a_deadline(authority: tuple[Tls, ssl.SSLContext], sockets: ExitStack) -> None:
    """A client that says nothing is disconnected, and no longer counts."""
    async with serving(authority, FrontLimits(head_seconds=0.05)) as served:
        silent = sockets.enter_context(connected(served.port, POLITE))
        silent.setblocking(False)
        assert await asyncio.get_running_loop().sock_recv(silent, 1) == b""
        await until(lambda: len(served.connections) == 0)
        assert served.state.connections == set()


async def test_what_comes_with_the_end_of_the_handshake_is_answered(
    authority: tuple[Tls, ssl.SSLContext], sockets: ExitStack
) -> None:
    """A client may send its call in the same segment as its last part of the handshake, and ends with it."""
    async with serving(authority, FrontLimits()) as served:
        loop = asyncio.get_running_loop()
        raw = sockets.enter_context(connected(served.port, POLITE))
        raw.setblocking(False)
        arrived, leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        session = served.client.wrap_bio(arrived, leaving, server_hostname="localhost")
        while True:
            try:
                session.do_handshake()
                break
            except ssl.SSLWantReadError:
                await loop.sock_sendall(raw, leaving.read())
                arrived.write(await loop.sock_recv(raw, 65_536))
        session.write(REQUEST)
        await loop.sock_sendall(raw, leaving.read())
        received = b""
        while not received.endswith(b"\r\n\r\n/"):
            arrived.write(await loop.sock_recv(raw, 65_536))
            try:
                while True:
                    received += session.read()
            except ssl.SSLWantReadError:
                pass
        assert received.startswith(b"HTTP/1.1 200 ")


async def test_a_connection_counts_once(authority: tuple[Tls, ssl.SSLContext], sockets: ExitStack) -> None:
    """A connection counts from its accept to its end, and a client beyond the limit of its address is disconnected
    before its handshake.
    """
    async with serving(authority, FrontLimits(connections_per_address=1)) as served:
        reader, writer = await asyncio.open_connection(
            POLITE, served.port, ssl=served.client, server_hostname="localhost"
        )
        await until(lambda: len(served.connections) == 1)
        second = sockets.enter_context(connected(served.port, POLITE))
        second.setblocking(False)
        assert await asyncio.get_running_loop().sock_recv(second, 1) == b""
        assert await answer(served, ATTACKER) == b"/"
        writer.write(REQUEST)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        writer.transport.abort()
        await until(lambda: len(served.connections) == 0)


class UnusableTransport(asyncio.Transport):
    """A transport whose socket cannot be copied, as if the process could open no more files."""

    def __init__(self) -> None:
        super().__init__()
        self.aborted = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return a socket that is closed, and the address of the client."""
        closed = socket.socket()
        closed.close()
        return {"socket": closed, "peername": (ATTACKER, 1)}.get(name, default)

    def abort(self) -> None:
        self.aborted = True


def test_a_connection_without_a_file_is_refused(authority: tuple[Tls, ssl.SSLContext]) -> None:
    """If the process can open no more files, a connection is closed and counts no longer; else it would for good."""
    connections = Connections(FrontLimits(), ByteBudget(1 << 20))
    transport = UnusableTransport()
    TlsHandshake(lambda _: asyncio.Protocol(), authority[0].context, connections).connection_made(transport)
    assert transport.aborted
    assert len(connections) == 0
    assert connections.refused == {503: 1}

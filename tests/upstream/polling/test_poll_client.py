"""The client that polls are sent with."""

import asyncio
import resource
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trustme

from router.errors import WorkerBroke
from router.upstream.polling.poll_client import AnswerLate, OtherStatus, PollClient, Unconnected
from tests.support.scripted_engine import TIMEOUT_S

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


@dataclass
class Server:
    """A server on a real socket that answers each request alike."""

    url: str
    connections: int = 0
    """How many it has accepted."""
    requests: list[bytes] = field(default_factory=list)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once a connection is over."""


@asynccontextmanager
async def server(
    answer: bytes = ANSWER, *, closes: bool = False, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Server]:
    """Run a server. `closes`: whether it closes the connection after an answer."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        here.connections += 1
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while not (closes and here.requests):
                here.requests.append(await reader.readuntil(b"\r\n\r\n"))
                writer.write(answer)
        writer.close()
        here.closed.set()
        await writer.wait_closed()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(asyncio.create_task(serve(reader, writer)))

    served = list[asyncio.Task[None]]()
    async with await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls) as listening:
        here = Server(f"http{'s' * (tls is not None)}://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
        yield here
        await asyncio.gather(*served, return_exceptions=True)  # the client has closed its connections before


async def test_polls_of_one_server_share_a_connection() -> None:
    """Whatever their paths."""
    async with server() as polled, PollClient() as client:
        for path in ("/health", "/metrics", "/health"):
            assert await client.fetch(polled.url + path, {}) == b"ok"
        assert polled.connections == 1


async def test_the_query_is_a_part_of_what_is_asked_for() -> None:
    """And the headers are sent."""
    async with server() as polled, PollClient() as client:
        await client.fetch(polled.url + "/get?a=1&b=2", {"authorization": "Bearer k"})
        assert polled.requests[0].startswith(b"GET /get?a=1&b=2 HTTP/1.1\r\n")
        assert b"authorization: Bearer k\r\n" in polled.requests[0]


async def test_a_server_that_is_polled_no_more_is_forgotten_when_another_one_comes() -> None:
    """Its connection is closed then."""
    async with server() as gone, server() as new, PollClient(forget_seconds=0.0) as client:
        await client.fetch(gone.url, {})
        await asyncio.sleep(0)  # the clock goes on
        await client.fetch(new.url, {})
        async with asyncio.timeout(TIMEOUT_S):
            await gone.closed.wait()


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n", "/health was answered with status 503"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok", "broke off"),
        (b"SSH-2.0-server\r\n", "without an answer"),
        (b"", "without an answer"),
    ],
)
async def test_an_answer_that_is_none_says_what_is_wrong_with_it(answer: bytes, says: str) -> None:
    """An error status, a part of an answer, another protocol, and nothing."""
    async with server(answer, closes=True) as polled, PollClient() as client:
        with pytest.raises(WorkerBroke, match=says) as raised:
            await client.fetch(polled.url + "/health?x", {})
        assert isinstance(raised.value, OtherStatus) == (b"503" in answer)
        assert not isinstance(raised.value, Unconnected | AnswerLate)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok"])
async def test_an_answer_that_is_not_whole_in_time_is_given_up(answer: bytes) -> None:
    """Its connection is closed, which every engine understands."""
    async with server(answer) as polled, PollClient(0.05) as client:
        with pytest.raises(AnswerLate):
            await client.fetch(polled.url, {})
        async with asyncio.timeout(TIMEOUT_S):
            await polled.closed.wait()


async def test_a_refused_connection_is_known_as_one_also_after_polls_that_were_answered() -> None:
    """Then nothing listens there any more."""
    async with PollClient() as client:
        async with server(closes=True) as polled:
            await client.fetch(polled.url, {})
        with pytest.raises(Unconnected, match="refuses"):
            await client.fetch(polled.url, {})


async def test_a_router_without_descriptors_says_nothing_about_the_worker() -> None:
    """The poll counts as late, not as refused."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with server() as polled, PollClient() as client:
        with socket.socket() as highest:
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest.fileno(), hard))
        try:
            with pytest.raises(AnswerLate, match="no connection left"):
                await client.fetch(polled.url, {})
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_server_with_tls_is_polled_only_if_the_machine_trusts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a call would be sent there only then."""
    authority, tls = trustme.CA(), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    async with server(tls=tls) as polled:
        async with PollClient() as client:
            with pytest.raises(Unconnected, match="CERTIFICATE_VERIFY_FAILED"):
                await client.fetch(polled.url, {})
        authority.cert_pem.write_to_path(tmp_path / "trusted.pem")
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "trusted.pem"))
        async with PollClient() as client:
            assert await client.fetch(polled.url, {}) == b"ok"
            assert await client.fetch(polled.url, {}) == b"ok"
        assert len(polled.requests) == 2

"""What a front answers itself when it cannot pass a call on to the scheduler's process."""

import asyncio
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
from starlette.types import Scope

from router.front.byte_budget import ByteBudget
from router.front.drain import Drain
from router.process.control_proxy import IDLE_SECONDS, ControlProxy
from router.process.server import control_server_config


@pytest.mark.parametrize(("path", "status"), [("/metrics", 503), ("/health", 200)])
async def test_while_no_scheduler_runs_its_paths_can_be_asked_again_later(
    path: str, status: int, tmp_path: Path
) -> None:
    """A monitor must not take a restart of the scheduler for an error of the router; /health is the front's own."""
    async with (
        ControlProxy(str(tmp_path / "nobody"), ByteBudget(1 << 20), Drain(1.0)) as proxy,
        httpx.AsyncClient(transport=httpx.ASGITransport(proxy), base_url="http://front") as http,
    ):
        answer = await http.get(path)
    assert answer.status_code == status
    if status == 503:
        assert answer.headers["retry-after"] == "1"


async def test_a_path_reaches_the_scheduler_as_the_front_checked_it(tmp_path: Path) -> None:
    """No `..` is followed on the way: it could lead from a path for everyone to one for operators."""
    asked: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readline()).decode().rstrip())
        writer.write(b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n")
        writer.close()

    socket = str(tmp_path / "s")
    statuses: list[int] = []

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    async with (
        await asyncio.start_unix_server(answer, socket),
        ControlProxy(socket, ByteBudget(1 << 20), Drain(1.0)) as proxy,
    ):
        for path in ("/v1/models/../../metrics", "/./metrics", "/v1/models/a b"):
            call: Scope = {"type": "http", "method": "GET", "path": path, "query_string": b"a=/../b", "headers": []}
            await proxy(call, receive, send)
    assert asked == [
        "GET /v1/models/../../metrics?a=/../b HTTP/1.1",
        "GET /./metrics?a=/../b HTTP/1.1",
        "GET /v1/models/a%20b?a=/../b HTTP/1.1",
    ]
    assert statuses == [204] * 3


async def test_an_answer_to_head_says_the_length_of_what_get_returns(tmp_path: Path) -> None:
    """The answer itself has no body."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 3483\r\nconnection: close\r\n\r\n")
        writer.close()

    socket = str(tmp_path / "s")
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async with (
        await asyncio.start_unix_server(answer, socket),
        ControlProxy(socket, ByteBudget(1 << 20), Drain(1.0)) as proxy,
    ):
        call: Scope = {"type": "http", "method": "HEAD", "path": "/ui/main.js", "query_string": b"", "headers": []}
        await proxy(call, receive, send)
    assert sent[0]["headers"] == [(b"content-length", b"3483")]
    assert sent[1]["body"] == b""


async def test_readiness_is_answered_as_before_while_calls_wait_for_the_scheduler(tmp_path: Path) -> None:
    """The scheduler said yes and is gone. Once new calls are refused, so is the probe; another path always is."""
    accepts, body = True, b'{"status":"ok"}'

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        writer.close()

    socket = str(tmp_path / "s")
    drain = Drain(1.0)
    async with (
        ControlProxy(socket, ByteBudget(1 << 20), drain, lambda: accepts) as proxy,
        httpx.AsyncClient(transport=httpx.ASGITransport(proxy), base_url="http://front") as http,
    ):
        assert (await http.get("/ready")).status_code == 503
        async with await asyncio.start_unix_server(answer, socket):
            assert (await http.get("/ready")).status_code == 200
        for _ in range(2):
            again = await http.get("/ready")
            assert (again.status_code, again.json()) == (200, {"status": "ok", "degraded": "scheduler away"})
        assert (await http.get("/workers")).status_code == 503
        accepts = False
        assert (await http.get("/ready")).status_code == 503
        accepts = True
        drain.begin()
        assert (await http.get("/ready")).status_code == 503


def test_a_front_gives_up_an_idle_connection_before_the_scheduler_does() -> None:
    """Otherwise a call could meet one that is being closed, and would fail although the scheduler runs."""
    config = control_server_config(ControlProxy("nobody", ByteBudget(0), Drain(1.0)), "control")
    assert config.timeout_keep_alive > IDLE_SECONDS


async def test_certificates_that_are_missing_do_not_matter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The scheduler's process is reached without TLS, so a wrong SSL_CERT_FILE ends no front."""
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "missing.pem"))
    async with ControlProxy(str(tmp_path / "nobody"), ByteBudget(1 << 20), Drain(1.0)) as proxy:
        assert proxy


def test_a_call_given_up_as_its_answer_arrives_logs_no_error(tmp_path: Path) -> None:
    """The data and the end of the wait come in one turn of uvloop, as where /ready is late by a quarter of a second."""
    errors: list[dict[str, Any]] = []

    async def give_up_calls() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        asked: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()

        async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            await asked.put(writer)

        socket = str(tmp_path / "s")
        async with (
            await asyncio.start_unix_server(ask, socket),
            ControlProxy(socket, ByteBudget(1 << 20), Drain(1.0)) as proxy,
            httpx.AsyncClient(transport=httpx.ASGITransport(proxy), base_url="http://front") as http,
        ):
            for _ in range(5):
                call = asyncio.create_task(http.get("/workers"))
                writer = await asked.get()
                writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
                call.cancel()
                await asyncio.wait([call])
                writer.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(give_up_calls())
    assert not errors

"""Calls over a limit are rejected in OpenAI's shape, and calls within it are accepted."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.support.running import CHAT, TIMEOUT_S, RunningRouter, chat, running_router
from tests.support.scripted_engine import ScriptedEngine, scripted_engine

LIMIT = 20_000
Served = tuple[ScriptedEngine, RunningRouter]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    """Run one router for all tests, so that damage by one input shows in the next test."""
    async with scripted_engine() as engine, running_router(engine.url, body_limit=LIMIT) as router:
        yield engine, router


async def refused(router: RunningRouter, method: str, path: str, body: bytes) -> tuple[int, Any, Any]:
    """Send a body that must be rejected. Returns status, headers and error object."""
    async with router.http.request(method, path, data=body, headers={"content-type": "application/json"}) as response:
        assert response.headers["content-type"] == "application/json"
        fields = await response.json()
    assert fields.keys() == {"error"}
    assert fields["error"].keys() == {"message", "type", "param", "code"}
    assert isinstance(fields["error"]["message"], str)
    return response.status, response.headers, fields["error"]


async def raw(router: RunningRouter, data: bytes) -> bytes:
    """Send raw bytes and read to the end of the connection."""
    reader, writer = await asyncio.open_connection(*router.address)
    try:
        writer.write(data)
        async with asyncio.timeout(TIMEOUT_S):
            return await reader.read()
    finally:
        writer.close()


HEAD = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n".encode()


async def test_a_body_over_the_limit_is_refused_before_it_is_read(served: Served) -> None:
    """The declared length is enough: the client does not have to send the body."""
    answer = await raw(served[1], HEAD + b"content-length: 99999999999\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b'"type":"invalid_request_error"' in answer


async def test_a_body_over_the_limit_in_chunks_is_refused(served: Served) -> None:
    """A body without a declared length is refused while the client is still sending."""
    size = LIMIT // 4
    answer = await raw(
        served[1], HEAD + b"transfer-encoding: chunked\r\n\r\n" + (b"%x\r\n%b\r\n" % (size, b"x" * size)) * 9
    )
    assert answer.startswith(b"HTTP/1.1 413 ")


async def test_a_body_of_exactly_the_limit_is_accepted(served: Served) -> None:
    """The length may be declared, or the body sent in chunks."""
    engine, router = served
    body = json.dumps(chat("x")).encode()
    body = body.replace(b'"x"', b'"' + b"x" * (LIMIT - len(body) + 1) + b'"')
    for head in (b"content-length: %d\r\n\r\n%b", b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n"):
        answering = asyncio.ensure_future(raw(router, HEAD + head % (LIMIT, body)))
        await (await engine.call()).answer()
        assert (await answering).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("body", [chat(max_tokens=2**63, n=2**63), chat("", max_tokens=0), chat(messages=[{}])])
async def test_a_body_that_only_the_engine_can_judge_is_forwarded(served: Served, body: dict[str, object]) -> None:
    """The router checks only the members that it needs, and no number is too large for its counts."""
    engine, router = served
    async with router.post(body) as post:
        await (await engine.call()).answer()
        assert (await post.response()).status == 200
    await router.check_at_rest()


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_a_full_queue_rejects_calls(stream: bool) -> None:
    """The reply is 429 with the reason and retry-after, and calls that wait keep their place."""
    async with (
        scripted_engine() as engine,
        running_router(engine.url, max_inflight=1, max_queued=1) as router,
        router.post(chat()) as first,
        router.post(chat()) as second,
    ):
        call = await engine.call()
        await router.until_waiting(1)
        status, headers, error = await refused(router, "POST", CHAT, json.dumps(chat(stream=stream)).encode())
        assert (status, error["type"]) == (429, "rate_limit_error")
        assert headers["x-d2lpm-dropped-reason"] == "rejected-saturated"
        assert int(headers["retry-after"]) >= 1
        await call.answer()
        await (await engine.call()).answer()
        assert [(await post.response()).status for post in (first, second)] == [200, 200]


async def test_a_request_that_waited_too_long_is_rejected() -> None:
    """The reply is a status 429, or an error in the stream if a heartbeat has begun it."""
    async with (
        scripted_engine() as engine,
        running_router(engine.url, max_inflight=1, queue_ttl=0.2, heartbeat=0.02) as router,
        router.post(chat()) as first,
    ):
        call = await engine.call()
        async with router.post(chat(stream=True)) as streamed:
            status, headers, error = await refused(router, "POST", CHAT, json.dumps(chat()).encode())
            assert (status, error["type"]) == (429, "rate_limit_error")
            assert headers["x-d2lpm-dropped-reason"] == "rejected-ttl-expired"
            assert int(headers["retry-after"]) >= 1
            answer = await streamed.read()
        assert answer.startswith(b"\n\n")
        assert b'"type":"rate_limit_error"' in answer
        assert answer.endswith(b"\n\ndata: [DONE]\n\n")
        await call.answer()
        assert (await first.response()).status == 200

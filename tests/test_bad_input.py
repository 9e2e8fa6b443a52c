"""Whatever a client sends, it is told what is wrong in OpenAI's shape, and nobody else notices."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from running import CHAT, COMPLETIONS, PATIENCE, RunningRouter, chat, running_router, until
from scripted_engine import ScriptedEngine, scripted_engine

LIMIT = 20_000
Served = tuple[ScriptedEngine, RunningRouter]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    """One router for all: what one test does to it, the next one would see."""
    async with scripted_engine() as engine, running_router(engine.url, body_limit=LIMIT) as router:
        yield engine, router


async def refused(router: RunningRouter, method: str, path: str, body: bytes) -> tuple[int, Any, Any]:
    """Status, headers and error object."""
    async with router.http.request(method, path, data=body) as response:
        assert response.headers["content-type"] == "application/json"
        fields = await response.json()
    assert fields.keys() == {"error"}
    assert fields["error"].keys() == {"message", "type", "param", "code"}
    assert isinstance(fields["error"]["message"], str)
    return response.status, response.headers, fields["error"]


HELLO = [{"role": "user", "content": "Hello"}]
TEXT = {"model": "m", "prompt": "Hello"}
BAD: list[tuple[str, object, str | None, str]] = [
    (CHAT, b"", None, "invalid_json"),
    (CHAT, b"{", None, "invalid_json"),
    (CHAT, b"\xff\xfe", None, "invalid_json"),
    (CHAT, b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}', None, "invalid_json"),
    (CHAT, b"[" * 10_000, None, "invalid_json"),
    (CHAT, b'{"model":NaN}', None, "invalid_json"),
    (CHAT, b"[]", None, "invalid_type"),
    (CHAT, b"null", None, "invalid_type"),
    (CHAT, {"messages": HELLO}, "model", "missing_required_parameter"),
    (CHAT, chat(model=None), "model", "missing_required_parameter"),
    (CHAT, chat(model=7), "model", "invalid_type"),
    (CHAT, chat(model=""), "model", "invalid_value"),
    (CHAT, chat(messages=None), "messages", "missing_required_parameter"),
    (CHAT, chat(messages="Hello"), "messages", "invalid_type"),
    (CHAT, chat(messages=[]), "messages", "invalid_value"),
    (CHAT, chat(messages=["Hello"]), "messages[0]", "invalid_type"),
    (CHAT, chat(max_tokens=-1), "max_tokens", "invalid_value"),
    (CHAT, chat(max_tokens="9"), "max_tokens", "invalid_type"),
    (CHAT, chat(max_tokens=1.5), "max_tokens", "invalid_type"),
    (CHAT, chat(max_tokens=True), "max_tokens", "invalid_type"),
    (CHAT, chat(max_tokens=10**30), "max_tokens", "invalid_type"),
    (CHAT, chat(max_completion_tokens=-1), "max_completion_tokens", "invalid_value"),
    (CHAT, chat(n=0), "n", "invalid_value"),
    (CHAT, chat(n=[1]), "n", "invalid_type"),
    (CHAT, chat(stream="yes"), "stream", "invalid_type"),
    (CHAT, chat(stream=1), "stream", "invalid_type"),
    (CHAT, chat(user=7), "user", "invalid_type"),
    (CHAT, chat(stream=True, stream_options=[]), "stream_options", "invalid_type"),
    (CHAT, chat(stream=True, stream_options={"include_usage": 1}), "stream_options.include_usage", "invalid_type"),
    (COMPLETIONS, {"model": "m"}, "prompt", "missing_required_parameter"),
    (COMPLETIONS, {**TEXT, "prompt": []}, "prompt", "invalid_value"),
    (COMPLETIONS, {**TEXT, "prompt": 7}, "prompt", "invalid_type"),
    (COMPLETIONS, {**TEXT, "prompt": [1, "a"]}, "prompt", "invalid_type"),
    (COMPLETIONS, {**TEXT, "prompt": ["a", 1]}, "prompt", "invalid_type"),
    (COMPLETIONS, {**TEXT, "prompt": [-1]}, "prompt", "invalid_type"),
    (COMPLETIONS, {**TEXT, "prompt": [[1], "a"]}, "prompt", "invalid_type"),
    (COMPLETIONS, {**TEXT, "max_tokens": -1}, "max_tokens", "invalid_value"),
]


@pytest.mark.parametrize(("path", "body", "param", "code"), BAD)
async def test_a_body_that_makes_no_sense_is_the_clients_fault(
    served: Served, path: str, body: object, param: str | None, code: str
) -> None:
    """A 400 that names the member at fault; no engine hears of it."""
    engine, router = served
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, _, error = await refused(router, "POST", path, data)
    assert (status, error["type"], error["param"], error["code"]) == (400, "invalid_request_error", param, code)
    assert engine.calls.empty()
    router.check_counts()


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", COMPLETIONS, 405, "method_not_allowed"),
        ("OPTIONS", CHAT, 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("POST", "/v1/chat/completion", 404, "unknown_path"),
        ("POST", "/v1/chat/completions/", 404, "unknown_path"),
        ("GET", "/", 404, "unknown_path"),
        ("GET", "/%00%ff", 404, "unknown_path"),
        ("GET", "/" + "x" * 5000, 404, "unknown_path"),
    ],
)
async def test_a_wrong_door(served: Served, method: str, path: str, status: int, code: str) -> None:
    """An unknown path is a 404 and a wrong method a 405 that says which one is right."""
    got, headers, error = await refused(served[1], method, path, b"{}")
    assert (got, error["code"]) == (status, code)
    assert ("allow" in headers) is (status == 405)
    assert len(error["message"]) < 300


async def test_an_unknown_model(served: Served) -> None:
    """OpenAI's own code for it, and no more of a long name than is useful."""
    status, _, error = await refused(served[1], "POST", CHAT, json.dumps(chat(model="x" * 9000)).encode())
    assert (status, error["param"], error["code"]) == (404, "model", "model_not_found")
    assert len(error["message"]) < 300


async def raw(router: RunningRouter, data: bytes) -> bytes:
    """Send bytes as they are and read to the end of the connection."""
    reader, writer = await asyncio.open_connection(*router.address)
    try:
        writer.write(data)
        async with asyncio.timeout(PATIENCE):
            return await reader.read()
    finally:
        writer.close()


HEAD = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n".encode()


async def test_a_body_over_the_limit_is_refused_before_it_is_read(served: Served) -> None:
    """By its declared length; nothing of it has to be sent."""
    answer = await raw(served[1], HEAD + b"content-length: 99999999999\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b'"type":"invalid_request_error"' in answer


async def test_a_body_over_the_limit_in_chunks_is_refused(served: Served) -> None:
    """It says no length, so the limit ends it; the client may still be sending."""
    size = LIMIT // 4
    answer = await raw(
        served[1], HEAD + b"transfer-encoding: chunked\r\n\r\n" + (b"%x\r\n%b\r\n" % (size, b"x" * size)) * 9
    )
    assert answer.startswith(b"HTTP/1.1 413 ")


async def test_a_body_of_just_the_limit_is_taken(served: Served) -> None:
    """Declared or in chunks."""
    engine, router = served
    body = json.dumps(chat("x")).encode()
    body = body.replace(b'"x"', b'"' + b"x" * (LIMIT - len(body) + 1) + b'"')
    for head in (b"content-length: %d\r\n\r\n%b", b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n"):
        answering = asyncio.ensure_future(raw(router, HEAD + head % (LIMIT, body)))
        await (await engine.call()).answer()
        assert (await answering).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        HEAD + b"content-length: -5\r\n\r\n",
        HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\n{}",
        HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        HEAD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_a_400(served: Served, data: bytes) -> None:
    """And never a request, nor half of one."""
    engine, router = served
    assert (await raw(router, data)).startswith(b"HTTP/1.1 400 ")
    assert engine.calls.empty()
    await router.check_at_rest()


@pytest.mark.parametrize("body", [chat(max_tokens=2**63, n=2**63), chat("", max_tokens=0), chat(messages=[{}])])
async def test_what_an_engine_may_refuse_is_forwarded(served: Served, body: dict[str, object]) -> None:
    """The router asks for no more than it needs, and no number is too large for its counts."""
    engine, router = served
    async with router.post(body) as post:
        await (await engine.call()).answer()
        assert (await post.response()).status == 200
    await router.check_at_rest()


async def test_others_are_served_beside_all_that(served: Served) -> None:
    """A hundred bad calls at once, and a good one among them."""
    engine, router = served
    bad = [refused(router, "POST", CHAT, b"{" * n) for n in range(1, 101)]
    async with router.post(chat()) as post:
        statuses = [status for status, _, _ in await asyncio.gather(*bad)]
        await (await engine.call()).answer()
        assert (await post.response()).status == 200
    assert statuses == [400] * 100


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_a_full_queue_refuses(stream: bool) -> None:
    """429 with the reason and when to come again; those that wait keep their place."""
    async with (
        scripted_engine() as engine,
        running_router(engine.url, max_inflight=1, max_queued=1) as router,
        router.post(chat()) as first,
        router.post(chat()) as second,
    ):
        call = await engine.call()
        await until(lambda: router.scheduler.waiting == 1)
        status, headers, error = await refused(router, "POST", CHAT, json.dumps(chat(stream=stream)).encode())
        assert (status, error["type"]) == (429, "rate_limit_error")
        assert headers["x-d2lpm-dropped-reason"] == "rejected-saturated"
        assert int(headers["retry-after"]) >= 1
        await call.answer()
        await (await engine.call()).answer()
        assert [(await post.response()).status for post in (first, second)] == [200, 200]


async def test_a_request_that_waited_too_long_is_refused() -> None:
    """429 by its status, and inside the stream where a comment has begun one."""
    async with (
        scripted_engine() as engine,
        running_router(engine.url, max_inflight=1, queue_ttl=0.2, heartbeat=0.02) as router,
        router.post(chat()) as first,
        router.post(chat(stream=True)) as streamed,
    ):
        call = await engine.call()
        status, headers, error = await refused(router, "POST", CHAT, json.dumps(chat()).encode())
        assert (status, error["type"]) == (429, "rate_limit_error")
        assert headers["x-d2lpm-dropped-reason"] == "rejected-ttl-expired"
        assert int(headers["retry-after"]) >= 1
        answer = await streamed.read()
        assert answer.startswith(b":")
        assert b'"type":"rate_limit_error"' in answer
        assert answer.endswith(b"\n\ndata: [DONE]\n\n")
        await call.answer()
        assert (await first.response()).status == 200

"""Calls to paths unknown to the router are forwarded unchanged, and queued and charged like all others."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from tests.support.running import chat, running_router, until
from tests.support.scripted_engine import Call, event, scripted_engine
from tests.support.served import service

AUDIO = "/v1/audio/transcriptions"
UNKNOWN_PATH = "/v1/decisions"
USAGE: list[tuple[Any, tuple[int, int, int]]] = [
    ({"usage": {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}}, (9, 0, 2)),
    ({"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}}, (5, 4, 0)),
    ({"usage": {"input_tokens": 9, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 4}}}, (5, 4, 2)),
    ({"usage": {"input_tokens": 3, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 2}}, (5, 4, 0)),
    ({"usage": {"total_tokens": 9}}, (9, 0, 0)),
    ({"usage": {"type": "duration", "seconds": 1.5}}, (75, 0, 0)),
    ({"meta": {"tokens": {"input_tokens": 9}}}, (9, 0, 0)),
    ({"usage": {"seconds": 1e99, "type": "duration"}}, (100, 0, 0)),
    ({"usage": None}, (100, 0, 0)),
    ([1, 2], (100, 0, 0)),
]


@pytest.mark.parametrize(("answer", "charged"), USAGE, ids=[json.dumps(answer) for answer, _ in USAGE])
async def test_usage_in_any_shape_is_charged(answer: object, charged: tuple[int, int, int]) -> None:
    """Without a readable usage, one token per four bytes of the body is charged."""
    body = json.dumps({"model": "m", "user": "ann", "x": ""}).encode()
    body = body.replace(b'""', b'"%b"' % (b"x" * (400 - len(body))))
    sent = json.dumps(answer, indent=1).encode()
    async with scripted_engine() as engine, running_router(engine.url) as router:
        async with router.post(body, f"{UNKNOWN_PATH}?a=b%20c&d=é") as post:
            call = await engine.call()
            assert (call.path, call.body) == (f"{UNKNOWN_PATH}?a=b%20c&d=%C3%A9", body)
            assert call.headers["content-type"] == "application/json"
            await call.respond(200, sent, content_type="application/json; odd=1")
            assert await post.read() == sent
            response = await post.response()
            assert (response.headers["content-type"], response.headers["x-d2lpm-client"]) == (
                *("application/json; odd=1", "user-ann"),
            )
        assert await service(router, "user-ann") == charged


async def test_a_stream_passes_unchanged_and_its_last_usage_is_charged() -> None:
    """Each event passes, whatever its form, before the engine sends the next."""
    events = [
        b": hi\n\n",
        b"event: x\nid: 7\ndata: no JSON\n\n",
        event({"usage": {"total_tokens": 7}}),
        b"data: [DONE]\n\n",
    ]
    async with scripted_engine() as engine, running_router(engine.url) as router:
        async with router.post(json.dumps({"stream": True, "user": "ann"}).encode(), UNKNOWN_PATH) as post:
            call = await engine.call()
            await call.begin()
            for block in events:
                await call.write(block)
                assert await (await post.response()).content.readexactly(len(block)) == block
            await call.end()
            assert await post.read() == b""
        assert await service(router, "user-ann") == (7, 0, 0)


@pytest.mark.parametrize("status", [200, 201])
async def test_a_call_that_asks_for_a_stream_can_get_a_whole_answer(status: int) -> None:
    """The content type of the answer counts: it is passed on and charged, and not retried elsewhere."""
    sent = b'{"object":"video","usage":{"total_tokens":7}}\n\n'
    async with scripted_engine() as one, scripted_engine() as two, running_router(one.url, two.url) as router:
        async with router.post(b'{"stream":true,"user":"ann"}', UNKNOWN_PATH) as post:
            await (await first_call(one.calls, two.calls)).respond(status, sent)
            response = await post.response()
            assert (response.status, response.headers["content-type"]) == (status, "application/json")
            assert await post.read() == sent
        assert await service(router, "user-ann") == (7, 0, 0)
        assert one.calls.empty()
        assert two.calls.empty()


async def test_a_waiting_call_gets_nothing_before_its_answer() -> None:
    """A heartbeat would announce a stream."""
    async with (
        scripted_engine() as engine,
        running_router(engine.url, max_inflight=1, heartbeat=0.01) as router,
        router.post(chat(stream=True)) as first,
    ):
        running = await engine.call()
        async with router.post(chat(stream=True)) as second, router.post(b'{"stream":true}', UNKNOWN_PATH) as post:
            await router.until_waiting(2)
            content = (await second.response()).content
            assert await content.readexactly(4) == b"\n" * 4
            await running.answer()
            await first.read()
            for _ in range(2):
                call = await engine.call()
                await (call.respond(200, b"[1]") if call.path == UNKNOWN_PATH else call.answer())
            assert (await post.response()).headers["content-type"] == "application/json"
            assert await post.read() == b"[1]"


@pytest.mark.parametrize("kind", ["text/event-stream", "Text/Event-Stream ;charset=utf-8"])
async def test_a_call_that_asks_for_no_stream_can_get_one(kind: str) -> None:
    """Each event passes before the next is sent, and a disconnect ends the stream."""
    async with scripted_engine() as engine, running_router(engine.url) as router:
        async with router.post(b'{"user":"ann"}', UNKNOWN_PATH) as post:
            call = await engine.call()
            await call.begin(content_type=kind)
            for number in range(3):
                block = event({"usage": {"total_tokens": number + 5}})
                await call.write(block)
                assert await (await post.response()).content.readexactly(len(block)) == block
            assert (await post.response()).headers["content-type"] == kind
            (await post.response()).close()
            await call.wait_closed()
        await router.until_all_ended()
        assert await service(router, "user-ann") == (7, 0, 0)


async def test_a_malformed_stream_is_a_failure_of_the_worker() -> None:
    """The answer claims to be a stream and is none, so another worker is tried."""
    async with (
        scripted_engine() as one,
        scripted_engine() as two,
        running_router(one.url, two.url) as router,
        router.post(b"{}", UNKNOWN_PATH) as post,
    ):
        await (await first_call(one.calls, two.calls)).stream(b"<html>")
        await (await first_call(one.calls, two.calls)).respond(200, b"{}")
        assert await post.read() == b"{}"


async def test_a_form_with_a_file_goes_to_a_worker_of_its_model() -> None:
    """The bytes and their type are forwarded unchanged; model and user are read from the form."""
    form = aiohttp.FormData({"model": "whisper", "user": "ann"})
    form.add_field("file", b"\x00\xff\r\n" * 12_800, filename="a.wav", content_type="audio/wav")
    async with (
        scripted_engine("m") as other,
        scripted_engine("whisper") as engine,
        running_router(other.url, engine.url) as router,
    ):
        request = asyncio.ensure_future(router.http.post(AUDIO, data=form))
        call = await engine.call()
        assert call.headers["content-type"].startswith("multipart/form-data; boundary=")
        assert b'name="file"; filename="a.wav"' in call.body
        await call.respond(200, b'{"text":"hello"}')
        async with await request as response:
            assert await response.json() == {"text": "hello"}
        assert await service(router, "user-ann") == (len(call.body) // 512, 0, 0)


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_other_methods_are_forwarded(method: str) -> None:
    """A call without a body names no model and costs one token."""
    async with scripted_engine() as engine, running_router(engine.url) as router:
        request = asyncio.ensure_future(router.http.request(method, "/v1/files/file 1"))
        call = await engine.call()
        assert (call.method, call.path, call.body) == (method, "/v1/files/file%201", b"")
        await call.respond(204 if method == "DELETE" else 200, b"")
        async with await request as response:
            assert response.status == (204 if method == "DELETE" else 200)
            assert ("content-length" in response.headers) is (method != "DELETE")  # a 204 must not have one
        assert await service(router, "address-127.0.0.1") == (1, 0, 0)


async def test_a_path_that_no_worker_serves_is_a_404_in_openais_shape() -> None:
    """The engine's `detail`, which no client library reads, becomes an error message; nothing is charged."""
    async with scripted_engine() as engine, running_router(engine.url) as router:
        async with router.post(b'{"user":"ann"}', "/v1/nothing") as post:
            await (await engine.call()).respond(404, b'{"detail":"Not Found"}')
            response = await post.response()
            assert (response.status, response.headers["content-type"]) == (404, "application/json")
            error = (await response.json())["error"]
            assert (error["message"], error["type"]) == ("Not Found", "not_found_error")
        assert await service(router, "user-ann") == (0, 0, 0)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter/",
        "/v1/loads",
        "/v1//loads",
        "/v1/x/..//loads",
        "/v1/./chat",
        "/x",
    ],
)
async def test_admin_paths_of_engines_are_closed(path: str) -> None:
    """Adapter and load paths are, in each spelling that a proxy may shorten, and all paths outside /v1."""
    async with scripted_engine() as engine, running_router(engine.url) as router:
        reader, writer = await asyncio.open_connection(*router.address)
        writer.write(f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{{}}".encode())
        assert (await reader.readline()).split()[1] == b"404"
        writer.close()
        assert engine.calls.empty()


async def test_a_call_without_a_model_is_queued_like_others() -> None:
    """A call without a model waits in the queue and counts in the window."""
    async with (
        scripted_engine() as engine,
        running_router(engine.url, max_inflight=1) as router,
        router.post(chat()) as first,
    ):
        running = await engine.call()
        async with router.post(b"{}", UNKNOWN_PATH) as second:
            await router.until_waiting(1)
            assert engine.calls.empty()
            await running.answer()
            await first.read()
            await (await engine.call()).respond(200, b"{}")
            assert await second.read() == b"{}"


async def test_a_failed_call_is_retried_at_another_worker() -> None:
    """The client has no part of the answer yet."""
    async with (
        scripted_engine() as one,
        scripted_engine() as two,
        running_router(one.url, two.url) as router,
        router.post(b'{"stream":true}', UNKNOWN_PATH) as post,
    ):
        (await first_call(one.calls, two.calls)).reset()
        await (await first_call(one.calls, two.calls)).stream(b"data: 1\n\n")
        assert await post.read() == b"data: 1\n\n"


async def first_call(*queues: "asyncio.Queue[Call]") -> Call:
    """Return the next call at any of these engines."""
    await until(lambda: any(not queue.empty() for queue in queues))
    return next(queue for queue in queues if not queue.empty()).get_nowait()

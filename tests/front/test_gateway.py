"""Calls end to end: with the official client and emulated engines, and byte by byte with a scripted engine."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.running import CHAT, COMPLETIONS, chat, emulated_workers, running_router
from tests.support.scripted_engine import DONE, chunk, event, scripted_engine, usage, usage_chunk


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def engines(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Run two emulated workers of each kind."""
    with emulated_workers(2, "--dialect", request.param) as urls:
        yield urls


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)


MESSAGES: Any = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Tell me of the sea. " * 20}]
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


async def whole_answer(url: str, path: str, options: dict[str, Any]) -> tuple[dict[int, str], Any]:
    """Return texts by choice, and prompt and output tokens, as the official client reads them."""
    async with client_of(url) as client:
        if path == CHAT:
            whole = await client.chat.completions.create(model="m", messages=MESSAGES, **options)
            texts = {choice.index: choice.message.content or "" for choice in whole.choices}
        else:
            whole = await client.completions.create(model="m", prompt=["One " * 9, "Two"], **options)
            texts = {choice.index: choice.text for choice in whole.choices}
    assert whole.usage is not None
    return texts, (whole.usage.prompt_tokens, whole.usage.completion_tokens)


async def streamed_answer(url: str, path: str, options: dict[str, Any]) -> tuple[dict[int, str], Any]:
    """Return the same for a streamed call."""
    texts: dict[int, str] = {}
    counted = None
    options = {**options, "stream": True}
    async with client_of(url) as client:
        if path == CHAT:
            stream = await client.chat.completions.create(model="m", messages=MESSAGES, **options)
        else:
            stream = await client.completions.create(model="m", prompt=["One " * 9, "Two"], **options)
        async for part in stream:
            for choice in part.choices:
                text = choice.delta.content if path == CHAT else choice.text
                texts[choice.index] = texts.get(choice.index, "") + (text or "")
            if part.usage is not None:
                assert not part.choices
                counted = part.usage.prompt_tokens, part.usage.completion_tokens
    return texts, counted


@pytest.mark.parametrize(
    ("path", "options"),
    [
        (CHAT, {"max_tokens": 20}),
        (CHAT, {"max_tokens": 8, "n": 2, "tools": TOOLS}),
        (COMPLETIONS, {"max_tokens": 8, "n": 2}),
    ],
    ids=["chat", "choices and tools", "completions"],
)
async def test_an_answer_reads_like_one_from_the_engine(engines: list[str], path: str, options: dict[str, Any]) -> None:
    """The official client reads the same text and usage as from a direct call, streamed and not."""
    options = {**options, "extra_body": {"ignore_eos": True}}
    wanted = {**options, "stream_options": {"include_usage": True}}
    async with running_router(*engines) as router:
        direct = await whole_answer(engines[0], path, options)
        assert await whole_answer(router.url, path, options) == direct
        assert await streamed_answer(router.url, path, wanted) == direct
        assert await streamed_answer(router.url, path, options) == (direct[0], None)


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"], ids=["LF", "CRLF", "CR"])
async def test_usage_that_only_the_router_asked_for_is_cut_out(newline: bytes) -> None:
    """Usage is removed from chunks and the end; all else stays, with any line ending, split at every byte."""
    sent = [
        b": keep-alive\n\n",
        chunk("a", usage=usage(9, 1)),
        b"id: 7\n" + chunk("b", usage=usage(9, 2)),
        chunk("c", "stop", usage=None),
        usage_chunk(9, 3),
        DONE,
    ]
    kept = [sent[0], chunk("a"), b"id: 7\n" + chunk("b"), sent[3], DONE]
    async with scripted_engine() as engine, running_router(engine.url) as router:
        async with router.post(chat(stream=True, user="ann")) as post:
            call = await engine.call()
            assert call.json["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
            stream = b"".join(sent).replace(b"\n", newline)
            await call.stream(*(stream[at : at + 1] for at in range(len(stream))))
            assert await post.read() == b"".join(kept).replace(b"\n", newline)
        await router.until_all_ended()
        service = (await router.fairness())["clients"]["user-ann"]["service"]
        assert (service["extend"], service["output"]) == (9, 3)


BLOCKS = [
    b": a comment\n\n",
    chunk("a", usage=usage(9, 1)),
    chunk("b", usage=usage(9, 2)) + chunk("several tokens", usage=usage(9, 5)),
    b'data: {"choices" : [ ],  "usage":null,"odd":"\\u00e9"}\n\n',
    b"event: strange\nretry: 5\n\n",
    chunk("", "stop"),
    usage_chunk(9, 5),
    DONE,
]


async def test_each_block_passes_at_once_and_unchanged() -> None:
    """A client that asked for all usage gets every block, byte for byte, before the engine sends the next."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with (
        scripted_engine() as engine,
        running_router(engine.url) as router,
        router.post(chat(stream=True, stream_options=options)) as post,
    ):
        call = await engine.call()
        await call.begin()
        for block in BLOCKS:
            await call.write(block)
            client = (await post.response()).content
            assert await client.readexactly(len(block)) == block
        await call.end()
        assert await client.read() == b""


async def test_each_event_passes_before_the_next_is_sent() -> None:
    """An event is passed on before the next one arrives, also if its usage is removed."""
    async with (
        scripted_engine() as engine,
        running_router(engine.url) as router,
        router.post(chat(stream=True)) as post,
    ):
        call = await engine.call()
        await call.begin()
        for word in ("a", "b", "c"):
            await call.write(chunk(word, usage=usage(9, 1)))
            client = (await post.response()).content
            assert await client.readexactly(len(chunk(word))) == chunk(word)
        await call.write(chunk("", "stop") + usage_chunk(9, 3) + DONE)
        await call.end()
        assert await client.read() == chunk("", "stop") + DONE


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "cut short"])
async def test_an_answer_that_arrives_all_at_once_passes(whole: bool) -> None:
    """If the end arrives with the last block, nothing of the block is lost, whether or not the answer is complete."""
    blocks = [chunk("a", usage=usage(9, 1)), *([chunk("", "stop"), usage_chunk(9, 1), DONE] if whole else [])]
    async with (
        scripted_engine() as engine,
        running_router(engine.url) as router,
        router.post(chat(stream=True)) as post,
    ):
        await (await engine.call()).respond(200, b"".join(blocks), content_type="text/event-stream")
        seen = await post.read()
        assert seen.startswith(chunk("a"))
        rest = seen.removeprefix(chunk("a"))
        assert rest == chunk("", "stop") + DONE if whole else b"worker_broke" in rest


@pytest.mark.parametrize(
    "error",
    [
        {"error": {"message": "died", "type": "InternalServerError", "param": None, "code": 500}},
        {"error": {"object": "error", "message": "died", "type": "abort", "param": None, "code": 500}},
    ],
    ids=["vllm", "sglang"],
)
async def test_an_engines_error_inside_a_stream_reaches_the_client(error: dict[str, Any]) -> None:
    """The error passes unchanged, the official client raises it, and the client pays for what was computed."""
    async with scripted_engine() as engine, running_router(engine.url) as router, client_of(router.url) as client:
        request = client.chat.completions.create(model="m", messages=MESSAGES, stream=True, user="ann")
        pending = asyncio.ensure_future(request)
        await (await engine.call()).stream(chunk("a", usage=usage(9, 1)), event(error), DONE)
        with pytest.raises(openai.APIError, match="died"):
            async for _ in await pending:
                pass
        await router.check_at_rest()
        (served,) = [entry["service"] for entry in (await router.fairness())["clients"].values()]
        assert (served["extend"], served["output"]) == (9, 1)


async def test_a_call_that_is_not_streamed_is_forwarded_unchanged() -> None:
    """Body and answer are the same bytes on both sides, with odd spacing and unknown fields."""
    body = b'{ "model" : "m","x":1e2, "messages":[{"role":"user","content":"\\u00e9"}],"unknown":{"a":[]} }\n'
    answer = b'{"choices": [{"index":0,"message":{"content":"a"}}], "odd":  true}\n'
    async with scripted_engine() as engine, running_router(engine.url) as router, router.post(body) as post:
        call = await engine.call()
        assert (call.method, call.path, call.body) == ("POST", CHAT, body)
        await call.respond(200, answer, content_type="application/json; odd=1")
        assert await post.read() == answer
        assert (await post.response()).headers["content-type"] == "application/json; odd=1"


async def test_a_long_body_is_forwarded_whole() -> None:
    """Several megabytes of prompt arrive as they were sent."""
    content = "0123456789" * 300_000
    async with scripted_engine() as engine, running_router(engine.url) as router, router.post(chat(content)) as post:
        call = await engine.call()
        assert call.json["messages"][0]["content"] == content
        await call.answer()
        assert (await post.response()).status == 200


async def test_a_waiting_stream_gets_heartbeats_and_then_its_answer() -> None:
    """With one request at a time, the second client gets blank lines before its answer.

    They are no comments, which some clients read as JSON.
    """
    async with (
        scripted_engine() as engine,
        running_router(engine.url, max_inflight=1, heartbeat=0.05) as router,
        router.post(chat("first", stream=True)) as first,
    ):
        running = await engine.call()
        async with router.post(chat("second", stream=True), x_request_id="mine") as second:
            response = await second.response()
            assert response.headers["x-request-id"] == "mine"
            assert response.headers["content-type"].startswith("text/event-stream")
            for _ in range(2):
                assert await response.content.readuntil(b"\n\n") == b"\n\n"
            assert engine.calls.empty()
            await running.answer("one")
            assert chunk("one") in await first.read()
            await (await engine.call()).answer("two")
            assert without_comments(await second.read()) == [chunk("two"), chunk("", "stop"), DONE]


def without_comments(stream: bytes) -> list[bytes]:
    """Return the events of a stream with LF line endings."""
    assert stream.endswith(b"\n\n")
    return [each + b"\n\n" for each in stream.split(b"\n\n") if each and not each.startswith(b":")]


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (400, b'{"error": {"message": "too long", "type": "BadRequestError", "code": 400}}', "too long"),
        (400, b'{"object":"error","message":"too long","type":"BadRequestError","param":null,"code":400}', "too long"),
        (400, b'{\r\n"error":\r{"message":"too long"}}\n', "too long"),
        (422, b'{"error":"Unprocessable"}', "Unprocessable"),
        (500, b"Internal Server Error", "500"),
        (502, b"", "502"),
    ],
    ids=["vllm", "sglang", "lines", "string", "text", "nothing"],
)
async def test_a_refusal_after_a_heartbeat_is_sent_in_the_stream(status: int, body: bytes, message: str) -> None:
    """The status is already sent, so the error comes as an event that the official client raises, and [DONE]."""
    async with (
        scripted_engine() as engine,
        running_router(engine.url, max_inflight=1, heartbeat=0.05) as router,
        router.post(chat(stream=True)) as first,
    ):
        running = await engine.call()
        async with router.post(chat(stream=True)) as second:
            await (await second.response()).content.readuntil(b"\n\n")
            await running.answer()
            await first.read()
            await (await engine.call()).respond(status, body)
            whole_answer, *rest = without_comments(await second.read())
        assert rest == [DONE]
        error = json.loads(whole_answer.removeprefix(b"data: "))["error"]
        assert message in error["message"]


async def test_headers_describe_the_placement() -> None:
    """The headers show worker, client, policy, times and predicted hit; a second prompt is predicted to be cached. Its
    answer is a stream, which a proxy is not to buffer.
    """
    async with scripted_engine() as engine, running_router(engine.url, trusted_header=["x-team"]) as router:
        for predicted in (False, True):
            async with router.post(chat("x" * 4000, stream=predicted), x_team="blue") as post:
                await (await engine.call()).answer(prompt=1000)
                await post.read()
                headers = (await post.response()).headers
            assert headers["x-d2lpm-worker"] == engine.url.removeprefix("http://")
            assert (headers["x-d2lpm-client"], headers["x-d2lpm-policy"]) == ("header-blue", "dlpm_home")
            assert float(headers["x-d2lpm-queue-ms"]) >= 0
            assert float(headers["x-d2lpm-overhead-ms"]) >= 0
            assert (int(headers["x-d2lpm-predicted-cached-tokens"]) > 500) is predicted
            assert headers.get("x-accel-buffering") == ("no" if predicted else None)
            assert len(headers["x-request-id"]) == 32


async def test_no_cache_hit_is_predicted_for_a_call_that_is_computed_in_full() -> None:
    """A member of the body that forbids cache hits reaches the scheduler."""
    async with scripted_engine() as engine, running_router(engine.url) as router:
        predicted = []
        for members in ({}, {"prompt_logprobs": 0}, {}):
            async with router.post(chat("x" * 4000, **members)) as post:
                await (await engine.call()).answer(prompt=1000)
                await post.read()
                predicted.append(int((await post.response()).headers["x-d2lpm-predicted-cached-tokens"]) > 0)
        assert predicted == [False, False, True]


async def test_headers_can_be_switched_off() -> None:
    """Without the headers only the request id is left, for the worker and the client."""
    async with (
        scripted_engine() as engine,
        running_router(engine.url, response_headers=False) as router,
        router.post(chat(), x_request_id="mine") as post,
    ):
        call = await engine.call()
        assert call.headers["x-request-id"] == "mine"
        await call.answer()
        headers = (await post.response()).headers
        assert [(k.lower(), v) for k, v in headers.items() if k.lower().startswith("x-")] == [("x-request-id", "mine")]


@pytest.mark.parametrize("given", ["", "a" * 129, "t\tab", "\u00e9"], ids=["empty", "long", "tab", "not ASCII"])
async def test_a_request_id_that_cannot_be_used_is_replaced(given: str) -> None:
    """Request ids go into headers and logs, here and at the worker."""
    async with (
        scripted_engine() as engine,
        running_router(engine.url) as router,
        router.post(chat(), x_request_id=given) as post,
    ):
        await (await engine.call()).answer()
        assert len((await post.response()).headers["x-request-id"]) == 32


async def test_two_requests_in_flight_never_share_an_id() -> None:
    """A second request with an id in use gets another id; later the id is free again."""
    async with (
        scripted_engine() as engine,
        running_router(engine.url) as router,
        router.post(chat(stream=True), x_request_id="mine") as first,
    ):
        one = await engine.call()
        for expected in (False, True):
            async with router.post(chat(), x_request_id="mine") as post:
                await (await engine.call()).answer()
                assert ((await post.response()).headers["x-request-id"] == "mine") is expected
            if not expected:
                await one.answer()
                await first.read()
                await router.until_all_ended()


async def test_an_error_has_the_request_id_too() -> None:
    """Users can report the id, and it is in the logs."""
    async with running_router("http://127.0.0.1:9") as router:
        for body in (chat(), b"no JSON"):
            async with router.post(body, x_request_id="mine") as post:
                assert (await post.response()).headers["x-request-id"] == "mine"


@pytest.mark.one_process("the test reads the router's log")
async def test_no_key_shows_anywhere(caplog: pytest.LogCaptureFixture) -> None:
    """The worker does not get the client's key, and no key is in a header, a log line, /metrics or /fairness."""
    caplog.set_level("DEBUG")
    shown = []
    async with scripted_engine() as engine:
        workers = [{"url": engine.url, "api_key": "sk-worker"}]
        async with running_router(worker=workers) as router:
            for headers in ({"authorization": "Bearer sk-client"}, {"x_api_key": "sk-client"}):
                async with router.post(chat(), **headers) as post:
                    call = await engine.call()
                    assert call.headers["authorization"] == "Bearer sk-worker"
                    assert "sk-client" not in str(call)
                    await call.respond(400, b"{}")
                    shown += [str((await post.response()).headers), str(await post.read())]
            for path in ("/metrics", "/fairness", "/workers"):
                async with router.http.get(path) as response:
                    shown.append(await response.text())
    assert {call.headers["authorization"] for call in engine.polls} == {"Bearer sk-worker"}
    assert caplog.records
    assert "key-" in shown[0], "the client is named by its key"
    assert "sk-" not in f"{shown} {caplog.text}"

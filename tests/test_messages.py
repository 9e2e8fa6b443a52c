"""Anthropic's messages end to end: its official client before emulated engines, every byte before a scripted one."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import orjson
import pytest
from running import chat, emulated_workers, running_router, until
from scripted_engine import ScriptedEngine, scripted_engine
from served import service, whole_service

MESSAGES = "/v1/messages"
SYSTEM = "Be short. " * 100
TURN: Any = [{"role": "user", "content": "Tell me of the sea."}]


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def engines(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Two emulated workers of each kind."""
    with emulated_workers(2, "--dialect", request.param) as urls:
        yield urls


def client_of(url: str) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=url, api_key="x", max_retries=0)


def event(kind: str, **fields: object) -> bytes:
    """An event as engines send it."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields}))


def delta(text: str) -> bytes:
    return event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})


START = event(
    "message_start", message={"id": "a", "role": "assistant", "usage": {"input_tokens": 9, "output_tokens": 0}}
)
BLOCK = event("content_block_start", index=0, content_block={"type": "text", "text": ""})
USAGE = {"input_tokens": 4, "cache_read_input_tokens": 5, "output_tokens": 3}
END = [event("message_delta", delta={"stop_reason": "end_turn"}, usage=USAGE), event("message_stop")]


def body(messages: Any = TURN, **more: object) -> bytes:
    return json.dumps({"model": "m", "max_tokens": 50, "messages": messages, **more}).encode()


async def test_the_official_client_reads_a_message(engines: list[str]) -> None:
    """Text, end and usage, streamed and not, are those of a direct call; the key is that of `x-api-key`."""
    more: Any = {"model": "m", "max_tokens": 12, "system": SYSTEM, "messages": TURN, "extra_body": {"ignore_eos": True}}
    async with running_router(*engines) as router, client_of(router.url) as ours, client_of(engines[0]) as theirs:
        direct, whole = await theirs.messages.create(**more), await ours.messages.create(**more)
        assert (whole.content, whole.stop_reason) == (direct.content, "max_tokens")
        assert whole.usage.output_tokens == 12
        async with ours.messages.stream(**more) as stream:
            told = [text async for text in stream.text_stream]
            last = await stream.get_final_message()
        assert len(told) > 1
        assert (last.stop_reason, last.usage.output_tokens) == ("max_tokens", 12)
        assert [block.model_dump(include={"type", "text"}) for block in last.content] == [
            block.model_dump(include={"type", "text"}) for block in whole.content
        ]
        counted = await ours.messages.count_tokens(model="m", system=SYSTEM, messages=TURN)
        read = whole.usage.cache_read_input_tokens or 0
        assert counted.input_tokens == whole.usage.input_tokens + read
        assert await whole_service(router) == (3 * counted.input_tokens, 24)
        (client,) = (await router.fairness())["clients"]
        assert client.startswith("key-")


async def test_every_event_goes_through_at_once_and_as_it_came() -> None:
    """The usage at the end is charged: what was in the cache, and what was not."""
    blocks = [START, b": hi\n\n", b"event: ping\ndata: {}\n\n", BLOCK, delta("a") + delta("b"), *END]
    async with scripted_engine() as engine, running_router(engine.url) as router:
        async with router.post(body(stream=True, metadata={"user_id": "ann"}), MESSAGES) as post:
            call = await engine.call()
            assert call.body == body(stream=True, metadata={"user_id": "ann"})
            await call.begin()
            for block in blocks:
                await call.write(block)
                assert await (await post.response()).content.readexactly(len(block)) == block
            await call.end()
            assert await post.read() == b""
        assert await service(router, "user-ann") == (4, 5, 3)


async def test_tokens_are_charged_while_they_stream() -> None:
    """One for each delta; a client that leaves pays for its input and for what came."""
    async with scripted_engine() as engine, running_router(engine.url) as router:
        async with router.post(body(stream=True, metadata={"user_id": "ann"}), MESSAGES) as post:
            call = await engine.call()
            await call.begin()
            await call.write(START + BLOCK + delta("a") * 7)
            await (await post.response()).content.readuntil(delta("a") * 7)
            (post_response := await post.response()).close()
            assert post_response.status == 200
            await call.gone()
        await until(lambda: not router.scheduler.live)
        assert await service(router, "user-ann") == (9, 0, 7)


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_conversation_stays_where_it_began(streamed: bool) -> None:
    """Message and answer are keyed as the chat that engines make of them: the next turn is predicted to be cached."""
    answer = "the sea is deep " * 100
    second = [*TURN, {"role": "assistant", "content": answer}, {"role": "user", "content": "More."}]
    async with scripted_engine() as one, scripted_engine() as two, running_router(one.url, two.url) as router:
        at, predicted = [], []
        for turn, system in ((TURN, SYSTEM), (second, [{"type": "text", "text": SYSTEM}])):
            async with router.post(body(turn, system=system, stream=streamed), MESSAGES) as post:
                await _answer(one, two, answer, streamed=streamed)
                await post.read()
                headers = (await post.response()).headers
            at.append(headers["x-d2lpm-worker"])
            predicted.append(int(headers["x-d2lpm-predicted-cached-tokens"]))
        async with router.post(chat(messages=[{"role": "system", "content": SYSTEM}, *second])) as post:
            await (await _engine(one, two)).calls.get_nowait().answer(prompt=650)
            headers = (await post.response()).headers
        assert at[0] == at[1] == headers["x-d2lpm-worker"]
        assert predicted[0] == 0
        assert predicted[1] > 500
        assert int(headers["x-d2lpm-predicted-cached-tokens"]) > 500


async def _engine(*engines: ScriptedEngine) -> ScriptedEngine:
    await until(lambda: any(not engine.calls.empty() for engine in engines))
    (engine,) = [engine for engine in engines if not engine.calls.empty()]
    return engine


async def _answer(one: ScriptedEngine, two: ScriptedEngine, answer: str, *, streamed: bool) -> None:
    call = (await _engine(one, two)).calls.get_nowait()
    usage = {"input_tokens": 650, "output_tokens": 400}
    if streamed:
        words = [delta(word + " ") for word in answer.split()]
        end = [event("message_delta", delta={"stop_reason": "end_turn"}, usage=usage), event("message_stop")]
        await call.stream(START, BLOCK, *words, *end)
    else:
        content = [{"type": "text", "text": answer}]
        await call.respond(200, orjson.dumps({"type": "message", "content": content, "usage": usage}))


async def test_a_worker_that_dies_amid_a_stream_is_told_in_the_apis_own_words() -> None:
    """The official client raises it; nobody else can go on with it."""
    async with scripted_engine() as engine, running_router(engine.url) as router, client_of(router.url) as client:
        pending = asyncio.ensure_future(client.messages.create(model="m", max_tokens=9, messages=TURN, stream=True))
        call = await engine.call()
        await call.begin()
        await call.write(START + BLOCK + delta("a"))
        stream = await pending
        call.reset()
        with pytest.raises(anthropic.APIStatusError, match="broke off") as caught:
            async for _ in stream:
                pass
        assert json.loads(json.dumps(caught.value.body))["error"]["type"] == "api_error"


async def test_an_engines_error_before_the_answer_goes_to_another() -> None:
    """As with chats: only when a client has nothing yet."""
    failed = event("error", error={"type": "api_error", "message": "died"})
    async with (
        scripted_engine() as one,
        scripted_engine() as two,
        running_router(one.url, two.url) as router,
        router.post(body(stream=True), MESSAGES) as post,
    ):
        await (await _engine(one, two)).calls.get_nowait().stream(failed)
        await (await _engine(one, two)).calls.get_nowait().stream(START, BLOCK, delta("a"), *END)
        assert await post.read() == b"".join([START, BLOCK, delta("a"), *END])


@pytest.mark.parametrize(
    ("sent", "status", "kind"),
    [
        (b"{", 400, "invalid_request_error"),
        (body(model="nobodys"), 404, "not_found_error"),
        (body(model=None), 400, "invalid_request_error"),
    ],
    ids=["no JSON", "no such model", "no model"],
)
async def test_what_is_wrong_is_told_in_anthropics_shape(sent: bytes, status: int, kind: str) -> None:
    """Ours is; see below for the engines'."""
    async with scripted_engine() as engine, running_router(engine.url) as router, router.post(sent, MESSAGES) as post:
        response = await post.response()
        told = await response.json()
        assert (response.status, told["type"], told["error"]["type"]) == (status, "error", kind)
        assert told["error"]["message"]


@pytest.mark.parametrize(
    ("status", "sent", "kind", "message"),
    [
        (400, b'{"error":{"message":"too long","type":"BadRequestError"}}', "invalid_request_error", "too long"),
        (400, b'{"object":"error","message":"too long"}', "invalid_request_error", "too long"),
        (404, b'{"detail":"Not Found"}', "not_found_error", "Not Found"),
        (422, b'{"type":"error","error":{"type":"odd","message":"its own"}}', "odd", "its own"),
    ],
    ids=["vllm", "sglang", "no such path", "its own"],
)
async def test_an_engines_refusal_is_told_in_anthropics_shape(
    status: int, sent: bytes, kind: str, message: str
) -> None:
    """Whatever its own is."""
    async with scripted_engine() as engine, running_router(engine.url) as router, router.post(body(), MESSAGES) as post:
        await (await engine.call()).respond(status, sent)
        response = await post.response()
        assert response.status == status
        assert (await response.json())["error"] == {"type": kind, "message": message}

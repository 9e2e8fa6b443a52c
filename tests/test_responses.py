"""OpenAI's responses end to end: its official client before emulated engines, every byte before a scripted one."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import orjson
import pytest
from running import chat, emulated_workers, running_router, until
from scripted_engine import ScriptedEngine, scripted_engine
from served import service, whole_service

RESPONSES = "/v1/responses"
SYSTEM = "Be short. " * 100
USAGE: dict[str, object] = {
    **{"input_tokens": 9, "input_tokens_details": {"cached_tokens": 5}, "output_tokens": 3, "total_tokens": 12},
    "output_tokens_details": {"reasoning_tokens": 0},
}


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def engines(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Two emulated workers of each kind."""
    with emulated_workers(2, "--dialect", request.param) as urls:
        yield urls


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)


def event(kind: str, **fields: object) -> bytes:
    """An event as engines send it."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({**fields, "type": kind}))


def delta(text: str) -> bytes:
    return event("response.output_text.delta", delta=text, output_index=0)


def said(text: str) -> dict[str, object]:
    """An item of output."""
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"id": "msg", "type": "message", "role": "assistant", "status": "completed", "content": content}


def completed(text: str, **usage: int) -> bytes:
    counts: dict[str, object] = {**USAGE, **usage}
    return event("response.completed", response={"id": "r", "output": [said(text)], "usage": counts})


START = event("response.created", response={"id": "r", "usage": None}) + event("response.in_progress", response={})


def body(given: object = "Tell me of the sea.", **more: object) -> bytes:
    return json.dumps({"model": "m", "input": given, **more}).encode()


async def test_the_official_client_reads_a_response(engines: list[str]) -> None:
    """Text, end and usage, streamed and not, are those of a direct call."""
    more: Any = {"model": "m", "instructions": SYSTEM, "input": "Hi", "max_output_tokens": 12}
    more["extra_body"] = {"ignore_eos": True}
    async with running_router(*engines) as router, client_of(router.url) as ours, client_of(engines[0]) as theirs:
        direct, whole = await theirs.responses.create(**more), await ours.responses.create(**more)
        assert (whole.output_text, whole.status) == (direct.output_text, "incomplete")
        assert whole.usage is not None
        assert whole.usage.output_tokens == 12
        events = [each async for each in await ours.responses.create(**more, stream=True)]
        assert "".join(each.delta for each in events if each.type == "response.output_text.delta") == whole.output_text
        assert events[0].type == "response.created"
        last = events[-1]
        assert last.type == "response.incomplete"
        assert last.response.output_text == whole.output_text
        assert await whole_service(router) == (2 * whole.usage.input_tokens, 24)


async def test_every_event_goes_through_at_once_and_as_it_came() -> None:
    """The usage of the last one is charged: what was in the cache, and what was not."""
    blocks = [START, b": hi\n\n", event("response.odd"), delta("a") + delta("b"), completed("ab")]
    async with scripted_engine() as engine, running_router(engine.url) as router:
        async with router.post(body(stream=True, user="ann"), RESPONSES) as post:
            call = await engine.call()
            assert call.body == body(stream=True, user="ann")
            await call.begin()
            for block in blocks:
                await call.write(block)
                assert await (await post.response()).content.readexactly(len(block)) == block
            await call.end()
            assert await post.read() == b""
        assert await service(router, "user-ann") == (4, 5, 3)


async def test_tokens_are_charged_while_they_stream() -> None:
    """One for each delta; a client that leaves pays for them, and for its input as estimated."""
    async with scripted_engine() as engine, running_router(engine.url) as router:
        async with router.post(body(stream=True, user="ann"), RESPONSES) as post:
            call = await engine.call()
            await call.begin()
            await call.write(START + delta("a") * 7)
            response = await post.response()
            await response.content.readuntil(delta("a") * 7)
            response.close()
            await call.gone()
        await until(lambda: not router.scheduler.live)
        extend, cached, output = await service(router, "user-ann")
        assert extend > 0
        assert (cached, output) == (0, 7)


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_conversation_stays_where_it_began(streamed: bool) -> None:
    """Input and output are keyed as the chat that engines make of them: the next turn is predicted to be cached."""
    answer = "the sea is deep " * 100
    first: Any = [{"role": "user", "content": "Tell me of the sea."}]
    second = [*first, said(answer), {"role": "user", "content": [{"type": "input_text", "text": "More."}]}]
    as_chat = [
        {"role": "system", "content": SYSTEM},
        *first,
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "More."},
    ]
    async with scripted_engine() as one, scripted_engine() as two, running_router(one.url, two.url) as router:
        at, predicted = [], []
        for turn in (first, second):
            async with router.post(body(turn, instructions=SYSTEM, stream=streamed), RESPONSES) as post:
                call = (await _engine(one, two)).calls.get_nowait()
                usage = {"input_tokens": 650, "output_tokens": 400}
                if streamed:
                    words = [delta(word + " ") for word in answer.split()]
                    await call.stream(START, *words, completed(answer, **usage))
                else:
                    whole = {"object": "response", "output": [said(answer)], "usage": {**USAGE, **usage}}
                    await call.respond(200, orjson.dumps(whole))
                await post.read()
                headers = (await post.response()).headers
            at.append(headers["x-d2lpm-worker"])
            predicted.append(int(headers["x-d2lpm-predicted-cached-tokens"]))
        async with router.post(chat(messages=as_chat)) as post:
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


async def test_a_worker_that_dies_amid_a_stream_is_told_by_an_event_of_the_api() -> None:
    """The official client reads it as such; nobody else can go on with it."""
    async with scripted_engine() as engine, running_router(engine.url) as router, client_of(router.url) as client:
        pending = asyncio.ensure_future(client.responses.create(model="m", input="Hi", stream=True))
        call = await engine.call()
        await call.begin()
        await call.write(START + delta("a"))
        stream = await pending
        call.reset()
        last = [each async for each in stream][-1]
        assert last.type == "error"
        assert last.code == "worker_broke"
        assert "broke off" in last.message


@pytest.mark.parametrize(
    "failed",
    [
        event("error", code="server_error", message="died"),
        event("response.failed", response={"error": {"code": "server_error", "message": "died"}}),
        b'data: {"error":{"message":"died","code":500}}\n\n',
    ],
    ids=["error", "failed", "as in a chat"],
)
async def test_an_engines_error_before_the_answer_goes_to_another(failed: bytes) -> None:
    """As with chats: only when a client has nothing yet. Amid an answer it reaches the client as it is."""
    async with (
        scripted_engine() as one,
        scripted_engine() as two,
        running_router(one.url, two.url) as router,
    ):
        async with router.post(body(stream=True), RESPONSES) as post:
            await (await _engine(one, two)).calls.get_nowait().stream(failed)
            await (await _engine(one, two)).calls.get_nowait().stream(START, delta("a"), completed("a"))
            assert await post.read() == START + delta("a") + completed("a")
        async with router.post(body(stream=True), RESPONSES) as post:
            await (await _engine(one, two)).calls.get_nowait().stream(START, failed)
            assert await post.read() == START + failed
    assert one.calls.empty()
    assert two.calls.empty()


async def test_what_is_wrong_is_told_in_openais_shape() -> None:
    """Ours and an engine's, whose 404 says that it serves no such path."""
    async with scripted_engine() as engine, running_router(engine.url) as router, client_of(router.url) as client:
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.responses.create(model="nobodys", input="Hi")
        pending = asyncio.ensure_future(client.responses.create(model="m", input="Hi"))
        await (await engine.call()).respond(404, b'{"detail":"Not Found"}')
        with pytest.raises(openai.NotFoundError, match="Not Found"):
            await pending

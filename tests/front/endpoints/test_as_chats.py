"""Anthropic's messages and OpenAI's responses with scripted engines: passed on byte for byte, charged, and keyed."""

from typing import Any

import pytest

from tests.support.as_chats import APIS, ASKED, SYSTEM, USED, ChatApi, Used
from tests.support.running import chat, running_router, until
from tests.support.scripted_engine import ScriptedEngine, scripted_engine
from tests.support.served import service

FAILURES = [(api, failed) for api in APIS for failed in api.failures]
each_api = pytest.mark.parametrize("api", APIS, ids=str)


async def next_call(*engines: ScriptedEngine) -> Any:
    """Return the next call; only one of these engines may have one."""
    await until(lambda: any(not engine.calls.empty() for engine in engines))
    (engine,) = [engine for engine in engines if not engine.calls.empty()]
    return engine.calls.get_nowait()


@each_api
async def test_every_event_passes_at_once_and_unchanged(api: ChatApi) -> None:
    """The usage at the end is charged, cached and uncached tokens apart."""
    blocks = [api.start, b": hi\n\n", *api.unknown_events, api.delta("a") + api.delta("b"), *api.end("ab")]
    async with scripted_engine() as engine, running_router(engine.url) as router:
        async with router.post(api.ask(stream=True), api.path) as post:
            call = await engine.call()
            assert call.body == api.ask(stream=True)
            await call.begin()
            for block in blocks:
                await call.write(block)
                assert await (await post.response()).content.readexactly(len(block)) == block
            await call.end()
            assert await post.read() == b""
        assert await service(router, "user-ann") == USED


@each_api
async def test_tokens_are_charged_while_they_stream(api: ChatApi) -> None:
    """Each delta costs one token; on a disconnect the client pays these, and its input as reported or estimated."""
    async with scripted_engine() as engine, running_router(engine.url) as router:
        async with router.post(api.ask(stream=True), api.path) as post:
            call = await engine.call()
            await call.begin()
            await call.write(api.start + api.delta("a") * 7)
            response = await post.response()
            await response.content.readuntil(api.delta("a") * 7)
            response.close()
            await call.wait_closed()
        await router.until_all_ended()
        extend, cached, output = await service(router, "user-ann")
        assert extend > 0
        assert api.charged_after_start in ((extend, cached), (None, cached))
        assert output == 7


@pytest.mark.parametrize("streamed", [True, False])
@each_api
async def test_a_conversation_stays_at_its_worker(api: ChatApi, streamed: bool) -> None:
    """Prompt and answer are keyed like the chat that engines build, so the next turn is predicted to be cached."""
    answer = "the sea is deep " * 100
    more: Any = {"role": "user", "content": [{"type": "text", "text": "More."}]}
    turns: list[list[Any]] = [[ASKED], [ASKED, api.answer_turn(answer), more]]
    as_chat = [{"role": "system", "content": SYSTEM}, ASKED, {"role": "assistant", "content": answer}, more]
    async with scripted_engine() as one, scripted_engine() as two, running_router(one.url, two.url) as router:
        at, predicted = [], []
        for turn, used in zip(turns, (Used(650, 0, 400), Used(50, 1000, 400)), strict=True):
            body = api.ask(*turn, stream=streamed, **api.system_prompt(again=turn is turns[1]))
            async with router.post(body, api.path) as post:
                call = await next_call(one, two)
                if streamed:
                    words = [api.delta(word + " ") for word in answer.split()]
                    await call.stream(api.start, *words, *api.end(answer, used))
                else:
                    await call.respond(200, api.whole(answer, used))
                await post.read()
                headers = (await post.response()).headers
            at.append(headers["x-d2lpm-worker"])
            predicted.append(int(headers["x-d2lpm-predicted-cached-tokens"]))
        async with router.post(chat(messages=as_chat)) as post:
            await (await next_call(one, two)).answer(prompt=650)
            headers = (await post.response()).headers
        assert at[0] == at[1] == headers["x-d2lpm-worker"]
        assert predicted[0] == 0
        assert predicted[1] > 500
        assert int(headers["x-d2lpm-predicted-cached-tokens"]) > 500


@pytest.mark.parametrize(
    ("api", "failed"), FAILURES, ids=lambda value: str(value) if isinstance(value, ChatApi) else ""
)
async def test_an_error_before_the_answer_is_retried_at_another_worker(api: ChatApi, failed: bytes) -> None:
    """As with chats, only before the client has part of the answer. Later the error reaches the client unchanged."""
    async with scripted_engine() as one, scripted_engine() as two, running_router(one.url, two.url) as router:
        async with router.post(api.ask(stream=True), api.path) as post:
            await (await next_call(one, two)).stream(failed)
            answer = [api.start, api.delta("a"), *api.end("a")]
            await (await next_call(one, two)).stream(*answer)
            assert await post.read() == b"".join(answer)
        async with router.post(api.ask(stream=True), api.path) as post:
            await (await next_call(one, two)).stream(api.start, failed)
            assert await post.read() == api.start + failed
    assert one.calls.empty()
    assert two.calls.empty()

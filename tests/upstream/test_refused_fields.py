"""A worker refuses a field that the router added: no client is refused for a field that it did not send."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.support.running import CHAT, COMPLETIONS, RunningRouter, chat, running_router
from tests.support.scripted_engine import (
    DONE,
    ScriptedEngine,
    called_first,
    chunk,
    event,
    scripted_engine,
    usage,
    usage_chunk,
)

OPTIONS = {"include_usage": True, "continuous_usage_stats": True}
FLAT = "return_token_ids is not supported with streaming on /v1/chat/completions."


def refusal(message: str) -> bytes:
    return json.dumps(
        {"object": "error", "message": message, "type": "BadRequest", "param": None, "code": 400}
    ).encode()


@asynccontextmanager
async def before(**settings: Any) -> AsyncIterator[tuple[ScriptedEngine, RunningRouter]]:
    """Run a router in front of one engine."""
    async with scripted_engine() as engine, running_router(engine.url, **settings) as router:
        yield engine, router


async def refused_fields(router: RunningRouter) -> Any:
    (card,) = (await router.get_json("/workers"))["workers"]
    return card["refused_fields"]


@pytest.mark.parametrize("status", [400, 422])
@pytest.mark.one_process("the test reads the router's log")
async def test_a_refused_field_is_left_out_from_then_on(status: int, caplog: pytest.LogCaptureFixture) -> None:
    """The call is sent again at once without the field, the client sees only the answer, and later calls omit the
    field.
    """
    async with before() as (engine, router):
        async with router.post(chat(stream=True)) as post:
            call = await engine.call()
            assert (call.json["return_token_ids"], call.json["stream_options"]) == (True, OPTIONS)
            await call.respond(status, refusal(FLAT))
            again = await engine.call()
            assert "return_token_ids" not in again.json
            assert again.json["stream_options"] == OPTIONS
            await again.answer("yes")
            assert (await post.response()).status == 200
            assert await post.read() == chunk("yes") + chunk("", "stop") + DONE
        async with router.post(chat("More", stream=True)) as post:
            call = await engine.call()
            assert "return_token_ids" not in call.json
            await call.answer()
            assert (await post.response()).status == 200
        assert await refused_fields(router) == {CHAT: ["return_token_ids"]}
        assert [line for line in caplog.messages if "return_token_ids" in line and CHAT in line]
        await router.check_at_rest()


async def test_a_refusal_counts_for_its_path_alone() -> None:
    """A field refused in chats is still added to completions."""
    async with before() as (engine, router):
        async with router.post(chat(stream=True)) as post:
            await (await engine.call()).respond(400, refusal(FLAT))
            await (await engine.call()).answer()
            await post.read()
        async with router.post({"model": "m", "prompt": "x", "stream": True}, COMPLETIONS) as post:
            call = await engine.call()
            assert call.json["return_token_ids"] is True
            choice = {"index": 0, "text": "y", "finish_reason": "stop"}
            await call.stream(event({"id": "c", "choices": [choice]}), usage_chunk(9, 1), DONE)
            assert b'"y"' in await post.read()


async def test_fields_that_are_refused_one_after_the_other_all_go() -> None:
    """After three refusals the call is sent unchanged, and its tokens are counted from its chunks."""
    refusals = [FLAT, "Extra inputs are not permitted: continuous_usage_stats", "unknown field stream_options"]
    async with before() as (engine, router):
        async with router.post(chat(stream=True)) as post:
            for message in refusals:
                await (await engine.call()).respond(400, refusal(message))
            last = await engine.call()
            assert last.json == chat(stream=True)
            await last.stream(chunk("a"), chunk("b"), chunk("", "stop"), DONE)
            assert await post.read() == chunk("a") + chunk("b") + chunk("", "stop") + DONE
        await router.check_at_rest()
        added = {"return_token_ids", "stream_options.continuous_usage_stats", "stream_options.include_usage"}
        assert set((await refused_fields(router))[CHAT]) == added
        (served,) = [entry["service"] for entry in (await router.fairness())["clients"].values()]
        assert served["output"] == 2


async def test_a_bad_call_does_not_count_as_a_refusal_of_a_field() -> None:
    """A client that quotes a field's name in a call which is refused anyway does not disable that field for others."""
    wrong = refusal("temperature: 'return_token_ids' is not a number")
    async with before() as (engine, router):
        async with router.post(chat(stream=True, temperature="return_token_ids")) as post:
            for _ in range(2):
                await (await engine.call()).respond(400, wrong)
            response = await post.response()
            assert (response.status, await post.read()) == (400, wrong)
        assert await refused_fields(router) == {}
        async with router.post(chat(stream=True)) as post:
            call = await engine.call()
            assert call.json["return_token_ids"] is True
            await call.answer()
            await post.read()
        await router.check_at_rest()


async def test_fields_that_the_client_sent_are_not_removed() -> None:
    """A refusal of a field that the client itself asked for reaches it as it is, and nothing is sent again."""
    async with before() as (engine, router):
        body = chat(stream=True, return_token_ids=True, stream_options=OPTIONS)
        async with router.post(body) as post:
            call = await engine.call()
            assert call.json == body
            await call.respond(400, refusal(FLAT))
            response = await post.response()
            assert (response.status, await post.read()) == (400, refusal(FLAT))
        assert engine.calls.empty()
        assert await refused_fields(router) == {}


async def test_a_refusal_that_names_nothing_is_passed_on() -> None:
    """A refusal for another reason is passed on to the client at once."""
    async with before() as (engine, router):
        async with router.post(chat(stream=True)) as post:
            await (await engine.call()).respond(400, refusal("The input is too long."))
            response = await post.response()
            assert (response.status, await post.read()) == (400, refusal("The input is too long."))
        assert engine.calls.empty()
        await router.check_at_rest()


async def test_a_worker_that_dies_over_its_refusal_loses_no_call() -> None:
    """If the connection breaks during a refusal, the worker is at fault and another one gets the call."""
    async with (
        scripted_engine() as one,
        scripted_engine() as two,
        running_router(one.url, two.url, policy="rr+fcfs") as router,
    ):
        async with router.post(chat(stream=True)) as post:
            call, _, other = await called_first(one, two)
            await call.raw(b"HTTP/1.1 400 X\r\ncontent-length: 900\r\n\r\nreturn_token_ids")
            call.reset()
            await (await other.call()).answer("yes")
            assert chunk("yes") in await post.read()
        await router.check_at_rest()


async def test_a_chat_continues_by_its_text_if_there_are_no_token_ids() -> None:
    """A chat that began at SGLang, which sends no token ids in chats, is continued elsewhere from its text."""
    card = {"id": "m", "object": "model", "owned_by": "sglang", "max_model_len": 1000}
    async with scripted_engine() as one, scripted_engine() as two:
        for engine in (one, two):
            engine.poll_answers["/v1/models"] = (200, json.dumps({"data": [card]}).encode())
            engine.poll_answers["/ready"] = (200, b"")
            engine.poll_answers["/server_info"] = (200, b'{"version":"0.5.23"}')
            engine.poll_answers["/v1/loads"] = (200, b'{"loads":[{"num_running_reqs":0,"num_waiting_reqs":0}]}')
        async with (
            running_router(one.url, two.url, policy="rr+fcfs") as router,
            router.post(chat(stream=True, max_tokens=9)) as post,
        ):
            call, _, other = await called_first(one, two)
            assert "return_token_ids" not in call.json
            await call.begin()
            await call.write(chunk("one ", usage=usage(9, 1)))
            await (await post.response()).content.readuntil(b"one ")
            call.reset()
            rest = await other.call()
            assert rest.path == CHAT
            assert rest.json["messages"][-1] == {"role": "assistant", "content": "one "}
            assert (rest.json["max_tokens"], rest.json["continue_final_message"]) == (8, True)
            assert "return_token_ids" not in rest.json
            assert rest.json["stream_options"] == OPTIONS
            await rest.answer("two")
            assert b"two" in await post.read()
            await router.check_at_rest()

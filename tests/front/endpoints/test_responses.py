"""OpenAI's responses end to end: its official client reads answers and errors."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.as_chats import SYSTEM, Responses
from tests.support.running import emulated_workers, running_router
from tests.support.scripted_engine import scripted_engine
from tests.support.served import total_service

API = Responses()


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def engines(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Run two emulated workers of each kind."""
    with emulated_workers(2, "--dialect", request.param) as urls:
        yield urls


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)


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
        assert last.type in ("response.incomplete", "response.completed")  # SGLang, and vLLM
        assert last.response.output_text == whole.output_text
        assert await total_service(router) == (2 * whole.usage.input_tokens, 24)


async def test_a_worker_that_dies_during_a_stream_is_reported_by_an_event() -> None:
    """The official client reads it as an error; no other worker can continue the stream."""
    async with scripted_engine() as engine, running_router(engine.url) as router, client_of(router.url) as client:
        pending = asyncio.ensure_future(client.responses.create(model="m", input="Hi", stream=True))
        call = await engine.call()
        await call.begin()
        await call.write(API.start + API.delta("a"))
        stream = await pending
        call.reset()
        last = [each async for each in stream][-1]
        assert last.type == "error"
        assert last.code == "worker_broke"
        assert "broke off" in last.message


async def test_errors_have_openais_shape() -> None:
    """The router's errors have it, and an engine's 404 for a path that it does not serve."""
    async with scripted_engine() as engine, running_router(engine.url) as router, client_of(router.url) as client:
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.responses.create(model="nobodys", input="Hi")
        pending = asyncio.ensure_future(client.responses.create(model="m", input="Hi"))
        await (await engine.call()).respond(404, b'{"detail":"Not Found"}')
        with pytest.raises(openai.NotFoundError, match="Not Found"):
            await pending


async def test_a_background_response_is_refused() -> None:
    """No engine gets a background response, whose computation after the answer would not be counted."""
    async with scripted_engine() as engine, running_router(engine.url) as router, client_of(router.url) as client:
        for streamed in (False, True):
            with pytest.raises(openai.BadRequestError, match="Background responses") as refused:
                await client.responses.create(model="m", input="Hi", background=True, stream=streamed, timeout=30)
            assert refused.value.param == "background"
        assert engine.calls.empty()
        pending = asyncio.ensure_future(client.responses.create(model="m", input="Hi", background=False))
        await (await engine.call()).respond(404, b'{"detail":"Not Found"}')
        with pytest.raises(openai.NotFoundError):
            await pending
        await router.check_at_rest()

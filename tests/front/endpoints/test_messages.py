"""Anthropic's messages end to end: its official client reads answers and errors."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.support.as_chats import ASKED, SYSTEM, Messages
from tests.support.running import emulated_workers, running_router
from tests.support.scripted_engine import scripted_engine
from tests.support.served import total_service

API = Messages()
TURN: Any = [ASKED]


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def engines(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Run two emulated workers of each kind."""
    with emulated_workers(2, "--dialect", request.param) as urls:
        yield urls


def client_of(url: str) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=url, api_key="x", max_retries=0)


async def test_the_official_client_reads_a_message(engines: list[str]) -> None:
    """Text, end and usage, streamed and not, are those of a direct call; the key is that of `x-api-key`."""
    more: Any = {"model": "m", "max_tokens": 12, "system": SYSTEM, "messages": TURN, "extra_body": {"ignore_eos": True}}
    async with running_router(*engines) as router, client_of(router.url) as ours, client_of(engines[0]) as theirs:
        direct, whole = await theirs.messages.create(**more), await ours.messages.create(**more)
        assert (whole.content, whole.stop_reason) == (direct.content, "max_tokens")
        assert whole.usage.output_tokens == 12
        async with ours.messages.stream(**more) as stream:
            answer = [text async for text in stream.text_stream]
            last = await stream.get_final_message()
        assert len(answer) > 1
        assert (last.stop_reason, last.usage.output_tokens) == ("max_tokens", 12)
        assert [block.model_dump(include={"type", "text"}) for block in last.content] == [
            block.model_dump(include={"type", "text"}) for block in whole.content
        ]
        counted = await ours.messages.count_tokens(model="m", system=SYSTEM, messages=TURN)
        beside = (whole.usage.cache_read_input_tokens or 0) + (whole.usage.cache_creation_input_tokens or 0)
        assert counted.input_tokens == whole.usage.input_tokens + beside
        assert await total_service(router) == (3 * counted.input_tokens, 24)
        (client,) = (await router.fairness())["clients"]
        assert client.startswith("key-")


async def test_a_worker_that_dies_during_a_stream_is_reported_in_anthropics_shape() -> None:
    """The official client raises the error; no other worker can continue the stream."""
    async with scripted_engine() as engine, running_router(engine.url) as router, client_of(router.url) as client:
        pending = asyncio.ensure_future(client.messages.create(model="m", max_tokens=9, messages=TURN, stream=True))
        call = await engine.call()
        await call.begin()
        await call.write(API.start + API.delta("a"))
        stream = await pending
        call.reset()
        with pytest.raises(anthropic.APIStatusError, match="broke off") as caught:
            async for _ in stream:
                pass
        assert json.loads(json.dumps(caught.value.body))["error"]["type"] == "api_error"


@pytest.mark.parametrize(
    ("sent", "status", "kind"),
    [
        (b"{", 400, "invalid_request_error"),
        (API.ask(model="nobodys"), 404, "not_found_error"),
        (API.ask(model=7), 400, "invalid_request_error"),
    ],
    ids=["no JSON", "no such model", "a model that is no text"],
)
async def test_errors_of_the_router_have_anthropics_shape(sent: bytes, status: int, kind: str) -> None:
    """The shape holds for errors of the router itself."""
    async with scripted_engine() as engine, running_router(engine.url) as router, router.post(sent, API.path) as post:
        response = await post.response()
        answer = await response.json()
        assert (response.status, answer["type"], answer["error"]["type"]) == (status, "error", kind)
        assert answer["error"]["message"]


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
async def test_refusals_of_an_engine_have_anthropics_shape(status: int, sent: bytes, kind: str, message: str) -> None:
    """The shape holds whatever the engine's own is."""
    async with (
        scripted_engine() as engine,
        running_router(engine.url) as router,
        router.post(API.ask(), API.path) as post,
    ):
        await (await engine.call()).respond(status, sent)
        response = await post.response()
        assert response.status == status
        assert (await response.json())["error"] == {"type": kind, "message": message}

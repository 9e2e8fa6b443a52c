"""The official client, with nothing changed but its base URL."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from . import prompts
from .fleet import Engine, Router
from .wire import WORKER_KEY

pytestmark = pytest.mark.engine

FIXED = {"ignore_eos": True}
"""Beside OpenAI's parameters: as many tokens as asked for."""


@pytest.fixture
def client(router: Router) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="someone", max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture
def direct(engines: tuple[Engine, ...]) -> Iterator[openai.OpenAI]:
    """The same client at an engine itself."""
    with openai.OpenAI(base_url=f"{engines[0].url}/v1", api_key=WORKER_KEY, max_retries=0, timeout=30) as client:
        yield client


def question(name: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": prompts.text(name, words=30)}]


def test_chat(client: openai.OpenAI, direct: openai.OpenAI) -> None:
    """An answer reads the same as the engine's own."""
    ours, theirs = (
        one.chat.completions.create(
            model="tiny", messages=question("client"), max_tokens=10, temperature=0, extra_body=FIXED
        )
        for one in (client, direct)
    )
    assert ours.choices == theirs.choices
    assert ours.usage is not None
    assert theirs.usage is not None
    assert (ours.usage.prompt_tokens, ours.usage.completion_tokens) == (theirs.usage.prompt_tokens, 10)


def test_chat_stream(client: openai.OpenAI) -> None:
    """A stream has the answer's text; its usage comes once, in the last chunk, which has no choice."""
    whole = client.chat.completions.create(
        model="tiny", messages=question("stream"), max_tokens=10, temperature=0, extra_body=FIXED
    )
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=question("stream"),
            max_tokens=10,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=FIXED,
        )
    )
    *deltas, last = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in deltas) == whole.choices[0].message.content
    assert deltas[-1].choices[0].finish_reason == "length"
    assert all(chunk.usage is None for chunk in deltas)
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.total_tokens == whole.usage.total_tokens


def test_completion_and_its_stream(client: openai.OpenAI) -> None:
    """A completion that is streamed has the text of one that is not, and every chunk has a choice."""
    prompt = prompts.text("completion", words=30)
    whole = client.completions.create(model="tiny", prompt=prompt, max_tokens=10, temperature=0, extra_body=FIXED)
    chunks = list(
        client.completions.create(
            model="tiny", prompt=prompt, max_tokens=10, temperature=0, stream=True, extra_body=FIXED
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"


def test_request_id(client: openai.OpenAI, fleet: str) -> None:
    """A client's own request id comes back in the header, and names the answer at a vLLM, which takes it over."""
    raw = client.completions.with_raw_response.create(
        model="tiny", prompt="hello", max_tokens=1, extra_headers={"x-request-id": "the-clients-own"}
    )
    assert raw.headers["x-request-id"] == "the-clients-own"
    assert (raw.parse().id == "cmpl-the-clients-own") == (fleet == "vllm")


def test_models(client: openai.OpenAI) -> None:
    """A model that both engines serve is listed once."""
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_unknown_model(client: openai.OpenAI) -> None:
    """A model that nobody serves is the client library's NotFoundError, with OpenAI's code."""
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="nope", messages=question("nope"))
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"


def test_prompt_too_long(client: openai.OpenAI, fleet: str) -> None:
    """An engine's refusal is the client library's BadRequestError, with the parameter if the engine names one."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt=prompts.tokens("long", 8193), max_tokens=1)
    assert caught.value.param == ("input_tokens" if fleet == "vllm" else None)
    assert "8192" in str(caught.value)


IDS = {**FIXED, "return_token_ids": True}
"""Asked for by the client itself."""


def test_ids_of_a_completion(client: openai.OpenAI) -> None:
    """A client that asks for token ids of a completion gets the same in a stream as in one piece."""
    more: dict[str, Any] = {"model": "tiny", "prompt": prompts.text("ids", words=30), "max_tokens": 10}
    whole = client.completions.create(**more, temperature=0, extra_body=IDS)
    chunks = list(client.completions.create(**more, temperature=0, stream=True, extra_body=IDS))
    told = [id_ for chunk in chunks for id_ in ids_of(chunk.choices[0])]
    assert told == ids_of(whole.choices[0])
    assert len(ids_of(whole.choices[0])) == 10


def ids_of(choice: Any) -> list[int]:
    """Of the answer's tokens; SGLang's name for those of a whole answer is another."""
    ids: list[int] = getattr(choice, "response_token_ids", None) or choice.token_ids
    return ids


@pytest.mark.fleets("sglang")
def test_ids_of_a_streamed_chat_are_refused_by_the_engine(client: openai.OpenAI, direct: openai.OpenAI) -> None:
    """SGLang's own refusal is what the client gets, and nobody takes its wish away."""
    told = []
    for one in (client, direct):
        with pytest.raises(openai.BadRequestError) as caught:
            one.chat.completions.create(model="tiny", messages=question("refused"), stream=True, extra_body=IDS)
        told.append(caught.value.body)
    assert told[0] == told[1]
    assert "return_token_ids" in str(told[0])


async def test_many_at_once(router: Router, direct: openai.OpenAI) -> None:
    """Streams that run at the same time get their own answers: the ones that each gets alone."""
    names = [f"at once {number}" for number in range(16)]
    alone = {name: ask(direct, name) for name in names}
    async with openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="x", max_retries=0, timeout=60) as client:
        together = await asyncio.gather(*(streamed(client, name) for name in names))
    assert dict(zip(names, together, strict=True)) == alone


def ask(client: openai.OpenAI, name: str) -> str | None:
    answer = client.chat.completions.create(
        model="tiny", messages=question(name), max_tokens=20, temperature=0, extra_body=FIXED
    )
    return answer.choices[0].message.content


async def streamed(client: openai.AsyncOpenAI, name: str) -> str:
    chunks = await client.chat.completions.create(
        model="tiny", messages=question(name), max_tokens=20, temperature=0, stream=True, extra_body=FIXED
    )
    return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

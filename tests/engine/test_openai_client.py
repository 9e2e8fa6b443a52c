"""Tests OpenAI's own client at the router, with nothing changed but its base URL."""

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
"""An extra parameter by which an answer has as many tokens as asked for."""


@pytest.fixture
def client(router: Router) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="someone", max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture
def direct(engines: tuple[Engine, ...]) -> Iterator[openai.OpenAI]:
    """Open the same client directly at an engine."""
    with openai.OpenAI(base_url=f"{engines[0].url}/v1", api_key=WORKER_KEY, max_retries=0, timeout=30) as client:
        yield client


def question(name: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": prompts.text(name, words=30)}]


def test_a_chat_reads_like_the_engines_own(client: openai.OpenAI, direct: openai.OpenAI) -> None:
    """Choices and token counts of a chat are those of the engine's own answer."""
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


def test_a_streamed_chat_adds_up_to_the_whole_one(client: openai.OpenAI) -> None:
    """A stream has the text of the whole answer, and usage once, in the last chunk, which has no choice."""
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


def test_a_streamed_completion_adds_up_to_the_whole_one(client: openai.OpenAI) -> None:
    """A streamed completion has the text of one that is not streamed, and each chunk has a choice."""
    prompt = prompts.text("completion", words=30)
    whole = client.completions.create(model="tiny", prompt=prompt, max_tokens=10, temperature=0, extra_body=FIXED)
    chunks = list(
        client.completions.create(
            model="tiny", prompt=prompt, max_tokens=10, temperature=0, stream=True, extra_body=FIXED
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"


def test_the_clients_request_id_comes_back(client: openai.OpenAI, fleet: str) -> None:
    """The router returns the client's request id in a header, and vLLM takes it as the id of the answer."""
    raw = client.completions.with_raw_response.create(
        model="tiny", prompt="hello", max_tokens=1, extra_headers={"x-request-id": "the-clients-own"}
    )
    assert raw.headers["x-request-id"] == "the-clients-own"
    assert (raw.parse().id == "cmpl-the-clients-own") == (fleet == "vllm")


def test_models_are_listed_once(client: openai.OpenAI) -> None:
    """The list of models has one entry for a model that both engines serve."""
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_an_unknown_model_is_a_not_found_error(client: openai.OpenAI) -> None:
    """The client library raises NotFoundError with OpenAI's code for a model that no worker serves."""
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="nope", messages=question("nope"))
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"


def test_a_prompt_that_is_too_long_is_a_bad_request_error(client: openai.OpenAI, fleet: str) -> None:
    """The client library raises BadRequestError for an engine's error, with the parameter if the engine names one."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt=prompts.tokens("long", 8193), max_tokens=1)
    assert caught.value.param == ("input_tokens" if fleet == "vllm" else None)
    assert "8192" in str(caught.value)


IDS = {**FIXED, "return_token_ids": True}
"""Extra parameters by which the client itself asks for token ids."""


def test_a_streamed_completion_has_the_ids_of_the_whole_one(client: openai.OpenAI) -> None:
    """A client that asks for token ids gets the same from a stream as from a whole completion."""
    more: dict[str, Any] = {"model": "tiny", "prompt": prompts.text("ids", words=30), "max_tokens": 10}
    whole = client.completions.create(**more, temperature=0, extra_body=IDS)
    chunks = list(client.completions.create(**more, temperature=0, stream=True, extra_body=IDS))
    received = [id_ for chunk in chunks for id_ in ids_of(chunk.choices[0])]
    assert received == ids_of(whole.choices[0])
    assert len(ids_of(whole.choices[0])) == 10


def ids_of(choice: Any) -> list[int]:
    """Return the ids of the answer's tokens. SGLang has another name for them in a whole answer."""
    ids: list[int] = getattr(choice, "response_token_ids", None) or choice.token_ids
    return ids


@pytest.mark.fleets("sglang")
def test_ids_of_a_streamed_chat_are_refused_by_the_engine(client: openai.OpenAI, direct: openai.OpenAI) -> None:
    """The client gets SGLang's own error: the router does not drop the parameter that SGLang rejects."""
    received = []
    for one in (client, direct):
        with pytest.raises(openai.BadRequestError) as caught:
            one.chat.completions.create(model="tiny", messages=question("refused"), stream=True, extra_body=IDS)
        received.append(caught.value.body)
    assert received[0] == received[1]
    assert "return_token_ids" in str(received[0])


async def test_concurrent_streams_get_their_own_answers(router: Router, direct: openai.OpenAI) -> None:
    """Each of sixteen streams that run at the same time gets the answer that it gets alone."""
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

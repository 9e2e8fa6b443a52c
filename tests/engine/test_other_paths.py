"""Tests an engine's other paths with the official clients: answers read as from the engine, and are charged."""

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from . import prompts
from .fleet import Engine, Router
from .wire import WORKER_KEY, call, listed, mapped

pytestmark = pytest.mark.engine

FEWER = {"vllm": 0, "sglang": 2}
"""Output tokens by which a response stays below its `max_output_tokens`."""
FIXED: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture
def clients(router: Router, engines: tuple[Engine, ...]) -> Iterator[tuple[openai.OpenAI, openai.OpenAI]]:
    """Open OpenAI's client at the router and at an engine."""
    with (
        openai.OpenAI(base_url=f"{router.url}/v1", api_key="responses", max_retries=0, timeout=60) as ours,
        openai.OpenAI(base_url=f"{engines[0].url}/v1", api_key=WORKER_KEY, max_retries=0, timeout=60) as theirs,
    ):
        yield ours, theirs


@pytest.fixture
def messengers(router: Router, engines: tuple[Engine, ...]) -> Iterator[tuple[Any, Any]]:
    """Open Anthropic's client at the router and at an engine, which gets its key as a bearer token."""
    with (
        anthropic.Anthropic(base_url=router.url, api_key="messages", max_retries=0, timeout=60) as ours,
        anthropic.Anthropic(base_url=engines[0].url, auth_token=WORKER_KEY, max_retries=0, timeout=60) as theirs,
    ):
        yield ours, theirs


def charged(router: Router, before: tuple[int, int] = (0, 0)) -> tuple[int, int]:
    """Return the input and output tokens charged to all clients together, less those of `before`."""
    clients = [mapped(mapped(entry)["service"]) for entry in mapped(router.get("/fairness")["clients"]).values()]
    given = sum(int(str(each["extend"])) + int(str(each["cached"])) for each in clients)
    return given - before[0], sum(int(str(each["output"])) for each in clients) - before[1]


def test_responses_are_the_engines_and_charged(
    router: Router, clients: tuple[openai.OpenAI, openai.OpenAI], fleet: str
) -> None:
    """Text and usage are the engine's own, and a stream is charged by the usage of its last event."""
    more: Any = {"model": "tiny", "input": prompts.text("response", words=60), "max_output_tokens": 12, **FIXED}
    before = charged(router)
    whole, direct = (client.responses.create(**more) for client in clients)
    assert whole.output_text == direct.output_text
    assert whole.usage is not None
    assert whole.usage.output_tokens == 12 - FEWER[fleet]
    events = list(clients[0].responses.create(**more, stream=True))
    assert "".join(each.delta for each in events if each.type == "response.output_text.delta") == whole.output_text
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert charged(router, before) == (2 * whole.usage.input_tokens, 2 * whole.usage.output_tokens)


def test_messages_are_the_engines_and_charged(router: Router, messengers: tuple[Any, Any]) -> None:
    """Text, stop reason and usage are the engine's own, and the input charged is what count_tokens returns."""
    turn = [{"role": "user", "content": prompts.text("message", words=60)}]
    more: Any = {"model": "tiny", "messages": turn, "system": "Be short.", "max_tokens": 12}
    more["extra_body"] = {"temperature": 0}  # the client no longer has this parameter itself
    ours, theirs = messengers
    before = charged(router)
    whole, direct = ours.messages.create(**more), theirs.messages.create(**more)
    assert [block.text for block in whole.content] == [block.text for block in direct.content]
    assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 12)
    with ours.messages.stream(**more) as stream:
        streamed_text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert streamed_text == whole.content[0].text
    assert last.usage.output_tokens == 12
    counted = ours.messages.count_tokens(model="tiny", messages=turn, system="Be short.").input_tokens
    assert charged(router, before) == (3 * counted, 24)


def test_a_message_finds_what_a_chat_left_in_the_cache(
    router: Router, clients: tuple[openai.OpenAI, openai.OpenAI], messengers: tuple[Any, Any]
) -> None:
    """A message with the text of a chat goes to the chat's worker, and finds its prompt cached.

    The engine makes a chat of a message, and so does the key of the prompt.
    """
    turn: Any = [{"role": "user", "content": prompts.text("both", words=300)}]
    chat = clients[0].chat.completions.with_raw_response.create(model="tiny", messages=turn, max_tokens=2)
    message = messengers[0].messages.with_raw_response.create(model="tiny", messages=turn, max_tokens=2)
    assert message.headers["x-d2lpm-worker"] == chat.headers["x-d2lpm-worker"]
    found = message.parse().usage.cache_read_input_tokens
    assert found >= int(message.headers["x-d2lpm-predicted-cached-tokens"]) - 64
    assert found > 200
    assert router.unfinished() == 0


def test_tokenizing_and_detokenizing_are_charged(router: Router) -> None:
    """Both paths are charged as many tokens as there are, with a model or without."""
    before = charged(router)
    text = prompts.text("tokens", words=20)
    ids = listed(
        call(router.url, "/tokenize", {"model": "tiny", "prompt": text, "add_special_tokens": False}).json["tokens"]
    )
    back = call(router.url, "/detokenize", {"tokens": ids}).json
    assert text in (back.get("prompt"), back.get("text"))  # vLLM's name, and SGLang's
    assert charged(router, before) == (2 * len(ids), 0)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/score", "/v1/audio/transcriptions", "/v1/nothing"])
def test_an_unserved_path_is_an_error_that_clients_can_read(router: Router, path: str) -> None:
    """The error has OpenAI's shape or the engine's own, and no client is charged."""
    before = charged(router)
    answer = call(router.url, path, {"model": "tiny", "input": "x", "text_1": "a", "text_2": "b"})
    assert answer.status >= 400
    error = answer.json if answer.json.get("object") == "error" else mapped(answer.json["error"])
    assert isinstance(error["message"], str)
    assert charged(router, before) == (0, 0)


def test_a_wrong_message_is_an_error_in_anthropics_shape(messengers: tuple[Any, Any]) -> None:
    """Errors of the engine, whose own checks answer in OpenAI's shape, and of the router have Anthropic's shape."""
    ours, _ = messengers
    with pytest.raises(anthropic.BadRequestError) as caught:
        ours.messages.create(model="tiny", max_tokens=5, messages=[{"role": "nobody", "content": 7}])
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["type"] == "error"
    with pytest.raises(anthropic.NotFoundError):
        ours.messages.create(model="nobodys", max_tokens=5, messages=[{"role": "user", "content": "x"}])

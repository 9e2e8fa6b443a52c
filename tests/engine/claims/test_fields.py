"""The effect of the fields that the router adds: in which chunks usage and ids are, and whose prefixes a prompt can
hit.
"""

import json
from collections.abc import Mapping

import pytest

from ..processes import Server
from ..wire import CHAT, COMPLETIONS, Json, call, listed, mapped
from .shapes import chunks
from .sides import Sides

pytestmark = pytest.mark.engine

FIXED: Json = {"model": "tiny", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
PROMPTS: Mapping[str, Json] = {
    CHAT: {"messages": [{"role": "user", "content": "so it goes, and so on it goes, and on and on again"}]},
    COMPLETIONS: {"prompt": "so it goes, and so on it goes, and on and on again"},
}


def streamed(server: Server, path: str, **more: object) -> list[Json]:
    """Return the chunks of a stream."""
    answer = call(server.url, path, {**FIXED, **PROMPTS[path], **more, "stream": True})
    assert answer.status == 200, answer.body
    return [json.loads(chunk) for chunk in chunks(answer)]


def says(chunk: Json) -> str:
    """Return the text of a chunk."""
    return "".join(
        str(mapped(choice.get("delta", choice)).get("content") or choice.get("text") or "")
        for choice in listed(chunk["choices"])
    )


def tokens(value: object) -> list[int]:
    """Token ids."""
    assert isinstance(value, list)
    assert all(isinstance(token, int) for token in value)
    return value


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_usage_at_the_end(server: Server, path: str) -> None:
    """With `include_usage` only the last chunk has the usage, and it has no choice."""
    *before, last = streamed(server, path, stream_options={"include_usage": True})
    assert last["choices"] == []
    assert mapped(last["usage"])["completion_tokens"] == FIXED["max_tokens"]
    assert isinstance(mapped(mapped(last["usage"])["prompt_tokens_details"])["cached_tokens"], int)
    assert not any(chunk.get("usage") for chunk in before)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_usage_in_chunks_alone(sides: Sides, server: Server, path: str) -> None:
    """Without `include_usage`, vLLM ignores `continuous_usage_stats`, and SGLang reports usage with each text."""
    events = streamed(server, path, stream_options={"continuous_usage_stats": True})
    reported = [bool(chunk.get("usage")) for chunk in events]
    assert reported == [sides.dialect == "sglang" and bool(says(chunk)) for chunk in events]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_usage_in_chunks(sides: Sides, server: Server, path: str) -> None:
    """With both, every chunk with text has the tokens so far; so do vLLM's role and finish chunks, not SGLang's."""
    *events, last = streamed(server, path, stream_options={"include_usage": True, "continuous_usage_stats": True})
    reported = [bool(chunk.get("usage")) for chunk in events]
    assert reported == [sides.dialect == "vllm" or bool(says(chunk)) for chunk in events]
    counts = [int(str(mapped(chunk["usage"])["completion_tokens"])) for chunk in (*events, last) if chunk.get("usage")]
    assert counts == sorted(counts)
    assert counts[-1] == FIXED["max_tokens"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_where_cached_tokens_are_reported(sides: Sides, server: Server, path: str) -> None:
    """SGLang's chat reports them with its first text; every other stream only in its last chunk."""
    *events, last = streamed(server, path, stream_options={"include_usage": True, "continuous_usage_stats": True})
    early = [bool(mapped(chunk["usage"]).get("prompt_tokens_details")) for chunk in events if chunk.get("usage")]
    assert set(early) == {sides.dialect == "sglang" and path == CHAT}
    assert mapped(last["usage"])["prompt_tokens_details"] is not None


def test_ids_of_a_streamed_completion(server: Server) -> None:
    """Each chunk has the ids of its text, and the first chunk also the prompt's."""
    first, *rest = [listed(chunk["choices"])[0] for chunk in streamed(server, COMPLETIONS, return_token_ids=True)]
    whole = listed(
        call(server.url, COMPLETIONS, {**FIXED, **PROMPTS[COMPLETIONS], "return_token_ids": True}).json["choices"]
    )
    ids = [token for choice in (first, *rest) for token in tokens(choice["token_ids"])]
    assert ids == whole[0]["token_ids"]
    assert len(ids) == FIXED["max_tokens"]
    assert first["prompt_token_ids"] == whole[0]["prompt_token_ids"]
    assert not any(choice.get("prompt_token_ids") for choice in rest)


def test_ids_of_a_chat(sides: Sides, server: Server) -> None:
    """In vLLM the ids have the names of completions, with the prompt's ids beside the choices; in SGLang they have
    others.
    """
    answer = call(server.url, CHAT, {**FIXED, **PROMPTS[CHAT], "return_token_ids": True}).json
    (choice,) = listed(answer["choices"])
    output, prompt = ("token_ids", answer) if sides.dialect == "vllm" else ("response_token_ids", choice)
    usage = mapped(answer["usage"])
    assert len(tokens(choice[output])) == usage["completion_tokens"]
    assert len(tokens(prompt["prompt_token_ids"])) == usage["prompt_tokens"]


def test_a_final_message_that_is_gone_on_with(server: Server) -> None:
    """The prompt ends inside the final message, and so is shorter than with the message's end and a new answer's
    start.
    """
    body = {**FIXED, "messages": [*listed(PROMPTS[CHAT]["messages"]), {"role": "assistant", "content": "and so"}]}
    ways: tuple[Json, ...] = ({}, {"continue_final_message": True, "add_generation_prompt": False})
    ended, gone_on = (mapped(call(server.url, CHAT, {**body, **way}).json["usage"]) for way in ways)
    assert int(str(gone_on["prompt_tokens"])) < int(str(ended["prompt_tokens"]))


def salted(path: str, text: str) -> Json:
    """A call with this prompt."""
    if path == COMPLETIONS:
        return {"model": "tiny", "prompt": text, "max_tokens": 2}
    if path == "/v1/responses":
        return {"model": "tiny", "input": text, "max_output_tokens": 8}
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 2}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/responses", "/v1/messages"])
def test_a_salt_keeps_prefixes_apart(sides: Sides, path: str) -> None:
    """Only calls with the same salt hit each other's prompts, except SGLang's messages, which all do."""
    body = salted(path, f"{path} has a prompt that is salted, of some length " * 20)
    found = []
    for salt in (None, "one", "one", "two"):
        usage = mapped(call(sides.real.url, path, body if salt is None else {**body, "cache_salt": salt}).json["usage"])
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or usage
        cached = mapped(details).get("cached_tokens", mapped(details).get("cache_read_input_tokens"))
        found.append(bool(cached))
    passed_over = sides.dialect == "sglang" and path == "/v1/messages"
    assert found == ([False, True, True, True] if passed_over else [False, False, True, False])

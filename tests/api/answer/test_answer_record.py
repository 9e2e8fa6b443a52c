from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api.answer.answer_record import ANSWER_LIMIT
from router.api.answer.stream_reader import StreamReader, read_json
from router.api.body.call import Head
from router.api.endpoints.chat import parse_chat
from router.api.endpoints.completions import parse_completion
from router.core.model.prompt_key import PromptHasher, PromptKey

# Small chunks, so that a short answer fills some of them.
HASHER = PromptHasher(b"secret", chunk_bytes=8)
HEAD = Head("/v1/chat/completions")
TEXTS = st.one_of(st.text(max_size=40), st.sampled_from(['"usage":{"', "data: x\n\n", "\u00fc" * 9]))
NAMES = st.text(min_size=1, max_size=8)
ANSWERS = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": st.one_of(st.none(), TEXTS)},
    optional={
        "tool_calls": st.lists(
            st.builds(
                lambda id_, name, arguments: {
                    "id": id_,
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                },
                NAMES,
                NAMES,
                TEXTS,
            ),
            max_size=3,
        )
    },
)
TURN = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the weather in Paris?"}]
NEXT = [{"role": "tool", "tool_call_id": "1", "content": "sunny"}, {"role": "user", "content": "And in London?"}]


def chat_body(messages: list[dict[str, Any]], **fields: Any) -> bytes:
    return orjson.dumps({"model": "m", "messages": messages, "stream": True, **fields})


def chat_key(messages: list[dict[str, Any]]) -> PromptKey:
    return parse_chat(HEAD, chat_body(messages), HASHER).prompts[0].key


def pieces(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


def deltas(message: dict[str, Any], size: int) -> Iterator[dict[str, Any]]:
    """A message as an engine streams it: its role, its text, then its tool calls, in pieces of `size` characters."""
    yield {"role": "assistant", "content": ""}
    for text in pieces(message["content"] or "", size):
        yield {"content": text}
    for index, call in enumerate(message.get("tool_calls", [])):
        function = call["function"]
        yield {"tool_calls": [{**call, "index": index, "function": {"name": function["name"], "arguments": ""}}]}
        for arguments in pieces(function["arguments"], size):
            yield {"tool_calls": [{"index": index, "id": None, "function": {"name": None, "arguments": arguments}}]}


def event(index: int, **choice: Any) -> bytes:
    return b"data: " + orjson.dumps({"choices": [{"index": index, "finish_reason": None, **choice}]}) + b"\n\n"


@given(st.lists(ANSWERS, min_size=1, max_size=3), st.integers(min_value=1, max_value=9), st.integers(1, 99))
def test_answer_extends_the_key_to_the_next_turn(messages: list[dict[str, Any]], size: int, block: int) -> None:
    """The next turn, which sends an answer back, begins with the key of that answer, streamed or not."""
    call = parse_chat(HEAD, chat_body(TURN, n=len(messages)), HASHER)
    reader = StreamReader(call)
    stream = b"".join(event(i, delta=delta) for i, one in enumerate(messages) for delta in deltas(one, size))
    for at in range(0, len(stream), block):
        reader.feed(stream[at : at + block])
    whole = {"choices": [{"index": index, "message": message} for index, message in enumerate(messages)]}
    assert reader.ending().answer_keys == read_json(call, orjson.dumps(whole)).answer_keys
    for key, message in zip(reader.ending().answer_keys, messages, strict=True):
        assert key == chat_key([*TURN, message])
        assert chat_key([*TURN, message, *NEXT]).hashes.startswith(key.hashes)


@given(st.lists(TEXTS, min_size=2, max_size=2), st.integers(min_value=1, max_value=9))
def test_completion_extends_its_prompt(texts: list[str], size: int) -> None:
    """Each text generated continues its own prompt of the list, as a next prompt would that holds both."""
    prompts = ["Once upon a time", "There was"]
    call = parse_completion(HEAD, orjson.dumps({"model": "m", "prompt": prompts, "stream": True}), HASHER)
    reader = StreamReader(call)
    for index, text in enumerate(texts):
        for piece in pieces(text, size) or [""]:
            reader.feed(event(index, text=piece))
    for key, prompt, text in zip(reader.ending().answer_keys, prompts, texts, strict=True):
        later = parse_completion(HEAD, orjson.dumps({"model": "m", "prompt": prompt + text}), HASHER)
        assert key == later.prompts[0].key


@pytest.mark.parametrize(
    "delta",
    [{"reasoning": "Hm"}, {"reasoning_content": "Hm"}, {"function_call": {"name": "f"}}, {"tool_calls": ["f"]}],
)
def test_answer_that_will_not_come_back_as_it_is_has_the_prompts_key(delta: dict[str, Any]) -> None:
    """Reasoning, which templates drop, and what cannot be rendered leave the key of the prompt alone."""
    call = parse_chat(HEAD, chat_body(TURN, n=2), HASHER)
    reader = StreamReader(call)
    reader.feed(event(0, delta=delta) + event(0, delta={"content": "Sunny."}) + event(1, delta={"content": "Sunny."}))
    assert reader.ending().answer_keys == (
        call.prompts[0].key,
        chat_key([*TURN, {"role": "assistant", "content": "Sunny."}]),
    )


def test_token_prompt_is_not_extended_by_text() -> None:
    """Generated text cannot extend token ids, whose key stays unchanged."""
    call = parse_completion(HEAD, orjson.dumps({"model": "m", "prompt": [1, 2, 3], "stream": True}), HASHER)
    reader = StreamReader(call)
    reader.feed(event(0, text="four"))
    assert reader.ending().answer_keys == (call.prompts[0].key,)


def test_very_long_answers_are_not_kept() -> None:
    """The text kept for one call is bounded; the key is then the prompt's."""
    call = parse_completion(HEAD, orjson.dumps({"model": "m", "prompt": "x", "stream": True}), HASHER)
    reader = StreamReader(call)
    for _ in range(ANSWER_LIMIT // 2**19 + 1):
        reader.feed(event(0, text="y" * 2**19))
    assert reader.ending().answer_keys == (call.prompts[0].key,)


def test_choices_that_were_not_asked_for_have_no_key() -> None:
    """An index beyond the choices of the call belongs to no prompt."""
    reader = StreamReader(parse_chat(HEAD, chat_body(TURN), HASHER))
    reader.feed(event(7, delta={"content": "a"}) + event(-1, delta={"content": "a"}))
    assert reader.ending().answer_keys == ()

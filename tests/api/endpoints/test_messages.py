from typing import Any

import orjson
import pytest

from router.api.body.call import Call, Head
from router.api.endpoints.chat import parse_chat
from router.api.endpoints.messages import MessageReader, parse_messages, read_message
from router.core.model.prompt_key import PromptHasher
from router.core.model.request import Usage

HASHER = PromptHasher(b"secret")
HEAD = Head("/v1/chat/completions")
HELLO: Any = {"role": "user", "content": "Hello " * 50}
USE: Any = {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": [1, 2]}}
CALLED: Any = {"id": "t1", "type": "function", "function": {"name": "look", "arguments": '{"at":[1,2]}'}}


def parse(messages: list[Any], **more: Any) -> Call:
    body = orjson.dumps({"model": "m", "max_tokens": 9, "messages": messages, **more})
    return parse_messages(Head("/v1/messages"), body, HASHER)


def chat(messages: list[Any], **more: Any) -> Call:
    return parse_chat(HEAD, orjson.dumps({"model": "m", "messages": messages, **more}), HASHER)


def event(kind: str, **fields: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields}))


@pytest.mark.parametrize(
    ("messages", "more", "as_chat"),
    [
        ([HELLO], {}, [HELLO]),
        ([HELLO], {"system": "Be short."}, [{"role": "system", "content": "Be short."}, HELLO]),
        (
            [{"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]}],
            {"system": [{"type": "text", "text": "x-anthropic-billing-header: 7"}, {"type": "text", "text": "Be"}]},
            [{"role": "system", "content": "Be"}, {"role": "user", "content": "Hi"}],
        ),
        (
            [
                HELLO,
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, USE]},
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t1", "content": "seen"},
                        {"type": "text", "text": "So?"},
                    ],
                },
            ],
            {},
            [
                HELLO,
                {"role": "assistant", "content": None, "tool_calls": [CALLED]},
                {"role": "tool", "tool_call_id": "t1", "content": "seen"},
                {"role": "user", "content": "So?"},
            ],
        ),
    ],
    ids=["text", "system", "blocks", "tools"],
)
def test_a_message_has_the_key_of_the_chat_that_engines_make_of_it(
    messages: list[Any], more: dict[str, Any], as_chat: list[Any]
) -> None:
    """A conversation matches the same cached prefix through either API."""
    assert parse(messages, **more).prompts[0].key == chat(as_chat).prompts[0].key


def test_the_answers_key_is_that_of_the_next_turn() -> None:
    """Text and tool calls, streamed or not, have the key of the messages that the client sends back."""
    call = parse([HELLO])
    content = [{"type": "text", "text": "I look."}, USE]
    reader = MessageReader(call)
    reader.feed(event("message_start", message={"usage": {"input_tokens": 5, "output_tokens": 0}}))
    reader.feed(event("content_block_start", index=0, content_block={"type": "text", "text": ""}))
    for more in ("I ", "look."):
        reader.feed(event("content_block_delta", index=0, delta={"type": "text_delta", "text": more}))
    reader.feed(event("content_block_start", index=1, content_block={**USE, "input": {}}))
    for more in ('{"at": ', "[1, 2]}"):
        reader.feed(event("content_block_delta", index=1, delta={"type": "input_json_delta", "partial_json": more}))
    assert (reader.output_tokens(), reader.usage) == (4, Usage(5, 4, None))
    reader.feed(event("message_delta", delta={}, usage={"output_tokens": 6}) + event("message_stop"))
    assert (reader.complete, reader.usage) == (True, Usage(5, 6, None))
    whole = read_message(call, orjson.dumps({"content": content, "usage": {"input_tokens": 5, "output_tokens": 6}}))
    assert reader.ending().answer_keys == whole.answer_keys
    (key,) = whole.answer_keys
    assert parse([HELLO, {"role": "assistant", "content": content}, HELLO]).prompts[0].key.hashes.startswith(key.hashes)
    assert len(key.hashes) >= len(call.prompts[0].key.hashes)


def test_a_long_answer_is_assembled_as_it_arrives() -> None:
    """The key is always that of the same message in one piece, and asking for it changes nothing."""
    call = parse([HELLO])
    reader = MessageReader(call)
    reader.feed(event("content_block_start", index=0, content_block={"type": "text", "text": "It "}))
    text = "It "
    for number in range(200):
        reader.feed(event("content_block_delta", index=0, delta={"type": "text_delta", "text": f"{number} "}))
        text += f"{number} "
        if number % 50 == 0:
            content = [{"type": "text", "text": text}]
            assert reader.ending().answer_keys == read_message(call, orjson.dumps({"content": content})).answer_keys
    assert (
        reader.ending().answer_keys
        == read_message(call, orjson.dumps({"content": [{"type": "text", "text": text}]})).answer_keys
    )
    assert len(reader._unread) < 64


def test_an_answer_with_reasoning_has_the_prompts_key() -> None:
    """The next turn leaves out reasoning, so the answer does not extend the key."""
    call = parse([HELLO])
    content = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "I " * 200}]
    assert read_message(call, orjson.dumps({"content": content})).answer_keys == (call.prompts[0].key,)


def test_an_error_is_held_back_and_has_the_status_of_its_type() -> None:
    """The router decides by the status about a retry; without one, the client gets the event."""
    reader = MessageReader(parse([HELLO]))
    sent = event("error", error={"type": "overloaded_error", "message": "full"})
    assert reader.feed(sent) == b""
    assert reader.error is not None
    assert (reader.error.code, reader.error.message, reader.held, reader.has_delivered) == (503, "full", sent, False)

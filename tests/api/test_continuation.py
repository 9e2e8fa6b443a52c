"""The record kept to continue an answer, which answers can be continued, and the call for the rest."""

import json
from typing import Any

import pytest

from router.api.answer.answer_record import RECORD_LIMIT, TokenRecord
from router.api.answer.stream_reader import StreamReader
from router.api.body.call import Call, Head, ResumeMode
from router.api.body.edits import Addition
from router.api.continuation import Continuation, Rewriter, continuation, last_events
from router.api.endpoints.chat import parse_chat
from router.api.endpoints.completions import parse_completion
from router.core.model.prompt_key import PromptHasher
from router.errors import WorkerBroke

HASHER = PromptHasher(b"secret")
CHAT = Head("/v1/chat/completions")
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}]
HEAD = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}


def chat(**fields: Any) -> Call:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": True, **fields}
    return parse_chat(CHAT, json.dumps(body).encode(), HASHER, ids=True)


def completion(**fields: Any) -> Call:
    body = {"model": "m", "prompt": "Hi", "stream": True, **fields}
    return parse_completion(CHAT, json.dumps(body).encode(), HASHER, ids=True)


def event(choice: dict[str, Any], **more: Any) -> bytes:
    return b"data: " + json.dumps({**HEAD, "choices": [{"index": 0, **choice}], **more}).encode() + b"\n\n"


def answered(call: Call, *deltas: dict[str, Any], prompt: list[int] | None = None) -> StreamReader:
    """The reader of a stream with these deltas, whose `ids` are the token ids of the chunk."""
    reader = StreamReader(call)
    reader.feed(event({"delta": {"role": "assistant", "content": ""}}, prompt_token_ids=prompt))
    for delta in deltas:
        new_delta = {name: value for name, value in delta.items() if name != "ids"}
        reader.feed(event({"delta": new_delta, "finish_reason": None, "token_ids": delta.get("ids")}))
    return reader


def rest_of(call: Call, *deltas: dict[str, Any], prompt: list[int] | None = None) -> Continuation | None:
    return continuation(call, answered(call, *deltas, prompt=prompt))


@pytest.mark.parametrize(
    ("fields", "mode"),
    [
        ({}, ResumeMode.IDS),
        (
            {"temperature": 1.0, "seed": 3, "response_format": {"type": "text"}, "n": 1, "logprobs": False},
            ResumeMode.IDS,
        ),
        ({"tools": [{}], "tool_choice": "none"}, ResumeMode.IDS),
        ({"tools": []}, ResumeMode.IDS),
        ({"tools": [{}]}, ResumeMode.TEXT),
        ({"tools": [{}], "tool_choice": "auto"}, ResumeMode.TEXT),
        ({"stop": ["END"]}, ResumeMode.TEXT),
        ({"messages": IMAGE}, ResumeMode.TEXT),
        ({"stream": False}, ResumeMode.NONE),
        ({"n": 2}, ResumeMode.NONE),
        ({"logprobs": True}, ResumeMode.NONE),
        ({"tools": [{}], "tool_choice": "required"}, ResumeMode.NONE),
        ({"tools": [{}], "tool_choice": {"type": "function", "function": {"name": "f"}}}, ResumeMode.NONE),
        ({"response_format": {"type": "json_object"}}, ResumeMode.NONE),
        ({"response_format": "odd"}, ResumeMode.NONE),
        ({"structured_outputs": {"regex": "a"}}, ResumeMode.NONE),
        ({"guided_choice": ["a", "b"]}, ResumeMode.NONE),
        ({"regex": "a+"}, ResumeMode.NONE),
        ({"echo": True}, ResumeMode.NONE),
    ],
)
def test_which_chats_can_be_continued(fields: dict[str, Any], mode: ResumeMode) -> None:
    """The router asks for token ids only if they would be used."""
    call = chat(**fields)
    assert call.resume_mode is mode
    assert (Addition.TOKEN_IDS in call.additions.wanted) == (mode is ResumeMode.IDS)


@pytest.mark.parametrize("fields", [{"prompt": ["a", "b"]}, {"best_of": 2}, {"suffix": "x"}, {"logprobs": 1}])
def test_completions_that_cannot_be_continued(fields: dict[str, Any]) -> None:
    """Completions with several answers, or with more than text in their answers, cannot be continued."""
    assert completion(**fields).resume_mode is ResumeMode.NONE


def test_ids_that_the_client_wants_stay() -> None:
    """Token ids that the client asked for are recorded for a continuation and passed on."""
    call = chat(return_token_ids=True)
    reader = StreamReader(call)
    usage = {"prompt_tokens": 1, "completion_tokens": 1}
    shown = b"".join(
        reader.feed(event({"delta": {"content": "a"}, "finish_reason": None, "token_ids": [number]}, usage=usage))
        for number in (5, 6)
    )
    assert [json.loads(each[6:])["choices"][0]["token_ids"] for each in shown.split(b"\n\n")[:-1]] == [[5], [6]]
    assert Addition.TOKEN_IDS not in call.additions.wanted


def test_a_record_is_bounded() -> None:
    """A stream with too many ids has no record and can be continued only by text."""
    record = TokenRecord()
    record.set_prompt([1, 2])
    for _ in range(RECORD_LIMIT // 600):
        record.add_list([12345] * 100, text=True)
    kept = record.ids
    assert kept is not None
    record.add_list([12345] * 100, text=True)
    assert record.ids is None
    assert not record._output


def test_a_token_without_an_id_ends_the_record() -> None:
    """A gap in the record would be a gap in the answer."""
    assert rest_of(chat(), {"content": "a", "ids": [7]}, {"content": "b"}, prompt=[1]) is not None
    rest = rest_of(chat(), {"content": "a", "ids": [7]}, {"content": "b"}, prompt=[1])
    assert rest is not None
    assert not rest.by_ids


@pytest.mark.parametrize(
    ("deltas", "by_ids"),
    [
        ([{"content": "a", "ids": [7]}], True),
        ([{"reasoning": "hm", "ids": [7]}, {"content": "a", "ids": [8]}], True),
        ([{"reasoning": "hm", "ids": [7]}], None),
        ([{"content": "a", "ids": [7]}, {"tool_calls": [{"index": 0, "function": {"name": "f"}}], "ids": [8]}], None),
        ([], True),
    ],
    ids=["text", "text after thoughts", "thoughts", "a tool call", "nothing"],
)
def test_the_kind_of_the_last_output_decides(deltas: list[dict[str, Any]], by_ids: bool | None) -> None:
    """An engine cannot continue within reasoning or a tool call, as it would take them for plain text."""
    rest = rest_of(chat(), *deltas, prompt=[1, 2])
    assert (None if rest is None else rest.by_ids) == by_ids


def test_limits_are_reduced_by_the_tokens_so_far() -> None:
    """So is the minimum; members that only chats have are left out."""
    call = chat(max_completion_tokens=9, max_tokens=5, min_tokens=2, temperature=0.5, user="ann", tools=[])
    rest = rest_of(call, {"content": "a", "ids": [7, 8]}, {"content": "b", "ids": [9]}, prompt=[1, 2])
    assert rest is not None
    body = json.loads(rest.body(None) or b"")
    assert (body["prompt"], body["max_tokens"], body["min_tokens"]) == ([1, 2, 7, 8, 9], 6, 0)
    assert (body["temperature"], body["stream"]) == (0.5, True)
    assert not body.keys() & {"messages", "max_completion_tokens", "tools"}


def test_without_a_limit_the_context_is_needed() -> None:
    """A chat may use the whole context; a completion defaults to 16 tokens."""
    rest = rest_of(chat(), {"content": "a", "ids": [7]}, prompt=[1, 2])
    assert rest is not None
    assert rest.body(None) is None
    assert json.loads(rest.body(100) or b"")["max_tokens"] == 97
    call = completion()
    reader = StreamReader(call)
    reader.feed(event({"text": "a", "prompt_token_ids": [1, 2], "token_ids": [7]}))
    rest = continuation(call, reader)
    assert rest is not None
    assert json.loads(rest.body(None) or b"")["max_tokens"] == 15


def test_a_chat_that_continues_a_message_is_not_continued_by_text() -> None:
    """Two consecutive assistant's messages would be rendered differently."""
    call = chat(continue_final_message=True, add_generation_prompt=False)
    assert rest_of(call, {"content": "a"}) is None
    assert rest_of(call, {"content": "a", "ids": [7]}, prompt=[1]) is not None


def test_invalid_counts_of_the_continuing_engine_are_ignored() -> None:
    """The rewritten chunk has the usage as far as it is known."""
    rest = rest_of(chat(), {"content": "x", "ids": [5]}, prompt=[1, 2])
    assert rest is not None
    rewritten = Rewriter(rest).feed(
        event({"text": "y"}, usage={"prompt_tokens": "many", "completion_tokens": [1], "total_tokens": None})
    )
    usage = json.loads(rewritten.removeprefix(b"data: "))["usage"]
    assert usage == {"prompt_tokens": 2, "total_tokens": 3, "completion_tokens": 1}


def test_an_answer_that_cannot_be_serialised_is_not_continued() -> None:
    """JSON that is parsed but nested too deeply to serialise may be in a body, a chunk or the head of a stream."""
    deep: Any = []
    for _ in range(300):
        deep = [deep]
    rest = rest_of(chat(metadata=deep), {"content": "x"})
    assert rest is not None
    assert rest.body(None) is None
    rest = rest_of(chat(), {"content": "x"})
    assert rest is not None
    with pytest.raises(WorkerBroke):
        Rewriter(rest).feed(event({"text": "y", "extra": deep}))
    reader = StreamReader(chat())
    reader.feed(event({"delta": {"content": "x"}}, id=deep))
    assert last_events(chat(), reader, "stop").endswith(b"data: [DONE]\n\n")

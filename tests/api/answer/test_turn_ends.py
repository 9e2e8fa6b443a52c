"""Whether an answer ends an agent's turn or asks for a tool, by each API."""

import json
from typing import Any

import pytest

from router.api.answer.stream_reader import StreamReader, read_json
from router.api.body.call import Head
from router.api.endpoints.chat import parse_chat
from router.api.endpoints.messages import MessageReader, parse_messages, read_message
from router.api.endpoints.responses import ResponseReader, parse_response, read_response
from router.core.model.prompt_key import PromptHasher

HASHER = PromptHasher(b"")
HEAD = Head("/v1/chat/completions")
CHAT = parse_chat(HEAD, b'{"model": "m", "messages": []}', HASHER)
MESSAGE = parse_messages(Head("/v1/messages"), b'{"model": "m", "messages": []}', HASHER)
RESPONSE = parse_response(Head("/v1/responses"), b'{"model": "m", "input": "x"}', HASHER)
TOOL_CALL = {"index": 0, "id": "1", "function": {"name": "f", "arguments": "{}"}}
FUNCTION = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def choice(part: str, reason: str, **message: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, part: message, "finish_reason": reason}]}


@pytest.mark.parametrize(
    ("reason", "message", "ended"),
    [
        ("stop", {"content": "done"}, True),
        ("tool_calls", {"tool_calls": [TOOL_CALL]}, False),
        ("stop", {"tool_calls": [TOOL_CALL]}, False),
        ("length", {"content": "cut"}, None),
    ],
)
def test_a_chat_ends_its_turn_unless_it_calls_a_tool(reason: str, message: dict[str, Any], ended: bool | None) -> None:
    """The finish reason of a chat says so, whole or streamed."""
    assert read_json(CHAT, json.dumps(choice("message", reason, **message)).encode()).ended_turn is ended
    reader = StreamReader(CHAT)
    reader.feed(event(choice("delta", reason, **message)) + b"data: [DONE]\n\n")
    assert reader.ending().ended_turn is ended


@pytest.mark.parametrize(("reason", "ended"), [("end_turn", True), ("tool_use", False), ("max_tokens", None)])
def test_a_message_says_why_it_stopped(reason: str, ended: bool | None) -> None:
    """The stop reason of a message says so, whole or streamed."""
    whole = {"type": "message", "content": [], "stop_reason": reason, "usage": {"input_tokens": 1, "output_tokens": 1}}
    assert read_message(MESSAGE, json.dumps(whole).encode()).ended_turn is ended
    reader = MessageReader(MESSAGE)
    reader.feed(event({"type": "message_delta", "delta": {"stop_reason": reason}, "usage": {"output_tokens": 1}}))
    assert reader.ending().ended_turn is ended


@pytest.mark.parametrize(
    ("output", "status", "ended"),
    [([], "completed", True), ([FUNCTION], "completed", False), ([], "incomplete", None)],
)
def test_a_complete_response_ends_its_turn_unless_it_calls_a_function(
    output: list[Any], status: str, ended: bool | None
) -> None:
    """The output items of a response say so, whole or streamed."""
    response = {"id": "r", "object": "response", "status": status, "output": output}
    assert read_response(RESPONSE, json.dumps(response).encode()).ended_turn is ended
    reader = ResponseReader(RESPONSE)
    reader.feed(event({"type": f"response.{status}", "response": response}))
    assert reader.ending().ended_turn is ended

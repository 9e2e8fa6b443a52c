"""POST /v1/messages, Anthropic's API. Engines convert a call to a chat, so its prompt's key is that of the chat."""

from collections.abc import Iterator
from typing import Any, ClassVar, Final

import orjson

from router.api.answer.event_reader import EventReader
from router.api.answer.stream_reader import UNREAD_LIMIT, Answer, EngineError, load_all
from router.api.answer.usage import token_count, whole_usage
from router.api.body import fields as read
from router.api.body import prompt_bytes as render
from router.api.body.call import Call, Head
from router.api.body.error_bodies import ErrorShape, worker_error_fields
from router.api.body.fields import Fields
from router.api.body.json_object import load, text_or_empty
from router.api.endpoints.as_chat import before_messages, next_turn
from router.api.endpoints.plain import plain_call
from router.core.model.prompt_key import PromptHasher, PromptKey
from router.core.model.request import Usage
from router.errors import RouterError, WorkerBroke

PATH: Final = "/v1/messages"
COUNT_PATH: Final = "/v1/messages/count_tokens"
ERROR_TYPES: Final = {
    **{400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"},
    **{413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"},
}
"""Anthropic's error types by status."""
STATUS_OF_TYPE: Final = {name: status for status, name in ERROR_TYPES.items()}
REASONING_BLOCKS: Final = ("thinking", "redacted_thinking")
TURN_ENDS: Final = {"end_turn": True, "stop_sequence": True, "tool_use": False}
"""Whether a message ends the turn, by its stop reason."""
ANSWER_LIMIT: Final = 4 * 2**20
"""Bytes of events kept per answer for its key. A longer answer does not count towards the key."""


def parse_messages(head: Head, body: bytes, hasher: PromptHasher, *, ids: bool = False) -> Call:  # noqa: ARG001
    """Parse the members that the router needs, and leave the others to the engine. Raises BadRequest."""
    fields = read.load_fields(body)
    model = read.model_name(fields)
    metadata = read.mapping(fields, "metadata") or {}
    chat = [*_system(fields.get("system")), *as_chat(fields.get("messages"))]
    prompt = hasher.prompt(render.head("chat", model, _as_chat_fields(fields)) + render.messages(chat))
    limit, user = read.count(fields, "max_tokens"), read.text(metadata, "user_id")
    return plain_call(head, body, fields, (prompt,), limit, user=user, streamed=read.flag(fields, "stream"))


def _as_chat_fields(fields: Fields) -> Fields:
    tools = [
        {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool.get("input_schema")}
        for tool in read.objects(fields.get("tools"))
    ]
    return before_messages(fields, tools, fields.get("output_config"))


def _system(system: object) -> Iterator[dict[str, Any]]:
    """Return the system prompt as one message, without the billing header that Anthropic's client adds to each call."""
    blocks = system if isinstance(system, list) else [system]
    texts = [block.get("text") if isinstance(block, dict) else block for block in blocks]
    kept = [text for text in texts if isinstance(text, str) and not text.startswith("x-anthropic-billing-header")]
    if any(kept):
        yield {"role": "system", "content": "".join(kept)}


def as_chat(messages: object) -> Iterator[dict[str, Any]]:
    """Convert messages to those of a chat, as engines do: tool results come before the rest of their message."""
    for message in read.objects(messages):
        content = message.get("content")
        if not isinstance(content, list):
            yield {"role": message.get("role"), "content": content}
            continue
        blocks = read.objects(content)
        results = [block for block in blocks if block.get("type") == "tool_result"]
        yield from (
            {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": block.get("content")}
            for block in results
        )
        parts = [block for block in blocks if block.get("type") not in ("tool_result", "tool_use", *REASONING_BLOCKS)]
        calls = [_tool_call(block) for block in blocks if block.get("type") == "tool_use"]
        if parts or calls or not results:
            yield {"role": message.get("role"), "content": [_part(part) for part in parts], "tool_calls": calls}


def _part(block: Fields) -> Fields:
    """A content block without its cache control, which changes from turn to turn."""
    return {name: value for name, value in block.items() if name != "cache_control"}


def _tool_call(block: Fields) -> dict[str, Any]:
    arguments = read.dump(block.get("input") or {}, "messages").decode()
    return {"id": block.get("id"), "function": {"name": block.get("name"), "arguments": arguments}}


class _Block:
    """A content block of a message, assembled from its deltas."""

    __slots__ = ("_fields", "_json", "_texts")

    def __init__(self, fields: Fields) -> None:
        self._fields = fields
        self._texts = [text_or_empty(fields.get("text"))]
        self._json: list[str] = []

    def add(self, delta: Fields) -> None:
        """Add a delta."""
        for name, pieces in (("text", self._texts), ("partial_json", self._json)):
            if more := text_or_empty(delta.get(name)):
                pieces.append(more)

    @property
    def whole(self) -> Fields:
        """The block so far."""
        if self._fields.get("type") == "tool_use":
            return {**self._fields, "input": load("".join(self._json).encode()) or {}}
        return {**self._fields, "text": "".join(self._texts)} if len(self._texts) > 1 else self._fields


class MessageReader(EventReader):
    """Follows a streamed message and assembles its blocks for its key."""

    failures: ClassVar = frozenset({"error"})
    ends: ClassVar = frozenset({"message_stop"})

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self._unread: list[bytes] = []
        self._blocks: dict[int, _Block] = {}
        self._bytes_left = ANSWER_LIMIT

    def _on_event(self, name: str, data: bytes) -> None:
        if name == "content_block_delta":
            self.started = True
            self._tokens += 1
        elif name in ("message_start", "message_delta"):
            fields = load(data) or {}
            self._take_usage(fields)
            delta = fields.get("delta")
            if isinstance(delta, dict):
                self.ended_turn = _ended_turn(delta)
            return
        elif name != "content_block_start":
            return
        self._bytes_left -= len(data)
        if self._bytes_left >= 0:
            self._unread.append(data)
        if len(self._unread) >= UNREAD_LIMIT:
            self._read()

    def _read(self) -> None:
        """Read the queued events: the beginnings and the deltas of blocks."""
        for event in load_all(self._unread):
            index, block_start, delta = event.get("index"), event.get("content_block"), event.get("delta")
            if not isinstance(index, int):
                continue
            if isinstance(block_start, dict):
                self._blocks[index] = _Block(block_start)
            elif isinstance(delta, dict) and (block := self._blocks.get(index)) is not None:
                block.add(delta)
        self._unread.clear()

    def _take_usage(self, fields: dict[str, Any]) -> None:
        """Read the usage. Engines report input tokens at the beginning, or with the output tokens at the end."""
        message = fields.get("message")
        reported = whole_usage(message if isinstance(message, dict) else fields)
        usage = fields.get("usage")
        if reported is None and isinstance(usage, dict) and (output := token_count(usage, "output_tokens")) is not None:
            before = self._usage or Usage(0, 0)
            reported = Usage(before.input_tokens, output, before.cached_tokens)
        if reported is not None and (reported.input_tokens or self._usage is None):
            self._usage = reported

    @property
    def usage(self) -> Usage | None:
        """The usage reported last, with the output tokens so far; None before the input tokens are known."""
        reported = self._usage
        if reported is None or not reported.input_tokens:
            return None
        return Usage(reported.input_tokens, self.output_tokens(), reported.cached_tokens)

    def _engine_error(self, fields: dict[str, Any]) -> EngineError:
        return failure_of(fields)

    def _answer_keys(self) -> tuple[PromptKey, ...]:
        """Return the key of prompt and message, or of the prompt alone if reasoning would be left out of the next
        prompt.
        """
        if self._bytes_left < 0:
            return (self._call.prompts[0].key,)
        self._read()
        return (_key(self._call, [block.whole for _, block in sorted(self._blocks.items())]),)


def _ended_turn(fields: Fields) -> bool | None:
    return TURN_ENDS.get(text_or_empty(fields.get("stop_reason")))


def _key(call: Call, blocks: list[Fields]) -> PromptKey:
    if any(block.get("type") in REASONING_BLOCKS for block in blocks):
        return call.prompts[0].key
    return next_turn(call, as_chat([{"role": "assistant", "content": blocks}]))


def read_message(call: Call, body: bytes) -> Answer:
    """Read a message that was not streamed. Raises WorkerBroke unless it is a JSON object."""
    fields = load(body)
    if fields is None:
        raise WorkerBroke("A worker's answer is not a JSON object.")
    if fields.get("type") == "error":
        return Answer(None, (), failure_of(fields), False)
    key, ended_turn = _key(call, read.objects(fields.get("content"))), _ended_turn(fields)
    return Answer(whole_usage(fields), (key,), None, False, ended_turn=ended_turn)


def failure_of(fields: dict[str, Any]) -> EngineError:
    """Read an error object. The code of the result is the status that belongs to its type."""
    error = fields.get("error")
    members = error if isinstance(error, dict) else {}
    status = STATUS_OF_TYPE.get(text_or_empty(members.get("type")), 500)
    return EngineError(text_or_empty(members.get("message")), status)


def _body(status: int, message: object) -> bytes:
    return orjson.dumps({"type": "error", "error": {"type": ERROR_TYPES.get(status, "api_error"), "message": message}})


def _event(body: bytes) -> bytes:
    return b"event: error\ndata: " + body + b"\n\n"


def error_body(error: RouterError) -> bytes:
    """Return the body of an error response in Anthropic's shape."""
    return _body(error.status, error.message)


def refusal(status: int, body: bytes) -> bytes | None:
    """Convert an engine's error response to Anthropic's shape. Returns None if it has that shape."""
    fields = load(body) or {}
    if fields.get("type") == "error" and isinstance(fields.get("error"), dict):
        return None
    return _body(status, worker_error_fields(status, body)["message"])


def refusal_event(status: int, body: bytes) -> bytes:
    """An engine's error response as the last event of a stream that has begun."""
    return _event(_body(status, worker_error_fields(status, body)["message"]))


ANTHROPIC: Final = ErrorShape(error_body, lambda error: _event(error_body(error)), refusal, refusal_event)

"""POST /v1/messages, Anthropic's API: engines turn such a call into a chat, and so does its key."""

from collections.abc import Iterator
from typing import Any, ClassVar, Final

import orjson

from router.api.answer.event_reader import EventReader
from router.api.answer.stream_reader import UNREAD_LIMIT, Answer, EngineError, load_all
from router.api.answer.usage import token_count, whole_usage
from router.api.body import fields as read
from router.api.body import prompt_bytes as render
from router.api.body.call import Call, Head
from router.api.body.error_bodies import ErrorShape, load, text_or_empty, worker_error_fields
from router.api.body.fields import Fields
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
"""Of errors, by status."""
STATUS_OF_TYPE: Final = {name: status for status, name in ERROR_TYPES.items()}
REASONING_BLOCKS: Final = ("thinking", "redacted_thinking")
ANSWER_LIMIT: Final = 4 * 2**20
"""Bytes of the events of an answer that are kept for its key; a longer one is not kept at all."""


def parse_messages(head: Head, body: bytes, hasher: PromptHasher, *, ids: bool = False) -> Call:  # noqa: ARG001
    """Check what the router needs to know and leave the rest to the engine. Raises BadRequest."""
    fields = read.load_fields(body)
    model = read.model_name(fields)
    metadata = read.mapping(fields, "metadata") or {}
    chat = [*_system(fields.get("system")), *as_chat(fields.get("messages"))]
    prompt = hasher.prompt(render.head("chat", model, _as_chat_fields(fields)) + render.messages(chat))
    limit, user = read.count(fields, "max_tokens"), read.text(metadata, "user_id")
    return plain_call(head, body, fields, (prompt,), limit, user=user, streamed=read.flag(fields, "stream"))


def _as_chat_fields(fields: Fields) -> Fields:
    """See `before_messages`."""
    tools = [
        {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool.get("input_schema")}
        for tool in read.objects(fields.get("tools"))
    ]
    return before_messages(fields, tools, fields.get("output_config"))


def _system(system: object) -> Iterator[dict[str, Any]]:
    """The system prompt as one message, without the line in which a client counts its own calls."""
    blocks = system if isinstance(system, list) else [system]
    texts = [block.get("text") if isinstance(block, dict) else block for block in blocks]
    said = [text for text in texts if isinstance(text, str) and not text.startswith("x-anthropic-billing-header")]
    if any(said):
        yield {"role": "system", "content": "".join(said)}


def as_chat(messages: object) -> Iterator[dict[str, Any]]:
    """Messages as engines make those of a chat of them: results of tools come before the rest of their message."""
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
    """A block without what is said of caching it, which changes from turn to turn."""
    return {name: value for name, value in block.items() if name != "cache_control"}


def _tool_call(block: Fields) -> dict[str, Any]:
    arguments = read.dump(block.get("input") or {}, "messages").decode()
    return {"id": block.get("id"), "function": {"name": block.get("name"), "arguments": arguments}}


class _Block:
    """A block of a message as it comes."""

    __slots__ = ("_fields", "_json", "_texts")

    def __init__(self, fields: Fields) -> None:
        self._fields = fields
        self._texts = [text_or_empty(fields.get("text"))]
        self._json: list[str] = []

    def add(self, delta: Fields) -> None:
        """Take more of it."""
        for name, pieces in (("text", self._texts), ("partial_json", self._json)):
            if more := text_or_empty(delta.get(name)):
                pieces.append(more)

    @property
    def whole(self) -> Fields:
        """All of it that has come."""
        if self._fields.get("type") == "tool_use":
            return {**self._fields, "input": load("".join(self._json).encode()) or {}}
        return {**self._fields, "text": "".join(self._texts)} if len(self._texts) > 1 else self._fields


class MessageReader(EventReader):
    """Follows a streamed message: its blocks are put together again for its key."""

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
            self._take_usage(load(data) or {})
            return
        elif name != "content_block_start":
            return
        self._bytes_left -= len(data)
        if self._bytes_left >= 0:
            self._unread.append(data)
        if len(self._unread) >= UNREAD_LIMIT:
            self._read()

    def _read(self) -> None:
        """Take in what was passed on: the beginnings of blocks, or more of them."""
        for event in load_all(self._unread):
            index, begun, delta = event.get("index"), event.get("content_block"), event.get("delta")
            if not isinstance(index, int):
                continue
            if isinstance(begun, dict):
                self._blocks[index] = _Block(begun)
            elif isinstance(delta, dict) and (block := self._blocks.get(index)) is not None:
                block.add(delta)
        self._unread.clear()

    def _take_usage(self, fields: dict[str, Any]) -> None:
        """The input is told at the beginning, or with the output at the end."""
        message = fields.get("message")
        told = whole_usage(message if isinstance(message, dict) else fields)
        usage = fields.get("usage")
        if told is None and isinstance(usage, dict) and (output := token_count(usage, "output_tokens")) is not None:
            before = self._usage or Usage(0, 0)
            told = Usage(before.input_tokens, output, before.cached_tokens)
        if told is not None and (told.input_tokens or self._usage is None):
            self._usage = told

    @property
    def usage(self) -> Usage | None:
        """What was told, with as many output tokens as came since."""
        told = self._usage
        if told is None or not told.input_tokens:
            return None
        return Usage(told.input_tokens, self.output_tokens, told.cached_tokens)

    def _engine_error(self, fields: dict[str, Any]) -> EngineError:
        return failure_of(fields)

    def answer_keys(self) -> tuple[PromptKey, ...]:
        """The key of prompt and message, or of the prompt alone where thoughts would be left out of the next."""
        if self._bytes_left < 0:
            return (self._call.prompts[0].key,)
        self._read()
        return (_key(self._call, [block.whole for _, block in sorted(self._blocks.items())]),)


def _key(call: Call, blocks: list[Fields]) -> PromptKey:
    if any(block.get("type") in REASONING_BLOCKS for block in blocks):
        return call.prompts[0].key
    return next_turn(call, as_chat([{"role": "assistant", "content": blocks}]))


def read_message(call: Call, body: bytes) -> Answer:
    """Read a message that was not streamed. Raises WorkerBroke where it is no JSON object."""
    fields = load(body)
    if fields is None:
        raise WorkerBroke("A worker's answer is not a JSON object.")
    if fields.get("type") == "error":
        return Answer(None, (), failure_of(fields), False)
    return Answer(whole_usage(fields), (_key(call, read.objects(fields.get("content"))),), None, False)


def failure_of(fields: dict[str, Any]) -> EngineError:
    """An error object; its code is the status that belongs to its type."""
    error = fields.get("error")
    said = error if isinstance(error, dict) else {}
    return EngineError(text_or_empty(said.get("message")), STATUS_OF_TYPE.get(text_or_empty(said.get("type")), 500))


def _body(status: int, message: object) -> bytes:
    return orjson.dumps({"type": "error", "error": {"type": ERROR_TYPES.get(status, "api_error"), "message": message}})


def _event(body: bytes) -> bytes:
    return b"event: error\ndata: " + body + b"\n\n"


def error_body(error: RouterError) -> bytes:
    """One of our errors in Anthropic's shape."""
    return _body(error.status, error.message)


def refusal(status: int, body: bytes) -> bytes | None:
    """An engine's error response in Anthropic's shape; None where it has that."""
    said = load(body) or {}
    if said.get("type") == "error" and isinstance(said.get("error"), dict):
        return None
    return _body(status, worker_error_fields(status, body)["message"])


def refusal_event(status: int, body: bytes) -> bytes:
    """The same as the end of a stream that has begun."""
    return _event(_body(status, worker_error_fields(status, body)["message"]))


ANTHROPIC: Final = ErrorShape(error_body, lambda error: _event(error_body(error)), refusal, refusal_event)

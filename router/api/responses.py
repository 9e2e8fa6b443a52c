"""POST /v1/responses: engines turn such a call into a chat, and so does its key."""

from collections.abc import Iterator
from typing import Any, ClassVar, Final

import orjson

from router.api import fields as read
from router.api import render
from router.api.answer import Answer, EngineError, read_error
from router.api.call import Call, Head
from router.api.chat_form import before_messages, next_turn
from router.api.error_json import ErrorShape, error_fields, load, words, worker_said
from router.api.event_reader import EventReader
from router.api.fields import Fields
from router.api.plain import model_or_any, plain_call
from router.api.usage import whole_usage
from router.core.prompt_key import PromptHasher, PromptKey
from router.errors import BadRequest, RouterError, WorkerBroke

PATH: Final = "/v1/responses"
CALLS: Final = ("function_call", "custom_tool_call")
RESULTS: Final = ("function_call_output", "custom_tool_call_output")
STATUS: Final = {"rate_limit_exceeded": 429, "invalid_prompt": 400}
"""That belong to an error's code; all others count as the engine's own."""


def parse_response(head: Head, body: bytes, hasher: PromptHasher, *, ids: bool = False) -> Call:  # noqa: ARG001
    """Check what the router needs to know and leave the rest to the engine. Raises BadRequest."""
    fields = read.load_fields(body)
    if fields.get("background"):
        # Its answer comes at once, and the engine computes on: nobody would hold its place, or its bill.
        raise BadRequest("Background responses are not served here.", param="background", code="invalid_value")
    model = model_or_any(fields)
    instructions, before = fields.get("instructions"), read.text(fields, "previous_response_id")
    chat = [*([{"role": "system", "content": instructions}] if instructions else []), *as_chat(fields.get("input"))]
    # What stands before is the engine's secret: such a prompt is like others that go on from the same response.
    kind = "chat" if before is None else f"after {before}"
    prompt = hasher.prompt(render.head(kind, model, _as_chat_fields(fields)) + render.messages(chat))
    limit, user = read.count(fields, "max_output_tokens"), read.text(fields, "user")
    streamed = read.flag(fields, "stream")
    return plain_call(head, body, fields, (prompt,), limit, user=user, streamed=streamed, extendable=before is None)


def _as_chat_fields(fields: Fields) -> Fields:
    """See `before_messages`."""
    tools = [
        {name: value for name, value in tool.items() if name != "type"} for tool in read.objects(fields.get("tools"))
    ]
    return before_messages(fields, tools, fields.get("reasoning"))


def as_chat(items: object) -> Iterator[dict[str, Any]]:
    """Items as engines make the messages of a chat of them: calls of tools belong to the message before."""
    if isinstance(items, str):
        yield {"role": "user", "content": items}
        return
    last: dict[str, Any] | None = None
    for item in read.objects(items):
        if item.get("type") == "reasoning":
            continue
        kind = item.get("type")
        if kind in CALLS and last is not None and last["role"] == "assistant":
            last["tool_calls"].append(_tool_call(item))
            continue
        if last is not None:
            yield last
        last = _message(item)
    if last is not None:
        yield last


def _message(item: Fields) -> dict[str, Any]:
    if item.get("type") in CALLS:
        return {"role": "assistant", "content": None, "tool_calls": [_tool_call(item)]}
    if item.get("type") in RESULTS:
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output"), "tool_calls": []}
    content = item.get("content")
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        content = [part if text is None else text for part, text in zip(content, texts, strict=True)]
    return {"role": item.get("role"), "content": content, "tool_calls": []}


def _tool_call(item: Fields) -> dict[str, Any]:
    arguments = item.get("arguments", item.get("input"))
    return {"id": item.get("call_id"), "function": {"name": item.get("name"), "arguments": arguments}}


class ResponseReader(EventReader):
    """Follows a streamed response, whose last event has all of it."""

    failures: ClassVar = frozenset({"error", "response.failed"})
    ends: ClassVar = frozenset({"response.completed", "response.incomplete", "response.cancelled"})

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self._key = call.prompts[0].key

    def _hear(self, name: str, data: bytes) -> None:  # noqa: ARG002 - the names say enough
        if name.endswith(".delta"):
            self.started = True
            self._tokens += 1

    def _end(self, fields: dict[str, Any]) -> None:
        response = fields.get("response")
        if isinstance(response, dict):
            self._usage = whole_usage(response)
            self._key = _key(self._call, response)

    def _failure(self, fields: dict[str, Any]) -> EngineError:
        return failure_of(fields)

    def answers(self) -> tuple[PromptKey, ...]:
        """The key of prompt and response, or of the prompt alone where thoughts would be left out of the next."""
        return (self._key,)


def _key(call: Call, response: dict[str, Any]) -> PromptKey:
    items = read.objects(response.get("output"))
    if not call.extendable or any(item.get("type") == "reasoning" for item in items):
        return call.prompts[0].key
    return next_turn(call, as_chat(items))


def read_response(call: Call, body: bytes) -> Answer:
    """Read a response that was not streamed. Raises WorkerBroke where it is no JSON object."""
    fields = load(body)
    if fields is None:
        raise WorkerBroke("A worker's answer is not a JSON object.")
    error = failure_of(fields) if fields.get("error") is not None else read_error(fields)
    return Answer(whole_usage(fields), (_key(call, fields),), error, False)


def failure_of(fields: dict[str, Any]) -> EngineError:
    """An event `error`, the error of a response, or an error as in a chat's stream; its code as a status."""
    response = fields.get("response")
    holder = response if isinstance(response, dict) else fields
    error = holder.get("error")
    said = error if isinstance(error, dict) else fields
    code = said.get("code")
    return EngineError(words(said.get("message")), code if isinstance(code, int) else STATUS.get(words(code), 500))


def _event(error: dict[str, Any]) -> bytes:
    said = {name: error.get(name) for name in ("code", "message", "param")}
    if said["code"] is not None:
        said["code"] = str(said["code"])
    return b"event: error\ndata: " + orjson.dumps({"type": "error", **said, "sequence_number": 0}) + b"\n\n"


def error_event(error: RouterError) -> bytes:
    """The end of a stream that began well."""
    return _event(error_fields(error))


def refusal_event(status: int, body: bytes) -> bytes:
    """An engine's error response as the end of a stream that has begun."""
    return _event(worker_said(status, body))


ERRORS: Final = ErrorShape(event=error_event, refusal_event=refusal_event)

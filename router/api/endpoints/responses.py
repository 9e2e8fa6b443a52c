"""POST /v1/responses. Engines convert a call to a chat, so its prompt's key is that of the chat.

An engine may store a response and return it to any caller that asks for it below this path: see `stored_id`.
"""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Final, NamedTuple

import orjson

from router.api.answer.event_reader import EventReader
from router.api.answer.stream_reader import Answer, EngineError, read_error
from router.api.answer.usage import whole_usage
from router.api.body import fields as read
from router.api.body import prompt_bytes as render
from router.api.body.call import Call, Head, Storage
from router.api.body.error_bodies import ErrorShape, error_fields, worker_error_fields
from router.api.body.fields import Fields
from router.api.body.json_object import load, text_or_empty
from router.api.endpoints.as_chat import before_messages, next_turn
from router.api.endpoints.plain import plain_call
from router.core.model.prompt_key import PromptHasher, PromptKey
from router.core.model.request import Usage
from router.errors import RouterError, WorkerBroke

PATH: Final = "/v1/responses"
TOOL_CALLS: Final = ("function_call", "custom_tool_call")
TOOL_RESULTS: Final = ("function_call_output", "custom_tool_call_output")
STATUS_OF_CODE: Final = {"rate_limit_exceeded": 429, "invalid_prompt": 400}
"""Statuses by the code of an error. All other codes count as failures of the engine (500)."""


def parse_response(head: Head, body: bytes, hasher: PromptHasher, *, ids: bool = False) -> Call:  # noqa: ARG001
    """Parse the members that the router needs, and leave the others to the engine. Raises BadRequest."""
    fields = read.load_fields(body)
    model = read.model_name(fields)
    instructions, previous_id = fields.get("instructions"), read.text(fields, "previous_response_id")
    chat = [*([{"role": "system", "content": instructions}] if instructions else []), *as_chat(fields.get("input"))]
    # Only the engine knows the previous response, so the prompt shares a prefix only with others that continue it.
    kind = "chat" if previous_id is None else f"after {previous_id}"
    prompt = hasher.prompt(render.head(kind, model, _as_chat_fields(fields)) + render.messages(chat))
    limit, user = read.count(fields, "max_output_tokens"), read.text(fields, "user")
    streamed = read.flag(fields, "stream")
    call = plain_call(
        head, body, fields, (prompt,), limit, user=user, streamed=streamed, extendable=previous_id is None
    )
    return call._replace(storage=_storage(fields, previous_id))


def _storage(fields: Fields, previous_id: str | None) -> Storage:
    requested_id = read.text(fields, "request_id")
    stored = bool(fields.get("store", True)) and requested_id is None
    return Storage(stored, bool(fields.get("background")), previous_id, requested_id)


def stored_id(path: str, method: str) -> str | None:
    """Return the id of the stored response that a call refers to; None if it refers to none.

    A call refers to a response by the response's own path, except with POST, or by any path below it.
    """
    if not path.startswith(f"{PATH}/"):
        return None
    response, slash, _ = path.removeprefix(f"{PATH}/").partition("/")
    return response if slash or method != "POST" else None


def _as_chat_fields(fields: Fields) -> Fields:
    tools = [
        {name: value for name, value in tool.items() if name != "type"} for tool in read.objects(fields.get("tools"))
    ]
    return before_messages(fields, tools, fields.get("reasoning"))


def as_chat(items: object) -> Iterator[dict[str, Any]]:
    """Convert items to messages of a chat, as engines do: tool calls belong to the assistant's message before them."""
    if isinstance(items, str):
        yield {"role": "user", "content": items}
        return
    last: dict[str, Any] | None = None
    for item in read.objects(items):
        if item.get("type") == "reasoning":
            continue
        kind = item.get("type")
        if kind in TOOL_CALLS and last is not None and last["role"] == "assistant":
            last["tool_calls"].append(_tool_call(item))
            continue
        if last is not None:
            yield last
        last = _message(item)
    if last is not None:
        yield last


def _message(item: Fields) -> dict[str, Any]:
    if item.get("type") in TOOL_CALLS:
        return {"role": "assistant", "content": None, "tool_calls": [_tool_call(item)]}
    if item.get("type") in TOOL_RESULTS:
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
    """Follows a streamed response, whose last event contains all of it."""

    failures: ClassVar = frozenset({"error", "response.failed"})
    ends: ClassVar = frozenset({"response.completed", "response.incomplete", "response.cancelled"})

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self._key = call.prompts[0].key
        self.on_response_id: Callable[[str], None] | None = None
        """Called with the id of the response before the client receives it."""

    def _on_event(self, name: str, data: bytes) -> None:
        if name == "response.created" and self.on_response_id is not None:
            response = response_id((load(data) or {}).get("response"))
            if response is not None:
                self.on_response_id(response)
        if name.endswith(".delta"):
            self.started = True
            self._tokens += 1

    def _on_last_event(self, fields: dict[str, Any]) -> None:
        response = fields.get("response")
        if isinstance(response, dict):
            self._usage = whole_usage(response)
            self._key = _key(self._call, response)
            self.ended_turn = _ended_turn(response)

    def _engine_error(self, fields: dict[str, Any]) -> EngineError:
        return failure_of(fields)

    def _answer_keys(self) -> tuple[PromptKey, ...]:
        """Return the key of prompt and response, or of the prompt alone if reasoning would be left out of the next
        prompt.
        """
        return (self._key,)


def _ended_turn(response: dict[str, Any]) -> bool | None:
    """Return whether a response ends the turn: it is complete and calls no function."""
    if any(item.get("type") in TOOL_CALLS for item in read.objects(response.get("output"))):
        return False
    return True if response.get("status") == "completed" else None


def _key(call: Call, response: dict[str, Any]) -> PromptKey:
    items = read.objects(response.get("output"))
    if not call.extendable or any(item.get("type") == "reasoning" for item in items):
        return call.prompts[0].key
    return next_turn(call, as_chat(items))


def response_id(response: object) -> str | None:
    """Return the id in a response object; None if it has none."""
    found = response.get("id") if isinstance(response, dict) else None
    return found if isinstance(found, str) else None


class ResponseProgress(NamedTuple):
    """The state of a stored response, as its engine reports it."""

    status: str | None
    """None if the engine does not know the response."""
    usage: Usage | None = None
    answer_keys: tuple[PromptKey, ...] = ()
    ended_turn: bool | None = None

    @property
    def running(self) -> bool:
        """Whether the response is queued or being generated."""
        return self.status is not None and is_running(self.status)


def is_running(status: str) -> bool:
    """Return whether a response of this status is queued or being generated."""
    return status in ("queued", "in_progress")


def read_progress(call: Call, body: bytes) -> ResponseProgress:
    """Read the state of a stored response. Raises WorkerBroke unless the body is a JSON object."""
    fields = load(body)
    if fields is None:
        raise WorkerBroke("A worker's answer is not a JSON object.")
    status, keys = text_or_empty(fields.get("status")), (_key(call, fields),)
    return ResponseProgress(status, whole_usage(fields), keys, _ended_turn(fields))


def read_response(call: Call, body: bytes) -> Answer:
    """Read a response that was not streamed. Raises WorkerBroke unless it is a JSON object."""
    fields = load(body)
    if fields is None:
        raise WorkerBroke("A worker's answer is not a JSON object.")
    error = failure_of(fields) if fields.get("error") is not None else read_error(fields)
    status = text_or_empty(fields.get("status"))
    usage, keys, ended_turn = whole_usage(fields), (_key(call, fields),), _ended_turn(fields)
    return Answer(usage, keys, error, False, response_id(fields), status, ended_turn)


def failure_of(fields: dict[str, Any]) -> EngineError:
    """Read an `error` event, the error of a response, or an error as in a chat's stream. The code becomes a status."""
    response = fields.get("response")
    holder = response if isinstance(response, dict) else fields
    error = holder.get("error")
    members = error if isinstance(error, dict) else fields
    code = members.get("code")
    return EngineError(
        text_or_empty(members.get("message")),
        code if isinstance(code, int) else STATUS_OF_CODE.get(text_or_empty(code), 500),
    )


def _event(error: dict[str, Any]) -> bytes:
    members = {name: error.get(name) for name in ("code", "message", "param")}
    if members["code"] is not None:
        members["code"] = str(members["code"])
    return b"event: error\ndata: " + orjson.dumps({"type": "error", **members, "sequence_number": 0}) + b"\n\n"


def error_event(error: RouterError) -> bytes:
    """Return the last event of a stream that fails after its start."""
    return _event(error_fields(error))


def refusal_event(status: int, body: bytes) -> bytes:
    """An engine's error response as the last event of a stream that has begun."""
    return _event(worker_error_fields(status, body))


ERRORS: Final = ErrorShape(event=error_event, refusal_event=refusal_event)

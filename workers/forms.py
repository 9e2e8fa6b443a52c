"""The APIs that both engines turn into chats: a body becomes a chat's, and the answer is told in the API's own words.

As vLLM does it (`entrypoints/anthropic`, `entrypoints/openai/responses`), and SGLang nearly so. Left out: thoughts,
calls of tools in answers, and stored responses. PURE.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import orjson

from workers.call import ApiError, Body, Call, parse_call
from workers.choice import Choice
from workers.dialects.wire import Answer, StreamWriter, usage_totals

STOP = {"stop": "end_turn", "length": "max_tokens", "abort": "refusal", None: None}
TYPES = {400: "invalid_request_error", 404: "not_found_error", 503: "overloaded_error"}


class Form(Protocol):
    """One such API."""

    def parse(self, body: Body) -> Call:
        """Raises ApiError."""

    def writer(self, answer: Answer) -> StreamWriter: ...

    def full(self, answer: Answer, choices: Sequence[Choice]) -> bytes:
        """The whole answer of a call that does not stream."""

    def error(self, error: ApiError) -> bytes:
        """The body of an error."""

    def stream_error(self, error: ApiError) -> bytes:
        """The end of a stream that cannot be gone on with."""


class MessagesForm:
    """POST /v1/messages."""

    def parse(self, body: Body) -> Call:
        if not isinstance(body.get("max_tokens"), int):
            raise ApiError(400, "max_tokens: Field required", param="max_tokens")
        return parse_call(_with_stream_options(messages_as_chat(body)), True)

    def writer(self, answer: Answer) -> StreamWriter:
        return _MessageWriter(answer)

    def full(self, answer: Answer, choices: Sequence[Choice]) -> bytes:
        (choice,) = choices
        content = [{"type": "text", "text": choice.text}]
        return orjson.dumps(
            _message(answer, content) | {"stop_reason": STOP[choice.finish], "usage": _message_usage(choice)}
        )

    def error(self, error: ApiError) -> bytes:
        return orjson.dumps(
            {"type": "error", "error": {"type": TYPES.get(error.status, "api_error"), "message": error.message}}
        )

    def stream_error(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + self.error(error) + b"\n\n"


class _MessageWriter:
    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def update(self, choice: Choice) -> bytes:
        text = choice.text
        events = b""
        if not choice.sent:
            usage = {"input_tokens": len(choice.prompt), "output_tokens": 0}
            message = _message(self._answer, []) | {"stop_reason": None, "usage": usage}
            events += _event("message_start", message=message)
            events += _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        if text:
            events += _event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})
        return events

    def end(self, choices: Sequence[Choice]) -> bytes:
        (choice,) = choices
        delta = {"stop_reason": STOP[choice.finish], "stop_sequence": None}
        return (
            _event("content_block_stop", index=0)
            + _event("message_delta", delta=delta, usage=_message_usage(choice))
            + _event("message_stop")
        )


class ResponsesForm:
    """POST /v1/responses."""

    def parse(self, body: Body) -> Call:
        given = body.get("input")
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            raise ApiError(400, "Input should be a string or a list: input", param="input")
        instructions = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
        chat = {name: body[name] for name in ("model", "stream", "ignore_eos", "tools") if name in body}
        chat |= {"messages": instructions + [_item(item) for item in items]}
        return parse_call(_with_stream_options(chat | {"max_tokens": body.get("max_output_tokens")}), True)

    def writer(self, answer: Answer) -> StreamWriter:
        return _ResponseWriter(answer)

    def full(self, answer: Answer, choices: Sequence[Choice]) -> bytes:
        (choice,) = choices
        return orjson.dumps(_response(answer, choice, choice.text))

    def error(self, error: ApiError) -> bytes:
        detail = {"message": error.message, "type": error.kind, "param": error.param, "code": error.status}
        return orjson.dumps({"error": detail})

    def stream_error(self, error: ApiError) -> bytes:
        return _event("error", code="server_error", message=error.message, param=None, sequence_number=0)


class _ResponseWriter:
    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._text: list[str] = []
        self._number = 0

    def update(self, choice: Choice) -> bytes:
        text = choice.text
        item = {"item_id": "msg_" + self._answer.id, "output_index": 0}
        events = b""
        if not choice.sent:
            begun = _response(self._answer, None, "")
            part = {"type": "output_text", "text": "", "annotations": []}
            events += self._event("response.created", response=begun) + self._event(
                "response.in_progress", response=begun
            )
            events += self._event("response.output_item.added", output_index=0, item=_output(self._answer, None))
            events += self._event("response.content_part.added", **item, content_index=0, part=part)
        if text:
            self._text.append(text)
            events += self._event("response.output_text.delta", **item, content_index=0, delta=text, logprobs=[])
        return events

    def end(self, choices: Sequence[Choice]) -> bytes:
        (choice,) = choices
        text = "".join(self._text)
        item = {"item_id": "msg_" + self._answer.id, "output_index": 0}
        response = _response(self._answer, choice, text)
        return (
            self._event("response.output_text.done", **item, content_index=0, text=text, logprobs=[])
            + self._event("response.output_item.done", output_index=0, item=_output(self._answer, text))
            + self._event(f"response.{response['status']}", response=response)
        )

    def _event(self, kind: str, **fields: object) -> bytes:
        self._number += 1
        return _event(kind, **fields, sequence_number=self._number - 1)


FORMS: Mapping[str, Form] = {"/v1/messages": MessagesForm(), "/v1/responses": ResponsesForm()}


def messages_as_chat(body: Body) -> dict[str, object]:
    """A message's body as that of a chat. Raises ApiError where there are no messages."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ApiError(400, "Input should be a list of objects: messages", param="messages")
    system = body.get("system")
    texts = [part.get("text") for part in system if isinstance(part, dict)] if isinstance(system, list) else [system]
    head = [{"role": "system", "content": "".join(str(text) for text in texts)}] if system else []
    chat = {name: body[name] for name in ("model", "stream", "ignore_eos", "tools", "max_tokens") if name in body}
    return chat | {"messages": head + messages}


def _with_stream_options(chat: dict[str, object]) -> dict[str, object]:
    return chat | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def _item(item: dict[str, object]) -> dict[str, object]:
    return {"role": item.get("role") or "tool", "content": item.get("content", item.get("output"))}


def _event(kind: str, **fields: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields}))


def _message(answer: Answer, content: list[dict[str, str]]) -> dict[str, object]:
    named = {"id": answer.id, "type": "message", "role": "assistant", "model": answer.model}
    return named | {"content": content, "stop_sequence": None}


def _message_usage(choice: Choice) -> dict[str, int]:
    cached = choice.cached_tokens
    return {
        "input_tokens": len(choice.prompt) - cached,
        "output_tokens": choice.completion_tokens,
        "cache_read_input_tokens": cached,
    }


def _output(answer: Answer, text: str | None) -> dict[str, object]:
    content: list[object] = (
        [] if text is None else [{"type": "output_text", "text": text, "annotations": [], "logprobs": None}]
    )
    status = "in_progress" if text is None else "completed"
    return {"id": "msg_" + answer.id, "type": "message", "role": "assistant", "status": status, "content": content}


def _response(answer: Answer, choice: Choice | None, text: str) -> dict[str, object]:
    """What there is of a response: nothing yet, without a choice."""
    status, usage = "in_progress", None
    if choice is not None:
        status = "incomplete" if choice.finish == "length" else "completed"
        prompt, output, cached = usage_totals([choice], 1)
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + output,
        }
    return {
        **{"id": "resp_" + answer.id, "object": "response", "created_at": answer.created, "model": answer.model},
        **{"status": status, "error": None, "instructions": None, "metadata": None, "parallel_tool_calls": True},
        **{"temperature": 1.0, "top_p": 1.0, "tool_choice": "auto", "tools": [], "usage": usage},
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "output": [] if choice is None else [_output(answer, text)],
    }

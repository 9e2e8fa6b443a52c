"""POST /v1/messages, as vLLM 0.32 and SGLang 0.5.23 answer it. PURE."""

from collections.abc import Sequence
from typing import Final

import orjson

from workers.api.call import ApiError, Body, Call, parse_call, wrong_type
from workers.api.choice import Choice
from workers.api.dialect import Answer, StreamWriter
from workers.api.forms import named_event, with_stream_options
from workers.engine.model import Dialect

STOP: Final = {"stop": "end_turn", "length": "max_tokens", "abort": "refusal", None: None}
TYPES: Final = {400: "invalid_request_error", 404: "not_found_error", 503: "overloaded_error"}
ROLES: Final = ("user", "assistant", "system")
CHECKED: Final = "Bad Request"
"""The kind of an error that vLLM finds before it knows the API of a call, and so reports in OpenAI's format."""


class MessagesForm:
    """The API of one engine. vLLM reports the input tokens at the end of a stream, SGLang only at the beginning."""

    def __init__(self, dialect: Dialect, block_size: int) -> None:
        self._vllm = dialect == "vllm"
        self._block_size = block_size

    def parse(self, body: Body) -> Call:
        """Parse a call. Raises ApiError if it is invalid."""
        limit = body.get("max_tokens")
        if type(limit) is not int or limit < 1:
            raise wrong_type("max_tokens", "a positive integer")
        chat = messages_as_chat(body)
        if any(turn.get("role") not in ROLES for turn in messages_of(body)):
            raise wrong_type("messages.0.role", " or ".join(ROLES))
        return parse_call(with_stream_options(chat), True)

    def writer(self, answer: Answer) -> StreamWriter:
        return _VllmWriter(answer, self._block_size) if self._vllm else _SglangWriter(answer)

    def full(self, answer: Answer, choices: Sequence[Choice]) -> bytes:
        (choice,) = choices
        output = choice.completion_tokens
        usage = _vllm_usage(choice, self._block_size) if self._vllm else _sglang_usage(choice, output)
        content = [{"type": "text", "text": choice.text}]
        return orjson.dumps(_message(answer, content) | {"stop_reason": STOP[choice.finish], "usage": usage})

    def error(self, error: ApiError) -> bytes:
        kind = TYPES.get(error.status, "api_error")
        if self._vllm and error.status != 503:
            kind = error.kind
            if kind == CHECKED:
                detail = {"message": error.message, "type": kind, "param": error.param, "code": error.status}
                return orjson.dumps({"error": detail})
        return orjson.dumps({"type": "error", "error": {"type": kind, "message": error.message}})

    def stream_error(self, error: ApiError) -> bytes:
        kind = TYPES.get(error.status, "api_error")
        return named_event("error", error={"type": kind, "message": error.message})


class _Writer:
    """What the streams of both engines share."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def update(self, choice: Choice) -> bytes:
        text = choice.text
        events = b""
        if not choice.sent:
            events += named_event("message_start", message=_message(self._answer, []) | self._beginning(choice))
            events += named_event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        if text:
            events += named_event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})
        return events

    def end(self, choices: Sequence[Choice]) -> bytes:
        (choice,) = choices
        stop = named_event("content_block_stop", index=0)
        return stop + named_event("message_delta", **self._ending(choice)) + named_event("message_stop")

    def _beginning(self, choice: Choice) -> dict[str, object]:
        raise NotImplementedError

    def _ending(self, choice: Choice) -> dict[str, object]:
        raise NotImplementedError


class _VllmWriter(_Writer):
    def __init__(self, answer: Answer, block_size: int) -> None:
        super().__init__(answer)
        self._block_size = block_size

    def _beginning(self, choice: Choice) -> dict[str, object]:
        usage = {"input_tokens": len(choice.prompt), "output_tokens": 0}
        return {"stop_reason": None, "stop_sequence": None, "usage": usage}

    def _ending(self, choice: Choice) -> dict[str, object]:
        delta = {"stop_reason": STOP[choice.finish], "stop_sequence": None}
        return {"delta": delta, "usage": _vllm_usage(choice, self._block_size)}


class _SglangWriter(_Writer):
    def _beginning(self, choice: Choice) -> dict[str, object]:
        return {"usage": _sglang_usage(choice, 0)}

    def _ending(self, choice: Choice) -> dict[str, object]:
        return {"delta": {"stop_reason": STOP[choice.finish]}, "usage": {"output_tokens": choice.completion_tokens}}


def messages_of(body: Body) -> list[dict[str, object]]:
    """Return the messages of a body. Raises ApiError if it has none."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise wrong_type("messages", "a list of objects")
    return messages


def messages_as_chat(body: Body) -> dict[str, object]:
    """Translate a body of this API into that of a chat. Raises ApiError if it has no messages."""
    messages = messages_of(body)
    system = body.get("system")
    texts = [part.get("text") for part in system if isinstance(part, dict)] if isinstance(system, list) else [system]
    head = [{"role": "system", "content": "".join(str(text) for text in texts)}] if system else []
    chat = {name: body[name] for name in ("model", "stream", "ignore_eos", "tools", "max_tokens") if name in body}
    return chat | {"messages": head + messages}


def _message(answer: Answer, content: list[dict[str, str]]) -> dict[str, object]:
    return {"id": answer.id, "type": "message", "role": "assistant", "model": answer.model, "content": content}


def _vllm_usage(choice: Choice, block_size: int) -> dict[str, int]:
    """Return the usage; its input tokens are those neither found in the cache nor stored there."""
    cached = choice.cached_tokens
    created = max(0, len(choice.prompt) // block_size * block_size - cached)
    return {
        "input_tokens": len(choice.prompt) - cached - created,
        "output_tokens": choice.completion_tokens,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": cached,
    }


def _sglang_usage(choice: Choice, output: int) -> dict[str, int]:
    cached = choice.cached_tokens
    usage = {"input_tokens": len(choice.prompt) - cached, "output_tokens": output}
    return usage | ({"cache_read_input_tokens": cached} if cached else {})

"""POST /v1/responses, as vLLM 0.32 and SGLang 0.5.23 answer it.

Left out: SGLang generates two tokens less than `max_output_tokens`, and both repeat `instructions` and the temperature.
PURE.
"""

from collections.abc import Sequence
from typing import Final

import orjson

from workers.api.call import ApiError, Body, Call, parse_call, wrong_type
from workers.api.choice import Choice
from workers.api.dialect import Answer, StreamWriter, usage_totals
from workers.api.forms import named_event, with_stream_options
from workers.engine.model import Dialect

WRONG_VALUE: Final = "invalid_request_error"
"""SGLang's kind of error for a wrong value here; for a wrong type it is the same kind as on every other path."""
UNSET: Final = dict.fromkeys(("previous_response_id", "reasoning", "text", "user"))
ALWAYS: dict[str, object] = {"parallel_tool_calls": True, "tools": [], "truncation": "disabled", **UNSET}
VLLM_UNSET: Final = dict.fromkeys(
    ("metadata", "max_tool_calls", "prompt", "top_logprobs", "input_messages", "output_messages")
)
VLLM_ALWAYS: dict[str, object] = {
    **{"background": False, "service_tier": "auto", "tool_choice": "none", "temperature": 1.0, "top_p": 1.0},
    **{"presence_penalty": 0.0, "frequency_penalty": 0.0, "kv_transfer_params": None, "ec_transfer_params": None},
    **VLLM_UNSET,
}
SGLANG_ALWAYS: dict[str, object] = {
    **{"tool_choice": "auto", "error": None, "store": True, "temperature": 1.0, "top_p": None, "metadata": {}},
    "reasoning": {"effort": None, "summary": None},
}


class ResponsesForm:
    """The API of one engine."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect

    def parse(self, body: Body) -> Call:
        """Parse a call. Raises ApiError if it is invalid."""
        given = body.get("input")
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            raise wrong_type("input", "a string or a list")
        instructions = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
        chat = {name: body[name] for name in ("model", "stream", "ignore_eos", "tools") if name in body}
        chat |= {"messages": instructions + [_item(item) for item in items]}
        return parse_call(with_stream_options(chat | {"max_tokens": body.get("max_output_tokens")}), True)

    def writer(self, answer: Answer) -> StreamWriter:
        return _Writer(answer, self._dialect)

    def full(self, answer: Answer, choices: Sequence[Choice]) -> bytes:
        (choice,) = choices
        response = _response(answer, self._dialect, choice, choice.text)
        if choice.transfer is not None:
            response["kv_transfer_params"] = choice.transfer
        return orjson.dumps(response)

    def error(self, error: ApiError) -> bytes:
        kind, param = error.kind, error.param
        if self._dialect != "vllm":
            kind = WRONG_VALUE if kind == "BadRequestError" else kind
            param = param if param == "model" else None
        detail = {"message": error.message, "type": kind, "param": param, "code": error.status}
        return orjson.dumps({"error": detail})

    def stream_error(self, error: ApiError) -> bytes:
        return named_event("error", code="server_error", message=error.message, param=None, sequence_number=0)


class _Writer:
    def __init__(self, answer: Answer, dialect: Dialect) -> None:
        self._answer = answer
        self._dialect = dialect
        self._text: list[str] = []
        self._number = 0

    def update(self, choice: Choice) -> bytes:
        text = choice.text
        events = b""
        if not choice.sent:
            begun = _response(self._answer, self._dialect, None, "")
            item = _output(self._answer, self._dialect, None)
            events += self._event("response.created", response=begun)
            events += self._event("response.in_progress", response=begun)
            events += self._event("response.output_item.added", output_index=0, item=item)
            # Here SGLang has no log probabilities and vLLM an empty list.
            part = _part("") | ({"logprobs": []} if self._dialect == "vllm" else {})
            events += self._event("response.content_part.added", **self._place, part=part)
        if text:
            self._text.append(text)
            events += self._event("response.output_text.delta", **self._place, delta=text, logprobs=[])
        return events

    def end(self, choices: Sequence[Choice]) -> bytes:
        (choice,) = choices
        text = "".join(self._text)
        response = _response(self._answer, self._dialect, choice, text)
        item = _output(self._answer, self._dialect, text)
        # vLLM calls the last event "completed" even if the response is incomplete.
        last = "completed" if self._dialect == "vllm" else response["status"]
        return (
            self._event("response.output_text.done", **self._place, text=text, logprobs=[])
            + self._event("response.content_part.done", **self._place, part=_part(text))
            + self._event("response.output_item.done", output_index=0, item=item)
            + self._event(f"response.{last}", response=response)
        )

    @property
    def _place(self) -> dict[str, object]:
        return {"item_id": "msg_" + self._answer.id, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **fields: object) -> bytes:
        self._number += 1
        return named_event(kind, **fields, sequence_number=self._number - 1)


def _item(item: dict[str, object]) -> dict[str, object]:
    return {"role": item.get("role") or "tool", "content": item.get("content", item.get("output"))}


def _part(text: str) -> dict[str, object]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": None}


def _output(answer: Answer, dialect: Dialect, text: str | None) -> dict[str, object]:
    content = [] if text is None else [_part(text)]
    status = "in_progress" if text is None else "completed"
    phase = None if dialect == "vllm" else "final_answer"
    head = {"id": "msg_" + answer.id, "type": "message", "role": "assistant", "status": status}
    return head | {"content": content, "phase": phase}


def _response(answer: Answer, dialect: Dialect, choice: Choice | None, text: str) -> dict[str, object]:
    """Return the response object, without output and usage if `choice` is None."""
    status = "in_progress" if choice is None else "incomplete" if choice.finish == "length" else "completed"
    more = VLLM_ALWAYS if dialect == "vllm" else SGLANG_ALWAYS
    if dialect != "vllm" and choice is not None:
        more = more | {"text": {"format": {"type": "text"}}}
    return {
        **{"id": "resp_" + answer.id, "object": "response", "created_at": answer.created, "model": answer.model},
        **ALWAYS,
        **more,
        **{"status": status, "instructions": None, "max_output_tokens": answer.call.max_tokens},
        "usage": None if choice is None else _usage(choice, dialect),
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "output": [] if choice is None else [_output(answer, dialect, text)],
    }


def _usage(choice: Choice, dialect: Dialect) -> dict[str, object]:
    prompt, output, cached = usage_totals([choice], 1)
    of_input: dict[str, object] = {"cached_tokens": cached, "cache_write_tokens": 0}
    of_output: dict[str, object] = {"reasoning_tokens": 0}
    if dialect == "vllm":
        of_input |= {"input_tokens_per_turn": [], "cached_tokens_per_turn": []}
        of_output |= {"tool_output_tokens": 0, "output_tokens_per_turn": [], "tool_output_tokens_per_turn": []}
    return {
        **{"input_tokens": prompt, "input_tokens_details": of_input},
        **{"output_tokens": output, "output_tokens_details": of_output},
        "total_tokens": prompt + output,
    }

"""Continues a stream after its engine failed: builds the call to another engine and rewrites that engine's events.

By token ids, continuation is exact: the ids of prompt and answer so far are the prompt of a call to /v1/completions,
whose chunks are rewritten to those of a chat if the client has a chat. By text, the answer so far becomes the beginning
of an assistant's message to continue (`continue_final_message`), or is appended to the text of the prompt; it is
tokenized again, which may give other tokens. In both cases the tokens so far count towards the call's limits and usage.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import orjson

from router.api.answer.sse import PLAIN_EVENT, EventSplitter, event_data
from router.api.answer.stream_reader import StreamReader, is_chunk
from router.api.answer.usage import token_count
from router.api.body import fields as read
from router.api.body.call import COMPLETIONS, Call, ResumeMode
from router.api.body.fields import Fields
from router.api.endpoints import chat, completions
from router.errors import WorkerBroke

NOT_OF_COMPLETIONS: Final = frozenset(
    {
        *(
            "messages",
            "max_completion_tokens",
            "tools",
            "tool_choice",
            "parallel_tool_calls",
            "response_format",
            "logprobs",
        ),
        *("top_logprobs", "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
        *("add_special_tokens", "truncate_prompt_tokens", "documents", "reasoning_effort", "include_reasoning", "n"),
    }
)
"""Members of a chat's body that have no effect on a prompt of token ids, or mean something else in a completion."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """A call for the rest of an answer, and what the client has of the answer already."""

    path: str
    by_ids: bool
    fields: Fields
    """The body. It lacks an output limit if the client set none."""
    input_tokens: int | None
    """Tokens of the prompt, as the first engine counted them; None if it did not report them."""
    output_tokens: int
    """Tokens of the answer so far."""
    head: dict[str, Any]
    chat: bool
    """Whether the client called the chat endpoint."""
    remaining: int | None
    """Output tokens that remain under the limit; None without a limit."""

    def body(self, context_tokens: int | None) -> bytes | None:
        """Return the bytes to send; None if they cannot be serialised.

        `context_tokens`: the model's context length. If it is needed as the output limit and None, returns None.
        """
        fields = self.fields
        if self.by_ids and self.remaining is None:
            if context_tokens is None:
                return None
            fields = {**fields, "max_tokens": max(1, context_tokens - len(fields["prompt"]))}
        try:
            return orjson.dumps(fields)
        except orjson.JSONEncodeError:  # orjson parses more levels than it serialises
            return None


def continuation(call: Call, reader: StreamReader, *, ids: bool = True) -> Continuation | None:
    """Build the continuation of an answer, by token ids if `ids` is set and they are known; None if there is none."""
    if call.resume_mode is ResumeMode.NONE or reader.head is None:
        return None
    fields = _with_whole_numbers(orjson.loads(call.body))
    usage = reader.usage
    input_tokens = None if usage is None else usage.input_tokens
    is_chat = call.path == chat.PATH
    if ids and call.resume_mode is ResumeMode.IDS and reader.continuable and (token_ids := reader.ids) is not None:
        prompt, output = token_ids
        limit = _limit(fields, is_chat)
        remaining = None if limit is None else limit - len(output)
        body = _by_ids(fields, [*prompt, *output], remaining, len(output))
        return Continuation(COMPLETIONS, True, body, len(prompt), len(output), reader.head, is_chat, remaining)
    text = reader.text
    if text is None:
        return None
    tokens = reader.output_tokens() if text else 0
    limit = _limit(fields, is_chat)
    remaining = None if limit is None else limit - tokens
    changed = _by_text(fields, text, tokens, is_chat)
    if changed is None:
        return None
    return Continuation(call.path, False, changed, input_tokens, tokens, reader.head, is_chat, remaining)


def _with_whole_numbers(fields: Fields) -> Fields:
    """Return the body with limits as integers where an engine takes "5" or 5.0 for one."""
    names = ("max_tokens", "max_completion_tokens", "min_tokens")
    limits = {name: read.whole_number(fields.get(name)) for name in names}
    return {**fields, **{name: limit for name, limit in limits.items() if limit is not None}}


def _limit(fields: Fields, is_chat: bool) -> int | None:
    if not is_chat:
        limit = fields.get("max_tokens", completions.DEFAULT_MAX_TOKENS)
    else:
        limit = fields.get("max_completion_tokens")
        limit = fields.get("max_tokens") if limit is None else limit
    return limit if isinstance(limit, int) else None


def _by_ids(fields: Fields, tokens: list[int], remaining: int | None, output: int) -> Fields:
    body = {name: value for name, value in fields.items() if name not in NOT_OF_COMPLETIONS}
    body["prompt"] = tokens
    if remaining is not None:
        body["max_tokens"] = remaining
    _shorten(body, "min_tokens", output)
    return body


def _by_text(fields: Fields, text: str, output: int, is_chat: bool) -> Fields | None:
    body = dict(fields)
    for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
        _shorten(body, name, output)
    if not text:
        return body
    if not is_chat:
        if not isinstance(fields.get("prompt"), str):
            return None
        body.setdefault("max_tokens", completions.DEFAULT_MAX_TOKENS - output)
        body["prompt"] = fields["prompt"] + text
        return body
    if fields.get("continue_final_message") or fields.get("add_generation_prompt") is False:
        return None
    body["messages"] = [*fields["messages"], {"role": "assistant", "content": text}]
    body["continue_final_message"], body["add_generation_prompt"] = True, False
    return body


def _shorten(body: Fields, name: str, by: int) -> None:
    if isinstance(body.get(name), int):
        body[name] = max(0, body[name] - by)


class Rewriter:
    """Rewrites the events of the continuing engine to those that the first engine would have sent."""

    def __init__(self, continuation: Continuation) -> None:
        self._continuation = continuation
        self._splitter = EventSplitter()
        self.started = False
        """True once the continuing engine sent its first token."""

    def feed(self, block: bytes) -> bytes:
        """Rewrite the events that are complete now. Raises WorkerBroke if an event exceeds a limit."""
        return b"".join([self._event(event) for event in self._splitter.feed(block)])

    def close(self) -> bytes:
        """End the stream and rewrite a last event without its blank line, if any."""
        return self._event(self._splitter.rest())

    def _event(self, event: bytes) -> bytes:
        data = event_data(event)
        if data is None or data == b"[DONE]":
            return event
        return self._chunk(data)

    def _chunk(self, data: bytes) -> bytes:
        try:
            chunk = orjson.loads(data)
        except orjson.JSONDecodeError:
            return PLAIN_EVENT % data
        if not isinstance(chunk, dict) or chunk.get("choices") is None or not is_chunk(chunk):
            return PLAIN_EVENT % data  # the reader detects the error
        choices, usage = chunk["choices"], chunk.get("usage")
        self.started = self.started or bool(choices)
        rewritten = {**self._continuation.head, "choices": [new for each in choices for new in self._choice(each)]}
        if choices and not rewritten["choices"]:
            return b""
        if isinstance(usage, dict):
            rewritten["usage"] = self._usage(usage)
        try:
            return PLAIN_EVENT % orjson.dumps(rewritten)
        except orjson.JSONEncodeError:  # orjson parses more levels than it serialises
            raise WorkerBroke("A worker's answer is nested too deeply.") from None

    def _choice(self, choice: dict[str, Any]) -> Iterator[dict[str, Any]]:
        others = ("index", "text", "delta", "prompt_token_ids")
        members = {name: value for name, value in choice.items() if name not in others}
        if not self._continuation.chat:
            yield {"index": 0, "text": choice.get("text") or "", **members}
            return
        delta = choice.get("delta")
        new_delta = {"content": choice.get("text") or ""} if not isinstance(delta, dict) else dict(delta)
        new_delta.pop("role", None)  # the client already has it
        if any(new_delta.values()) or choice.get("token_ids") or choice.get("finish_reason") is not None:
            yield {"index": 0, "delta": new_delta, **members}

    def _usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return the usage of the whole answer. It omits the continuing engine's cache hits, which are not the
        prompt's.
        """
        output = token_count(usage, "completion_tokens") or 0
        before = self._continuation.output_tokens
        prompt = self._continuation.input_tokens
        if prompt is None:
            prompt = max(0, (token_count(usage, "prompt_tokens") or 0) - before)
        total = prompt + before + output
        return {"prompt_tokens": prompt, "total_tokens": total, "completion_tokens": before + output}


def last_events(call: Call, reader: StreamReader, reason: str | None) -> bytes:
    """Return the missing end of a stream, as its engine would have sent it.

    `reason`: the finish reason of the choice if that is missing, too; else None.
    """
    head = reader.head or {}
    usage = reader.usage
    counts = None
    if usage is not None:
        total = usage.input_tokens + usage.output_tokens
        counts = {"prompt_tokens": usage.input_tokens, "total_tokens": total, "completion_tokens": usage.output_tokens}
    events = [reader.close()]
    if reason is not None:
        empty = {"delta": {"content": ""}} if call.path == chat.PATH else {"text": ""}
        choice = {"index": 0, **empty, "logprobs": None, "finish_reason": reason}
        events.append(PLAIN_EVENT % orjson.dumps({**head, "choices": [choice]}))
    if counts is not None and not reader.has_final_usage:
        events.append(PLAIN_EVENT % orjson.dumps({**head, "choices": [], "usage": counts}))
    if not reader.done:
        events.append(PLAIN_EVENT % b"[DONE]")
    return b"".join(events)

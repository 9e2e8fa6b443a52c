"""Going on with a stream whose engine failed: what to ask another engine for, and its answer in the form of the first.

By token ids it is exact: the tokens of prompt and answer so far are the prompt of a call to /v1/completions, whose
chunks are made those of a chat where the client has a chat. By text, the answer so far is the beginning of an
assistant's message that is to be gone on with (`continue_final_message`), or of the prompt's text; it is split into
tokens anew, which may come out otherwise. Either way the tokens so far count against the limits of the call, and for
its usage.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import orjson

from router.api.answer.sse import EventSplitter, event_data, plain_event
from router.api.answer.stream_reader import StreamReader, is_chunk
from router.api.answer.usage import token_count
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
"""Members of a chat's body that have done their work when there are tokens, or would mean something else."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """The rest of an answer: whom to ask for it how, and what the client has already."""

    path: str
    by_ids: bool
    fields: Fields
    """The body, but for the limit of its output where the client gave none."""
    input_tokens: int | None
    """Of the prompt, as the first engine counted it."""
    output_tokens: int
    """Of the answer so far."""
    head: dict[str, Any]
    chat: bool
    """Whether the client has a chat."""
    remaining: int | None
    """Output tokens that may still come; None without a limit."""

    def body(self, context_tokens: int | None) -> bytes | None:
        """What to send. `context_tokens`: of the model; None, where that has to be known and is not."""
        fields = self.fields
        if self.by_ids and self.remaining is None:
            if context_tokens is None:
                return None
            fields = {**fields, "max_tokens": max(1, context_tokens - len(fields["prompt"]))}
        try:
            return orjson.dumps(fields)
        except orjson.JSONEncodeError:  # it writes fewer levels than it reads
            return None


def continuation(call: Call, reader: StreamReader, *, ids: bool = True) -> Continuation | None:
    """How to go on with what a client has of an answer, by `ids` where they are known; None where it cannot be done."""
    if call.resume_mode is ResumeMode.NONE or reader.head is None:
        return None
    fields: Fields = orjson.loads(call.body)
    usage = reader.usage
    input_tokens = None if usage is None else usage.input_tokens
    is_chat = call.path == chat.PATH
    if ids and call.resume_mode is ResumeMode.IDS and reader.continuable and (known := reader.ids) is not None:
        prompt, output = known
        limit = _limit(fields, is_chat)
        remaining = None if limit is None else limit - len(output)
        body = _by_ids(fields, [*prompt, *output], remaining, len(output))
        return Continuation(COMPLETIONS, True, body, len(prompt), len(output), reader.head, is_chat, remaining)
    text = reader.text
    if text is None:
        return None
    tokens = reader.output_tokens if text else 0
    limit = _limit(fields, is_chat)
    remaining = None if limit is None else limit - tokens
    changed = _by_text(fields, text, tokens, is_chat)
    if changed is None:
        return None
    return Continuation(call.path, False, changed, input_tokens, tokens, reader.head, is_chat, remaining)


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
    """Makes the continuing engine's events those that the first one would have sent."""

    def __init__(self, rest: Continuation) -> None:
        self._continuation = rest
        self._splitter = EventSplitter()
        self.started = False
        """The continuing engine's first token is here."""

    def feed(self, block: bytes) -> bytes:
        """The events that are complete now. Raises WorkerBroke on an event beyond a limit."""
        return b"".join([self._event(event) for event in self._splitter.feed(block)])

    def close(self) -> bytes:
        """At the end of the stream: an event that lacks its blank line."""
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
            return plain_event(data)
        if not isinstance(chunk, dict) or chunk.get("choices") is None or not is_chunk(chunk):
            return plain_event(data)  # the reader sees what it is
        choices, usage = chunk["choices"], chunk.get("usage")
        self.started = self.started or bool(choices)
        made = {**self._continuation.head, "choices": [made for each in choices for made in self._choice(each)]}
        if choices and not made["choices"]:
            return b""
        if isinstance(usage, dict):
            made["usage"] = self._usage(usage)
        try:
            return plain_event(orjson.dumps(made))
        except orjson.JSONEncodeError:  # it writes fewer levels than it reads
            raise WorkerBroke("A worker's answer is nested too deeply.") from None

    def _choice(self, choice: dict[str, Any]) -> Iterator[dict[str, Any]]:
        others = ("index", "text", "delta", "prompt_token_ids")
        made = {name: value for name, value in choice.items() if name not in others}
        if not self._continuation.chat:
            yield {"index": 0, "text": choice.get("text") or "", **made}
            return
        delta = choice.get("delta")
        said = {"content": choice.get("text") or ""} if not isinstance(delta, dict) else dict(delta)
        said.pop("role", None)  # the client has one
        if any(said.values()) or choice.get("token_ids") or choice.get("finish_reason") is not None:
            yield {"index": 0, "delta": said, **made}

    def _usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """That of the whole answer: what was found in the continuing engine's cache says nothing about the prompt."""
        output = token_count(usage, "completion_tokens") or 0
        before = self._continuation.output_tokens
        prompt = self._continuation.input_tokens
        if prompt is None:
            prompt = max(0, (token_count(usage, "prompt_tokens") or 0) - before)
        total = prompt + before + output
        return {"prompt_tokens": prompt, "total_tokens": total, "completion_tokens": before + output}


def last_events(call: Call, reader: StreamReader, reason: str | None) -> bytes:
    """The end of a stream that lacks it, as its engine would have sent it.

    `reason`: of the last choice's end, if that is missing too.
    """
    head = reader.head or {}
    usage = reader.usage
    counts = None
    if usage is not None:
        total = usage.input_tokens + usage.output_tokens
        counts = {"prompt_tokens": usage.input_tokens, "total_tokens": total, "completion_tokens": usage.output_tokens}
    events = []
    if reason is not None:
        said = {"delta": {"content": ""}} if call.path == chat.PATH else {"text": ""}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": reason}
        events.append(plain_event(orjson.dumps({**head, "choices": [choice]})))
    if counts is not None and not reader.has_final_usage:
        events.append(plain_event(orjson.dumps({**head, "choices": [], "usage": counts})))
    if not reader.done:
        events.append(plain_event(b"[DONE]"))
    return b"".join(events)

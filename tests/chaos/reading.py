"""Classifies the bytes that a client receives: the expected answer, a clear error, or neither. Pure."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import orjson

from workers.engine.tokenizer import encode

from .asks import Ask

STATUSES: Final = frozenset({429, 500, 502, 503, 504})
"""Codes of errors that are not the client's fault."""


class Ending(StrEnum):
    """How a call ended for its client."""

    COMPLETE = "complete"
    """With the expected bytes."""
    ERROR = "error"
    """With an error object that says what happened."""
    VANISHED = "vanished"
    """The client disconnected on purpose."""
    WRONG = "wrong"
    """In any other way."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """An ending, with the error's code or what is wrong."""

    ending: Ending
    why: str = ""


class Wrong(Exception):
    """The answer differs from the expected one, for this reason."""


class Reading:
    """One answer as it arrives."""

    def __init__(self, ask: Ask, status: int) -> None:
        self._ask = ask
        self._status = status
        self._tail = b""
        self._body = b""
        self._chunks: list[dict[str, Any]] = []
        self._done = False
        self._wrong: str | None = None

    def feed(self, block: bytes) -> int:
        """Take the next bytes and return the number of output tokens in them."""
        if self._status != 200 or not self._ask.streamed:
            self._body += block
            return 0
        *events, self._tail = (self._tail + block).split(b"\n\n")
        return sum(map(self._event, events))

    def verdict(self) -> Verdict:
        """Return the verdict at the end of the answer."""
        try:
            if self._status != 200:
                return _error(self._status, self._body)
            return self._stream() if self._ask.streamed else self._whole()
        except Wrong as error:
            return Verdict(Ending.WRONG, str(error))
        except (KeyError, TypeError, AttributeError) as error:
            return Verdict(Ending.WRONG, f"of another form: {error!r}")

    def _event(self, event: bytes) -> int:
        if not event or event.startswith(b":"):
            return 0
        data = event.removeprefix(b"data: ")
        if self._done or len(data) == len(event):
            self._wrong = f"an event that is none: {event[:80]!r}"
        elif data == b"[DONE]":
            self._done = True
        else:
            return self._chunk(data)
        return 0

    def _chunk(self, data: bytes) -> int:
        try:
            chunk = orjson.loads(data)
        except orjson.JSONDecodeError:
            chunk = None
        choices = chunk.get("choices", []) if isinstance(chunk, dict) else None
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            self._wrong = f"a chunk that is none: {data[:80]!r}"
            return 0
        self._chunks.append(chunk)
        return sum(len(encode(_said(choice))) for choice in choices)

    def _stream(self) -> Verdict:
        if self._wrong:
            raise Wrong(self._wrong)
        if self._tail or not self._done:
            raise Wrong(f"cut off behind {len(self._chunks)} chunks: {self._tail[:80]!r}")
        if self._chunks and "error" in self._chunks[-1]:
            return _error_object(self._chunks[-1])
        ask, chunks = self._ask, self._chunks
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        for index, text in enumerate(ask.texts):
            own = [choice for choice in choices if choice["index"] == index]
            _same("text", text, "".join(map(_said, own)))
            _same("reasons", [ask.reasons[index]], [each["finish_reason"] for each in own if each["finish_reason"]])
            _same("roles", ["assistant"] * ask.chat, [r for each in own if (r := each.get("delta", {}).get("role"))])
            _same("ids", [], [each for each in own if each.get("token_ids")])
        _same("choices", set(range(len(ask.texts))), {choice["index"] for choice in choices})
        _same("answers", 1, len({chunk["id"] for chunk in chunks}))
        _check_usage(ask, [chunk["usage"] for chunk in chunks if chunk.get("usage")])
        return Verdict(Ending.COMPLETE)

    def _whole(self) -> Verdict:
        try:
            answer = orjson.loads(self._body)
        except orjson.JSONDecodeError:
            raise Wrong(f"no JSON: {self._body[:80]!r}") from None
        if not isinstance(answer, dict):
            raise Wrong(f"no object: {self._body[:80]!r}")
        if "error" in answer:
            return _error_object(answer)
        choices = answer.get("choices")
        if not isinstance(choices, list):
            raise Wrong(f"no answer: {self._body[:80]!r}")
        _same("texts", list(self._ask.texts), [choice["message"]["content"] for choice in choices])
        _same("reasons", list(self._ask.reasons), [choice["finish_reason"] for choice in choices])
        _check_usage(self._ask, [answer["usage"]])
        return Verdict(Ending.COMPLETE)


def _said(choice: dict[str, Any]) -> str:
    delta = choice.get("delta")
    return (delta.get("content") if isinstance(delta, dict) else choice.get("text")) or ""


def _same(what: str, expected: object, came: object) -> None:
    if came != expected:
        raise Wrong(f"{what}: {came!r} instead of {expected!r}")


def _check_usage(ask: Ask, usages: list[dict[str, Any]]) -> None:
    """Check that usage came once if it was requested, and equals that of an undisturbed answer."""
    counts = [(usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) for usage in usages]
    prompt, output = ask.prompt_tokens, ask.output_tokens
    _same("usage", [(prompt, output, prompt + output)] * ask.usage_wanted, counts)


def _error(status: int, body: bytes) -> Verdict:
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        fields = None
    if status not in STATUSES or not isinstance(fields, dict):
        raise Wrong(f"status {status}: {body[:80]!r}")
    return _error_object(fields, str(status))


def _error_object(fields: dict[str, Any], status: str = "200") -> Verdict:
    error = fields.get("error")
    if not isinstance(error, dict) or not error.get("message") or not error.get("type"):
        raise Wrong(f"an error that says nothing: {fields!r}")
    return Verdict(Ending.ERROR, f"{status} {error.get('code') or error['message']}")

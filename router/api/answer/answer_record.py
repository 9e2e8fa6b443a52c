"""What the router remembers of one answer: its choices, token ids and usage so far.

The text of the choices extends the prompt's key, and the token ids let another engine continue a stream exactly where
it broke off.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from router.api.answer.usage import TOKEN_COUNT_LIMIT, read_usage, token_count
from router.api.body import prompt_bytes as render
from router.api.body.call import Call
from router.api.body.json_object import load, text_or_empty
from router.core.model.prompt_key import PromptKey
from router.core.model.request import Usage

TOOL_REASONS: Final = frozenset({"tool_calls", "function_call"})
"""Finish reasons of an answer that asks for a tool."""
ANSWER_LIMIT: Final = 4 * 2**20
"""Characters kept over all choices of one call. Of a longer answer nothing counts towards the key."""


@dataclass(slots=True)
class _ToolCall:
    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)


class _Choice:
    __slots__ = ("exact", "pieces", "tool_calls")

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.tool_calls: dict[int, _ToolCall] = {}
        self.exact = True
        """True while the kept text and tool calls are all that the next prompt will contain of this choice."""


class Choices:
    """The text and tool calls of each choice so far."""

    def __init__(self, call: Call, part: str) -> None:
        """`part` names the member of a chat choice that holds its message: "delta" in a stream, else "message"."""
        self._call = call
        self._part = part
        self.chat = call.path.endswith("/chat/completions")
        self._choices: dict[int, _Choice] = {}
        self._chars_left = ANSWER_LIMIT
        self.finish_reasons: dict[int, str] = {}

    def add_choice(self, index: int, fields: dict[str, Any]) -> bool:
        """Add one choice object of a chunk or an answer. Returns True if it carries output."""
        reason = fields.get("finish_reason")
        if reason is not None:
            self.finish_reasons[index] = text_or_empty(reason)
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = _Choice()
        other_output = False
        text = fields.get("text")
        if self.chat:
            message = fields.get(self._part)
            if not isinstance(message, dict):
                return False
            text = message.get("content")
            other_output = (not text or len(message) > 1) and self._add_other_output(choice, message)
        if not text or not isinstance(text, str):
            return other_output
        self._keep(choice, choice.pieces, text)
        return True

    def add_text(self, index: int, text: str, finish_reason: str | None) -> None:
        """Add text to a choice, and its finish reason if the choice ends here."""
        if finish_reason is not None:
            self.finish_reasons[index] = finish_reason
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = _Choice()
        if text:
            self._keep(choice, choice.pieces, text)

    def _add_other_output(self, choice: _Choice, message: dict[str, Any]) -> bool:
        """Add tool calls and other output that is not plain text. Returns True if there was any.

        Chat templates drop reasoning from earlier turns, so no later prompt contains it.
        """
        calls = message.get("tool_calls")
        if calls and isinstance(calls, list):
            for position, call in enumerate(calls):
                self._add_tool_call(choice, position, call)
        other = message.get("reasoning") or message.get("reasoning_content") or message.get("function_call")
        if other:
            choice.exact = False
        return bool(calls or other)

    def _add_tool_call(self, choice: _Choice, position: int, fields: object) -> None:
        function = fields.get("function") if isinstance(fields, dict) else None
        if not isinstance(fields, dict) or not isinstance(function, dict):
            choice.exact = False
            return
        index = fields.get("index")
        call = choice.tool_calls.setdefault(index if isinstance(index, int) else position, _ToolCall())
        call.id = call.id or text_or_empty(fields.get("id"))
        call.name = call.name or text_or_empty(function.get("name"))
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            self._keep(choice, call.arguments, arguments)

    @property
    def ended_turn(self) -> bool | None:
        """Whether the answer ended the turn; False if it asks for a tool. None if it does not say, as when it was cut
        short.
        """
        reasons = set(self.finish_reasons.values())
        if reasons & TOOL_REASONS or any(choice.tool_calls for choice in self._choices.values()):
            return False
        return True if reasons == {"stop"} else None

    def is_plain_text(self, index: int) -> bool:
        """Return whether the output of a choice has reached its plain text and includes no tool call."""
        choice = self._choices.get(index)
        return choice is None or (not choice.tool_calls and (choice.exact or bool(choice.pieces)))

    def text(self, index: int) -> str | None:
        """Return the text of a choice. None if the text is incomplete or was not kept, or if there is output besides
        text.
        """
        choice = self._choices.get(index)
        if choice is None:
            return ""
        return "".join(choice.pieces) if choice.exact and not choice.tool_calls else None

    def _keep(self, choice: _Choice, pieces: list[str], text: str) -> None:
        self._chars_left -= len(text)
        if self._chars_left >= 0:
            pieces.append(text)
        else:
            choice.exact = False

    def keys(self) -> tuple[PromptKey, ...]:
        """One key per choice, in order: of prompt and answer, or of the prompt alone if the answer was not kept."""
        count = self._call.choices * len(self._call.prompts)
        return tuple([self._key(index, self._choices[index]) for index in sorted(self._choices) if 0 <= index < count])

    def _key(self, index: int, choice: _Choice) -> PromptKey:
        prompt = self._call.prompts[index // self._call.choices]
        if not (choice.exact and self._call.extendable):
            return prompt.key
        text = "".join(choice.pieces)
        if not self.chat:
            return prompt.extend(text.encode())
        return prompt.extend(render.messages([_as_message(text, choice.tool_calls)]))


def _as_message(text: str, calls: dict[int, _ToolCall]) -> dict[str, Any]:
    """Return the answer as the assistant's message that a client sends back in its next turn."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "function": {"name": call.name, "arguments": "".join(call.arguments)}}
            for _, call in sorted(calls.items())
        ]
    return message


RECORD_LIMIT: Final = 2**20
"""Bytes of ids at most, of prompt and answer together. A longer stream can be continued by its text only."""


class TokenRecord:
    """The token ids of prompt and answer, kept as decimal digits, each id followed by a comma.

    A token whose text has not been sent yet, such as half a character, is left for the next engine to sample again.
    """

    __slots__ = ("_complete", "_output", "_pending", "_prompt")

    def __init__(self) -> None:
        self._prompt = b""
        self._output = bytearray()
        self._pending = bytearray()
        """Ids since the last text."""
        self._complete = True

    def set_prompt(self, ids: object) -> None:
        """Set the token ids of the prompt. Later calls are ignored."""
        if not self._prompt and isinstance(ids, list):
            self._prompt = _digits(ids)
            self._check()

    def add(self, with_text: bytes | None, pending: bytes = b"") -> None:
        """Add ids of the answer from some chunks: those up to their last text, and those after it.

        `with_text` is None if there was text without ids; the record is then given up.
        """
        self.add_all([(with_text, pending)])

    def add_all(self, parts: Iterable[tuple[bytes | None, bytes]]) -> None:
        """Add ids as `add` does, for each of these parts in order."""
        if not self._complete:
            return
        for with_text, pending in parts:
            if with_text is None:
                self._give_up()
                return
            if with_text:
                self._output += self._pending
                self._output += with_text
                self._pending.clear()
            self._pending += pending
        self._check()

    def add_list(self, ids: object, *, text: bool) -> None:
        """Add the ids of one chunk. `text`: whether the chunk has text."""
        if isinstance(ids, list):
            digits = _digits(ids)
            self.add(digits if text else b"", b"" if text else digits)
        elif text:
            self._give_up()

    def drop_pending(self) -> None:
        """Drop the ids without text: the next engine samples those tokens again."""
        self._pending.clear()

    @property
    def ids(self) -> tuple[list[int], list[int]] | None:
        """The ids of the prompt and of the answer up to the last text; None unless all of them are known."""
        if not (self._complete and self._prompt):
            return None
        return _numbers(self._prompt), _numbers(bytes(self._output))

    def _check(self) -> None:
        if len(self._prompt) + len(self._output) > RECORD_LIMIT:
            self._give_up()

    def _give_up(self) -> None:
        self._complete = False
        self._prompt = b""
        self._output.clear()
        self._pending.clear()


def _digits(ids: Iterable[Any]) -> bytes:
    return b"".join([b"%d," % each for each in ids if type(each) is int])


def _numbers(digits: bytes) -> list[int]:
    return [int(each) for each in digits.split(b",") if each.strip()]


class UsageTally:
    """Adds up the usage in the chunks of one stream.

    In chunks, both engines count per choice: `completion_tokens` of the choice so far, `prompt_tokens` of its prompt.
    """

    __slots__ = ("_choices", "_deferred", "_latest", "_tokens", "final")

    def __init__(self, choices: int) -> None:
        self._choices = choices
        self._tokens: dict[int, int] = {}
        self._latest: dict[int, dict[str, Any]] = {}
        self._deferred: tuple[bytes, bool] | None = None
        self.final: Usage | None = None
        """The sum that the engine sent at the end. It overrides the counts of the chunks."""

    def add_chunk(self, index: int, usage: object, has_output: bool) -> None:
        """Count a chunk of choice `index`. A chunk with output but without usage counts as one token."""
        self._read()
        if isinstance(usage, dict) and (tokens := token_count(usage, "completion_tokens")) is not None:
            self._tokens[index] = tokens
            self._latest[index] = usage
        elif has_output:
            self._tokens[index] = self._tokens.get(index, 0) + 1

    def add_outputs(self, chunks: int) -> None:
        """Count chunks of choice 0 with output but without usage."""
        self._read()
        self._tokens[0] = self._tokens.get(0, 0) + chunks

    def defer_chunk(self, usage: bytes, has_output: bool) -> None:
        """Count a chunk of choice 0, and parse its usage only when it is needed: later usage may replace it."""
        if b'"completion_tokens"' not in usage:
            self._read()
        self._deferred = usage, has_output

    def _read(self) -> None:
        deferred, self._deferred = self._deferred, None
        if deferred is not None and (usage := load(deferred[0])) is not None:
            self.add_chunk(0, usage, deferred[1])

    @property
    def output_tokens(self) -> int:
        if self.final:
            return self.final.output_tokens
        self._read()
        return min(sum(self._tokens.values()), TOKEN_COUNT_LIMIT)

    @property
    def usage(self) -> Usage | None:
        """The final usage, or else the sum over the chunks. Cached tokens are None unless the chunks report them."""
        if self.final:
            return self.final
        self._read()
        by_prompt = {index // self._choices: read_usage(latest) for index, latest in self._latest.items()}
        known = [usage for usage in by_prompt.values() if usage]
        if not known:
            return None
        cached = [usage.cached_tokens for usage in known if usage.cached_tokens is not None]
        input_tokens = min(sum([usage.input_tokens for usage in known]), TOKEN_COUNT_LIMIT)
        return Usage(input_tokens, self.output_tokens, min(sum(cached), input_tokens) if cached else None)

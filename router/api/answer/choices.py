"""Collects the choices of one answer, so that the prompt's key can be extended by the answer's text."""

from dataclasses import dataclass, field
from typing import Any, Final

from router.api.body import prompt_bytes as render
from router.api.body.call import Call
from router.api.body.error_bodies import text_or_empty
from router.core.model.prompt_key import PromptKey

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

    def is_plain_text(self, index: int) -> bool:
        """Whether the output of a choice has reached its plain text and includes no tool call."""
        choice = self._choices.get(index)
        return choice is None or (not choice.tool_calls and (choice.exact or bool(choice.pieces)))

    def text(self, index: int) -> str | None:
        """The text of a choice. None if the text is incomplete or was not kept, or if there is output besides text."""
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
    """The answer as the assistant's message that a client sends back in its next turn."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "function": {"name": call.name, "arguments": "".join(call.arguments)}}
            for _, call in sorted(calls.items())
        ]
    return message

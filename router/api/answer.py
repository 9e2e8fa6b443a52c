"""Reading an engine's answer on its way to the client: the per-chunk path.

Usage is asked for in every chunk (see `ask_for_usage`), and the client sees as much of it as it asked for itself:

    include_usage  continuous_usage_stats   in chunks   final chunk
    no             no                       cut out     dropped
    yes            no                       cut out     as it came
    no             yes                      as it came  dropped
    yes            yes                      as it came  as it came

vLLM ignores continuous_usage_stats alone and SGLang honours it; here it is honoured. A `usage` of null is the engine's
own and stays. Everything else goes through byte for byte.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import orjson

from router.api.call import Call
from router.api.choices import Choices
from router.api.json_span import cut_member
from router.api.usage import UsageTally, read_usage
from router.core.model import Usage
from router.core.prompt_key import PromptKey
from router.errors import WorkerBroke
from router.sse import EVENT_LIMIT, EventSplitter, event_data, with_data

_USAGE: Final = b',"usage":'


@dataclass(frozen=True, slots=True)
class EngineError:
    """An error object inside an answer that began with status 200."""

    message: str
    code: int | str | None = None
    """Often an HTTP status."""


class StreamReader:
    """Follows one streamed answer, and takes out of it the usage that only we asked for."""

    def __init__(self, call: Call, event_limit: int = EVENT_LIMIT) -> None:
        self._splitter = EventSplitter(event_limit)
        self._keep_final = call.usage_wanted
        self._keep_chunks = call.continuous_wanted
        self._verbatim = call.usage_wanted and call.continuous_wanted
        self._expected = call.choices * len(call.prompts)
        self._choices = Choices(call, "delta")
        self._tally = UsageTally(call.choices)
        self._done = False
        self.started = False
        """The prefill is over: both engines send the first chunk of a choice with its first token."""
        self.error: EngineError | None = None

    def feed(self, block: bytes) -> bytes:
        """Take bytes of the engine; return what goes to the client now.

        That is the block itself where the client asked for all the usage that there is, else the events that are
        complete. Raises WorkerBroke on an event beyond the limit.
        """
        events = self._splitter.feed(block)
        if len(events) == 1 and not self._verbatim:
            return self._read(events[0])
        passed = b"".join([self._read(event) for event in events])
        return block if self._verbatim else passed

    def close(self) -> bytes:
        """At the end of the stream: what was held back, an event that lacks its blank line."""
        rest = self._splitter.rest()
        passed = self._read(rest) if rest else rest
        return b"" if self._verbatim else passed

    @property
    def output_tokens(self) -> int:
        """Tokens so far over all choices; where chunks carry no usage, one for each chunk with output."""
        return self._tally.output_tokens

    @property
    def usage(self) -> Usage | None:
        """The engine's final usage, else the sum of what its chunks told last."""
        return self._tally.usage

    @property
    def finished(self) -> bool:
        """The stream said that it is complete, by every choice or by `[DONE]`; look at `error` and `aborted` too."""
        return self._done or len(self._choices.finish_reasons) >= self._expected

    @property
    def aborted(self) -> bool:
        """The engine gave a choice up: its finish reason is "abort", which is no success."""
        return "abort" in self._choices.finish_reasons.values()

    def answers(self) -> tuple[PromptKey, ...]:
        """One key for each choice that has begun: prompt and answer as the next turn would begin."""
        return self._choices.keys()

    def _read(self, event: bytes) -> bytes:
        """Count one event; return what of it goes to the client."""
        data = event_data(event)
        if data is None:
            return event
        if data == b"[DONE]":
            self._done = True
            return event
        try:
            chunk = orjson.loads(data)
        except orjson.JSONDecodeError:
            return event
        if not isinstance(chunk, dict):
            return event
        choices, usage = chunk.get("choices"), chunk.get("usage")
        if choices:
            self._read_choices(choices, usage)
        else:
            self._tally.final = read_usage(usage) or self._tally.final
            self.error = read_error(chunk) or self.error
        if usage is None or self._verbatim:
            return event
        return self._with_usage_as_wanted(event, data, final=choices == [])

    def _read_choices(self, choices: object, usage: object) -> None:
        if not isinstance(choices, list):
            return
        self.started = True
        for index, choice in _numbered(choices):
            self._tally.chunk(index, usage, self._choices.add(index, choice))

    def _with_usage_as_wanted(self, event: bytes, data: bytes, final: bool) -> bytes:
        if final:
            return event if self._keep_final else b""
        return event if self._keep_chunks else with_data(event, cut_usage(data))


@dataclass(frozen=True, slots=True)
class Answer:
    """What a whole answer tells, as `StreamReader` does for a streamed one."""

    usage: Usage | None
    answers: tuple[PromptKey, ...]
    error: EngineError | None
    aborted: bool


def read_json(call: Call, body: bytes) -> Answer:
    """Read an answer that was not streamed.

    Raises WorkerBroke where it is no JSON object.
    """
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise WorkerBroke("A worker's answer is not valid JSON.") from None
    if not isinstance(fields, dict):
        raise WorkerBroke("A worker's answer is not a JSON object.")
    choices = Choices(call, "message")
    found = fields.get("choices")
    for index, choice in _numbered(found if isinstance(found, list) else []):
        choices.add(index, choice)
    aborted = "abort" in choices.finish_reasons.values()
    return Answer(read_usage(fields.get("usage")), choices.keys(), read_error(fields), aborted)


def read_error(fields: dict[str, Any]) -> EngineError | None:
    """VLLM wraps its error in `error` (as a string where a key is refused); SGLang's may be flat."""
    error = fields if fields.get("object") == "error" else fields.get("error")
    if isinstance(error, str):
        return EngineError(error)
    if not isinstance(error, dict):
        return None
    code = error.get("code")
    return EngineError(str(error.get("message") or ""), code if isinstance(code, int | str) else None)


def cut_usage(data: bytes) -> bytes:
    """A chunk's JSON without its top-level `usage`; no other byte changes."""
    at = data.rfind(_USAGE)
    # What follows the name, less the last byte, is a whole value only if that byte closes the root: then this is the
    # last member of the root, and not one of an inner object. Raw quotes cannot stand inside a string.
    try:
        orjson.loads(data[at + len(_USAGE) : -1] if at >= 0 else b"")
    except orjson.JSONDecodeError:
        return cut_member(data, "usage")
    return data[:at] + b"}"


def _numbered(choices: list[object]) -> Iterable[tuple[int, dict[str, Any]]]:
    for choice in choices:
        if isinstance(choice, dict) and type(index := choice.get("index", 0)) is int:
            yield index, choice

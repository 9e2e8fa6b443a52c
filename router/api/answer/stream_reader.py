"""Reading an engine's answer on its way to the client.

Usage is asked for in every chunk (`additions`); the client sees as much of it as it asked for itself
(`splice`), and the router learns from it what to charge.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import orjson

from router.api.answer.choices import Choices
from router.api.answer.fast_path import ChunkRun, CommonChunks
from router.api.answer.sse import BLANK, EVENT_LIMIT, EventSplitter, event_data, is_event, plain_data, plain_event
from router.api.answer.token_record import TokenRecord
from router.api.answer.usage import UsageTally, read_usage
from router.api.answer.usage_splice import UsageSplice
from router.api.body.call import Call
from router.api.body.error_bodies import load, text_or_empty
from router.api.body.json_object import read_object
from router.core.model.prompt_key import PromptKey
from router.core.model.request import Usage
from router.errors import WorkerBroke

UNREAD_LIMIT: Final = 64
"""Events, or runs of common ones, kept at most before they are read."""
HEAD_MEMBERS: Final = ("id", "object", "created", "model")
"""Members that every chunk of a stream repeats."""


@dataclass(frozen=True, slots=True)
class EngineError:
    """An error object inside an answer that began with status 200."""

    message: str
    code: int | str | None = None
    """Often an HTTP status."""


class StreamReader:
    """Follows one streamed answer: events are passed on first and read later, many in one go."""

    def __init__(self, call: Call, event_limit: int = EVENT_LIMIT) -> None:
        self._splitter = EventSplitter(event_limit)
        self._splice = UsageSplice(call)
        self._expected = call.choices * len(call.prompts)
        self._choices = Choices(call, "delta")
        self._tally = UsageTally(call.choices)
        self._token_record = TokenRecord()
        self._first_chunk: dict[str, Any] | bytes | None = None
        """The first chunk, or its JSON."""
        plain = not (call.continuous_wanted or call.ids_wanted)
        may_be_common = self._expected == 1 and plain and self._choices.chat
        self._common_chunks = CommonChunks(call.hides_ids) if may_be_common else None
        """Where chunks may have the common form, they are read without their JSON."""
        self._unread: list[dict[str, Any] | ChunkRun] = []
        """Chunks that were passed on and not looked at yet."""
        self._broken = False
        """The engine sent what is no event of an answer; nothing behind that counts."""
        self._done = False
        self._error: EngineError | None = None
        self._held: list[bytes] | None = None
        """What would go to the client from the event on by which the engine gave up; None while it has not."""
        self.has_delivered = False
        """Whether the client was given an event of the answer."""
        self.started = False
        """The prefill is over: both engines send the first chunk of a choice with its first token."""

    def feed(self, block: bytes) -> bytes:
        """Take bytes of the engine; return what goes to the client now.

        Those are the events that are complete, so that an error after them is an event of its own. Raises WorkerBroke
        on an event beyond the limit.
        """
        if self._splitter.empty and (plain := plain_data(block)):
            passed = self._pass_plain(plain)
        else:
            passed = b"".join([self._pass_event(event) for event in self._splitter.feed(block)])
        if not self.started or len(self._unread) >= UNREAD_LIMIT:
            self._read()
        return passed

    def _pass_plain(self, data: list[bytes]) -> bytes:
        """What the client sees of plain events with these data; noted, to be read later."""
        passed = []
        for part in data if self._common_chunks is None else self._common_chunks.split_runs(data):
            if self._broken:
                break
            if isinstance(part, ChunkRun):
                self._unread.append(part)
                passed.append(self._deliver(part.client_bytes))
            elif (chunk := self._queue_chunk(part)) is not None and (seen := self._splice.filter_data(part, chunk)) is not None:
                passed.append(self._deliver(plain_event(seen)))
        return b"".join(passed)

    def _pass_event(self, event: bytes) -> bytes:
        """What the client sees of an event of any form."""
        if event in BLANK and self._held is None and not self._broken:
            return event
        self._broken = self._broken or not is_event(event)
        if self._broken:
            return b""
        if (data := event_data(event)) is None:
            if self._held is None:
                return event
            self._held.append(event)
            return b""
        return b"" if self._queue_chunk(data) is None else self._deliver(self._splice.filter_event(event))

    def _queue_chunk(self, data: bytes) -> dict[str, Any] | None:
        """Note an event's data, to be read later, and return what it says; None if it is not that of an answer."""
        if data == b"[DONE]":
            self._done = True
            return {}
        chunk = load(data)
        if chunk is None or not is_chunk(chunk):
            self._broken = True
            return None
        self._unread.append(chunk)
        if self._held is None and (data.find(b'"error"') >= 0 or data.find(b'"abort"') >= 0):
            self._hold_if_failed(chunk)
        return chunk

    def _deliver(self, seen: bytes) -> bytes:
        """Give this to the client, unless the engine has given up."""
        if self._held is None:
            self.has_delivered = self.has_delivered or bool(seen)
            return seen
        self._held.append(seen)
        return b""

    def _hold_if_failed(self, chunk: dict[str, Any]) -> None:
        """Hold back from here on if by this event the engine gives up: another may go on."""
        choices = chunk.get("choices")
        reasons = [each.get("finish_reason") for each in choices or ()]
        if "abort" in reasons or (not choices and read_error(chunk) is not None):
            self._held = []

    @property
    def held(self) -> bytes:
        """What was held back, for the client of a call that nobody goes on with."""
        return b"".join(self._held or ())

    def close(self) -> bytes:
        """At the end of the stream: what was held back, an event that lacks its blank line."""
        if self._splitter.empty:
            return b""
        return self._pass_event(self._splitter.rest())

    @property
    def broken(self) -> bool:
        """The engine sent what is no event of an answer. The client has what came before, and gets nothing more."""
        return self._broken

    @property
    def output_tokens(self) -> int:
        """Tokens so far over all choices; where chunks carry no usage, one for each chunk with output."""
        self._read()
        return self._tally.output_tokens

    @property
    def usage(self) -> Usage | None:
        """The engine's final usage, else the sum of what its chunks told last."""
        self._read()
        return self._tally.usage

    @property
    def error(self) -> EngineError | None:
        """The last error that came instead of a chunk."""
        self._read()
        return self._error

    @property
    def finished(self) -> bool:
        """The stream said that it is complete, by every choice or by `[DONE]`; look at `error` and `aborted` too."""
        self._read()
        return self._done or len(self._choices.finish_reasons) >= self._expected

    @property
    def aborted(self) -> bool:
        """The engine gave a choice up: its finish reason is "abort", which is no success."""
        self._read()
        return "abort" in self._choices.finish_reasons.values()

    def answer_keys(self) -> tuple[PromptKey, ...]:
        """One key for each choice that has begun: prompt and answer as the next turn would begin."""
        self._read()
        return self._choices.keys()

    def _read(self) -> None:
        """Take in the events that were passed on since the last time."""
        if not self._unread:
            return
        unread, self._unread = self._unread, []
        runs: list[ChunkRun] = []
        for each in unread:
            if isinstance(each, ChunkRun):
                runs.append(each)
            else:
                self._read_runs(runs)
                self._read_chunk(each)
                runs = []
        self._read_runs(runs)

    def _read_runs(self, runs: list[ChunkRun]) -> None:
        """Common chunks in a row: their text, and the usage of the last, which counts for all of them."""
        if not runs:
            return
        if self._first_chunk is None:
            self._first_chunk = runs[0].client_bytes.partition(b"\n\n")[0].removeprefix(b"data: ")
        self.started = True
        text = _load_text(b"".join([run.text for run in runs]))
        reason = None
        for run in runs:
            reason = run.finish_reason or reason
            self._token_record.add(run.ids, run.pending_ids)
        self._choices.add_text(0, text, None if reason is None else reason.decode())
        self._tally.defer_chunk(runs[-1].usage, has_output=bool(text))

    def _read_chunk(self, chunk: dict[str, Any]) -> None:
        choices, usage = chunk.get("choices"), chunk.get("usage")
        if not choices:
            self._tally.final = read_usage(usage) or self._tally.final
            self._error = read_error(chunk) or self._error
            return
        if self._first_chunk is None:
            self._first_chunk = chunk
            self._token_record.set_prompt(chunk.get("prompt_token_ids"))
        self.started = True
        for choice in choices:
            index = choice.get("index", 0)
            said = self._choices.add_choice(index, choice)
            self._tally.add_chunk(index, usage, said)
            self._token_record.set_prompt(choice.get("prompt_token_ids"))
            self._token_record.add_list(choice.get("token_ids"), text=said)

    @property
    def head(self) -> dict[str, Any] | None:
        """What the first chunk says of the answer as a whole: its id, time and model."""
        first = load(self._first_chunk) or {} if isinstance(self._first_chunk, bytes) else self._first_chunk
        return first and {name: first[name] for name in HEAD_MEMBERS if isinstance(first.get(name), str | int)}

    @property
    def ids(self) -> tuple[list[int], list[int]] | None:
        """The tokens of prompt and answer, as far as the client has their text; None where they are not known."""
        self._read()
        return self._token_record.ids

    @property
    def continuable(self) -> bool:
        """Whether the client has plain text of the answer last, or nothing: no tool call, and no thoughts."""
        self._read()
        return self._choices.is_plain_text(0)

    @property
    def text(self) -> str | None:
        """The answer's text so far; None where it is not known in full, or is not all of it."""
        self._read()
        return self._choices.text(0)

    @property
    def complete(self) -> bool:
        """Every choice has ended in good order, be it that the end of the stream is missing."""
        self._read()
        return len(self._choices.finish_reasons) >= self._expected and not self.aborted

    @property
    def done(self) -> bool:
        """The stream said that it is over."""
        self._read()
        return self._done

    @property
    def has_final_usage(self) -> bool:
        """The final usage is here."""
        self._read()
        return self._tally.final is not None

    def resume(self) -> None:
        """Another engine goes on: forget how this one ended, and what of it never reached the client."""
        self._read()
        self._splitter.rest()
        self._token_record.drop_pending()
        self._choices.finish_reasons.clear()
        self._held = self._error = None
        self._done = self._broken = False


@dataclass(frozen=True, slots=True)
class Answer:
    """What a whole answer tells, as `StreamReader` does for a streamed one."""

    usage: Usage | None
    answer_keys: tuple[PromptKey, ...]
    error: EngineError | None
    aborted: bool
    response: str | None = None
    """The id of a response that may be stored."""
    status: str = ""
    """How far that response is."""


def read_json(call: Call, body: bytes) -> Answer:
    """Read an answer that was not streamed.

    Raises WorkerBroke where it is no JSON object, or one without choices that tells of no error.
    """
    fields = read_object(body)
    error = read_error(fields)
    found = fields.get("choices") or ()
    if error is None and not (found and is_chunk(fields)):
        raise WorkerBroke("A worker's answer has no choices.")
    choices = Choices(call, "message")
    for choice in found if error is None else ():
        choices.add_choice(choice.get("index", 0), choice)
    aborted = "abort" in choices.finish_reasons.values()
    return Answer(read_usage(fields.get("usage")), choices.keys(), error, aborted)


def is_chunk(fields: dict[str, Any]) -> bool:
    """Whether choices, where there are any, are objects with an index."""
    choices = fields.get("choices")
    if not choices:
        return choices is None or isinstance(choices, list)
    return isinstance(choices, list) and all(
        isinstance(choice, dict) and type(choice.get("index", 0)) is int for choice in choices
    )


def read_error(fields: dict[str, Any]) -> EngineError | None:
    """VLLM wraps its error in `error` (as a string where a key is refused); SGLang's may be flat."""
    error = fields if fields.get("object") == "error" else fields.get("error")
    if isinstance(error, str):
        return EngineError(error)
    if not isinstance(error, dict):
        return None
    code = error.get("code")
    return EngineError(text_or_empty(error.get("message")), code if isinstance(code, int | str) else None)


def _load_text(inside: bytes) -> str:
    """The string between whose quotes this stands; where that is none, the text as it is."""
    try:
        text: str = orjson.loads(b'"%b"' % inside)
    except orjson.JSONDecodeError:
        return inside.decode(errors="replace")
    return text


def load_all(data: list[bytes]) -> Iterable[dict[str, Any]]:
    """Parse these, in one call where all of them are JSON; what is no JSON object is passed over."""
    try:
        chunks = orjson.loads(b"[%b]" % b",".join(data))
    except orjson.JSONDecodeError:
        chunks = []
        for each in data:
            with suppress(orjson.JSONDecodeError):
                chunks.append(orjson.loads(each))
    return (chunk for chunk in chunks if isinstance(chunk, dict))

"""Reads an engine's answer on its way to the client.

The router asks the engine for usage in every chunk (`router.api.body.edits`) and charges the client by it. The client
sees only the usage that it asked for itself (`client_view`).
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import orjson

from router.api.answer.answer_record import Choices, TokenRecord, UsageTally
from router.api.answer.client_view import LastChunks, UsageSplice
from router.api.answer.fast_path import ChunkRun, CommonChunks
from router.api.answer.sse import BLANK, EVENT_LIMIT, PLAIN_EVENT, EventSplitter, event_data, is_event, plain_data
from router.api.answer.usage import read_usage, token_count
from router.api.body.call import Call
from router.api.body.json_object import load, read_object, text_or_empty
from router.core.model.prompt_key import PromptKey
from router.core.model.request import Usage
from router.errors import WorkerBroke

UNREAD_LIMIT: Final = 64
"""Chunks, or runs of common chunks, queued at most before they are read."""
HEAD_MEMBERS: Final = ("id", "object", "created", "model")
"""Members that are the same in every chunk of a stream."""


@dataclass(frozen=True, slots=True)
class EngineError:
    """An error object inside an answer that began with status 200."""

    message: str
    code: int | str | None = None
    """Often an HTTP status code."""


class Ending(NamedTuple):
    """What the scheduler learns from a complete answer."""

    usage: Usage | None
    answer_keys: tuple[PromptKey, ...]
    """One key per choice: of prompt and answer, as the next turn's prompt would begin."""
    ended_turn: bool | None
    """Whether the answer ended the turn; see `Finished`."""


class StreamReader:
    """Follows one streamed answer: passes events on first, and reads them later, many at a time."""

    def __init__(self, call: Call, event_limit: int = EVENT_LIMIT) -> None:
        self._splitter = EventSplitter(event_limit)
        self._splice = UsageSplice(call)
        self.last_chunks: Final = LastChunks(call)
        """Set `last_chunks.fingerprint` to what an earlier answer of the worker has shown; afterwards it is what this
        one has."""
        self._expected = call.choices * len(call.prompts)
        self._choices = Choices(call, "delta")
        self._tally = UsageTally(call.choices)
        self._token_record = TokenRecord()
        self._first_chunk: dict[str, Any] | bytes | None = None
        """The first chunk, parsed or as JSON."""
        plain = not (call.continuous_wanted or call.ids_wanted)
        may_be_common = self._expected == 1 and plain and self._choices.chat
        self._common_chunks = CommonChunks(self._splice.hides_ids) if may_be_common else None
        """Parses common chunks without a JSON parser; None if this stream cannot have any."""
        self._unread: list[dict[str, Any] | ChunkRun] = []
        """Chunks that were passed on and have not been read yet."""
        self.broken = False
        """True once the engine sent something that is not an event of an answer. Everything after it is ignored."""
        self._done = False
        self._error: EngineError | None = None
        self._held: list[bytes] | None = None
        """Events held back, from the one by which the engine failed; None while it has not failed."""
        self.has_delivered = False
        """True once an event of the answer was passed on to the client."""
        self.started = False
        """True once prefill is over: both engines send the first chunk of a choice with its first token."""

    def feed(self, block: bytes) -> bytes:
        """Take a block of bytes from the engine and return what to send to the client now.

        Only complete events are returned, so that an error sent after them is an event of its own. Raises WorkerBroke
        if an event exceeds the limit.
        """
        if self.broken:
            return b""
        common = self._common_chunks
        if self._splitter.tail:
            passed = self._pass_events(block)
        elif common is not None and (run := common.single_run(block)) is not None:
            self._unread.append(run)
            self.started = True
            if self._held is None:
                self.has_delivered = True
                passed = run.client_bytes
            else:
                passed = self._deliver(run.client_bytes)
        elif plain := plain_data(block):
            passed = self._pass_plain(plain if common is None else common.split_runs(plain))
        else:
            passed = self._pass_events(block)
        if len(self._unread) >= UNREAD_LIMIT:
            self._read()
        return passed

    def _pass_plain(self, parts: Iterable[bytes | ChunkRun]) -> bytes:
        """Queue plain events for reading, given as their data or in runs, and return what the client sees of them."""
        passed = []
        for part in parts:
            if self.broken:
                break
            if isinstance(part, ChunkRun):
                self._unread.append(part)
                self.started = True
                if part.finish_reason is not None and self._hold_last(part.client_bytes):
                    continue
                passed.append(self._deliver(part.client_bytes))
            elif (chunk := self._queue_chunk(part)) is not None:
                visible = self._splice.filter_data(part, chunk) if chunk else part
                passed.append(self._deliver_chunk(b"" if visible is None else PLAIN_EVENT % visible, chunk))
        return b"".join(passed)

    def _pass_events(self, block: bytes) -> bytes:
        """Queue the events that are complete with this block, and return what the client sees of them."""
        return b"".join([self._pass_event(event) for event in self._splitter.feed(block)])

    def _pass_event(self, event: bytes) -> bytes:
        """Queue an event of any form for reading, and return what the client sees of it."""
        if event in BLANK and self._held is None and not self.broken:
            return event
        self.broken = self.broken or not is_event(event)
        if self.broken:
            return b""
        if (data := event_data(event)) is None:
            if self._held is None:
                return event
            self._held.append(event)
            return b""
        if (chunk := self._queue_chunk(data)) is None:
            return b""
        return self._deliver_chunk(self._splice.filter_event(event), chunk)

    def _queue_chunk(self, data: bytes) -> dict[str, Any] | None:
        """Queue an event's data for reading and return it parsed; None if it is not part of an answer."""
        if data == b"[DONE]":
            self._done = True
            return {}
        chunk = _load_chunk(data)
        if chunk is None:
            self.broken = True
            return None
        self._unread.append(chunk)
        self.started = self.started or bool(chunk.get("choices"))
        if self._held is None and (data.find(b'"error"') >= 0 or data.find(b'"abort"') >= 0):
            self._hold_if_failed(chunk)
        return chunk

    def _deliver_chunk(self, visible: bytes, chunk: dict[str, Any]) -> bytes:
        """Pass a chunk on, the last ones of choices only with what follows them unless their fingerprint is known.

        `visible`: what the client sees of it.
        """
        if not chunk.get("choices"):
            return self._release(chunk) + self._deliver(visible)
        if any(choice.get("finish_reason") is not None for choice in chunk["choices"]):
            early = self.last_chunks.complete_early(visible)
            if early is None and self._hold_last(visible):
                return b""
            visible = visible if early is None else early
        return self._deliver(visible)

    def _hold_last(self, events: bytes) -> bool:
        """Keep the last chunks of choices until the next chunk shows the fingerprint; return False if they go now."""
        return self._held is None and self.last_chunks.hold(events)

    def _release(self, after: dict[str, Any]) -> bytes:
        """Return the last chunks of choices that waited for the chunk `after` them."""
        if not (after or self.last_chunks.waiting):
            return b""
        released = self.last_chunks.release(after)
        self.has_delivered = self.has_delivered or bool(released)
        return released

    def _deliver(self, visible: bytes) -> bytes:
        """Pass bytes on to the client, or hold them back if the engine has failed."""
        if self._held is None:
            self.has_delivered = self.has_delivered or bool(visible)
            return visible
        self._held.append(visible)
        return b""

    def _hold_if_failed(self, chunk: dict[str, Any]) -> None:
        """Start to hold back events if this chunk reports a failure, since another engine may continue."""
        choices = chunk.get("choices")
        reasons = [each.get("finish_reason") for each in choices or ()]
        if "abort" in reasons or (not choices and read_error(chunk) is not None):
            self._held = []

    @property
    def held(self) -> bytes:
        """The events held back, for the client of a call that no other engine continues."""
        return b"".join(self._held or ())

    def close(self) -> bytes:
        """End the stream and return what to send to the client: what waited, and an event without its blank line."""
        last = self._pass_event(self._splitter.rest()) if self._splitter.tail else b""
        return last + self._release({})

    def output_tokens(self) -> int:
        """Output tokens so far over all choices. Without usage in chunks, a chunk with output counts as one token.

        This is asked several times a second. If the last chunk says it, the chunks are left to be read together later.
        """
        if self._unread and isinstance(last := self._unread[-1], ChunkRun) and last.usage and self._tally.final is None:
            usage = load(last.usage)
            if usage is not None and (tokens := token_count(usage, "completion_tokens")) is not None:
                return tokens
        self._read()
        return self._tally.output_tokens

    @property
    def usage(self) -> Usage | None:
        """The engine's final usage, or else the sum of the latest usage of each choice."""
        self._read()
        return self._tally.final or self._tally.usage

    @property
    def error(self) -> EngineError | None:
        """The last error object that came in place of a chunk."""
        self._read()
        return self._error

    @property
    def finished(self) -> bool:
        """Whether every choice has a finish reason, or `[DONE]` came. See also `error` and `aborted`."""
        self._read()
        return self._done or len(self._choices.finish_reasons) >= self._expected

    @property
    def aborted(self) -> bool:
        """Whether the engine aborted a choice: the finish reason "abort" is a failure."""
        self._read()
        return "abort" in self._choices.finish_reasons.values()

    def ending(self) -> Ending:
        """Return what the scheduler learns from the answer so far."""
        self._read()
        return Ending(self._tally.final or self._tally.usage, self._choices.keys(), self._choices.ended_turn)

    def _read(self) -> None:
        """Read the chunks queued since the last call."""
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
        """Read runs of common chunks: their text, and the usage of the last chunk, which covers all of them."""
        if not runs:
            return
        if self._first_chunk is None:
            self._first_chunk = runs[0].client_bytes.partition(b"\n\n")[0].removeprefix(b"data: ")
        text = _load_text(b"".join([run.text for run in runs]))
        reason, uncounted = None, 0
        for run in runs:
            reason = run.finish_reason or reason
            uncounted += run.uncounted
        self._token_record.add_all([(run.ids, run.pending_ids) for run in runs])
        self._choices.add_text(0, text, None if reason is None else reason.decode())
        if uncounted or not runs[-1].usage:
            self._count_each(runs)
        else:
            self._tally.defer_chunk(runs[-1].usage, has_output=bool(text))

    def _count_each(self, runs: list[ChunkRun]) -> None:
        """Count runs of which some have no usage: the usage of others does not cover them."""
        for run in runs:
            if run.usage:
                self._tally.defer_chunk(run.usage, has_output=bool(run.text))
            elif run.uncounted:
                self._tally.add_outputs(run.uncounted)

    def _read_chunk(self, chunk: dict[str, Any]) -> None:
        choices, usage = chunk.get("choices"), chunk.get("usage")
        if not choices:
            self._tally.final = read_usage(usage) or self._tally.final
            self._error = read_error(chunk) or self._error
            return
        if self._first_chunk is None:
            self._first_chunk = chunk
            self._token_record.set_prompt(chunk.get("prompt_token_ids"))
        for choice in choices:
            index = choice.get("index", 0)
            has_output = self._choices.add_choice(index, choice)
            self._token_record.set_prompt(choice.get("prompt_token_ids"))
            self._token_record.add_list(choice.get("token_ids"), text=has_output)
            self._tally.add_chunk(index, usage, has_output)

    @property
    def head(self) -> dict[str, Any] | None:
        """The members of the first chunk that describe the whole answer: id, object, creation time and model."""
        self._read()
        first = load(self._first_chunk) or {} if isinstance(self._first_chunk, bytes) else self._first_chunk
        return first and {name: first[name] for name in HEAD_MEMBERS if isinstance(first.get(name), str | int)}

    @property
    def ids(self) -> tuple[list[int], list[int]] | None:
        """The token ids of prompt and answer, up to the last text that the client has; None if they are not known."""
        self._read()
        return self._token_record.ids

    @property
    def continuable(self) -> bool:
        """Whether the last output that the client has is plain text, or none: not a tool call and not reasoning."""
        self._read()
        return self._choices.is_plain_text(0)

    @property
    def text(self) -> str | None:
        """The answer's text so far. None if it is not known in full, or if there is output besides text."""
        self._read()
        return self._choices.text(0)

    @property
    def complete(self) -> bool:
        """Whether every choice ended without abort, even if the end of the stream is missing."""
        self._read()
        return len(self._choices.finish_reasons) >= self._expected and not self.aborted

    @property
    def done(self) -> bool:
        """Whether the stream ended with `[DONE]`."""
        self._read()
        return self._done

    @property
    def has_final_usage(self) -> bool:
        """Whether the final usage has arrived."""
        self._read()
        return self._tally.final is not None

    def resume(self) -> None:
        """Prepare for the events of another engine that continues the answer.

        Forget how this engine ended, and its output that never reached the client.
        """
        self._read()
        self._splitter.rest()
        self._token_record.drop_pending()
        self._choices.finish_reasons.clear()
        self._held = self._error = None
        self._done = self.broken = False


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of an answer that was not streamed."""

    usage: Usage | None
    answer_keys: tuple[PromptKey, ...]
    error: EngineError | None
    aborted: bool
    response: str | None = None
    """The id of a response that an engine may have stored."""
    status: str = ""
    """The status of that response."""
    ended_turn: bool | None = None
    """Whether it ended the turn; see `Finished`."""


def read_json(call: Call, body: bytes) -> Answer:
    """Read an answer that was not streamed.

    Raises WorkerBroke unless the body is a JSON object with choices or an error.
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
    return Answer(read_usage(fields.get("usage")), choices.keys(), error, aborted, ended_turn=choices.ended_turn)


def _load_chunk(data: bytes) -> dict[str, Any] | None:
    """Parse an event's data; None if it is not part of an answer."""
    try:
        chunk = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    return chunk if isinstance(chunk, dict) and is_chunk(chunk) else None


def is_chunk(fields: dict[str, Any]) -> bool:
    """Return whether the choices, if any, are a list of objects with an integer index."""
    choices = fields.get("choices")
    if not choices:
        return choices is None or isinstance(choices, list)
    return isinstance(choices, list) and all(
        isinstance(choice, dict) and type(choice.get("index", 0)) is int for choice in choices
    )


def read_error(fields: dict[str, Any]) -> EngineError | None:
    """Return the error in a JSON object; None if there is none.

    vLLM wraps its error in `error` (a string if it rejects a key); SGLang's error may be the object itself.
    """
    error = fields if fields.get("object") == "error" else fields.get("error")
    if isinstance(error, str):
        return EngineError(error)
    if not isinstance(error, dict):
        return None
    code = error.get("code")
    return EngineError(text_or_empty(error.get("message")), code if isinstance(code, int | str) else None)


def _load_text(inside: bytes) -> str:
    """Return the JSON string with `inside` between its quotes; if that is not valid, the text unchanged."""
    try:
        text: str = orjson.loads(b'"%b"' % inside)
    except orjson.JSONDecodeError:
        return inside.decode(errors="replace")
    return text


def load_all(data: list[bytes]) -> Iterable[dict[str, Any]]:
    """Parse pieces of JSON, in one call if all are valid. Skips whatever is not a JSON object."""
    try:
        chunks = orjson.loads(b"[%b]" % b",".join(data))
    except orjson.JSONDecodeError:
        chunks = []
        for each in data:
            with suppress(orjson.JSONDecodeError):
                chunks.append(orjson.loads(each))
    return (chunk for chunk in chunks if isinstance(chunk, dict))

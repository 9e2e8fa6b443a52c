"""Reads streams that no other engine can continue: every event is passed on byte for byte."""

from typing import Any, ClassVar, Final

from router.api.answer.sse import BLANK, EVENT_LIMIT, EventSplitter, event_data, is_event
from router.api.answer.stream_reader import Ending, EngineError, read_error
from router.api.answer.usage import whole_usage
from router.api.body.call import Call
from router.api.body.json_object import load, text_or_empty
from router.core.model.prompt_key import PromptKey
from router.core.model.request import Usage

_NAME: Final = b"event:"


class EventReader:
    """Follows a stream of any API and takes the usage from the last event that has one.

    Subclasses know the event names of their API.
    """

    failures: ClassVar[frozenset[str]] = frozenset()
    """Names of the events by which an engine reports failure."""
    ends: ClassVar[frozenset[str]] = frozenset()
    """Names of the events that complete an answer. If there are none, the end of the stream completes it."""

    def __init__(self, call: Call, event_limit: int = EVENT_LIMIT) -> None:
        self._call = call
        self._splitter = EventSplitter(event_limit)
        self._held: list[bytes] | None = None
        """Events held back, from the one that reported failure; None while the engine has not failed."""
        self._tokens = 0
        self.has_delivered = False
        """True once an event of the answer was passed on to the client."""
        self.started = False
        """True once prefill is over."""
        self.finished = not self.ends
        """True if the answer is complete should the stream end now."""
        self.error: EngineError | None = None
        self.aborted = False
        self.ended_turn: bool | None = None
        """Whether the answer ended the turn; see `Finished`."""
        self.broken = False
        """True once the engine sent something that is not an event. Everything after it is ignored."""
        self._usage: Usage | None = None

    def feed(self, block: bytes) -> bytes:
        """Take a block of bytes from the engine and return what to send to the client: the complete events.

        Raises WorkerBroke if an event exceeds the limit.
        """
        return b"".join([self._pass(event) for event in self._splitter.feed(block)])

    def close(self) -> bytes:
        """End the stream and return what to send to the client: a last event without its blank line, if any."""
        return b"" if not self._splitter.tail else self._pass(self._splitter.rest())

    def _pass(self, event: bytes) -> bytes:
        if event in BLANK and self._held is None and not self.broken:
            return event
        self.broken = self.broken or not is_event(event)
        if self.broken:
            return b""
        data = event_data(event)
        if data is not None:
            self._handle_event(_name(event, data), data)
        if self._held is not None:
            self._held.append(event)
            return b""
        self.has_delivered = self.has_delivered or data is not None
        return event

    def _handle_event(self, name: str, data: bytes) -> None:
        if self._held is None and self._is_failure(name, data):
            self._held = []
            self.error = self._engine_error(load(data) or {})
        elif name in self.ends:
            self.started = self.finished = True
            self._on_last_event(load(data) or {})
        else:
            self._on_event(name, data)

    def _is_failure(self, name: str, data: bytes) -> bool:
        """Return whether this event reports failure, by its name or as an error object without a name, as in chat
        streams.
        """
        unnamed = bool(self.failures) and not name
        return name in self.failures or (unnamed and read_error(load(data) or {}) is not None)

    def _on_event(self, name: str, data: bytes) -> None:  # noqa: ARG002 - used by subclasses
        """Read an event that neither completes the answer nor reports failure."""
        self.started = True
        if b'"usage"' in data:
            self._usage = whole_usage(load(data) or {}) or self._usage

    def _on_last_event(self, fields: dict[str, Any]) -> None:
        """Read the answer's last event."""

    def _engine_error(self, fields: dict[str, Any]) -> EngineError:
        return EngineError(text_or_empty(fields.get("message")))

    @property
    def complete(self) -> bool:
        """Whether the whole answer has arrived, even if the end of the stream is missing."""
        return bool(self.ends) and self.finished

    @property
    def held(self) -> bytes:
        """The events held back, for the client of a call that no other worker can serve."""
        return b"".join(self._held or ())

    def output_tokens(self) -> int:
        """Output tokens so far: the engine's own count, or one per event with output, whichever is larger."""
        return self._tokens if self._usage is None else max(self._tokens, self._usage.output_tokens)

    @property
    def usage(self) -> Usage | None:
        """The usage that the engine reported last; None if it has reported none."""
        return self._usage

    def ending(self) -> Ending:
        """Return what the scheduler learns from the answer."""
        return Ending(self._usage, self._answer_keys(), self.ended_turn)

    def _answer_keys(self) -> tuple[PromptKey, ...]:
        """One key if another turn can follow the answer, else none."""
        return ()


def _name(event: bytes, data: bytes) -> str:
    """An event's name: from its first line, or else the `type` in its data."""
    if event.startswith(_NAME):
        return event[len(_NAME) :].split(b"\n", 1)[0].strip().decode(errors="replace")
    kind = (load(data) or {}).get("type")
    return kind if isinstance(kind, str) else ""

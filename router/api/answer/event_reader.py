"""Following a stream that only its own engine can go on with: every event goes through byte for byte."""

from typing import Any, ClassVar, Final

from router.api.answer.sse import BLANK, EVENT_LIMIT, EventSplitter, event_data, is_event
from router.api.answer.stream_reader import EngineError, read_error
from router.api.answer.usage import whole_usage
from router.api.body.call import Call
from router.api.body.error_bodies import load, text_or_empty
from router.core.model.prompt_key import PromptKey
from router.core.model.request import Usage

_NAME: Final = b"event:"


class EventReader:
    """Counts what it can of any stream: the usage that an event tells last. Derived ones know their events' names."""

    failures: ClassVar[frozenset[str]] = frozenset()
    """Events by which an engine gives up."""
    ends: ClassVar[frozenset[str]] = frozenset()
    """Events after which nothing is missing; where there are none, the stream's end will do."""

    def __init__(self, call: Call, event_limit: int = EVENT_LIMIT) -> None:
        self._call = call
        self._splitter = EventSplitter(event_limit)
        self._held: list[bytes] | None = None
        """What would go to the client from the event on by which the engine gave up; None while it has not."""
        self._tokens = 0
        self.has_delivered = False
        """Whether the client was given an event of the answer."""
        self.started = False
        """The prefill is over."""
        self.finished = not self.ends
        """Whether the answer is complete if the stream ends now."""
        self.error: EngineError | None = None
        self.aborted = False
        self.broken = False
        """The engine sent what is no event; nothing behind that counts."""
        self._usage: Usage | None = None

    def feed(self, block: bytes) -> bytes:
        """Take bytes of the engine; return the events that are complete.

        Raises WorkerBroke on an event beyond the limit.
        """
        return b"".join([self._pass(event) for event in self._splitter.feed(block)])

    def close(self) -> bytes:
        """At the end of the stream: what was held back, an event that lacks its blank line."""
        return b"" if self._splitter.empty else self._pass(self._splitter.rest())

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
        """Whether this is one of its failures, or an error without a name, as in the streams of chats."""
        nameless = bool(self.failures) and not name
        return name in self.failures or (nameless and read_error(load(data) or {}) is not None)

    def _on_event(self, name: str, data: bytes) -> None:  # noqa: ARG002 - for the derived ones
        """Take in an event that neither ends the answer nor gives it up."""
        self.started = True
        if b'"usage"' in data:
            self._usage = whole_usage(load(data) or {}) or self._usage

    def _on_last_event(self, fields: dict[str, Any]) -> None:
        """Take in the answer's last event."""

    def _engine_error(self, fields: dict[str, Any]) -> EngineError:
        return EngineError(text_or_empty(fields.get("message")))

    @property
    def complete(self) -> bool:
        """Whether all of the answer is here, be it that the end of the stream is missing."""
        return bool(self.ends) and self.finished

    @property
    def held(self) -> bytes:
        """What was held back, for the client of a call that nobody does better with."""
        return b"".join(self._held or ())

    @property
    def output_tokens(self) -> int:
        """Tokens so far: the engine's own count, or one for each event with output."""
        return self._tokens if self._usage is None else max(self._tokens, self._usage.output_tokens)

    @property
    def usage(self) -> Usage | None:
        """What the engine told last; None where it told nothing yet."""
        return self._usage

    def answer_keys(self) -> tuple[PromptKey, ...]:
        """One key, where the answer can be followed by another turn."""
        return ()


def _name(event: bytes, data: bytes) -> str:
    """An event's name: that of its first line, or the type in its data."""
    if event.startswith(_NAME):
        return event[len(_NAME) :].split(b"\n", 1)[0].strip().decode(errors="replace")
    kind = (load(data) or {}).get("type")
    return kind if isinstance(kind, str) else ""

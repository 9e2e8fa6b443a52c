"""Gives the last chunk of each choice the fingerprint that its engine moved to the chunk with the usage.

vLLM puts `system_fingerprint` into the chunks with a finish reason, or only into the chunk with the usage if usage is
asked for. If only the router asked for usage, the client gets no such chunk; so the chunks with a finish reason wait
for it, and get its fingerprint. The engine sends the last one in the same step. A choice that ends before others does
not wait if an earlier answer of the worker has shown its fingerprint: that stays the same until the engine restarts.
"""

from typing import Any, Final

import orjson

from router.api.answer.sse import event_data, plain_data, plain_event, with_data
from router.api.body.call import Call
from router.api.body.edits import Addition
from router.api.body.json_edit import replace_member

NAME: Final = "system_fingerprint"
_NAME_BYTES: Final = b'"system_fingerprint"'


class LastChunks:
    """The chunks with a finish reason of one stream, while they wait for the fingerprint."""

    __slots__ = ("_running", "_waits", "fingerprint", "waiting")

    def __init__(self, call: Call) -> None:
        self._waits = Addition.USAGE in call.additions.wanted
        self.waiting: list[bytes] = []
        """The events that wait; read-only for others."""
        self._running = call.choices * len(call.prompts)
        """Choices that have not ended, each in a chunk of its own."""
        self.fingerprint: str | None = None
        """The worker's: of an earlier answer, then of this one. Empty if its answers have none, None if unknown."""

    def complete_early(self, event: bytes) -> bytes | None:
        """Return a choice's last chunk as the client gets it now; None if it is the last one or has to wait."""
        self._running -= 1
        if not self._waits or self._running <= 0 or self.fingerprint is None:
            return None
        return _with_fingerprint(event, orjson.dumps(self.fingerprint)) if self.fingerprint and event else event

    def hold(self, events: bytes) -> bool:
        """Keep one event with a finish reason, or several plain ones; return False if they need not wait."""
        if self._waits and events:
            self.waiting.append(events)
        return self._waits

    def release(self, after: dict[str, Any]) -> bytes:
        """Return the events that waited. `after`: the chunk that comes next, which may have the fingerprint."""
        events, self.waiting = self.waiting, []
        fingerprint = after.get(NAME)
        if not isinstance(fingerprint, str):
            if after.get("usage") is not None:
                self.fingerprint = ""
            return b"".join(events)
        self.fingerprint = fingerprint
        value = orjson.dumps(fingerprint)
        return b"".join([_with_fingerprint(event, value) for event in events])


def _with_fingerprint(events: bytes, value: bytes) -> bytes:
    """Put a fingerprint, as JSON, into one event or several plain ones."""
    if (plain := plain_data(events)) is not None:
        return b"".join([plain_event(_with_member(data, value)) for data in plain])
    data = event_data(events)
    return events if data is None else with_data(events, _with_member(data, value))


def _with_member(data: bytes, value: bytes) -> bytes:
    if data.find(_NAME_BYTES) >= 0:
        try:
            return replace_member(data, NAME, value)
        except KeyError:  # only a text or an inner object has that name
            pass
    end = data.rindex(b"}")
    return b"%b,%b:%b%b" % (data[:end].rstrip(), _NAME_BYTES, value, data[end:])

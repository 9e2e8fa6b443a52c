"""What the client sees of a stream for which the router asked the engine for more than the client did.

**What is removed.** The usage and the token ids that only the router asked for, chunk by chunk. By what the client
asked for, the usage in chunks and the final chunk with usage are:

    include_usage  continuous_usage_stats   in chunks   final chunk
    no             no                       cut out     dropped
    yes            no                       cut out     unchanged
    no             yes                      by engine   dropped
    yes            yes                      unchanged   unchanged

vLLM ignores continuous_usage_stats without include_usage, so that the usage in its chunks is cut out; SGLang honours
it. A `usage` of null comes from the engine itself and stays. Token ids become null, which is what vLLM sends if no ids
are asked for. SGLang then sends no member for ids at all, and in completions sends a `usage` of null; so for SGLang's
completions ids are cut out and usage becomes null. Everything else passes byte for byte.

**What is put back.** The `system_fingerprint`. vLLM puts it into the chunks with a finish reason, or only into the
chunk with the usage if usage is asked for. If only the router asked for usage, the client gets no such chunk; so the
chunks with a finish reason wait for it, and get its fingerprint. The engine sends the last one in the same step. A
choice that ends before others does not wait if an earlier answer of the worker has shown its fingerprint: that stays
the same until the engine restarts.
"""

import re
from typing import Any, Final

import orjson

from router.api.answer.sse import PLAIN_EVENT, event_data, plain_data, with_data
from router.api.body.call import COMPLETIONS, Call
from router.api.body.edits import Addition
from router.api.body.json_object import cut_member, load, replace_member

_USAGE: Final = b'"usage"'
_IDS: Final = re.compile(rb'("(?:prompt_)?token_ids"\s*+:\s*+)\[[\d,\s]*+\]')
_IDS_MEMBER: Final = re.compile(rb',\s*+"(?:prompt_)?token_ids"\s*+:\s*+\[[\d,\s]*+\]')
_SGLANG: Final = b'"matched_stop"'
"""A member that every choice from SGLang has, and none from vLLM."""
_COMMA: Final = ord(",")
# The last member of a chunk's root object, from its name to the brace that closes the root. A string cannot contain an
# unescaped quote, so what looks like a member's name is one.
_LAST_MEMBER: Final = re.compile(rb'"usage"\s*+:\s*+\{[^{}]*+(?:\{[^{}]*+\}[^{}]*+)*+\}(\s*+\})')


class UsageSplice:
    """Filters the usage and the token ids in one client's stream."""

    def __init__(self, call: Call) -> None:
        self._keep_final = call.usage_wanted
        self._keep_chunks = call.continuous_wanted
        self.hides_ids = Addition.TOKEN_IDS in call.additions.wanted
        """Whether only the router asked for token ids."""
        self._completion = call.path == COMPLETIONS
        self._keep_usage = call.usage_wanted and call.continuous_wanted
        """The client asked for all usage, so none is removed."""

    def filter_event(self, event: bytes) -> bytes:
        """Return the event as the client sees it; empty if the client does not see it."""
        data = event_data(event)
        if data is None:
            return event
        visible = self.filter_data(data)
        if visible is data:
            return event
        return b"" if visible is None else with_data(event, visible)

    def filter_data(self, data: bytes, chunk: dict[str, Any] | None = None) -> bytes | None:
        """An event's data as the client sees it; None if the client does not see the event.

        `chunk`: the parsed data, if the caller has it.
        """
        if self._completion and data.find(_SGLANG) >= 0:
            return self._filter_sglang_completion(data, chunk)
        if self.hides_ids and data.find(b'token_ids"') >= 0:
            data = _IDS.sub(rb"\1null", data)
        at = data.rfind(_USAGE)
        if at < 0 or self._keep_usage:
            return data
        keep = self._keep_chunks and data.find(_SGLANG) >= 0
        if keep or data.find(b"[]") >= 0 or (last := _LAST_MEMBER.fullmatch(data, at)) is None:
            return self._filter_parsed(data, chunk, keep)
        before = at - 1 if data[at - 1] == _COMMA else len(data[:at].rstrip()) - 1
        return (
            data[:before] + data[last.start(1) :] if data[before] == _COMMA else self._filter_parsed(data, chunk, keep)
        )

    def _filter_sglang_completion(self, data: bytes, chunk: dict[str, Any] | None) -> bytes:
        """Filter a chunk with choices of a completion from SGLang."""
        if self.hides_ids:
            data = _IDS_MEMBER.sub(b"", data)
        if self._keep_chunks or data.rfind(_USAGE) < 0:
            return data
        chunk = load(data) if chunk is None else chunk
        return data if chunk is None or chunk.get("usage") is None else replace_member(data, "usage", b"null")

    def _filter_parsed(self, data: bytes, chunk: dict[str, Any] | None, keep: bool) -> bytes | None:
        chunk = load(data) if chunk is None else chunk
        if chunk is None or chunk.get("usage") is None:
            return data
        if chunk.get("choices") == []:
            return data if self._keep_final else None
        return data if keep else cut_member(data, "usage")


FINGERPRINT: Final = "system_fingerprint"
_FINGERPRINT: Final = b'"system_fingerprint"'


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
        fingerprint = after.get(FINGERPRINT)
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
        return b"".join([PLAIN_EVENT % _with_member(data, value) for data in plain])
    data = event_data(events)
    return events if data is None else with_data(events, _with_member(data, value))


def _with_member(data: bytes, value: bytes) -> bytes:
    if data.find(_FINGERPRINT) >= 0:
        try:
            return replace_member(data, FINGERPRINT, value)
        except KeyError:  # only a text or an inner object has that name
            pass
    end = data.rindex(b"}")
    return b"%b,%b:%b%b" % (data[:end].rstrip(), _FINGERPRINT, value, data[end:])

"""Taking the usage that only we asked for out of a stream: the per-chunk path.

    include_usage  continuous_usage_stats   in chunks   final chunk
    no             no                       cut out     dropped
    yes            no                       cut out     as it came
    no             yes                      as it came  dropped
    yes            yes                      as it came  as it came

vLLM ignores continuous_usage_stats alone and SGLang honours it; here it is honoured. A `usage` of null is the engine's
own and stays. Everything else goes through byte for byte.
"""

import re
from typing import Any, Final

import orjson

from router.api.call import Call
from router.api.json_span import cut_member
from router.sse import event_data, plain_data, with_data

_KEY: Final = b'"usage"'
# The last member of an event's root: an object, and after it only the brace that closes the root. A raw quote cannot
# stand inside a string, so what looks like the name of a member is one.
_LAST_MEMBER: Final = re.compile(
    rb',\s*+"usage"\s*+:\s*+\{[^{}\r\n]*+(?:\{[^{}\r\n]*+\}[^{}\r\n]*+)*+\}(?=[^\S\r\n]*+\}\n\n)'
)
_NO_CHOICES: Final = (b'"choices":[]', b'"choices": []')
"""How the final chunk is told from others, as JSON is written in one line."""


class UsageSplice:
    """What one client sees of the usage in its stream."""

    def __init__(self, call: Call) -> None:
        self._keep_final = call.usage_wanted
        self._keep_chunks = call.continuous_wanted
        self.verbatim = call.usage_wanted and call.continuous_wanted
        """The client asked for all that there is: nothing is ever taken out."""

    def plain_events(self, events: bytes) -> bytes:
        """Any number of plain events (`sse.is_plain`) as the client should see them: one pass over all that it can."""
        if self.verbatim or _KEY not in events:
            return events
        final = max(map(events.find, _NO_CHOICES))
        if final >= 0:
            start, end = events.rfind(b"\n", 0, final) + 1, events.index(b"\n\n", final) + 2
            return self.plain_events(events[:start]) + self.event(events[start:end]) + self.plain_events(events[end:])
        if self._keep_chunks:
            return events
        spliced = _LAST_MEMBER.sub(b"", events)
        if _KEY not in spliced:
            return spliced
        return b"".join([self.event(b"data: %b\n\n" % data) for data in plain_data(spliced)])

    def event(self, event: bytes) -> bytes:
        """One event of any form as the client should see it; empty where it should not."""
        if self.verbatim or _KEY not in event:
            return event
        data = event_data(event)
        chunk = None if data is None else _loads(data)
        if data is None or chunk is None or chunk.get("usage") is None:
            return event
        if chunk.get("choices") == []:
            return event if self._keep_final else b""
        return event if self._keep_chunks else with_data(event, cut_member(data, "usage"))


def _loads(data: bytes) -> dict[str, Any] | None:
    try:
        chunk = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    return chunk if isinstance(chunk, dict) else None

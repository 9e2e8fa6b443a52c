"""Taking the usage and the token ids that only we asked for out of a stream: the per-chunk path.

    include_usage  continuous_usage_stats   in chunks   final chunk
    no             no                       cut out     dropped
    yes            no                       cut out     as it came
    no             yes                      as it came  dropped
    yes            yes                      as it came  as it came

vLLM ignores continuous_usage_stats alone and SGLang honours it; here it is honoured. A `usage` of null is the engine's
own and stays. Ids become null, which is what engines send to whoever asks for none. Everything else goes through byte
for byte.
"""

import re
from typing import Any, Final

from router.api.call import Call
from router.api.error_json import load
from router.api.json_span import cut_member
from router.sse import event_data, with_data

_KEY: Final = b'"usage"'
_IDS: Final = re.compile(rb'("(?:prompt_)?token_ids"\s*+:\s*+)\[[\d,\s]*+\]')
_COMMA: Final = ord(",")
# The last member of a chunk's root, from its name to the brace that closes the root. A raw quote cannot stand inside a
# string, so what looks like the name of a member is one.
_LAST_MEMBER: Final = re.compile(rb'"usage"\s*+:\s*+\{[^{}]*+(?:\{[^{}]*+\}[^{}]*+)*+\}(\s*+\})')


class UsageSplice:
    """What one client sees of the usage and the token ids in its stream."""

    def __init__(self, call: Call) -> None:
        self._keep_final = call.usage_wanted
        self._keep_chunks = call.continuous_wanted
        self._hide_ids = call.hides_ids
        self._keep_usage = call.usage_wanted and call.continuous_wanted
        """The client asked for all of it: none is ever taken out."""

    def event(self, event: bytes) -> bytes:
        """An event as the client should see it; empty where it should not."""
        data = event_data(event)
        if data is None:
            return event
        seen = self.data(data)
        if seen is data:
            return event
        return b"" if seen is None else with_data(event, seen)

    def data(self, data: bytes, chunk: dict[str, Any] | None = None) -> bytes | None:
        """An event's data as the client should see it; None where it should not see the event.

        `chunk`: what it says, where that has been parsed already.
        """
        if self._hide_ids and data.find(b'token_ids"') >= 0:
            data = _IDS.sub(rb"\1null", data)
        at = data.rfind(_KEY)
        if at < 0 or self._keep_usage:
            return data
        if self._keep_chunks or data.find(b"[]") >= 0 or (last := _LAST_MEMBER.fullmatch(data, at)) is None:
            return self._parsed(data, chunk)
        before = at - 1 if data[at - 1] == _COMMA else len(data[:at].rstrip()) - 1
        return data[:before] + data[last.start(1) :] if data[before] == _COMMA else self._parsed(data, chunk)

    def _parsed(self, data: bytes, chunk: dict[str, Any] | None) -> bytes | None:
        chunk = load(data) if chunk is None else chunk
        if chunk is None or chunk.get("usage") is None:
            return data
        if chunk.get("choices") == []:
            return data if self._keep_final else None
        return data if self._keep_chunks else cut_member(data, "usage")

"""Taking the usage and the token ids that only we asked for out of a stream: the per-chunk path.

    include_usage  continuous_usage_stats   in chunks   final chunk
    no             no                       cut out     dropped
    yes            no                       cut out     as it came
    no             yes                      as it came  dropped
    yes            yes                      as it came  as it came

vLLM ignores continuous_usage_stats alone and SGLang honours it; here it is honoured. A `usage` of null is the engine's
own and stays. Ids become null, which is what vLLM sends to whoever asks for none. SGLang sends them no ids at all, and
in a completion `usage` is null: there ids are cut out, and usage becomes null. Everything else goes through byte for
byte.
"""

import re
from typing import Any, Final

from router.api.answer.sse import event_data, with_data
from router.api.body.call import COMPLETIONS, Call
from router.api.body.error_bodies import load
from router.api.body.json_edit import cut_member, replace_member

_KEY: Final = b'"usage"'
_IDS: Final = re.compile(rb'("(?:prompt_)?token_ids"\s*+:\s*+)\[[\d,\s]*+\]')
_IDS_MEMBER: Final = re.compile(rb',\s*+"(?:prompt_)?token_ids"\s*+:\s*+\[[\d,\s]*+\]')
_SGLANG: Final = b'"matched_stop"'
"""A member of each choice of an SGLang, and of no vLLM's."""
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
        self._completion = call.path == COMPLETIONS
        self._keep_usage = call.usage_wanted and call.continuous_wanted
        """The client asked for all of it: none is ever taken out."""

    def filter_event(self, event: bytes) -> bytes:
        """An event as the client should see it; empty where it should not."""
        data = event_data(event)
        if data is None:
            return event
        seen = self.filter_data(data)
        if seen is data:
            return event
        return b"" if seen is None else with_data(event, seen)

    def filter_data(self, data: bytes, chunk: dict[str, Any] | None = None) -> bytes | None:
        """An event's data as the client should see it; None where it should not see the event.

        `chunk`: what it says, where that has been parsed already.
        """
        if self._completion and data.find(_SGLANG) >= 0:
            return self._filter_sglang_completion(data, chunk)
        if self._hide_ids and data.find(b'token_ids"') >= 0:
            data = _IDS.sub(rb"\1null", data)
        at = data.rfind(_KEY)
        if at < 0 or self._keep_usage:
            return data
        if self._keep_chunks or data.find(b"[]") >= 0 or (last := _LAST_MEMBER.fullmatch(data, at)) is None:
            return self._filter_parsed(data, chunk)
        before = at - 1 if data[at - 1] == _COMMA else len(data[:at].rstrip()) - 1
        return data[:before] + data[last.start(1) :] if data[before] == _COMMA else self._filter_parsed(data, chunk)

    def _filter_sglang_completion(self, data: bytes, chunk: dict[str, Any] | None) -> bytes:
        """A completion's chunk with a choice."""
        if self._hide_ids:
            data = _IDS_MEMBER.sub(b"", data)
        if self._keep_chunks or data.rfind(_KEY) < 0:
            return data
        chunk = load(data) if chunk is None else chunk
        return data if chunk is None or chunk.get("usage") is None else replace_member(data, "usage", b"null")

    def _filter_parsed(self, data: bytes, chunk: dict[str, Any] | None) -> bytes | None:
        chunk = load(data) if chunk is None else chunk
        if chunk is None or chunk.get("usage") is None:
            return data
        if chunk.get("choices") == []:
            return data if self._keep_final else None
        return data if self._keep_chunks else cut_member(data, "usage")

"""Removes from a stream the usage and the token ids that only the router asked for, chunk by chunk.

By what the client asked for, the usage in chunks and the final chunk with usage are:

    include_usage  continuous_usage_stats   in chunks   final chunk
    no             no                       cut out     dropped
    yes            no                       cut out     unchanged
    no             yes                      by engine   dropped
    yes            yes                      unchanged   unchanged

vLLM ignores continuous_usage_stats without include_usage, so that the usage in its chunks is cut out; SGLang honours
it. A `usage` of null comes from the engine itself and stays. Token ids become null, which is what vLLM sends if no ids
are asked for. SGLang then sends no member for ids at all, and in completions sends a `usage` of null; so for SGLang's
completions ids are cut out and usage becomes null. Everything else passes byte for byte.
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
        self.hides_ids = call.hides_ids
        """Whether only the router asked for token ids."""
        self._completion = call.path == COMPLETIONS
        self._keep_usage = call.usage_wanted and call.continuous_wanted
        """The client asked for all usage, so none is removed."""

    def filter_event(self, event: bytes) -> bytes:
        """The event as the client sees it; empty if the client does not see it."""
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
        at = data.rfind(_KEY)
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
        if self._keep_chunks or data.rfind(_KEY) < 0:
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

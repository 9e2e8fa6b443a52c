"""APIs that both engines translate into chats: the body becomes a chat's, the answer has the API's own format.

Left out: reasoning, tool calls in answers, and stored responses. PURE.
"""

from collections.abc import Sequence
from typing import Protocol

import orjson

from workers.api.call import ApiError, Body, Call
from workers.api.choice import Choice
from workers.api.dialect import Answer, StreamWriter


class Form(Protocol):
    """One such API as one engine serves it."""

    def parse(self, body: Body) -> Call:
        """Parse a call. Raises ApiError if it is invalid."""

    def writer(self, answer: Answer) -> StreamWriter: ...

    def full(self, answer: Answer, choices: Sequence[Choice]) -> bytes:
        """Return the whole answer of a call that does not stream."""

    def error(self, error: ApiError) -> bytes:
        """Return the body of an error answer."""

    def stream_error(self, error: ApiError) -> bytes:
        """Return the event that ends a stream which cannot go on."""


def with_stream_options(chat: dict[str, object]) -> dict[str, object]:
    """Add options to a chat such that it reports its usage in every chunk, if it streams."""
    return chat | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def named_event(kind: str, **fields: object) -> bytes:
    """Return a server-sent event whose name is repeated in its data."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields}))

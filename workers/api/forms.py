"""The APIs that both engines turn into chats: a body becomes a chat's, and the answer is told in the API's own words.

Left out: thoughts, calls of tools in answers, and stored responses. PURE.
"""

from collections.abc import Sequence
from typing import Protocol

import orjson

from workers.api.call import ApiError, Body, Call
from workers.api.choice import Choice
from workers.api.dialect import Answer, StreamWriter


class Form(Protocol):
    """One such API of one engine."""

    def parse(self, body: Body) -> Call:
        """Raises ApiError."""

    def writer(self, answer: Answer) -> StreamWriter: ...

    def full(self, answer: Answer, choices: Sequence[Choice]) -> bytes:
        """The whole answer of a call that does not stream."""

    def error(self, error: ApiError) -> bytes:
        """The body of an error."""

    def stream_error(self, error: ApiError) -> bytes:
        """The end of a stream that cannot be gone on with."""


def with_stream_options(chat: dict[str, object]) -> dict[str, object]:
    """A chat that tells its usage in every chunk, if it streams."""
    return chat | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def named_event(kind: str, **fields: object) -> bytes:
    """A server-sent event with a name, which its data repeat."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields}))

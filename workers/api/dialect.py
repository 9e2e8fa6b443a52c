"""What the HTTP server requires of a dialect. PURE."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import orjson

from workers.api.call import ApiError, Body, Call
from workers.api.choice import Choice
from workers.engine.model import FinishReason

DONE: Final = b"data: [DONE]\n\n"

FINISH: dict[FinishReason | None, bytes] = {
    None: b"null",
    "stop": b'"stop"',
    "length": b'"length"',
    "abort": b'"abort"',
}


@dataclass(frozen=True, slots=True)
class Answer:
    """The fields that every chunk of a call repeats: its id, the model's name as answered, its creation time (s)."""

    call: Call
    id: str
    model: str
    created: int

    def opening(self, kind: str) -> bytes:
        """Return the start of each chunk, up to its choices."""
        head = orjson.dumps({"id": self.id, "object": kind, "created": self.created, "model": self.model})
        return b"data: " + head[:-1] + b',"choices":['


class StreamWriter(Protocol):
    """Encodes the choices of one call as server-sent events."""

    def update(self, choice: Choice) -> bytes:
        """Return the events for the unsent part of `choice`; possibly none."""

    def end(self, choices: Sequence[Choice]) -> bytes:
        """Return the events after the last token, up to and including [DONE]."""


class Wire(Protocol):
    """The wire format of one engine's generation endpoints."""

    disconnect_poll: float  # emulated seconds between checks that an unstreamed client is there; 0: at once
    headers_at_once: bool  # the headers of a stream are sent before its first token
    queue_full_in_band: bool  # a stream reports a full queue in an event, not by its status

    def check(self, body: Body, path: str) -> None:
        """Raise ApiError if the engine rejects a generation call by its body alone."""

    def answer(self, call: Call, request_id: str | None) -> Answer:
        """Return the identity of the answer. Raises ApiError if the model is not served."""

    def max_tokens(self, call: Call, prompt: Sequence[int]) -> int:
        """Return the most tokens of the answer to `prompt`. Raises ApiError if the call asks for too many."""

    def writer(self, answer: Answer) -> StreamWriter: ...

    def full(self, answer: Answer, choices: Sequence[Choice]) -> bytes:
        """Return the whole answer of a call that does not stream."""

    def error(self, error: ApiError) -> bytes: ...

    def stream_error(self, error: ApiError) -> bytes:
        """Return an error as an event of a stream that has begun."""


def now_seconds() -> int:
    return int(time.time())


def usage_totals(choices: Sequence[Choice], n: int) -> tuple[int, int, int]:
    """Return the prompt tokens (each prompt once), completion tokens and cached tokens of a whole call."""
    firsts = choices[::n]
    return (
        sum(len(choice.prompt) for choice in firsts),
        sum(choice.completion_tokens for choice in choices),
        sum(choice.cached_tokens for choice in firsts),
    )

"""What the HTTP front asks of a dialect. PURE."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import orjson

from workers.api.call import ApiError, Body, Call
from workers.api.choice import Choice
from workers.engine.model import FinishReason

DONE = b"data: [DONE]\n\n"

FINISH: dict[FinishReason | None, bytes] = {
    None: b"null",
    "stop": b'"stop"',
    "length": b'"length"',
    "abort": b'"abort"',
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What every chunk of one call repeats: its id, the model's name as answered, and when it was created (s)."""

    call: Call
    id: str
    model: str
    created: int

    def opening(self, kind: str) -> bytes:
        """The start of each chunk, up to its choices."""
        head = orjson.dumps({"id": self.id, "object": kind, "created": self.created, "model": self.model})
        return b"data: " + head[:-1] + b',"choices":['


class StreamWriter(Protocol):
    """Turns the choices of one call into server-sent events."""

    def update(self, choice: Choice) -> bytes:
        """Events for what `choice` holds unsent; may be empty."""

    def end(self, choices: Sequence[Choice]) -> bytes:
        """Events after the last token, up to and including [DONE]."""


class Wire(Protocol):
    """How one engine speaks on the generation endpoints."""

    disconnect_poll: float  # emulated seconds between looks for a client to whom nothing streams; 0: it is seen at once
    headers_at_once: bool  # a stream's headers do not wait for its first token
    queue_full_in_band: bool  # a stream is told in its events, not by its status, that the queue is full

    def check(self, body: Body, path: str) -> None:
        """Raises ApiError where the engine refuses a generation call by its body alone."""

    def answer(self, call: Call, request_id: str | None) -> Answer:
        """The identity of the answer. Raises ApiError for a model that is not served."""

    def max_tokens(self, call: Call, prompt: Sequence[int]) -> int:
        """How long the answer to `prompt` may get. Raises ApiError where that is the client's mistake."""

    def writer(self, answer: Answer) -> StreamWriter: ...

    def full(self, answer: Answer, choices: Sequence[Choice]) -> bytes:
        """The whole answer of a call that does not stream."""

    def error(self, error: ApiError) -> bytes: ...

    def stream_error(self, error: ApiError) -> bytes:
        """An error as an event of a stream that has begun."""


def now_seconds() -> int:
    return int(time.time())


def usage_totals(choices: Sequence[Choice], n: int) -> tuple[int, int, int]:
    """Prompt tokens (each prompt once), completion tokens and cached tokens of a whole call."""
    firsts = choices[::n]
    return (
        sum(len(choice.prompt) for choice in firsts),
        sum(choice.completion_tokens for choice in choices),
        sum(choice.cached_tokens for choice in firsts),
    )

"""Plays the recorded load to one engine: a fixed number of calls at a time, begun in the order of the load."""

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httptools

from ..wire import COMPLETIONS, WORKER_KEY
from .load import Call

READ_BYTES = 1 << 16
CALL_SECONDS = 120.0
"""Timeout of one call."""


@dataclass(slots=True)
class Outcome:
    """The outcome of one call."""

    number: int
    prompt_tokens: int
    began: float
    ended: float = 0.0
    cached: int | None = None
    """Cached tokens of the prompt; None for a call that was cancelled."""
    token_times: list[float] = field(default_factory=list)
    """When each event with new tokens was read."""

    @property
    def completed(self) -> bool:
        return self.cached is not None


async def play(url: str, calls: Sequence[Call], at_once: int) -> list[Outcome]:
    """Return the outcome of each call, in the order of the load. Raises RuntimeError if an answer is wrong."""
    left = iter(calls)
    outcomes: list[Outcome] = []
    await asyncio.gather(*(_play_on(url, left, outcomes) for _ in range(at_once)))
    return sorted(outcomes, key=lambda outcome: outcome.number)


async def _play_on(url: str, left: Iterator[Call], outcomes: list[Outcome]) -> None:
    for call in left:
        async with asyncio.timeout(CALL_SECONDS):
            outcomes.append(await ask(url, call))


async def ask(url: str, call: Call) -> Outcome:
    """Send one call over its own connection, which is closed when the call ends or is cancelled."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    outcome = Outcome(call.number, len(call.prompt), time.monotonic())
    try:
        writer.write(_request(call))
        await _follow(reader, call, outcome)
    finally:
        writer.close()
    outcome.ended = time.monotonic()
    return outcome


def _request(call: Call) -> bytes:
    body = json.dumps(call.body()).encode()
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: engine\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {WORKER_KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class _Events:
    """Parses the server-sent events of one HTTP answer as they come."""

    def __init__(self) -> None:
        self._buffer = b""
        self._parser = httptools.HttpResponseParser(self)

    def on_body(self, body: bytes) -> None:
        self._buffer += body

    def feed(self, data: bytes) -> list[bytes]:
        self._parser.feed_data(data)
        status = self._parser.get_status_code()
        if status != 200:
            raise RuntimeError(f"status {status}: {self._buffer!r}")
        *events, self._buffer = self._buffer.split(b"\n\n")
        return [event.removeprefix(b"data: ") for event in events]


async def _follow(reader: asyncio.StreamReader, call: Call, outcome: Outcome) -> None:
    events = _Events()
    tokens = 0
    while True:
        data = await reader.read(READ_BYTES)
        if not data:
            raise RuntimeError(f"call {call.number} ended after {tokens} tokens")
        now = time.monotonic()
        for event in events.feed(data):
            if event == b"[DONE]":
                _check_complete(call, outcome, tokens)
                return
            parsed = json.loads(event)
            usage = parsed.get("usage")
            if usage is None:
                raise RuntimeError(f"call {call.number}: {event!r}")
            if usage["completion_tokens"] > tokens:
                tokens = usage["completion_tokens"]
                outcome.token_times.append(now)
            if call.cancelled_after is not None and tokens >= call.cancelled_after:
                return
            if not parsed["choices"]:
                outcome.cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)


def _check_complete(call: Call, outcome: Outcome, tokens: int) -> None:
    if tokens != call.answer_tokens or outcome.cached is None:
        raise RuntimeError(f"call {call.number} has {tokens} of {call.answer_tokens} tokens, cached {outcome.cached}")

"""One call over HTTP, as its client sees it. Times are seconds of the clock that the workload's calls use."""

from collections.abc import Mapping
from typing import Any

import orjson

from bench.live import completions
from bench.report.records import Record
from bench.workloads.parts.traffic import Call, Client, Outcome
from router.core.model.cost import Tokens


class HttpCall:
    """The state of a call from its sending to its end."""

    __slots__ = (
        *("answer", "arrived", "call", "client", "dispatched", "finished", "id", "outcome", "predicted_cached_tokens"),
        *("started", "tokens", "usage", "worker", "_complete", "_rest"),
    )

    def __init__(self, name: str, client: Client, call: Call, now: float) -> None:
        self.id = name
        self.client = client
        self.call = call
        self.arrived = now
        self.dispatched: float | None = None
        """As reported by our router; other servers do not report it."""
        self.worker: str | None = None
        self.predicted_cached_tokens: int | None = None
        self.started: float | None = None
        self.finished: float | None = None
        self.outcome = Outcome.UNFINISHED
        self.tokens = 0
        """Tokens of the answer so far."""
        self.answer: list[str] = []
        """The text so far, in parts."""
        self.usage: Tokens | None = None
        """The last usage that the server reported; `complete` is None while it is not that of the whole call."""
        self._rest = b""
        self._complete = False

    @property
    def complete(self) -> Tokens | None:
        """The usage of the whole call; None before the answer has ended."""
        return self.usage if self._complete else None

    def on_headers(self, headers: Mapping[str, str], speed: float) -> None:
        """Read the headers of the answer."""
        self.worker = headers.get("x-d2lpm-worker")
        if (waited := headers.get("x-d2lpm-queue-ms")) is not None:
            self.dispatched = self.arrived + float(waited) / 1000 * speed
        if (predicted := headers.get("x-d2lpm-predicted-cached-tokens")) is not None:
            self.predicted_cached_tokens = int(predicted)

    def feed(self, block: bytes, now: float) -> None:
        """Parse a part of a streamed answer. Raises AnswerFailed, or ValueError if it is no valid answer."""
        *lines, self._rest = (self._rest + block).split(b"\n")
        for line in lines:
            found = completions.event(line)
            if found is not None:
                self._event(found, now)
            elif line.startswith(b"data: [DONE]"):
                self._complete = True

    def set_answer(self, answer: bytes) -> None:
        """Parse an answer that was sent whole. Raises ValueError if it is not valid."""
        found = orjson.loads(answer)
        self.answer = [found["choices"][0]["text"]]
        self.usage = completions.tokens(found["usage"])
        self.tokens = self.usage.output
        self._complete = True

    def end(self, outcome: Outcome, now: float) -> None:
        """Record how and when the call ended."""
        self.outcome, self.finished = outcome, now

    def record(self) -> Record:
        """Return the record of this call."""
        used = self.complete
        return Record(
            id=self.id,
            client=self.client.name,
            outcome=self.outcome,
            arrived=self.arrived,
            dispatched=self.dispatched,
            started=self.started,
            finished=self.finished,
            worker=self.worker,
            why=None,
            input_tokens=len(self.call.prompt),
            cached_tokens=None if used is None else used.cached,
            predicted_cached_tokens=self.predicted_cached_tokens,
            output_tokens=self.tokens,
            program=self.call.program,
            program_calls=self.call.program_calls,
        )

    def _event(self, found: Mapping[str, Any], now: float) -> None:
        if choices := found.get("choices"):
            if self.started is None:
                self.started = now
            self.answer.append(choices[0].get("text") or "")
            self.tokens += 1
        if usage := found.get("usage"):
            self.usage = completions.tokens(usage)
            self.tokens = self.usage.output  # an event may hold more than one token

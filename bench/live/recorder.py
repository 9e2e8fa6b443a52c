"""Record what clients see over HTTP, in the simulator's own records.

What only an engine or a router knows is missing: the result has no workers, and totals over all workers are sums of
what the clients received.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from bench.live.call import HttpCall
from bench.report.meters import censored_percentile
from bench.report.records import CLIENT_VIEW, Result, ServiceSample
from bench.report.summary import Summary, summarise
from router.core.model.cost import NOTHING, LinearCost, Tokens

ACTUAL: Final = LinearCost()
"""The cost behind `ServiceSample.service`."""


class Totals(NamedTuple):
    """Sums over all calls in the measured time."""

    prompt_tokens: int = 0
    """Tokens of prompts answered by a first token, cached ones included."""
    output_tokens: int = 0
    queried_tokens: int = 0
    """Tokens of prompts whose usage has arrived."""
    cached_tokens: int = 0
    """Cached tokens among the queried ones."""

    def plus(self, other: "Totals") -> "Totals":
        """Add field by field."""
        return Totals(*map(sum, zip(self, other, strict=True)))


@dataclass(frozen=True, slots=True)
class LiveResult:
    """The outcome of a load over HTTP."""

    result: Result
    """The records, without workers."""
    totals: Totals
    failures: Mapping[str, int]
    """The number of calls that ended with each error, rejections included."""
    late_p99_s: float | None
    """How late calls were sent (s). If high, this machine was too slow for the load, and the figures describe it
    instead.
    """
    interrupted: bool

    def report(self) -> dict[str, object]:
        """Return the summary, and what only a live load reports."""
        beside = {"seconds": self.result.seconds, "warmup": self.result.warmup, "late_p99_s": self.late_p99_s}
        return {**self.summary(), **beside, "failures": dict(self.failures), "interrupted": self.interrupted}

    def summary(self) -> Summary:
        """Return the simulator's figures, with those it takes from engines computed from what clients received."""
        totals, seconds = self.totals, self.result.seconds - self.result.warmup
        summary = summarise(self.result)
        summary["throughput_tokens_per_s"] = (totals.prompt_tokens + totals.output_tokens) / seconds
        summary["output_tokens_per_s"] = totals.output_tokens / seconds
        summary["hit_rate"] = totals.cached_tokens / totals.queried_tokens if totals.queried_tokens else None
        return summary


class LoadRecorder:
    """Records one load."""

    def __init__(self, warmup: float, seconds: float, weights: Mapping[str, float]) -> None:
        """Measures from `warmup` to `seconds`."""
        self._warmup = warmup
        self._seconds = seconds
        self._weights = weights
        self._calls: list[HttpCall] = []
        self._late: list[tuple[float, bool]] = []
        self._served: dict[str, Tokens] = dict.fromkeys(weights, NOTHING)
        self._known: dict[str, int] = {}
        self._before = Totals()
        self._totals = Totals()
        self._timeline: list[ServiceSample] = []

    def on_sent(self, call: HttpCall, late: float) -> None:
        """Record that a call was sent, `late` seconds after its time."""
        self._calls.append(call)
        self._late.append((late, True))
        self._known[call.id] = 0

    def on_tokens(self, call: HttpCall, now: float) -> None:
        """Record that more of an answer has arrived."""
        before, self._known[call.id] = self._known[call.id], call.tokens
        gained = call.tokens - before
        self._serve(call, Tokens(output=gained))
        began = len(call.call.prompt) if before == 0 and gained else 0
        self._add(Totals(prompt_tokens=began, output_tokens=gained), now)

    def on_end(self, call: HttpCall, now: float) -> None:
        """Record the end of a call. Only now are the tokens of its input known."""
        del self._known[call.id]
        if (used := call.complete) is not None:
            self._serve(call, used._replace(output=0))
            self._add(Totals(queried_tokens=used.extend + used.cached, cached_tokens=used.cached), now)

    def sample(self, now: float) -> None:
        """Sample the service of every client."""
        actual = {client: ACTUAL(tokens) for client, tokens in self._served.items()}
        seen = {client: CLIENT_VIEW(tokens) for client, tokens in self._served.items()}
        self._timeline.append(ServiceSample(now, actual, seen))

    def result(self, end: float, failures: Mapping[str, int], *, interrupted: bool) -> LiveResult:
        """Return the outcome of a load that ended at `end`; if that is during the warm-up, everything counts."""
        self.sample(end)
        warmup, totals = (self._warmup, self._totals) if end > self._warmup else (0.0, self._before)
        records = tuple(call.record() for call in self._calls)
        result = Result(end, warmup, records, {}, self._weights, tuple(self._timeline))
        return LiveResult(result, totals, failures, censored_percentile(self._late, 0.99), interrupted)

    def _serve(self, call: HttpCall, tokens: Tokens) -> None:
        self._served[call.client.name] = self._served[call.client.name].plus(tokens)

    def _add(self, more: Totals, now: float) -> None:
        if now < self._warmup:
            self._before = self._before.plus(more)
        elif now < self._seconds:
            self._totals = self._totals.plus(more)

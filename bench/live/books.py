"""Writes down what clients see over HTTP, in the simulator's own records.

What only an engine or a router knows is not in it: there are no workers in the result, and sums over all of them are of
what the clients were told.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from bench.live.call import LiveFlight
from bench.report.meters import censored_percentile
from bench.report.records import CLIENT_VIEW, Result, ServiceSample
from bench.report.summary import Summary, summarise
from router.core.model.cost import NOTHING, LinearCost, Tokens

ACTUAL: Final = LinearCost()
"""See `ServiceSample`."""


class Totals(NamedTuple):
    """Sums over all calls, in the time measured."""

    prompt_tokens: int = 0
    """Of prompts that were answered by a first token, cached ones included."""
    output_tokens: int = 0
    queried_tokens: int = 0
    """Of prompts whose usage came."""
    cached_tokens: int = 0
    """Of those."""

    def plus(self, other: "Totals") -> "Totals":
        """Add member by member."""
        return Totals(*map(sum, zip(self, other, strict=True)))


@dataclass(frozen=True, slots=True)
class LiveResult:
    """What a load over HTTP leaves."""

    result: Result
    """Without workers."""
    totals: Totals
    failures: Mapping[str, int]
    """How often a call ended so, by the reason: refusals too."""
    late_p99_s: float | None
    """How late calls were sent: if it is much, this machine was too slow for the load, and the figures are its own."""
    interrupted: bool

    def report(self) -> dict[str, object]:
        """The summary, and what a simulation has no need to tell."""
        beside = {"seconds": self.result.seconds, "warmup": self.result.warmup, "late_p99_s": self.late_p99_s}
        return {**self.summary(), **beside, "failures": dict(self.failures), "interrupted": self.interrupted}

    def summary(self) -> Summary:
        """The simulator's figures; those that it has from the engines are here from what the clients were told."""
        totals, seconds = self.totals, self.result.seconds - self.result.warmup
        told = summarise(self.result)
        told["throughput_tokens_per_s"] = (totals.prompt_tokens + totals.output_tokens) / seconds
        told["output_tokens_per_s"] = totals.output_tokens / seconds
        told["hit_rate"] = totals.cached_tokens / totals.queried_tokens if totals.queried_tokens else None
        return told


class Books:
    """Of one load."""

    def __init__(self, warmup: float, seconds: float, weights: Mapping[str, float]) -> None:
        """Measures from `warmup` until `seconds`."""
        self._warmup = warmup
        self._seconds = seconds
        self._weights = weights
        self._calls: list[LiveFlight] = []
        self._late: list[tuple[float, bool]] = []
        self._served: dict[str, Tokens] = dict.fromkeys(weights, NOTHING)
        self._known: dict[str, int] = {}
        self._before = Totals()
        self._totals = Totals()
        self._timeline: list[ServiceSample] = []

    def arrived(self, call: LiveFlight, late: float) -> None:
        """A call is sent, so long after its time."""
        self._calls.append(call)
        self._late.append((late, True))
        self._known[call.id] = 0

    def heard(self, call: LiveFlight, now: float) -> None:
        """More of its answer is here."""
        before, self._known[call.id] = self._known[call.id], call.tokens
        gained = call.tokens - before
        self._serve(call, Tokens(output=gained))
        began = len(call.call.prompt) if before == 0 and gained else 0
        self._add(Totals(prompt_tokens=began, output_tokens=gained), now)

    def ended(self, call: LiveFlight, now: float) -> None:
        """It is over. What it cost in input is known only now."""
        del self._known[call.id]
        if (used := call.complete) is not None:
            self._serve(call, used._replace(output=0))
            self._add(Totals(queried_tokens=used.extend + used.cached, cached_tokens=used.cached), now)

    def sample(self, now: float) -> None:
        """Look at what every client was served."""
        actual = {client: ACTUAL(tokens) for client, tokens in self._served.items()}
        seen = {client: CLIENT_VIEW(tokens) for client, tokens in self._served.items()}
        self._timeline.append(ServiceSample(now, actual, seen))

    def result(self, end: float, failures: Mapping[str, int], *, interrupted: bool) -> LiveResult:
        """All of it; it ended then. Before the warm-up was over, all that there is counts."""
        self.sample(end)
        warmup, totals = (self._warmup, self._totals) if end > self._warmup else (0.0, self._before)
        records = tuple(call.record() for call in self._calls)
        result = Result(end, warmup, records, {}, self._weights, tuple(self._timeline))
        return LiveResult(result, totals, failures, censored_percentile(self._late, 0.99), interrupted)

    def _serve(self, call: LiveFlight, tokens: Tokens) -> None:
        self._served[call.client.name] = self._served[call.client.name].plus(tokens)

    def _add(self, more: Totals, now: float) -> None:
        if now < self._warmup:
            self._before = self._before.plus(more)
        elif now < self._seconds:
            self._totals = self._totals.plus(more)

"""Forecast of the KV cache that the requests in flight at one worker will use at their peak.

Each request grows by one token per step until it ends, and then releases all its tokens. An engine filled to its limit
with young requests runs out of memory as they grow, so that it has to preempt some and compute them again.

A request's growth is predicted when it is added, and the prediction may be too low: large output limits are not taken
at their word (`output_length`). A request that goes on is predicted to grow as much again, up to its maximum.
"""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate, count
from math import inf
from operator import add, mul
from typing import Final

from router.core.model.request import RequestId
from router.core.predict.output_length import remaining_beyond

LEAST_MORE: Final = 16.0
"""Minimum of the tokens still to come, whatever the maximum: the clock is only that of the average stream."""


@dataclass(slots=True, eq=False)
class KvHold:
    """What one request holds of the cache, and the prediction of it, in tokens."""

    request: RequestId
    tokens: int
    """Tokens held when it begins to grow."""
    growth: float
    most: float
    """Maximum growth, if it outlives the prediction."""
    end: float = 0.0
    """When it is expected to end, on the clock of the engine's steps."""
    base: float = 0.0
    """Tokens held until then, minus the clock's time."""

    @property
    def span(self) -> "Span":
        """Its place among the worker's spans."""
        return self.end, self.base, self.request, self


Span = tuple[float, float, RequestId, KvHold]
"""One request's use of the cache, on the clock of the engine's steps: when it is expected to end, and its tokens until
then minus the clock's time. Of equal spans, the id decides the order.
"""


class KvPeakForecast:
    """The spans of one worker's requests, by their ends."""

    def __init__(self) -> None:
        self.clock = 0.0
        """Steps that the engine did. No span ends before it."""
        self._spans: list[Span] = []
        self._ends: list[float] = []
        self._bases: list[float] = []
        """Tokens of the spans, in parallel with `_ends`: whole columns are summed much faster than single spans."""
        self._total = 0.0
        """Tokens that all requests would hold if each was at its end."""

    def add(self, request: RequestId, tokens: int, growth: float, most: float = inf) -> KvHold:
        """Add a request that holds `tokens` and is expected to grow by `growth`, in tokens.

        `most`: maximum growth if it goes on.
        """
        hold = KvHold(request, tokens, growth, most)
        self._insert(hold, self.clock + growth, tokens - self.clock)
        return hold

    def start_growth(self, hold: KvHold) -> None:
        """Let a request grow from now on."""
        self.remove(hold)
        self._insert(hold, self.clock + hold.growth, hold.tokens - self.clock)

    def remove(self, hold: KvHold) -> None:
        """Remove a request."""
        self._take_out(bisect_left(self._spans, hold.span))

    def advance(self, steps: float) -> None:
        """Advance the clock by the engine's steps. Requests that should have ended by now go on."""
        self.clock = clock = self.clock + steps
        while self._ends and self._ends[0] < clock:
            _, base, _, hold = self._spans[0]
            grown = base + clock - hold.tokens
            self._take_out(0)
            more = remaining_beyond(hold.growth, hold.most, grown)
            self._insert(hold, clock + max(LEAST_MORE, more), base)

    def _insert(self, hold: KvHold, end: float, base: float) -> None:
        hold.end, hold.base = end, base
        place = bisect_left(self._spans, hold.span)
        self._spans.insert(place, hold.span)
        self._ends.insert(place, end)
        self._bases.insert(place, base)
        self._total += base + end

    def _take_out(self, place: int) -> None:
        end, base, *_ = self._spans[place]
        del self._spans[place], self._ends[place], self._bases[place]
        self._total = self._total - end - base if self._spans else 0.0

    def peak(self, growth: float, enough: float) -> float:
        """Return the peak of the tokens held, with one more request that begins with none and grows by `growth`.

        If the sum of everything ever held does not exceed `enough`, that sum is returned at once. Otherwise this checks
        every end, one of which is the peak: costs O(requests).
        """
        clock, ends = self.clock, self._ends
        most = self._total + growth
        if most <= enough:
            return most
        late = bisect_left(ends, clock + growth)  # from this index on, the new request has ended, too
        latest_first = ends[::-1]
        held = [*map(add, accumulate(reversed(self._bases)), map(mul, count(1), latest_first))]
        after = len(ends) - late
        return max(
            growth,
            max(held[:after], default=0.0) + growth,
            max(map(add, held[after:], latest_first[after:]), default=clock) - clock,
        )

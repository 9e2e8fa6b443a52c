"""What the requests in flight at a worker will hold in its KV cache when they hold most.

Each grows by a token a step until it ends, and then gives all of it back. An engine that is filled to the brim with
young requests runs out of memory as they grow: it has to throw some of them out and compute them again.

How far one grows is foreseen when it is put, and may be too little: whoever asks for much is not believed (`answers`).
One that goes on is foreseen to grow as much again, and so on up to the most that it may have.
"""

from bisect import bisect_left
from itertools import accumulate, count
from math import inf
from operator import add, mul
from typing import Final, NamedTuple

from router.core.model.request import RequestId

LEAST_MORE: Final = 16.0
"""Tokens that one has still to come in any case, whatever it may have: the clock is only that of the average stream."""

Span = tuple[float, float, RequestId]
"""One request's hold, on the clock of the engine's steps: when it is expected to end, and what it holds until then
besides the clock's time."""


class Hold(NamedTuple):
    """What was foreseen of a request, in tokens."""

    tokens: int
    """What it holds when it begins to grow."""
    growth: float
    most: float
    """By which it may grow, if it outlives what was foreseen."""


class KvPeakForecast:
    """The spans of one worker's requests, by their ends."""

    def __init__(self) -> None:
        self.clock = 0.0
        """Steps that the engine did; none of the spans ends before."""
        self._spans: list[Span] = []
        self._ends: list[float] = []
        self._bases: list[float] = []
        """Of the spans, beside them: whole columns are summed much faster than single spans."""
        self._by_request: dict[RequestId, Span] = {}
        self._holds: dict[RequestId, Hold] = {}
        """Of each what was foreseen of it."""
        self._total = 0.0
        """Tokens that all would hold if each were at its end."""

    def put(self, request: RequestId, tokens: int, growth: float, most: float = inf) -> None:
        """A request holds so many tokens and is expected to grow by so many; replaces what was put before.

        `most`: tokens by which it may grow if it goes on.
        """
        self.remove(request)
        self._holds[request] = Hold(tokens, growth, most)
        self.begin(request)

    def begin(self, request: RequestId) -> None:
        """A request that was put grows from now on."""
        if request in self._by_request:
            self._take_out(bisect_left(self._spans, self._by_request[request]))
        hold = self._holds[request]
        self._insert((self.clock + hold.growth, hold.tokens - self.clock, request))

    def remove(self, request: RequestId) -> None:
        """It holds nothing; one that is not here is passed over."""
        span = self._by_request.pop(request, None)
        if span is not None:
            del self._holds[request]
            self._take_out(bisect_left(self._spans, span))

    def advance(self, steps: float) -> None:
        """The engine did so many steps; what should have ended by now goes on."""
        self.clock = clock = self.clock + steps
        while self._ends and self._ends[0] < clock:
            _, base, request = self._spans[0]
            hold = self._holds[request]
            grown = base + clock - hold.tokens
            self._take_out(0)
            self._insert((clock + max(LEAST_MORE, min(grown, hold.most - grown)), base, request))

    def _insert(self, span: Span) -> None:
        end, base, request = span
        self._by_request[request] = span
        place = bisect_left(self._spans, span)
        self._spans.insert(place, span)
        self._ends.insert(place, end)
        self._bases.insert(place, base)
        self._total += base + end

    def _take_out(self, place: int) -> None:
        end, base, _ = self._spans[place]
        del self._spans[place], self._ends[place], self._bases[place]
        self._total = self._total - end - base if self._spans else 0.0

    def peak(self, growth: float, enough: float) -> float:
        """Tokens held at the highest point, with one more request that begins with nothing and grows by `growth`.

        A sum of all that will ever be held is answered at once where it is not above `enough`; else this looks at every
        end, since the highest point is at one of them: costs O(requests).
        """
        clock, ends = self.clock, self._ends
        most = self._total + growth
        if most <= enough:
            return most
        late = bisect_left(ends, clock + growth)  # at the ends from there on the new request has ended, too
        latest_first = ends[::-1]
        held = [*map(add, accumulate(reversed(self._bases)), map(mul, count(1), latest_first))]
        after = len(ends) - late
        return max(
            growth,
            max(held[:after], default=0.0) + growth,
            max(map(add, held[after:], latest_first[after:]), default=clock) - clock,
        )

"""What the requests in flight at a worker will hold in its KV cache when they hold most.

Each grows by a token a step until it ends, and then gives all of it back. An engine that is filled to the brim with
young requests runs out of memory as they grow: it has to throw some of them out and compute them again.
"""

from bisect import bisect_left
from itertools import accumulate, count
from math import inf
from operator import add, mul

from router.core.model import RequestId

Span = tuple[float, float, RequestId]
"""One request's hold, on the clock of the engine's steps: when it is expected to end, and what it holds until then
besides the clock's time."""


class KvForecast:
    """The spans of one worker's requests, by their ends."""

    def __init__(self) -> None:
        self.clock = 0.0
        """Steps that the engine did."""
        self._spans: list[Span] = []
        self._ends: list[float] = []
        self._bases: list[float] = []
        """Of the spans, beside them: whole columns are summed much faster than single spans."""
        self._by_request: dict[RequestId, Span] = {}
        self._total = 0.0
        """Tokens that all would hold if each were at its end."""

    def put(self, request: RequestId, tokens: int, growth: float) -> None:
        """A request holds so many tokens now and is expected to grow by so many; replaces what was put before."""
        self.remove(request)
        end, base = self.clock + growth, tokens - self.clock
        span = self._by_request[request] = end, base, request
        place = bisect_left(self._spans, span)
        self._spans.insert(place, span)
        self._ends.insert(place, end)
        self._bases.insert(place, base)
        self._total += tokens + growth

    def remove(self, request: RequestId) -> None:
        """It holds nothing; one that is not here is passed over."""
        span = self._by_request.pop(request, None)
        if span is None:
            return
        place = bisect_left(self._spans, span)
        del self._spans[place], self._ends[place], self._bases[place]
        end, base, _ = span
        self._total = self._total - end - base if self._spans else 0.0

    def peak(self, growth: float, enough: float) -> float:
        """Tokens held at the highest point, with one more request that begins with nothing and grows by `growth`.

        A sum of all that will ever be held is answered at once where it is not above `enough` and all that is held was
        expected to be, and where `enough` is infinite; else this looks at every end, since the highest point is at one
        of them: costs O(requests).
        """
        clock, ends = self.clock, self._ends
        most = self._total + growth
        if enough == inf or (most <= enough and not (ends and ends[0] < clock)):
            return most
        # Ends before `due` should have been; at those from `late` on the new request has ended, too.
        due, late = bisect_left(ends, clock), bisect_left(ends, clock + growth)
        latest_first = [*reversed(ends[due:]), *[clock] * due]
        held = [*map(add, accumulate(reversed(self._bases)), map(mul, count(1), latest_first))]
        after, beside = len(ends) - late, len(ends) - due
        return max(
            growth,
            max(held[:after], default=0.0) + growth,
            max(map(add, held[after:beside], latest_first[after:beside]), default=clock) - clock,
            max(held[beside:], default=0.0),
        )

"""The requests in flight at one worker: which have not started, and what they will hold of the KV cache.

A stream shows when its request starts. An answer without streaming does not: it is guessed to have started once the
prefill of all requests before it should be over, or when a stream that was sent after it starts.

The forecast of the KV cache says how much of it the requests will use at their peak. Each request grows by one token
per step until it ends, and then releases all its tokens. An engine filled to its limit with young requests runs out of
memory as they grow, so that it has to preempt some and compute them again.

A request's growth is predicted when it is added, and the prediction may be too low: large output limits are not taken
at their word (`output_length`). A request that goes on is predicted to grow as much again, up to its maximum.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator
from itertools import accumulate, count, takewhile
from math import inf
from operator import add, mul
from typing import Final

from router.core.fleet.service_rate import Burst
from router.core.model.load import Load
from router.core.predict.output_length import remaining_beyond

EARLY_PREFILL_SHARE: Final = 0.7
"""Share of the learned prefill time after which prefill is guessed to be over. A late guess would leave the engine
idle, an early one only lets a little more wait there.
"""
LEAST_MORE: Final = 16.0
"""Minimum of the tokens still to come, whatever the maximum: the clock is only that of the average stream."""


class KvShare:
    """What one request holds of the cache, and the prediction of it, in tokens."""

    __slots__ = ("base", "end", "growth", "most", "tokens")

    def __init__(self, tokens: int, growth: float, most: float) -> None:
        self.tokens = tokens
        """Tokens held when it begins to grow."""
        self.growth = growth
        self.most = most
        """Maximum growth, if it outlives the prediction."""
        self.end = 0.0
        """When it is expected to end, on the clock of the engine's steps."""
        self.base = 0.0
        """Tokens held until then, minus the clock's time."""


class KvPeakForecast:
    """What one worker's requests hold, by their ends."""

    def __init__(self) -> None:
        self.clock = 0.0
        """Steps that the engine did. No request is expected to end before it."""
        self._shares: list[KvShare] = []
        """By their ends; of equal ends, in the order in which they were set."""
        self._ends: list[float] = []
        self._bases: list[float] = []
        """Those of `_shares`, in parallel: whole columns are summed much faster than single shares."""
        self._total = 0.0
        """Tokens that all requests would hold if each was at its end."""

    def add(self, tokens: int, growth: float, most: float = inf) -> KvShare:
        """Add a request that holds `tokens` and is expected to grow by `growth`, in tokens.

        `most`: maximum growth if it goes on.
        """
        share = KvShare(tokens, growth, most)
        self._insert(share, self.clock + growth, tokens - self.clock)
        return share

    def start_growth(self, share: KvShare) -> None:
        """Let a request grow from now on."""
        self.remove(share)
        self._insert(share, self.clock + share.growth, share.tokens - self.clock)

    def bring_back(self, share: KvShare, grown: int) -> None:
        """Add a request again that was removed and has grown by so many tokens in all."""
        more = remaining_beyond(share.growth, share.most, grown)
        self._insert(share, self.clock + more, share.tokens + grown - self.clock)

    def remove(self, share: KvShare) -> None:
        """Remove a request."""
        self._take_out(self._shares.index(share, bisect_left(self._ends, share.end)))

    def advance(self, steps: float) -> None:
        """Advance the clock by the engine's steps. Requests that should have ended by now go on."""
        self.clock += steps
        if overdue := bisect_left(self._ends, self.clock):
            self._extend(overdue)

    def _extend(self, overdue: int) -> None:
        """Let the first `overdue` requests go on, taken out at once: an engine may be late for nearly all of them."""
        shares, ends, bases, clock = self._shares, self._ends, self._bases, self.clock
        late, alone, total = shares[:overdue], len(shares) == 1, self._total
        del shares[:overdue], ends[:overdue], bases[:overdue]
        for share in late:
            base = share.base
            more = remaining_beyond(share.growth, share.most, base + clock - share.tokens)
            end = clock + max(LEAST_MORE, more)
            # One by one, as `remove` and `_insert` count: the sum of a single request is exact.
            total = base + end if alone else total - share.end - base + (base + end)
            share.end = end
            if not ends or end >= ends[-1]:  # so are most, where nearly all are late
                shares.append(share)
                ends.append(end)
                bases.append(base)
            else:
                place = bisect_right(ends, end)
                shares.insert(place, share)
                ends.insert(place, end)
                bases.insert(place, base)
        self._total = total

    def _insert(self, share: KvShare, end: float, base: float) -> None:
        share.end, share.base = end, base
        place = bisect_right(self._ends, end)
        self._shares.insert(place, share)
        self._ends.insert(place, end)
        self._bases.insert(place, base)
        self._total += base + end

    def _take_out(self, place: int) -> None:
        share = self._shares.pop(place)
        del self._ends[place], self._bases[place]
        self._total = self._total - share.end - share.base if self._shares else 0.0

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


class InFlight:
    """An attempt as its worker's load counts it, from its dispatch to its end."""

    __slots__ = (
        "answers",
        "burst",
        "cached_tokens",
        "decoding_since",
        "dispatched",
        "earlier_output",
        "fetched_tokens",
        "first_token_at",
        "first_token_seen",
        "guessed",
        "had_place",
        "kv_share",
        "number",
        "output",
        "started",
        "streamed",
        "uncached_tokens",
    )

    def __init__(
        self,
        number: int,
        dispatched: float,
        uncached_tokens: int,
        streamed: bool,
        had_place: bool,
        answers: int,
        cached_tokens: int,
        fetched_tokens: int,
    ) -> None:
        self.number = number
        """Sequence number of its dispatch at this worker."""
        self.dispatched = dispatched
        self.uncached_tokens = uncached_tokens
        self.streamed = streamed
        self.had_place = had_place
        """Whether the batch had a place for it at its dispatch, so that it waited only for prefill until it started."""
        self.started = False
        self.guessed = False
        """Whether its start is only a guess."""
        self.output = 0
        """Output tokens so far."""
        self.earlier_output = 0
        """Those of them that an earlier run has seen."""
        self.burst: Burst | None = None
        """The burst of starts that it belongs to, if its start was seen."""
        self.answers = answers
        """Number of answers that it asks for."""
        self.cached_tokens = cached_tokens
        """Input tokens that the engine need not compute, because its cache holds them."""
        self.fetched_tokens = fetched_tokens
        """Input tokens that the engine need not compute, because it fetches them from a prefill worker."""
        self.first_token_seen = False
        """Whether its first token was seen, so that every token is."""
        self.first_token_at = inf
        """When that was; infinite before."""
        self.decoding_since = inf
        """When its answers are believed to begin, if its start does not show; infinite while it has no
        place in the batch.
        """
        self.kv_share: KvShare
        """What it is predicted to hold of the worker's cache."""

    @property
    def context_tokens(self) -> int:
        """All tokens that a decode step reads for it: its whole input, cached or not, and its output so far."""
        return self.uncached_tokens + self.cached_tokens + self.fetched_tokens + self.output

    @property
    def new_tokens(self) -> int:
        """Input tokens that take room in the engine's KV cache beside what it held: computed or fetched."""
        return self.uncached_tokens + self.fetched_tokens


class InFlightTable:
    """The requests of one worker, in the order of their dispatch, and sums over them."""

    __slots__ = (
        "_dispatches",
        "_placeless",
        "_start_guesses",
        "aside",
        "context_tokens",
        "guessed",
        "head_since",
        "kv_forecast",
        "kv_tokens",
        "requests",
        "seen_answers",
        "unstarted_tokens",
        "waiting",
    )

    def __init__(self) -> None:
        self.requests: dict[InFlight, None] = {}
        self.aside: dict[InFlight, None] = {}
        """Requests that nobody reports on, as their front is away. They are in none of the sums."""
        self.unstarted_tokens = 0
        self.kv_tokens = 0
        """KV tokens held by started requests, without those shared with others."""
        self.context_tokens = 0
        """The sum of the contexts of all requests. What has not started counts as if it had."""
        self.guessed = 0
        """Requests whose start is only a guess."""
        self.head_since = 0.0
        """When the first unstarted request became the first."""
        self.waiting: dict[InFlight, None] = {}
        """The unstarted requests."""
        self.seen_answers = 0
        """Answers of the requests whose first token was seen."""
        self._placeless: deque[InFlight] = deque()
        """Requests that had no place in the batch when they were sent. Some may have one by now, or be gone."""
        self._start_guesses: deque[tuple[float, InFlight]] = deque()
        """Unstarted requests that will never show their start, and when to guess it. Some may be gone."""
        self._dispatches = 0
        self.kv_forecast: Final = KvPeakForecast()

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def unstarted(self) -> int:
        """Number of unstarted requests."""
        return len(self.waiting)

    @property
    def head_tokens(self) -> int:
        """Uncached tokens of the first unstarted request, which is being computed; 0 if there is none."""
        return next(iter(self.waiting)).uncached_tokens if self.waiting else 0

    def unstarted_since(self, time: float) -> int:
        """Return the number of unstarted requests dispatched after this time."""
        return sum(1 for _ in takewhile(lambda flight: flight.dispatched > time, reversed(self.waiting)))

    def add(
        self,
        uncached_tokens: int,
        now: float,
        *,
        streamed: bool,
        had_place: bool,
        answers: int = 1,
        cached_tokens: int = 0,
        fetched_tokens: int = 0,
        output: float = 0.0,
        most_output: float = inf,
    ) -> InFlight:
        """Add a dispatched request. `output`: its predicted output tokens; `most_output`: their maximum."""
        self._dispatches += 1
        flight = InFlight(
            self._dispatches,
            now,
            uncached_tokens,
            streamed,
            had_place,
            answers=answers,
            cached_tokens=cached_tokens,
            fetched_tokens=fetched_tokens,
        )
        if not had_place:
            self._placeless.append(flight)
        if not self.waiting:
            self.head_since = now
        self.requests[flight] = self.waiting[flight] = None
        self.unstarted_tokens += uncached_tokens
        self.context_tokens += flight.context_tokens
        flight.kv_share = self.kv_forecast.add(flight.new_tokens, output, most_output)
        return flight

    def count_output(self, flight: InFlight, tokens: int) -> None:
        """Add output tokens of a request; a negative number takes back an estimate that was too high."""
        flight.output += tokens
        if flight not in self.aside:
            self.context_tokens += tokens

    def next_placeless(self) -> InFlight | None:
        """Remove and return the first request without a place in the batch, because one became free; None if there is
        none.
        """
        while self._placeless:
            flight = self._placeless.popleft()
            if flight in self.requests and not flight.first_token_seen:
                return flight
        return None

    def mark_first_token(self, flight: InFlight, now: float) -> None:
        """Record that a request's first token was seen, unless it was before."""
        if not flight.first_token_seen:
            flight.first_token_seen, flight.first_token_at = True, now
            if flight not in self.aside:
                self.seen_answers += flight.answers

    def without_first_token(self) -> Iterator[InFlight]:
        """Return the requests whose first token was not seen, the latest first."""
        return (flight for flight in reversed(self.requests) if not flight.first_token_seen)

    def guess_at(self, flight: InFlight, time: float) -> None:
        """Schedule the guess that a request has started, at this time or later, after all guesses
        scheduled before it.
        """
        while self._start_guesses and self._start_guesses[-1][1] not in self.waiting:
            self._start_guesses.pop()
        self._start_guesses.append((max(time, self._start_guesses[-1][0]) if self._start_guesses else time, flight))

    @property
    def next_guess(self) -> float:
        """When the next start is to be guessed; infinite if none is."""
        return self._start_guesses[0][0] if self._start_guesses else inf

    def guesses(self, *, until: float = 0.0, before: int = 0) -> Iterator[InFlight]:
        """Remove and yield the requests to be guessed started by now, or dispatched before this sequence number."""
        while self._start_guesses:
            time, flight = self._start_guesses[0]
            waits = flight in self.waiting
            if waits and time > until and flight.number >= before:
                return
            self._start_guesses.popleft()
            if waits:
                yield flight

    def start(self, flight: InFlight, now: float, *, guessed: bool) -> None:
        """Mark an unstarted request as started."""
        self._move_head(flight, now)
        del self.waiting[flight]
        flight.started, flight.guessed = True, guessed
        self.guessed += guessed
        self.unstarted_tokens -= flight.uncached_tokens
        self.kv_tokens += flight.new_tokens
        self.kv_forecast.start_growth(flight.kv_share)

    def remove(self, flight: InFlight, now: float) -> None:
        """Remove a request that ended."""
        if flight in self.aside:
            del self.aside[flight]
            return
        del self.requests[flight]
        if flight.first_token_seen:
            self.seen_answers -= flight.answers
        if flight.started:
            self.guessed -= flight.guessed
            self.kv_tokens -= flight.new_tokens
        else:
            self._move_head(flight, now)
            del self.waiting[flight]
            self.unstarted_tokens -= flight.uncached_tokens
        self.kv_tokens -= flight.output
        self.context_tokens -= flight.context_tokens
        self.kv_forecast.remove(flight.kv_share)

    def set_aside(self, flight: InFlight, now: float) -> None:
        """Leave a request out, as if it had ended, until it is brought back."""
        self.remove(flight, now)
        self.aside[flight] = None

    def bring_back(self, flight: InFlight, now: float) -> None:
        """Count a request again that was set aside, as far as it has come."""
        del self.aside[flight]
        self.requests = _with(self.requests, flight)
        if flight.started:
            self.guessed += flight.guessed
            self.kv_tokens += flight.new_tokens
        else:
            self.waiting = _with(self.waiting, flight)
            self.unstarted_tokens += flight.uncached_tokens
            if next(iter(self.waiting)) is flight:
                self.head_since = now
        if flight.first_token_seen:
            self.seen_answers += flight.answers
        self.kv_tokens += flight.output
        self.context_tokens += flight.context_tokens
        self.kv_forecast.bring_back(flight.kv_share, flight.output)

    def load(
        self, now: float, seconds_per_token: float | None, low_tokens: float, next_output: float, kv_limit: float
    ) -> tuple[Load, float]:
        """Return the load at this time, and when time alone changes it, in seconds; infinite if never.

        `seconds_per_token`: prefill time, for what is left of the request that is computed; None if it may not be
        computed yet. `low_tokens`, `kv_limit`: those of the window. `next_output`: mean output of one more request.
        """
        ahead = float(self.unstarted_tokens)
        low_at = inf
        if self.waiting and seconds_per_token is not None:
            ahead, low_at = self._prefill_left(now, seconds_per_token, low_tokens)
        peak = self.kv_forecast.peak(next_output, kv_limit)
        load = Load(len(self.requests), len(self.waiting), self.unstarted_tokens, ahead, self.guessed, peak)
        return load, min(self.next_guess, low_at)

    def _prefill_left(self, now: float, seconds_per_token: float, low_tokens: float) -> tuple[float, float]:
        """Return the unstarted tokens left to compute, and when no more are left than `low_tokens`.

        Only the first unstarted request counts as being computed. The time is infinite if only a start can bring it
        about.
        """
        first, unstarted = self.head_tokens, self.unstarted_tokens
        done = (now - self.head_since) / (EARLY_PREFILL_SHARE * seconds_per_token)
        ahead = unstarted - min(done, first)
        excess = unstarted - low_tokens
        if 0 < excess <= first:
            time = self.head_since + EARLY_PREFILL_SHARE * (excess + 1) * seconds_per_token
            if time > now:
                return ahead, time
        return ahead, inf

    def _move_head(self, leaving: InFlight, now: float) -> None:
        """Update `head_since` if the first unstarted request is leaving."""
        if next(iter(self.waiting)) is leaving:
            self.head_since = now


def _with(flights: dict[InFlight, None], flight: InFlight) -> dict[InFlight, None]:
    """Return the requests and one more, in the order of their dispatch."""
    return dict.fromkeys(sorted([*flights, flight], key=_number))


def _number(flight: InFlight) -> int:
    return flight.number

"""What is in flight at one worker, and what of it has not started.

A stream shows when it starts. A whole answer does not: it is guessed to have started once the prefill of all before it
should be over, or when a stream that was sent after it starts.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from math import inf

from router.core.fleet.service_rate import Burst
from router.core.model.request import RequestId


@dataclass(slots=True)
class InFlight:
    """A request dispatched to a worker."""

    number: int
    """Which dispatch to this worker it was."""
    dispatched: float
    uncached_tokens: int
    streamed: bool
    had_place: bool
    """Whether there was a place for it, so that until its start it waited for prefill alone."""
    started: bool = False
    guessed: bool = False
    """Whether that is only what is believed."""
    output: int = 0
    burst: Burst | None = None
    """Those that it started with, where its start was seen."""
    answers: int = 1
    """How many it asks for."""
    first_token_seen: bool = False
    """Whether its first token was seen, so that each of its tokens is."""
    decoding_since: float = inf
    """Of one whose start does not show: when its answers are believed to begin; infinite while it has no place."""


class InFlightTable:
    """The requests of one worker, by id and in the order of their dispatch, and sums over them."""

    def __init__(self) -> None:
        self.requests: dict[RequestId, InFlight] = {}
        self.unstarted_tokens = 0
        self.kv_tokens = 0
        """What the started ones hold, without what they share with others."""
        self.guessed = 0
        self.head_since = 0.0
        """When the first of the unstarted ones came to be first."""
        self.waiting: dict[RequestId, InFlight] = {}
        """The unstarted ones."""
        self.seen_answers = 0
        """Of those whose first token was seen."""
        self._placeless: deque[RequestId] = deque()
        """Those for which there was no place when they were sent; some may have one by now, or be gone."""
        self._start_guesses: deque[tuple[float, RequestId]] = deque()
        """Unstarted ones that will never show their start, and when it may be guessed; some may be gone."""
        self._dispatches = 0

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def unstarted(self) -> int:
        """How many."""
        return len(self.waiting)

    @property
    def head_tokens(self) -> int:
        """The uncached tokens of the first of the unstarted, which is computed now; 0 without any."""
        return next(iter(self.waiting.values())).uncached_tokens if self.waiting else 0

    def unstarted_since(self, time: float) -> int:
        """How many of the unstarted were dispatched after this time."""
        return sum(1 for _ in takewhile(lambda flight: flight.dispatched > time, reversed(self.waiting.values())))

    def add(
        self,
        request: RequestId,
        uncached_tokens: int,
        now: float,
        *,
        streamed: bool,
        had_place: bool,
        answers: int = 1,
    ) -> InFlight:
        """A request is dispatched."""
        self._dispatches += 1
        flight = InFlight(self._dispatches, now, uncached_tokens, streamed, had_place, answers=answers)
        if not had_place:
            self._placeless.append(request)
        if not self.waiting:
            self.head_since = now
        self.requests[request] = self.waiting[request] = flight
        self.unstarted_tokens += uncached_tokens
        return flight

    def next_placeless(self) -> InFlight | None:
        """A place fell free, for the first of those that were sent without one; None if there is none."""
        while self._placeless:
            flight = self.requests.get(self._placeless.popleft())
            if flight is not None and not flight.first_token_seen:
                return flight
        return None

    def mark_first_token(self, flight: InFlight) -> None:
        """Its first token is seen."""
        if not flight.first_token_seen:
            flight.first_token_seen = True
            self.seen_answers += flight.answers

    def without_first_token(self) -> Iterator[InFlight]:
        """Those whose first token was not seen, the latest first."""
        return (flight for flight in reversed(self.requests.values()) if not flight.first_token_seen)

    def guess_at(self, request: RequestId, time: float) -> None:
        """Guess that this one has started when it is so late, and when all that may be guessed before it have."""
        while self._start_guesses and self._start_guesses[-1][1] not in self.waiting:
            self._start_guesses.pop()
        self._start_guesses.append((max(time, self._start_guesses[-1][0]) if self._start_guesses else time, request))

    @property
    def next_guess(self) -> float:
        """When the next guess is due; infinite without any."""
        return self._start_guesses[0][0] if self._start_guesses else inf

    def guesses(self, *, until: float = 0.0, before: int = 0) -> Iterator[RequestId]:
        """Take out those that may be guessed by now, or that were dispatched before this number."""
        while self._start_guesses:
            time, request = self._start_guesses[0]
            flight = self.waiting.get(request)
            if flight is not None and time > until and flight.number >= before:
                return
            self._start_guesses.popleft()
            if flight is not None:
                yield request

    def start(self, request: RequestId, now: float, *, guessed: bool) -> InFlight:
        """An unstarted one is unstarted no more."""
        self._move_head(request, now)
        flight = self.waiting.pop(request)
        flight.started, flight.guessed = True, guessed
        self.guessed += guessed
        self.unstarted_tokens -= flight.uncached_tokens
        self.kv_tokens += flight.uncached_tokens
        return flight

    def remove(self, request: RequestId, now: float) -> InFlight:
        """It ended."""
        flight = self.requests.pop(request)
        if flight.first_token_seen:
            self.seen_answers -= flight.answers
        if flight.started:
            self.guessed -= flight.guessed
            self.kv_tokens -= flight.uncached_tokens
        else:
            self._move_head(request, now)
            del self.waiting[request]
            self.unstarted_tokens -= flight.uncached_tokens
        self.kv_tokens -= flight.output
        return flight

    def _move_head(self, leaving: RequestId, now: float) -> None:
        """An unstarted one goes from there: if it was the first, another is now."""
        if next(iter(self.waiting)) == leaving:
            self.head_since = now

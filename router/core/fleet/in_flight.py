"""The requests in flight at one worker, and which of them have not started.

A stream shows when its request starts. An answer without streaming does not: it is guessed to have started once the
prefill of all requests before it should be over, or when a stream that was sent after it starts.
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
    """Sequence number of its dispatch at this worker."""
    dispatched: float
    uncached_tokens: int
    streamed: bool
    had_place: bool
    """Whether the batch had a place for it at its dispatch, so that it waited only for prefill until it started."""
    started: bool = False
    guessed: bool = False
    """Whether its start is only a guess."""
    output: int = 0
    """Output tokens so far."""
    burst: Burst | None = None
    """The burst of starts that it belongs to, if its start was seen."""
    answers: int = 1
    """Number of answers that it asks for."""
    first_token_at: float = inf
    """When its first token was seen; infinite while it was not."""
    decoding_since: float = inf
    """When its answers are believed to begin, if its start does not show; infinite while it has no
    place in the batch.
    """

    @property
    def first_token_seen(self) -> bool:
        """Whether its first token was seen, so that every token is."""
        return self.first_token_at < inf


class InFlightTable:
    """The requests of one worker, by id and in the order of their dispatch, and sums over them."""

    def __init__(self) -> None:
        self.requests: dict[RequestId, InFlight] = {}
        self.unstarted_tokens = 0
        self.kv_tokens = 0
        """KV tokens held by started requests, without those shared with others."""
        self.guessed = 0
        """Requests whose start is only a guess."""
        self.head_since = 0.0
        """When the first unstarted request became the first."""
        self.waiting: dict[RequestId, InFlight] = {}
        """The unstarted requests."""
        self.seen_answers = 0
        """Answers of the requests whose first token was seen."""
        self._placeless: deque[RequestId] = deque()
        """Requests that had no place in the batch when they were sent. Some may have one by now, or be gone."""
        self._start_guesses: deque[tuple[float, RequestId]] = deque()
        """Unstarted requests that will never show their start, and when to guess it. Some may be gone."""
        self._dispatches = 0

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def unstarted(self) -> int:
        """Number of unstarted requests."""
        return len(self.waiting)

    @property
    def head_tokens(self) -> int:
        """Uncached tokens of the first unstarted request, which is being computed; 0 if there is none."""
        return next(iter(self.waiting.values())).uncached_tokens if self.waiting else 0

    def unstarted_since(self, time: float) -> int:
        """Return the number of unstarted requests dispatched after this time."""
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
        """Add a dispatched request."""
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
        """Remove and return the first request without a place in the batch, because one became free; None if there is
        none.
        """
        while self._placeless:
            flight = self.requests.get(self._placeless.popleft())
            if flight is not None and not flight.first_token_seen:
                return flight
        return None

    def mark_first_token(self, flight: InFlight, now: float) -> None:
        """Record that a request's first token was seen, unless it was before."""
        if not flight.first_token_seen:
            flight.first_token_at = now
            self.seen_answers += flight.answers

    def without_first_token(self) -> Iterator[InFlight]:
        """Return the requests whose first token was not seen, the latest first."""
        return (flight for flight in reversed(self.requests.values()) if not flight.first_token_seen)

    def guess_at(self, request: RequestId, time: float) -> None:
        """Schedule the guess that a request has started, at this time or later, after all guesses
        scheduled before it.
        """
        while self._start_guesses and self._start_guesses[-1][1] not in self.waiting:
            self._start_guesses.pop()
        self._start_guesses.append((max(time, self._start_guesses[-1][0]) if self._start_guesses else time, request))

    @property
    def next_guess(self) -> float:
        """When the next start is to be guessed; infinite if none is."""
        return self._start_guesses[0][0] if self._start_guesses else inf

    def guesses(self, *, until: float = 0.0, before: int = 0) -> Iterator[RequestId]:
        """Remove and yield the requests to be guessed started by now, or dispatched before this sequence number."""
        while self._start_guesses:
            time, request = self._start_guesses[0]
            flight = self.waiting.get(request)
            if flight is not None and time > until and flight.number >= before:
                return
            self._start_guesses.popleft()
            if flight is not None:
                yield request

    def start(self, request: RequestId, now: float, *, guessed: bool) -> InFlight:
        """Mark an unstarted request as started."""
        self._move_head(request, now)
        flight = self.waiting.pop(request)
        flight.started, flight.guessed = True, guessed
        self.guessed += guessed
        self.unstarted_tokens -= flight.uncached_tokens
        self.kv_tokens += flight.uncached_tokens
        return flight

    def remove(self, request: RequestId, now: float) -> InFlight:
        """Remove a request that ended."""
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
        """Update `head_since` if the first unstarted request is leaving."""
        if next(iter(self.waiting)) == leaving:
            self.head_since = now

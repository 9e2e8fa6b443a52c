"""Which workers to trust with requests: a circuit breaker for each worker.

A breaker is closed while its worker does its work. When at least half of the recent calls failed, and more than a few,
it opens: the worker gets no requests for a cooldown, which doubles each time. Then the breaker is half-open: one
request is sent as a probe, and its first token closes the breaker. From then on, and also for a worker that was away
and came back, trust grows as in TCP's slow start: with each first token, one more request may be in flight there
unproven.

The scheduler decides which worker to blame. An error response of an engine counts only once another worker has served
the same request, so that a request on which every engine fails opens no breaker.
"""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

OUTCOMES_KEPT: Final = 20
"""Recent calls that a breaker looks at."""
LONGEST_COOLDOWN: Final = 12
"""Maximum cooldown, as a multiple of the first one."""
FULL_TRUST: Final = 16
"""Number of unproven requests from which on only the window limits a worker."""
FIRST_BACKOFF: Final = 0.5
"""Seconds for which a worker without room gets no requests; doubled while it has none."""
LONGEST_BACKOFF: Final = 8.0
"""The most such seconds."""


@dataclass(frozen=True, slots=True)
class SilenceRules:
    """Minimum timeouts for a worker's silence."""

    first_token: float = 120.0
    """Minimum seconds until the first token; 0 for no limit."""
    between_tokens: float = 30.0
    """Minimum seconds between two tokens; 0 for no limit."""


DEFAULT_SILENCE_RULES: Final = SilenceRules()


@dataclass(frozen=True, slots=True)
class HealthRules:
    """When a worker is ejected, and when a request is retried."""

    failures: int = 5
    """How many of a worker's last 20 calls, and at least half of them, must have failed to open its breaker; 0 for
    never.
    """
    cooldown: float = 5.0
    """Seconds for which a breaker stays open the first time."""
    tries: int = 3
    """Workers that a request is sent to at most while they fail; 1 for no retries."""
    budget: float = 0.1
    """Retries per request, on average."""
    floor: int = 10
    """Additional retries in every 10 s."""
    silence: float = 0.0
    """Minimum seconds without any sign of life, if only an answered poll, after which a worker with requests in flight
    counts as silent; 0 for no limit, for example if nothing polls it.
    """
    answers: SilenceRules = DEFAULT_SILENCE_RULES
    """How long a worker may be silent with one request before that request is given up."""


DEFAULT_RULES: Final = HealthRules()


class Condition(StrEnum):
    """State of a breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Health:
    """One worker's breaker, and how far the worker is trusted."""

    __slots__ = (
        "_cooldown",
        "_failures",
        "_first_cooldown",
        "_unproven",
        "condition",
        "outcomes",
        "trust",
        "trusted",
    )

    def __init__(self, rules: HealthRules) -> None:
        self.condition = Condition.CLOSED
        self.trusted = True
        """Whether one more request may be sent."""
        self._failures = rules.failures
        self._first_cooldown = self._cooldown = rules.cooldown
        self.outcomes: deque[bool] = deque(maxlen=OUTCOMES_KEPT)
        """Outcomes of the calls since the first failure; true for success. Read-only for others."""
        self.trust: int | None = None
        """How many unproven requests may be in flight; None if only the window limits them."""
        self._unproven: set[Hashable] = set()
        """The attempts in flight that were sent while trust was limited and have proven nothing yet."""

    def on_dispatch(self, attempt: Hashable) -> None:
        """Record that a request was sent to the worker while its trust is limited."""
        self._unproven.add(attempt)
        self._update_trusted()

    def on_end(self, attempt: Hashable) -> None:
        """Record that a request ended while the worker's trust is limited: it can prove nothing any more."""
        self._unproven.discard(attempt)
        self._update_trusted()

    def on_success(self, attempt: Hashable) -> None:
        """Record a request's first token or whole answer. Requests from before the breaker opened do not close it."""
        if self.trust is not None:
            if attempt in self._unproven:
                self._unproven.remove(attempt)
                self._grow()
                self._update_trusted()
        elif self.outcomes:
            self.outcomes.append(True)

    def on_failure(self, now: float) -> float | None:
        """Record a call that failed by this worker's fault. If it opens the breaker, return until when; else None."""
        if not self._failures or self.condition is Condition.OPEN:
            return None
        self.outcomes.append(False)
        failures = self.outcomes.count(False)
        if self.condition is Condition.CLOSED and not (
            failures >= self._failures and 2 * failures >= len(self.outcomes)
        ):
            return None
        until = now + self._cooldown
        self._cooldown = min(2 * self._cooldown, LONGEST_COOLDOWN * self._first_cooldown)
        self._distrust(Condition.OPEN)
        return until

    def half_open(self) -> None:
        """Make the breaker half-open, after its cooldown or because the worker was away and came back."""
        self._distrust(Condition.HALF_OPEN)

    def reset(self) -> None:
        """Close the breaker and clear its history."""
        self.condition = Condition.CLOSED
        self._cooldown = self._first_cooldown
        self.trust = None
        self._unproven.clear()
        self.outcomes.clear()
        self._update_trusted()

    def _distrust(self, condition: Condition) -> None:
        self.condition = condition
        self.trust = 1
        self._unproven.clear()
        self.outcomes.clear()
        self._update_trusted()

    def _update_trusted(self) -> None:
        """Update `trusted` after a change of what it depends on."""
        self.trusted = self.trust is None or (self.condition is not Condition.OPEN and len(self._unproven) < self.trust)

    def _grow(self) -> None:
        assert self.trust is not None
        self.condition = Condition.CLOSED
        self.trust += 1
        if self.trust > FULL_TRUST:
            self.reset()


class Backoff:
    """How long to send nothing to a worker that reports having no room."""

    __slots__ = ("_next", "until")

    def __init__(self) -> None:
        self.until = 0.0
        self._next = FIRST_BACKOFF

    def begin(self, now: float) -> None:
        """Start the backoff, because the worker refused a request. Refusals during a backoff are of requests sent
        before it.
        """
        if now >= self.until:
            self.until = now + self._next
            self._next = min(2 * self._next, LONGEST_BACKOFF)

    def reset(self) -> None:
        """Return to the first backoff, because the worker began to answer a request."""
        self._next = FIRST_BACKOFF


class SilenceTimeout:
    """Timeouts for a worker's silence, as multiples of its own slowest recent times."""

    __slots__ = ("_first", "_gap", "_rules")

    FACTOR: Final = 10.0
    """Factor of the slowest recent first token; squared, factor of the slowest recent mean time between a stream's
    tokens.
    """
    MEMORY: Final = 0.98
    """Factor by which the slowest time decays with each new one."""

    def __init__(self, rules: SilenceRules) -> None:
        self._rules = rules
        self._first = self._gap = 0.0

    def on_first_token(self, seconds: float) -> None:
        """Record the time until a first token."""
        self._first = max(seconds, self._first * self.MEMORY)

    def on_tokens(self, seconds: float, tokens: int) -> None:
        """Record the time that a stream took for this many tokens."""
        if tokens > 0:
            self._gap = max(seconds / tokens, self._gap * self.MEMORY)

    @property
    def first_token(self) -> float | None:
        """Seconds after which a request without a first token is given up; None for never."""
        return max(self._rules.first_token, self.FACTOR * self._first) if self._rules.first_token else None

    @property
    def between_tokens(self) -> float | None:
        """Seconds of silence after which a stream is given up; None for never."""
        least = self._rules.between_tokens
        return max(least, self.FACTOR**2 * self._gap) if least else None

    def whole(self, output_limit: int | None) -> float | None:
        """Return the seconds after which an answer without streaming is given up; None if its length is unbounded."""
        first, between = self.first_token, self.between_tokens
        if first is None or between is None or output_limit is None:
            return None
        return first + between + self.FACTOR * self._gap * output_limit

"""Measure the queue inside the engine over time: a router's window exists to keep it short.

PURE: the caller passes the time, by the clock that its engine steps on.
"""

from collections import defaultdict
from typing import Final

from workers.engine.engine import Engine

SHALLOW: Final = 16
"""Up to this many waiting requests, their uncached tokens are counted at every change."""
DEEP_SECONDS: Final = 0.5
"""Otherwise they are counted at this interval (s), and whenever the number of requests has changed much."""
MUCH: Final = 0.25
"""By what share the number of waiting requests has changed much."""


class TimeWeighted:
    """A quantity that keeps its value from one change to the next."""

    def __init__(self) -> None:
        self._seconds: defaultdict[float, float] = defaultdict(float)
        self._value = 0.0
        self._since = 0.0

    def change(self, now: float, value: float) -> None:
        """Set the value from `now` on."""
        if value != self._value:
            self._seconds[self._value] += now - self._since
            self._value, self._since = value, now

    def reset(self, now: float) -> None:
        """Forget the values before `now`."""
        self._seconds.clear()
        self._since = now

    def percentile(self, now: float, share: float) -> float:
        """Return the smallest value that was not exceeded for at least this share of the time."""
        self._seconds[self._value] += now - self._since
        self._since = now
        left = share * sum(self._seconds.values())
        for value in sorted(self._seconds):
            left -= self._seconds[value]
            if left <= 1e-9:
                return value
        return self._value


class QueueMeter:
    """The waiting requests of one engine, and their uncached tokens."""

    def __init__(self) -> None:
        self.requests = TimeWeighted()
        self.tokens = TimeWeighted()
        self._count_due = 0.0
        self._counted_requests = 0

    def observe(self, now: float, engine: Engine) -> None:
        """Read the queue. Call after submissions, aborts and steps that may have admitted a request."""
        waiting = engine.waiting
        self.requests.change(now, waiting)
        changed = abs(waiting - self._counted_requests) > MUCH * self._counted_requests
        if waiting <= SHALLOW or changed or now >= self._count_due:
            self._count_due = now + DEEP_SECONDS
            self._counted_requests = waiting
            self.tokens.change(now, engine.waiting_uncached_tokens())

    def reset(self, now: float) -> None:
        """Forget the queue before `now`."""
        self.requests.reset(now)
        self.tokens.reset(now)

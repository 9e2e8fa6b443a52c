"""How much waits in the engine itself, over time: what a router's window is there to keep small.

PURE: times are told, by whatever clock the engine's steps are on.
"""

from collections import defaultdict

from workers.engine.engine import Engine

SHALLOW = 16
"""Waiting requests up to which their uncached tokens are counted at every change."""
DEEP_SECONDS = 0.5
"""How often they are counted when there are more."""


class TimeWeighted:
    """A quantity that holds from one change to the next."""

    def __init__(self) -> None:
        self._seconds: defaultdict[float, float] = defaultdict(float)
        self._value = 0.0
        self._since = 0.0

    def change(self, now: float, value: float) -> None:
        """From now on it is this."""
        if value != self._value:
            self._seconds[self._value] += now - self._since
            self._value, self._since = value, now

    def reset(self, now: float) -> None:
        """Forget what it was before now."""
        self._seconds.clear()
        self._since = now

    def percentile(self, now: float, share: float) -> float:
        """The smallest value that it did not exceed for at least this share of the time."""
        self._seconds[self._value] += now - self._since
        self._since = now
        left = share * sum(self._seconds.values())
        for value in sorted(self._seconds):
            left -= self._seconds[value]
            if left <= 1e-9:
                return value
        return self._value


class QueueMeter:
    """Of one engine: its waiting requests, and their uncached tokens."""

    def __init__(self) -> None:
        self.requests = TimeWeighted()
        self.tokens = TimeWeighted()
        self._count_due = 0.0

    def note(self, now: float, engine: Engine) -> None:
        """Look at it; to be called after submissions, abortions and steps that may have admitted somebody."""
        waiting = engine.waiting
        self.requests.change(now, waiting)
        if waiting <= SHALLOW or now >= self._count_due:
            self._count_due = now + DEEP_SECONDS
            self.tokens.change(now, engine.waiting_uncached_tokens())

    def reset(self, now: float) -> None:
        """Forget what was before now."""
        self.requests.reset(now)
        self.tokens.reset(now)

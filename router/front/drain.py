"""Graceful shutdown: while the router drains, it finishes calls in flight and refuses new ones."""

import time
from collections.abc import Callable
from math import inf


class Drain:
    """Tracks whether the router accepts calls, and how many are in flight."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`seconds`: how long calls in flight have to finish once draining has begun."""
        self._seconds = seconds
        self._clock = clock
        self._until = inf
        self.begun = False
        """Whether draining has begun, so that new calls are refused."""
        self.calls = 0
        """How many calls are in flight; the gateway counts them."""

    def begin(self) -> None:
        """Refuse new calls from now on. To be called once."""
        self.begun = True
        self._until = self._clock() + self._seconds

    @property
    def over(self) -> bool:
        """Whether the router can exit: no call is in flight, or the time to drain is up."""
        return self.begun and (self.idle or self._clock() >= self._until)

    @property
    def idle(self) -> bool:
        """Whether no call is in flight."""
        return not self.calls

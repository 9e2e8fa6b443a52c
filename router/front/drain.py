"""Graceful shutdown: a router that drains is not ready, soon refuses new calls, and finishes those in flight."""

import time
from collections.abc import Callable
from math import inf


class Drain:
    """Tracks whether the router accepts calls, and how many are in flight."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic, *, delay: float = 0.0) -> None:
        """`seconds`: how long calls in flight have to finish once new ones are refused; `delay`: how long new ones are
        still accepted once draining has begun.
        """
        self._seconds = seconds
        self._delay = delay
        self._clock = clock
        self._refuses_from = inf
        self.begun = False
        """Whether draining has begun: the router is no longer ready."""
        self.calls = 0
        """How many calls are in flight; the gateway counts them."""

    def begin(self) -> None:
        """Begin to drain. To be called once."""
        self.begun = True
        self._refuses_from = self._clock() + self._delay

    @property
    def refuses(self) -> bool:
        """Whether new calls are refused."""
        return self.begun and self._clock() >= self._refuses_from

    @property
    def over(self) -> bool:
        """Whether the router can exit: it refuses new calls, and none is in flight or the time to drain is up."""
        return self.refuses and (self.idle or self._clock() >= self._refuses_from + self._seconds)

    @property
    def idle(self) -> bool:
        """Whether no call is in flight."""
        return not self.calls

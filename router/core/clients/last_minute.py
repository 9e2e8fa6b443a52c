"""Sums and maxima over the last minute, in steps of a second: bounded memory, and a constant cost for each addition."""

from collections import deque
from typing import Final

MINUTE: Final = 60.0
"""Seconds that are looked back on; one more may be counted, since what came within a second is kept together."""


class MinuteSums:
    """Two sums of the same happenings."""

    __slots__ = ("_first", "_second", "_seconds")

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, float, float]] = deque()
        """Each second in which anything was added, with what was added in it."""
        self._first = self._second = 0.0

    def add(self, first: float, second: float, now: float) -> None:
        """Add to both; `now` never falls."""
        at = int(now)
        seconds = self._seconds
        if seconds and (last := seconds[-1])[0] == at:
            seconds[-1] = at, last[1] + first, last[2] + second
        else:
            self._forget(now)
            seconds.append((at, first, second))
        self._first += first
        self._second += second

    def totals(self, now: float) -> tuple[float, float]:
        """Both sums over the last minute."""
        self._forget(now)
        return self._first, self._second

    def _forget(self, now: float) -> None:
        seconds = self._seconds
        while seconds and seconds[0][0] < now - MINUTE:
            _, first, second = seconds.popleft()
            self._first -= first
            self._second -= second
        if not seconds:  # no rounding is left over
            self._first = self._second = 0.0


class MinuteMaximum:
    """The largest value of the last minute."""

    __slots__ = ("_falling",)

    def __init__(self) -> None:
        self._falling: deque[tuple[int, float]] = deque()
        """The seconds, oldest first, after which nothing as large came."""

    def add(self, value: float, now: float) -> None:
        """One more value; `now` never falls."""
        falling = self._falling
        while falling and falling[-1][1] <= value:
            falling.pop()
        if not falling or falling[-1][0] != int(now):
            falling.append((int(now), value))

    def largest(self, now: float) -> float:
        """The largest value; 0 if there was none."""
        while self._falling and self._falling[0][0] < now - MINUTE:
            self._falling.popleft()
        return self._falling[0][1] if self._falling else 0.0

"""Sums and maxima over the last minute, in steps of one second, with bounded memory and constant cost per addition."""

from collections import deque
from typing import Final

MINUTE: Final = 60.0
"""Length of the window in seconds. One second more may be counted, because values of one second are kept together."""


class MinuteSums:
    """Two sums over the same events."""

    __slots__ = ("_first", "_second", "_seconds")

    def __init__(self) -> None:
        self._seconds: deque[list[float]] = deque()
        """Each second with an addition, and what was added to both sums in it."""
        self._first = self._second = 0.0

    def add(self, first: float, second: float, now: float) -> None:
        """Add to both sums. `now` must not decrease."""
        at = int(now)
        seconds = self._seconds
        if seconds and (last := seconds[-1])[0] == at:
            last[1] += first
            last[2] += second
        else:
            self._forget(now)
            seconds.append([at, first, second])
        self._first += first
        self._second += second

    def totals(self, now: float) -> tuple[float, float]:
        """Return both sums over the last minute."""
        self._forget(now)
        return self._first, self._second

    def _forget(self, now: float) -> None:
        seconds = self._seconds
        while seconds and seconds[0][0] < now - MINUTE:
            _, first, second = seconds.popleft()
            self._first -= first
            self._second -= second
        if not seconds:  # drop accumulated rounding errors
            self._first = self._second = 0.0


class MinuteMaximum:
    """The largest value of the last minute."""

    __slots__ = ("_falling",)

    def __init__(self) -> None:
        self._falling: deque[tuple[int, float]] = deque()
        """Seconds, oldest first, with their values; each value is larger than all later ones."""

    def add(self, value: float, now: float) -> None:
        """Add a value. `now` must not decrease."""
        falling = self._falling
        while falling and falling[-1][1] <= value:
            falling.pop()
        if not falling or falling[-1][0] != int(now):
            falling.append((int(now), value))

    def largest(self, now: float) -> float:
        """Return the largest value of the last minute; 0 if there was none."""
        while self._falling and self._falling[0][0] < now - MINUTE:
            self._falling.popleft()
        return self._falling[0][1] if self._falling else 0.0

"""The sum and the mean of what was counted in the last seconds."""

from collections import deque
from typing import NamedTuple


class TimedAmount(NamedTuple):
    """An amount and the time at which it was counted."""

    time: float
    amount: float


class SlidingSum:
    """The sum and the mean of the amounts counted within a sliding window of seconds."""

    __slots__ = ("_samples", "_seconds", "total")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._samples: deque[TimedAmount] = deque()
        self.total = 0.0

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def mean(self) -> float:
        """The mean amount; 0 if there is none."""
        return self.total / len(self._samples) if self._samples else 0.0

    def add(self, timed: TimedAmount) -> None:
        """Add an amount. Times must not decrease."""
        self._samples.append(timed)
        self.total += timed.amount

    def advance(self, now: float) -> list[TimedAmount]:
        """Remove and return the amounts that are too old at `now`."""
        dropped = []
        while self._samples and self._samples[0].time <= now - self._seconds:
            dropped.append(self._samples.popleft())
            self.total -= dropped[-1].amount
        if not self._samples:
            self.total = 0.0  # drop the rounding error
        return dropped

"""How late the event loop is: whatever holds it up holds up every stream."""

import asyncio
from collections import deque
from collections.abc import Iterator
from typing import Final, Self

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

INTERVAL_SECONDS: Final = 0.1
"""Seconds between two looks."""
SAMPLES: Final = 300
"""How many the gauge remembers, so that a scrape every half minute misses none."""


class LoopLag(Collector):
    """A timer, as long as it is entered, that notes how much too late it rings."""

    def __init__(self) -> None:
        self._lags: deque[float] = deque(maxlen=SAMPLES)
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        """Begin to look."""
        self._loop = asyncio.get_running_loop()
        self._schedule()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    @property
    def worst(self) -> float:
        """The longest delay of the last half minute, in seconds."""
        return max(self._lags, default=0.0)

    def _schedule(self) -> None:
        due = self._loop.time() + INTERVAL_SECONDS
        self._timer = self._loop.call_at(due, self._measure, due)

    def _measure(self, due: float) -> None:
        self._lags.append(max(0.0, self._loop.time() - due))
        self._schedule()

    def collect(self) -> Iterator[Metric]:
        """The worst of late, and how much there is for the loop to do."""
        lag = GaugeMetricFamily(
            "d2lpm_event_loop_lag_seconds", "Longest delay of the event loop in the last half minute."
        )
        lag.add_metric((), self.worst)
        yield lag
        tasks = GaugeMetricFamily("d2lpm_event_loop_tasks", "Tasks of the event loop; two for each call under way.")
        if self._timer is not None:
            tasks.add_metric((), len(asyncio.all_tasks(self._loop)))
        yield tasks

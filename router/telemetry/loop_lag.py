"""Measures how late the event loop runs its timers: whatever blocks the loop delays every stream."""

import asyncio
from collections import deque
from collections.abc import Iterator
from typing import Final, Self

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

INTERVAL_SECONDS: Final = 0.1
"""Seconds between two measurements."""
SAMPLES: Final = 300
"""Measurements kept: half a minute of them, so that a scrape every 30 seconds misses none."""


class LoopLag(Collector):
    """Measures the delay of a repeated timer while its context is entered."""

    def __init__(self) -> None:
        self._lags: deque[float] = deque(maxlen=SAMPLES)
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._schedule()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    @property
    def worst(self) -> float:
        """The longest delay of the last half minute, in seconds."""
        return max(self._lags, default=0.0)

    def _schedule(self) -> None:
        deadline = self._loop.time() + INTERVAL_SECONDS
        self._timer = self._loop.call_at(deadline, self._measure, deadline)

    def _measure(self, deadline: float) -> None:
        self._lags.append(max(0.0, self._loop.time() - deadline))
        self._schedule()

    def collect(self) -> Iterator[Metric]:
        """Return the longest recent delay and the number of tasks."""
        lag = GaugeMetricFamily(
            "d2lpm_event_loop_lag_seconds", "Longest delay of the event loop in the last half minute."
        )
        lag.add_metric((), self.worst)
        yield lag
        tasks = GaugeMetricFamily("d2lpm_event_loop_tasks", "Tasks in the event loop; two for each call in flight.")
        if self._timer is not None:
            tasks.add_metric((), len(asyncio.all_tasks(self._loop)))
        yield tasks

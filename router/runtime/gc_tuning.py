"""When Python collects garbage cycles: young objects often, old ones only while no call is in flight.

A full collection takes time in proportion to all objects, of which the prefix tree has many, and stalls every stream.
Requests are freed by their reference counts; the cycles left to find are closed connections, of a few KB each.
"""

import asyncio
import gc
from collections.abc import Callable
from typing import Final, Self

from router.runtime.periodic import PeriodicTask

YOUNGEST_THRESHOLD: Final = 10_000
"""Objects allocated, less those freed, before a collection of the youngest generation: about a millisecond of work."""
MIDDLE_THRESHOLD: Final = 5
"""Youngest-generation collections before one of the middle generation."""
NEVER: Final = 1_000_000_000
CHECK_SECONDS: Final = 1.0
INTERVAL_SECONDS: Final = 600.0
"""Least time between two full collections, which wait for a moment without a call in flight."""
MAX_INTERVAL_SECONDS: Final = 3600.0
"""After this time without one, a collection takes place in spite of calls in flight, over new objects only."""


def tune_collector() -> None:
    """Exempt all present objects, collect young ones often, and never start a full collection automatically."""
    gc.freeze()
    gc.set_threshold(YOUNGEST_THRESHOLD, MIDDLE_THRESHOLD, NEVER)


class FullCollections(PeriodicTask):
    """Runs a full garbage collection now and then while the context is entered."""

    def __init__(
        self,
        idle: Callable[[], bool],
        min_interval: float = INTERVAL_SECONDS,
        max_interval: float = MAX_INTERVAL_SECONDS,
    ) -> None:
        """`idle`: whether no call is in flight; the intervals are in seconds."""
        super().__init__(min(CHECK_SECONDS, min_interval))
        self._idle = idle
        self._min_interval = min_interval
        self._max_interval = max_interval
        self.collections = 0
        """Full collections so far."""

    async def __aenter__(self) -> Self:
        """Start the interval before the first collection."""
        self._collected_at = asyncio.get_running_loop().time()
        return await super().__aenter__()

    async def _run_once(self) -> None:
        loop = asyncio.get_running_loop()
        age = loop.time() - self._collected_at
        if age < self._min_interval or not (self._idle() or age >= self._max_interval):
            return
        if self._idle():
            gc.unfreeze()
        gc.collect()
        gc.freeze()
        self._collected_at = loop.time()
        self.collections += 1

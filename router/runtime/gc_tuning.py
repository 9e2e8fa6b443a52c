"""When Python looks for cycles: in what is young often, in what is old only when nobody waits for the router.

A look at everything takes as long as there is much, and the prefix tree is much; all streams stand still meanwhile.
Requests are freed by their reference counts. What is left to find are connections that are no more, a few KB each.
"""

import asyncio
import gc
from collections.abc import Callable
from typing import Final, Self

from router.runtime.periodic import PeriodicTask

YOUNGEST_THRESHOLD: Final = 10_000
"""Objects made, less those freed, after which the youngest are looked at: a millisecond's work."""
MIDDLE_THRESHOLD: Final = 5
"""Of such looks, after how many also what has survived these."""
NEVER: Final = 1_000_000_000
CHECK_SECONDS: Final = 1.0
INTERVAL_SECONDS: Final = 600.0
"""Between two looks at everything, which wait for a moment in which no call is under way ..."""
MAX_INTERVAL_SECONDS: Final = 3600.0
"""... for so long at most. Then what has come since is looked at, which is less."""


def tune_collector() -> None:
    """Look often at what is young, and never of itself at what is there for good."""
    gc.freeze()
    gc.set_threshold(YOUNGEST_THRESHOLD, MIDDLE_THRESHOLD, NEVER)


class FullCollections(PeriodicTask):
    """Looks at everything now and then, as long as it is entered."""

    def __init__(
        self, idle: Callable[[], bool], seldom: float = INTERVAL_SECONDS, latest: float = MAX_INTERVAL_SECONDS
    ) -> None:
        """`idle`: whether no call is under way."""
        super().__init__(min(CHECK_SECONDS, seldom))
        self._idle = idle
        self._min_interval = seldom
        self._max_interval = latest
        self.collections = 0
        """At everything, so far."""

    async def __aenter__(self) -> Self:
        """Begin."""
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

"""Computes the frames of the live page: once for all readers, at most one a second, and only while there are any."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.control.page.frame import frame_json
from router.errors import CapacityError
from router.runtime.metered import Metered
from router.telemetry.explain import RecentDecision
from router.telemetry.report import FairnessReport

log = logging.getLogger(__name__)

UPDATE_SECONDS: Final = 1.0
"""Least time between two frames."""
MOST_OF_A_CORE: Final = 0.03
"""Share of one core that computing frames may take: a frame that costs more delays the next one."""
READER_LIMIT: Final = 32
"""Readers at a time; those beyond get 503."""


class PageFeed(Collector):
    """Gives every reader the latest frame. A slow reader misses frames; none are kept for it."""

    def __init__(
        self,
        report: Callable[[], Awaitable[FairnessReport]],
        decisions: Callable[[], Sequence[RecentDecision]],
        ending: Callable[[], bool],
        least_seconds: float = UPDATE_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`report`: returns what /fairness has; `decisions`: the latest ones; `ending`: whether streams are to end.

        `least_seconds`: between two frames; `clock`: the wall clock in seconds since 1970.
        """
        self._report = report
        self._decisions = decisions
        self._ending = ending
        self._least_seconds = least_seconds
        self._clock = clock
        self._latest: FairnessReport | None = None
        self._frame: bytes | None = None
        """The latest frame, and None while there is no reader."""
        self._changed = asyncio.Event()
        """Set when the next frame is there, or will not come; replaced by another one at each frame."""
        self._task: asyncio.Task[None] | None = None
        self._cost_seconds = 0.0
        """Processor time of the latest frame."""
        self.readers = 0
        """Streams that are open."""
        self.seconds = 0.0
        """Processor time of all frames so far."""

    def check_room(self) -> None:
        """Raise CapacityError if there are as many readers as may be."""
        if self.readers >= READER_LIMIT:
            raise CapacityError(f"The live page has {READER_LIMIT} readers already.", retry_after=UPDATE_SECONDS)

    async def frames(self) -> AsyncGenerator[bytes]:
        """Yield frames from now on, until the router ends."""
        self.readers += 1
        if self._task is None:
            self._task = asyncio.create_task(self._compute())
        try:
            seen: bytes | None = None
            while not self._ending():
                changed = self._changed
                if self._frame is seen:
                    await changed.wait()
                if self._frame is not None and self._frame is not seen:
                    seen = self._frame
                    yield seen
        finally:
            self.readers -= 1
            if not self.readers and self._task is not None:
                self._task.cancel()
                self._task = self._frame = self._latest = None

    def pause_after(self, seconds: float) -> float:
        """Return how long to wait after a frame that took so much processor time, in seconds."""
        return max(self._least_seconds, seconds / MOST_OF_A_CORE)

    async def report(self) -> FairnessReport:
        """Return the report of the latest frame; without readers, one of now."""
        return self._latest or await self._report()

    async def _compute(self) -> None:
        while not self._ending():
            metered = Metered(self._next_frame())
            try:
                self._frame = await metered
            except Exception:  # one failed frame must not end the stream
                log.exception("a frame of the live page failed inside the router")
            self.seconds += metered.seconds
            self._cost_seconds = metered.seconds
            self._wake_readers()
            await asyncio.sleep(self.pause_after(metered.seconds))
        self._wake_readers()

    def _wake_readers(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _next_frame(self) -> bytes:
        self._latest = await self._report()
        return await frame_json(self._latest, self._decisions(), self._clock(), self._cost_seconds)

    def collect(self) -> Iterator[Metric]:
        """The readers of the live page, and what computing its frames took."""
        readers = GaugeMetricFamily("d2lpm_page_readers", "Open streams of the live page.")
        readers.add_metric((), self.readers)
        yield readers
        seconds = CounterMetricFamily("d2lpm_page_cpu_seconds", "Processor time of computing the live page.")
        seconds.add_metric((), self.seconds)
        yield seconds

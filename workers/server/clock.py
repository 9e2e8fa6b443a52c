"""I/O: the time of the emulated machine, by the real clock."""

import asyncio
from time import monotonic


class EmulatedClock:
    """Seconds of a machine that runs `speed` times faster than real time.

    If it runs as fast as possible (0 or infinity), work takes no time, and timeouts take as long as they do in real
    time.
    """

    def __init__(self, speed: float) -> None:
        self._rate = speed if 0 < speed < float("inf") else 1.0
        self._work_factor = 1 / speed if speed else 0.0

    def now(self) -> float:
        """Return emulated seconds since some moment."""
        return monotonic() * self._rate

    def real(self, seconds: float) -> float:
        """Return the real seconds of a timeout."""
        return seconds / self._rate

    async def work(self, seconds: float) -> None:
        """Wait as long as work of so many emulated seconds takes."""
        await asyncio.sleep(seconds * self._work_factor)

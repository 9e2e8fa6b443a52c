"""Tasks that repeat while the router runs."""

import asyncio
import logging
from abc import ABC, abstractmethod
from typing import Self

log = logging.getLogger(__name__)


class PeriodicTask(ABC):
    """Runs again and again from when the context is entered until it is left, with pauses between the runs.

    A run that raises is logged with its traceback, and the next run takes place all the same.
    """

    def __init__(self, interval: float) -> None:
        """`interval`: seconds between two runs, and before the first."""
        self._interval = interval

    @abstractmethod
    async def _run_once(self) -> None:
        """Do the work once. The run is cancelled if the context is left meanwhile."""

    async def _pause(self) -> None:
        """Wait for the next run: for the interval, if nothing else is written here."""
        await asyncio.sleep(self._interval)

    async def __aenter__(self) -> Self:
        """Start the task."""
        self._task = asyncio.create_task(self._run_forever())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop the task."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run_forever(self) -> None:
        while True:
            await self._pause()
            try:
                await self._run_once()
            except Exception:  # one failed run must not end the task
                log.exception("a run of %s failed inside the router", type(self).__name__)

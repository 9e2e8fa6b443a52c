"""What is done again and again for as long as the router runs."""

import asyncio
import logging
from abc import ABC, abstractmethod
from typing import Self

log = logging.getLogger(__name__)


class PeriodicTask(ABC):
    """Takes a turn at regular times, from when the context is entered until it is left.

    A turn that fails is told in the log with its trace, and the next one comes all the same.
    """

    def __init__(self, every: float) -> None:
        """`every`: seconds between two turns, and before the first."""
        self._interval = every

    @abstractmethod
    async def _run_once(self) -> None:
        """Do it once; cancelled in the middle when the context is left."""

    async def __aenter__(self) -> Self:
        """Begin."""
        self._task = asyncio.create_task(self._run_forever())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Take no more turns."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run_forever(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            try:
                await self._run_once()
            except Exception:  # the outermost boundary of a turn
                log.exception("a turn of %s failed inside the router", type(self).__name__)

"""How fairness went: readings of /fairness at regular times, for as long back as they are kept."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from heapq import nlargest
from types import TracebackType
from typing import Final, Self

from router.core.model import ClientId, WorkerId
from router.report import ClientReport, FairnessReport

log = logging.getLogger(__name__)

SECONDS: Final = 10.0
"""Between two readings."""
MOST: Final = 360
"""Readings kept: an hour of them."""
CLIENTS: Final = 100
"""Of a reading, at most: those that wait or run most, and then those that were served most."""


@dataclass(frozen=True, slots=True)
class ClientSample:
    """One client at one time."""

    cost: float
    """Of all it was served so far, in cost units."""
    queued: int
    running: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading."""

    time: float
    """Seconds since 1970."""
    jain: float | None
    clients: dict[ClientId, ClientSample]
    gaps: dict[WorkerId, float | None]
    """The largest difference in service per weight, in cost units; None where nothing bounds it."""


class FairnessHistory:
    """Takes readings for as long as the context is entered."""

    def __init__(
        self,
        read: Callable[[], Awaitable[FairnessReport]],
        every: float = SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`every`: seconds between two readings."""
        self._read = read
        self._every = every
        self._clock = clock
        self._samples: deque[Sample] = deque(maxlen=MOST)
        self._task: asyncio.Task[None] | None = None

    @property
    def samples(self) -> list[Sample]:
        """Oldest first."""
        return list(self._samples)

    async def take(self) -> None:
        """One reading, now."""
        self._samples.append(sample(await self._read(), self._clock()))

    async def __aenter__(self) -> Self:
        """Begin."""
        self._task = asyncio.create_task(self._keep_taking())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop; what was read stays."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _keep_taking(self) -> None:
        while True:
            try:
                await self.take()
            except Exception:  # or there would be no more of them
                log.exception("reading fairness failed inside the router")
            await asyncio.sleep(self._every)


def sample(report: FairnessReport, now: float) -> Sample:
    """What is kept of a report."""

    def rank(entry: tuple[ClientId, ClientReport]) -> tuple[int, float]:
        return entry[1].queued + entry[1].running, entry[1].service.cost

    return Sample(
        now,
        report.jain,
        {
            client: ClientSample(told.service.cost, told.queued, told.running)
            for client, told in nlargest(CLIENTS, report.clients.items(), key=rank)
        },
        {worker: told.service_gap for worker, told in report.workers.items()},
    )

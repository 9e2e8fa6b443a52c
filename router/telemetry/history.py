"""How fairness went: readings of /fairness at regular times, for as long back as they are kept."""

import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from heapq import nlargest
from typing import Final

from router.core.model.request import ClientId, WorkerId
from router.runtime.periodic import Background
from router.telemetry.report import ClientReport, FairnessReport

SAMPLE_SECONDS: Final = 10.0
"""Between two readings."""
SAMPLE_LIMIT: Final = 360
"""Readings kept: an hour of them."""
CLIENT_LIMIT: Final = 100
"""Of a reading, at most: those that wait or run most, and then those that were served most."""


@dataclass(frozen=True, slots=True)
class ClientSample:
    """One client at one time."""

    cost: float
    """Of all it was served so far, in cost units."""
    queued: int
    running: int


@dataclass(frozen=True, slots=True)
class FairnessSample:
    """One reading."""

    time: float
    """Seconds since 1970."""
    jain: float | None
    clients: dict[ClientId, ClientSample]
    gaps: dict[WorkerId, float | None]
    """The largest difference in service per weight, in cost units; None where nothing bounds it."""
    service_lag: float
    """The largest of all clients, in cost units per weight."""
    unserved_rounds: float | None
    """The longest time in fair rounds for which a client that waited was served nothing; None before they are known."""


class FairnessHistory(Background):
    """Takes readings for as long as the context is entered."""

    def __init__(
        self,
        read: Callable[[], Awaitable[FairnessReport]],
        every: float = SAMPLE_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`every`: seconds between two readings."""
        super().__init__(every)
        self._read = read
        self._clock = clock
        self._samples: deque[FairnessSample] = deque(maxlen=SAMPLE_LIMIT)

    @property
    def samples(self) -> list[FairnessSample]:
        """Oldest first."""
        return list(self._samples)

    async def take_sample(self) -> None:
        """One reading, now."""
        self._samples.append(sample(await self._read(), self._clock()))

    async def _turn(self) -> None:
        await self.take_sample()


def sample(report: FairnessReport, now: float) -> FairnessSample:
    """What is kept of a report."""

    def rank(entry: tuple[ClientId, ClientReport]) -> tuple[int, float]:
        return entry[1].queued + entry[1].running, entry[1].service.cost

    return FairnessSample(
        now,
        report.jain,
        {
            client: ClientSample(told.service.cost, told.queued, told.running)
            for client, told in nlargest(CLIENT_LIMIT, report.clients.items(), key=rank)
        },
        {worker: told.service_gap for worker, told in report.workers.items()},
        report.service_lag,
        report.waits.unserved_rounds,
    )

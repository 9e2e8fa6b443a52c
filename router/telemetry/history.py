"""The history of fairness: samples of /fairness taken at regular intervals over the last hour."""

import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from heapq import nlargest
from typing import Final

from router.core.model.request import ClientId, WorkerId
from router.runtime.periodic import PeriodicTask
from router.telemetry.report import ClientReport, FairnessReport

SAMPLE_SECONDS: Final = 10.0
"""Seconds between two samples."""
SAMPLE_LIMIT: Final = 360
"""Samples kept: one hour at `SAMPLE_SECONDS`."""
CLIENT_LIMIT: Final = 100
"""Clients kept in a sample: those with the most queued and running requests, then those with the most service."""


@dataclass(frozen=True, slots=True)
class ClientSample:
    """One client at the time of a sample."""

    cost: float
    """Cost of all its service so far, in cost units."""
    queued: int
    """Requests that wait in the router."""
    running: int
    """Requests at workers."""
    share: float | None = None
    """Its share of the cost of all service in the minute before, 0 to 1; None if nothing was served."""


@dataclass(frozen=True, slots=True)
class CacheSample:
    """Input tokens of all answers that reported how much of their prompt was cached, at all workers that are present.

    The counts of a worker begin when it joins.
    """

    prompt: int
    """Input tokens."""
    predicted: int
    """Input tokens predicted to be cached."""
    actual: int
    """Input tokens that were cached."""


@dataclass(frozen=True, slots=True)
class FairnessSample:
    """Fairness at one time."""

    time: float
    """Seconds since 1970."""
    jain: float | None
    """Jain's index of service per weight over the clients with a lasting backlog; None without any."""
    clients: dict[ClientId, ClientSample]
    gaps: dict[WorkerId, float | None]
    """Service gap of each worker, in cost units per weight; None where nothing bounds it."""
    service_lag: float
    """The largest service lag of a client, in cost units per weight."""
    unserved_rounds: float | None
    """Longest time for which a waiting client was served nothing, in fair rounds; None before these are known."""
    bounds: dict[WorkerId, float | None]
    """What each worker's service gap cannot exceed, in cost units per weight; None where nothing bounds it."""
    queued: int
    """Requests of all clients that wait in the router."""
    running: int
    """Requests of all clients at workers."""
    cache: CacheSample
    """How right predictions of cached tokens were."""


class FairnessHistory(PeriodicTask):
    """Takes samples in the background while its context is entered."""

    def __init__(
        self,
        read: Callable[[], Awaitable[FairnessReport]],
        every: float = SAMPLE_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`every`: seconds between two samples; `clock`: the wall clock in seconds since 1970."""
        super().__init__(every)
        self._read = read
        self._clock = clock
        self._samples: deque[FairnessSample] = deque(maxlen=SAMPLE_LIMIT)

    @property
    def samples(self) -> list[FairnessSample]:
        """The samples, oldest first."""
        return list(self._samples)

    async def take_sample(self) -> None:
        """Take a sample now."""
        self._samples.append(sample(await self._read(), self._clock()))

    async def _run_once(self) -> None:
        await self.take_sample()


def sample(report: FairnessReport, now: float) -> FairnessSample:
    """Reduce a report to what the history keeps."""

    def rank(entry: tuple[ClientId, ClientReport]) -> tuple[int, float]:
        return entry[1].queued + entry[1].running, entry[1].service.cost

    return FairnessSample(
        now,
        report.jain,
        {
            client: ClientSample(entry.service.cost, entry.queued, entry.running, entry.share)
            for client, entry in nlargest(CLIENT_LIMIT, report.clients.items(), key=rank)
        },
        {worker: entry.service_gap for worker, entry in report.workers.items()},
        report.service_lag,
        report.waits.unserved_rounds,
        {worker: entry.service_gap_bound for worker, entry in report.workers.items()},
        sum(entry.queued for entry in report.clients.values()),
        sum(entry.running for entry in report.clients.values()),
        _cache_totals(report),
    )


def _cache_totals(report: FairnessReport) -> CacheSample:
    caches = [entry.cache for entry in report.workers.values() if entry.cache is not None]
    return CacheSample(
        sum(cache.prompt for cache in caches),
        sum(cache.predicted for cache in caches),
        sum(cache.actual for cache in caches),
    )

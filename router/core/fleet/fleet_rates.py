"""The service rates of all workers, and how fast one is compared with the others."""

from collections.abc import Collection
from typing import Final

from router.core.model.request import WorkerId

SPEED_TOLERANCE: Final = 1.25
"""Workers whose service rates differ by at most this factor are equally fast: rates also differ with what is served."""


class FleetRates:
    """Rates by worker, in cost units per second; see `ServiceRate`. Sums over the fleet are single calls."""

    def __init__(self) -> None:
        self._full: dict[WorkerId, float | None] = {}
        """While full; None before that was seen."""
        self._known: dict[WorkerId, float | None] = {}
        """While full, else at least; None before either was seen."""
        self._mean: float | None = None
        """The mean of the rates that count for `speed`; None if none does or one changed since."""
        self._mean_of_full = 0.0

    def set(self, worker: WorkerId, full: float | None, least: float | None) -> None:
        """Set a worker's rate while full and its least rate; None if not known. New workers come last."""
        self._full[worker] = full
        self._known[worker] = full or least
        self._mean = None

    def remove(self, worker: WorkerId) -> None:
        """Forget a worker."""
        self._full.pop(worker, None)
        self._known.pop(worker, None)
        self._mean = None

    def together(self, workers: Collection[WorkerId]) -> float | None:
        """Return the rate of these workers together; None if none is known. Others count as the mean of the known."""
        rates = [*filter(None, map(self._known.__getitem__, workers))]
        return sum(rates) * len(workers) / len(rates) if rates else None

    def speed(self, worker: WorkerId) -> float:
        """Return a worker's rate divided by the mean of the known rates; 1 if it is close to 1 or not known.

        A rate is known for a worker that was seen full, and for one that serves more than the mean of these even so: a
        worker with little to do serves little, however fast it is.
        """
        if self._mean is None:
            self._mean = self._compute_mean()
        rate = self._known[worker]
        if not self._mean or rate is None or (self._full[worker] is None and rate <= self._mean_of_full):
            return 1.0
        speed = rate / self._mean
        return 1.0 if 1 / SPEED_TOLERANCE < speed < SPEED_TOLERANCE else speed

    def _compute_mean(self) -> float:
        """Return the mean of the rates that count; 0 if none was seen full."""
        full = [*filter(None, self._full.values())]
        if not full:
            return 0.0
        self._mean_of_full = sum(full) / len(full)
        least = [rate for worker, rate in self._known.items() if rate is not None and self._full[worker] is None]
        rates = [*full, *[rate for rate in least if rate > self._mean_of_full]]
        return sum(rates) / len(rates)

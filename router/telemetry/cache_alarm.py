"""Logs when the predicted content of a worker's prefix cache turns out wrong, and when it is right again."""

import logging
from collections.abc import Collection, Sequence
from typing import ClassVar, Final

from router.core.cache.cache_mirror import CacheMirror
from router.core.model.commands import Command
from router.core.model.events import Event, WorkerLeft, WorkerReported
from router.core.model.request import WorkerId

log = logging.getLogger(__name__)

REPEAT_SECONDS: Final = 60.0
"""Seconds between two warnings about the same worker."""


class CacheAlarm:
    """Observer that checks a worker's calibration each time the worker reports."""

    event_types: ClassVar[Collection[type[Event]]] = (WorkerReported, WorkerLeft)

    def __init__(self, mirror: CacheMirror) -> None:
        self._mirror = mirror
        self._last_warning: dict[WorkerId, float] = {}
        """Time of the last warning, for each worker whose predictions are wrong now."""

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:  # noqa: ARG002
        if isinstance(event, WorkerLeft):
            self._last_warning.pop(event.worker, None)
        if not isinstance(event, WorkerReported) or event.worker not in self._mirror.caches:
            return
        calibration = self._mirror.cache(event.worker).calibration
        warned = self._last_warning.get(event.worker)
        if not calibration.suspect:
            if self._last_warning.pop(event.worker, None) is not None:
                log.info("worker %s: predictions of its cache are right again", event.worker)
        elif warned is None or now >= warned + REPEAT_SECONDS:
            self._last_warning[event.worker] = now
            log.warning(
                "worker %s: predictions of its cache are off by %.0f %% of the prompt; %s",
                event.worker,
                100 * (calibration.error or 0.0),
                _consequence(calibration.discount),
            )


def _consequence(discount: float) -> str:
    """Return what follows for placements. Predictions that promise too little are not discounted."""
    if discount == 1.0:
        return "more is cached there than predicted"
    return f"less is cached there than predicted, so each counts {100 * discount:.0f} % until they are right"

"""Says in the log when what is believed of a worker's cache proves wrong, and when it is right again."""

import logging
from collections.abc import Collection, Sequence
from typing import ClassVar, Final

from router.core.cache.cache_mirror import CacheMirror
from router.core.model.commands import Command
from router.core.model.events import Event, WorkerLeft, WorkerReported
from router.core.model.request import WorkerId

log = logging.getLogger(__name__)

REPEAT_SECONDS: Final = 60.0
"""How often it is said of one worker while it lasts."""


class CacheAlarm:
    """Observer: looks at a worker's calibration whenever the worker reports."""

    event_types: ClassVar[Collection[type[Event]]] = (WorkerReported, WorkerLeft)

    def __init__(self, mirror: CacheMirror) -> None:
        self._mirror = mirror
        self._last_warning: dict[WorkerId, float] = {}
        """When it was last said of those of which it is so."""

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:  # noqa: ARG002
        """See `Observer`. Of a worker that left, nothing is believed."""
        if isinstance(event, WorkerLeft):
            self._last_warning.pop(event.worker, None)
        if not isinstance(event, WorkerReported) or event.worker not in self._mirror.caches:
            return
        calibration = self._mirror.cache(event.worker).calibration
        said = self._last_warning.get(event.worker)
        if not calibration.suspect:
            if self._last_warning.pop(event.worker, None) is not None:
                log.info("worker %s: predictions of its cache are right again", event.worker)
        elif said is None or now >= said + REPEAT_SECONDS:
            self._last_warning[event.worker] = now
            log.warning(
                "worker %s: predictions of its cache are off by %.0f %% of the prompt; they count %.0f %% until they "
                "are right",
                event.worker,
                100 * (calibration.error or 0.0),
                100 * calibration.discount,
            )

"""The bounds on waiting: how many requests, and for how long; and when a refused client should try again."""

from collections import OrderedDict, deque
from dataclasses import dataclass
from math import ceil

from router.core.model import RequestId

RATE_MEMORY = 64
"""How many departures the measured drain rate looks back on."""
LONGEST_RETRY = 60.0
"""Seconds; a longer promise would be a guess."""


@dataclass(frozen=True, slots=True)
class WaitingLimits:
    """How many requests may wait in all, and how long each, in seconds."""

    requests: int = 5000
    time_to_live: float = 300.0


class WaitingRoom:
    """Every waiting request with the time until which it may wait, in order of arrival."""

    def __init__(self, limits: WaitingLimits) -> None:
        self._limits = limits
        # All wait equally long, so the order of arrival is the order of expiry.
        # A dict finds its first key by walking past all that were deleted before it.
        self._deadlines: OrderedDict[RequestId, float] = OrderedDict()
        self._departures: deque[float] = deque(maxlen=RATE_MEMORY)

    def __len__(self) -> int:
        return len(self._deadlines)

    @property
    def overfull(self) -> bool:
        """Whether more wait than may."""
        return len(self._deadlines) > self._limits.requests

    @property
    def next_deadline(self) -> float | None:
        """When the request that waits longest expires."""
        return next(iter(self._deadlines.values()), None)

    def enter(self, request: RequestId, now: float) -> None:
        """A request begins to wait."""
        self._deadlines[request] = now + self._limits.time_to_live

    def leave(self, request: RequestId, now: float, *, served: bool) -> None:
        """A request waits no more; if it was `served`, the drain rate learns of it."""
        del self._deadlines[request]
        if served:
            self._departures.append(now)

    def expired(self, now: float) -> list[RequestId]:
        """Those whose time is over, longest waiting first; they stay until they `leave`."""
        late = []
        for request, deadline in self._deadlines.items():
            if deadline > now:
                break
            late.append(request)
        return late

    def retry_after(self, now: float) -> float:
        """Seconds until the queue of now should have drained at the measured rate; 1 to `LONGEST_RETRY`."""
        if not self._departures or now <= self._departures[0]:
            return LONGEST_RETRY if self._deadlines else 1.0
        rate = len(self._departures) / (now - self._departures[0])
        return min(LONGEST_RETRY, max(1.0, ceil(len(self._deadlines) / rate)))

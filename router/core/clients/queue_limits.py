"""The bounds on waiting: how much, of whom, and for how long; and when a refused client should try again."""

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, inf
from typing import NamedTuple

from router.core.clients.fair_drop import LongestQueueDrop
from router.core.model.commands import Refusal
from router.core.model.request import ClientId, Request, RequestId

RATE_MEMORY = 64
"""How many departures the measured drain rate looks back on."""
LONGEST_RETRY = 60.0
"""Seconds; a longer promise would be a guess."""


@dataclass(frozen=True, slots=True)
class WaitingLimits:
    """How much may wait, and for how long; a limit of None is none."""

    requests: int = 5000
    time_to_live: float = 300.0
    """Seconds."""
    body_bytes: int | None = None
    """Of the bodies of all that waits."""
    client_requests: int | None = None
    """Of one client."""
    client_bytes: int | None = None
    """Of the bodies of one client."""


class Surplus(NamedTuple):
    """A waiting request that has to go, and why."""

    request: RequestId
    reason: Refusal


class Waiter(NamedTuple):
    """A request that waits."""

    deadline: float
    client: ClientId
    body_bytes: int
    weight: float


class QueueLimits:
    """Every waiting request with the time until which it may wait, in order of arrival, and what each client has."""

    def __init__(self, limits: WaitingLimits) -> None:
        self._limits = limits
        # All wait equally long, so the order of arrival is the order of expiry.
        # A dict finds its first key by walking past all that were deleted before it.
        self._waiters: OrderedDict[RequestId, Waiter] = OrderedDict()
        self.waiters: Mapping[RequestId, Waiter] = self._waiters
        """To be looked at only."""
        self._by_client: dict[ClientId, dict[RequestId, None]] = {}
        self._requests: LongestQueueDrop[ClientId] = LongestQueueDrop()
        self._bytes: LongestQueueDrop[ClientId] = LongestQueueDrop()
        self._departures: deque[float] = deque(maxlen=RATE_MEMORY)

    def __len__(self) -> int:
        return len(self._waiters)

    def waiting_of(self, client: ClientId) -> int:
        """How many of a client's wait."""
        return self._requests.amount_of(client)

    @property
    def next_deadline(self) -> float:
        """When the request that waits longest expires; infinite without any."""
        return next(iter(self._waiters.values())).deadline if self._waiters else inf

    def enter(self, request: Request, now: float, weight: float) -> None:
        """A request begins to wait, of a client of this weight. Whether it may, `surplus` tells."""
        deadline = now + self._limits.time_to_live
        self._waiters[request.id] = Waiter(deadline, request.client, request.body_bytes, weight)
        self._hold(request.id)

    def leave(self, request: RequestId, now: float, *, served: bool) -> None:
        """A request waits no more, if it ever did; if it was `served`, the drain rate learns of it."""
        if request in self._waiters:
            self._drop(request)
            del self._waiters[request]
        if served:
            self._departures.append(now)

    def surplus(self, arrival: RequestId) -> list[Surplus]:
        """What has to `leave`, now that this request came last: nothing, itself, or the newest of those with most.

        A client beyond a limit of its own has its request refused. Where all together are beyond one, the client with
        most by weight of what is exceeded gives way; if that is the one that came, even after others gave way, it alone
        is refused.
        """
        waiter = self._waiters.get(arrival)
        if waiter is None:
            return []
        client, limits = waiter.client, self._limits
        if _exceeds(self._requests.amount_of(client), limits.client_requests) or _exceeds(
            self._bytes.amount_of(client), limits.client_bytes
        ):
            return [Surplus(arrival, Refusal.CLIENT_FULL)]
        displaced: list[RequestId] = []
        fits = True
        while fits and (exceeded := self._exceeded()) is not None:
            largest = exceeded.largest_holder()
            fits = largest is not None and exceeded.weighted_amount(largest) > exceeded.weighted_amount(client)
            if fits and largest is not None:
                newest = next(reversed(self._by_client[largest]))
                self._drop(newest)
                displaced.append(newest)
        for request in reversed(displaced):
            self._hold(request)
        return (
            [Surplus(each, Refusal.DISPLACED) for each in displaced] if fits else [Surplus(arrival, Refusal.QUEUE_FULL)]
        )

    def expired(self, now: float) -> list[RequestId]:
        """Those whose time is over, longest waiting first; they stay until they `leave`."""
        late = []
        for request, waiter in self._waiters.items():
            if waiter.deadline > now:
                break
            late.append(request)
        return late

    def retry_after(self, now: float) -> float:
        """Seconds until the queue of now should have drained at the measured rate; 1 to `LONGEST_RETRY`."""
        if not self._departures or now <= self._departures[0]:
            return LONGEST_RETRY if self._waiters else 1.0
        rate = len(self._departures) / (now - self._departures[0])
        return min(LONGEST_RETRY, max(1.0, ceil(len(self._waiters) / rate)))

    def _exceeded(self) -> LongestQueueDrop[ClientId] | None:
        """What all together have more of than they may."""
        if _exceeds(self._requests.total, self._limits.requests):
            return self._requests
        return self._bytes if _exceeds(self._bytes.total, self._limits.body_bytes) else None

    def _hold(self, request: RequestId) -> None:
        """Count a waiting request as the newest of its client's."""
        _, client, body_bytes, weight = self._waiters[request]
        self._by_client.setdefault(client, {})[request] = None
        self._requests.add(client, 1, weight)
        self._bytes.add(client, body_bytes, weight)

    def _drop(self, request: RequestId) -> None:
        """Count it no more."""
        _, client, body_bytes, _ = self._waiters[request]
        client_requests = self._by_client[client]
        del client_requests[request]
        if not client_requests:
            del self._by_client[client]
        self._requests.remove(client, 1)
        self._bytes.remove(client, body_bytes)


def _exceeds(amount: int, limit: int | None) -> bool:
    return limit is not None and amount > limit

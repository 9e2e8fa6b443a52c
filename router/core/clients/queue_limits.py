"""Limits on waiting: how many requests may wait, of each client and in total, for how long, and when to retry."""

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, inf
from typing import Final, NamedTuple

from router.core.clients.fair_drop import LongestQueueDrop
from router.core.model.commands import Refusal
from router.core.model.request import ClientId, Request, RequestId

RATE_MEMORY: Final = 64
"""Departures from which the drain rate is measured."""
LONGEST_RETRY: Final = 60.0
"""Seconds; a longer estimate would be a guess."""


@dataclass(frozen=True, slots=True)
class WaitingLimits:
    """How much may wait, and for how long. None is no limit."""

    requests: int = 5000
    time_to_live: float = 300.0
    """Seconds."""
    body_bytes: int | None = None
    """Total body bytes of all waiting requests."""
    client_requests: int | None = None
    """Requests of one client."""
    client_bytes: int | None = None
    """Body bytes of one client."""


class Surplus(NamedTuple):
    """A waiting request that must leave, and why."""

    request: RequestId
    reason: Refusal


class Waiter:
    """A waiting request. Never changes."""

    __slots__ = ("body_bytes", "client", "deadline", "weight")

    def __init__(self, deadline: float, client: ClientId, body_bytes: int, weight: float) -> None:
        self.deadline = deadline
        self.client = client
        self.body_bytes = body_bytes
        self.weight = weight


class QueueLimits:
    """All waiting requests with their deadlines, in order of arrival, and how much of the queue each client holds."""

    def __init__(self, limits: WaitingLimits) -> None:
        self._limits = limits
        # All requests have the same time to live, so the order of arrival is the order of expiry.
        # Not a plain dict, which finds its first key by walking past all keys deleted before it.
        self._waiters: OrderedDict[RequestId, Waiter] = OrderedDict()
        self.waiters: Mapping[RequestId, Waiter] = self._waiters
        """Read-only view."""
        self._by_client: dict[ClientId, dict[RequestId, None]] = {}
        self._requests: LongestQueueDrop[ClientId] = LongestQueueDrop()
        self._bytes: LongestQueueDrop[ClientId] = LongestQueueDrop()
        self._departures: deque[float] = deque(maxlen=RATE_MEMORY)
        self.count_dispatch: Final = self._departures.append
        """Count a dispatch at this time for the drain rate, of a request that did not wait."""

    def __len__(self) -> int:
        return len(self._waiters)

    @property
    def next_deadline(self) -> float:
        """When the request that waits longest expires; infinite if none waits."""
        return next(iter(self._waiters.values())).deadline if self._waiters else inf

    def enter(self, request: Request, now: float, weight: float) -> None:
        """Add a waiting request of a client with this weight. Call `surplus` to learn whether it may stay."""
        deadline = now + self._limits.time_to_live
        waiter = self._waiters[request.id] = Waiter(deadline, request.client, request.body_bytes, weight)
        self._hold(request.id, waiter)

    def leave(self, request: RequestId, now: float, *, served: bool) -> None:
        """Remove a request, if it waits. `served`: whether it counts for the drain rate."""
        if (waiter := self._waiters.pop(request, None)) is not None:
            self._drop(request, waiter)
        if served:
            self._departures.append(now)

    def surplus(self, arrival: RequestId) -> list[Surplus]:
        """Return the requests that must `leave` after this arrival: none, the arrival itself, or the newest of other
        clients.

        A client beyond a limit of its own has its request refused. While a total limit is exceeded, the client with the
        most by weight of the exceeded resource gives up its newest request. If that client is the one of the arrival,
        even after others gave way, only the arrival is refused.
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
                self._drop(newest, self._waiters[newest])
                displaced.append(newest)
        for request in reversed(displaced):
            self._hold(request, self._waiters[request])
        return (
            [Surplus(each, Refusal.DISPLACED) for each in displaced] if fits else [Surplus(arrival, Refusal.QUEUE_FULL)]
        )

    def expired(self, now: float) -> list[RequestId]:
        """Return the expired requests, the longest waiting first. They stay until they `leave`."""
        late = []
        for request, waiter in self._waiters.items():
            if waiter.deadline > now:
                break
            late.append(request)
        return late

    def retry_after(self, now: float) -> float:
        """Return the seconds in which the current queue should drain at the measured rate, from 1
        to `LONGEST_RETRY`.
        """
        if not self._departures or now <= self._departures[0]:
            return LONGEST_RETRY if self._waiters else 1.0
        rate = len(self._departures) / (now - self._departures[0])
        return min(LONGEST_RETRY, max(1.0, ceil(len(self._waiters) / rate)))

    def _exceeded(self) -> LongestQueueDrop[ClientId] | None:
        """Return the amounts of the first total that exceeds its limit, or None."""
        if _exceeds(self._requests.total, self._limits.requests):
            return self._requests
        return self._bytes if _exceeds(self._bytes.total, self._limits.body_bytes) else None

    def _hold(self, request: RequestId, waiter: Waiter) -> None:
        """Count a waiting request as its client's newest."""
        client, weight = waiter.client, waiter.weight
        self._by_client.setdefault(client, {})[request] = None
        self._requests.add(client, 1, weight)
        self._bytes.add(client, waiter.body_bytes, weight)

    def _drop(self, request: RequestId, waiter: Waiter) -> None:
        """Stop counting a waiting request."""
        client = waiter.client
        client_requests = self._by_client[client]
        del client_requests[request]
        if not client_requests:
            del self._by_client[client]
        self._requests.remove(client, 1)
        self._bytes.remove(client, waiter.body_bytes)


def _exceeds(amount: int, limit: int | None) -> bool:
    return limit is not None and amount > limit

"""The waiting requests of one pool, in order of arrival and by the size of their inputs."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterator
from typing import NamedTuple

from router.core.model.request import Request, RequestId


class WeighedRequest(NamedTuple):
    """A waiting request; they sort by weight, and of equals by arrival."""

    weight: int
    """Its estimated input, in tokens: what it adds to a rank's load at first."""
    arrival: int
    """Unique."""
    request: Request


class RouteQueue:
    """The requests of one route."""

    __slots__ = ("by_arrival", "by_weight")

    def __init__(self) -> None:
        # Sorted lists: to remove one of 10,000 moves 80 KB at most, and to read the first ones costs next to nothing.
        self.by_arrival: list[WeighedRequest] = []
        self.by_weight: list[WeighedRequest] = []


class WaitingPool:
    """The waiting requests by route."""

    def __init__(self) -> None:
        self._routes: dict[str, RouteQueue] = {}
        self._waiting: dict[RequestId, WeighedRequest] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return (each.request for queue in self._routes.values() for each in queue.by_arrival)

    def __getitem__(self, request: RequestId) -> Request:
        return self._waiting[request].request

    @property
    def heads(self) -> list[WeighedRequest]:
        """The first request of each route, in order of arrival."""
        return sorted([queue.by_arrival[0] for queue in self._routes.values()], key=_arrival)

    def add(self, request: Request, weight: int) -> None:
        """Add a request of this many input tokens."""
        self._arrivals += 1
        weighed = self._waiting[request.id] = WeighedRequest(weight, self._arrivals, request)
        queue = self._routes.setdefault(request.route, RouteQueue())
        queue.by_arrival.append(weighed)
        insort(queue.by_weight, weighed)

    def remove(self, request: RequestId) -> Request:
        """Remove and return a request."""
        weighed = self._waiting.pop(request)
        route = weighed.request.route
        queue = self._routes[route]
        del queue.by_arrival[bisect_left(queue.by_arrival, weighed.arrival, key=_arrival)]
        del queue.by_weight[bisect_left(queue.by_weight, weighed)]
        if not queue.by_arrival:
            del self._routes[route]
        return weighed.request

    def first_arrived(self, routes: Collection[str], count: int) -> list[WeighedRequest]:
        """Return the `count` requests of these routes that arrived first."""
        queues = self._queues(routes)
        if len(queues) == 1:
            return queues[0].by_arrival[:count]
        return sorted([weighed for queue in queues for weighed in queue.by_arrival[:count]], key=_arrival)[:count]

    def heaviest(self, routes: Collection[str], count: int) -> list[WeighedRequest]:
        """Return the `count` largest requests of these routes, the largest first."""
        found = [weighed for queue in self._queues(routes) for weighed in queue.by_weight[-count:]]
        return sorted(found, reverse=True)[:count]

    def lightest(self, routes: Collection[str], count: int) -> list[WeighedRequest]:
        """Return the `count` smallest requests of these routes, the smallest first."""
        found = [weighed for queue in self._queues(routes) for weighed in queue.by_weight[:count]]
        return sorted(found)[:count]

    def around(self, routes: Collection[str], tokens: float) -> list[WeighedRequest]:
        """Return of each of these routes the largest request of at most this many tokens, and the smallest beyond."""
        found: list[WeighedRequest] = []
        for queue in self._queues(routes):
            beyond = bisect_right(queue.by_weight, tokens, key=_weight)
            found += queue.by_weight[max(0, beyond - 1) : beyond + 1]
        return found

    def _queues(self, routes: Collection[str]) -> list[RouteQueue]:
        return [queue for route, queue in self._routes.items() if route in routes]


def _arrival(weighed: WeighedRequest) -> int:
    return weighed.arrival


def _weight(weighed: WeighedRequest) -> int:
    return weighed.weight

"""The waiting requests of one pool, in order of arrival and by the size of their inputs."""

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
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

    __slots__ = ("by_weight", "waiting")

    def __init__(self) -> None:
        # An OrderedDict, because a plain dict finds its first key by walking past all deleted ones.
        self.waiting: OrderedDict[RequestId, WeighedRequest] = OrderedDict()
        """In order of arrival."""
        self.by_weight: list[WeighedRequest] = []


class WaitingPool:
    """The waiting requests by route."""

    def __init__(self) -> None:
        self._routes: dict[str, RouteQueue] = {}
        self._route_of: dict[RequestId, str] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._route_of)

    def __iter__(self) -> Iterator[Request]:
        return (each.request for queue in self._routes.values() for each in queue.waiting.values())

    def __getitem__(self, request: RequestId) -> Request:
        return self._routes[self._route_of[request]].waiting[request].request

    @property
    def heads(self) -> list[WeighedRequest]:
        """The first request of each route, in order of arrival."""
        return sorted([next(iter(queue.waiting.values())) for queue in self._routes.values()], key=_arrival)

    def add(self, request: Request, weight: int) -> None:
        """Add a request of this many input tokens."""
        self._arrivals += 1
        self._route_of[request.id] = request.route
        weighed = WeighedRequest(weight, self._arrivals, request)
        queue = self._routes.setdefault(request.route, RouteQueue())
        queue.waiting[request.id] = weighed
        insort(queue.by_weight, weighed)

    def remove(self, request: RequestId) -> Request:
        """Remove and return a request."""
        route = self._route_of.pop(request)
        queue = self._routes[route]
        weighed = queue.waiting.pop(request)
        del queue.by_weight[bisect_left(queue.by_weight, weighed)]
        if not queue.waiting:
            del self._routes[route]
        return weighed.request

    def first_arrived(self, routes: Collection[str], count: int) -> list[WeighedRequest]:
        """Return the `count` requests of these routes that arrived first."""
        queues = self._queues(routes)
        found = [weighed for queue in queues for weighed in islice(queue.waiting.values(), count)]
        return found if len(queues) == 1 else sorted(found, key=_arrival)[:count]

    def heaviest(self, routes: Collection[str], count: int) -> list[WeighedRequest]:
        """Return the `count` largest requests of these routes, the largest first."""
        found = [weighed for queue in self._queues(routes) for weighed in queue.by_weight[-count:]]
        return sorted(found, reverse=True)[:count]

    def lightest(self, routes: Collection[str], count: int) -> list[WeighedRequest]:
        """Return the `count` smallest requests of these routes, the smallest first."""
        found = [weighed for queue in self._queues(routes) for weighed in queue.by_weight[:count]]
        return sorted(found)[:count]

    def around(self, routes: Collection[str], tokens: float) -> Iterable[WeighedRequest]:
        """Yield of each of these routes the largest request of at most this many tokens, and the smallest beyond."""
        for queue in self._queues(routes):
            beyond = bisect_right(queue.by_weight, tokens, key=_weight)
            yield from queue.by_weight[max(0, beyond - 1) : beyond + 1]

    def _queues(self, routes: Collection[str]) -> list[RouteQueue]:
        return [queue for route, queue in self._routes.items() if route in routes]


def _arrival(weighed: WeighedRequest) -> int:
    return weighed.arrival


def _weight(weighed: WeighedRequest) -> int:
    return weighed.weight

"""The waiting requests of one pool, in order of arrival and by the size of their inputs."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterator, Sequence
from typing import Final, NamedTuple

from router.core.model.request import Request, RequestId

MANY: Final = 64
"""A request is looked for among as many of the oldest first: most often it is one of them that goes."""


class WeighedRequest(NamedTuple):
    """A waiting request; they sort by weight, and of equals by arrival."""

    weight: int
    """Its estimated input, in tokens: what it adds to a rank's load at first."""
    arrival: int
    """Unique."""
    request: Request


class OldestRequests:
    """The oldest requests of a route, up to a number, in order of weight. Each arrival or departure costs O(log n)."""

    __slots__ = ("by_weight", "count")

    def __init__(self, by_arrival: Sequence[WeighedRequest], count: int) -> None:
        self.count = count
        self.by_weight = sorted(by_arrival[:count])

    def added(self, by_arrival: Sequence[WeighedRequest]) -> None:
        """Take in that the last of these requests arrived."""
        if len(by_arrival) <= self.count:
            insort(self.by_weight, by_arrival[-1])

    def removed(self, weighed: WeighedRequest, place: int, by_arrival: Sequence[WeighedRequest]) -> None:
        """Take in that a request was removed from this place; these are left."""
        if place < self.count:
            del self.by_weight[bisect_left(self.by_weight, weighed)]
            if len(by_arrival) >= self.count:
                insort(self.by_weight, by_arrival[self.count - 1])


class RouteQueue:
    """The requests of one route."""

    __slots__ = ("_oldest", "_sorts_all", "by_arrival", "by_weight")

    def __init__(self, *, sorts_all: bool) -> None:
        # Sorted lists: to remove one of 10,000 moves 80 KB at most, and to read the first ones costs next to nothing.
        self.by_arrival: list[WeighedRequest] = []
        self.by_weight: list[WeighedRequest] = []
        """Empty unless all requests are to be sorted."""
        self._sorts_all = sorts_all
        self._oldest: dict[int, OldestRequests] = {}
        """By how many they are at most."""

    def add(self, weighed: WeighedRequest) -> None:
        """Add a request that arrived after all others."""
        self.by_arrival.append(weighed)
        if self._sorts_all:
            insort(self.by_weight, weighed)
        for oldest in self._oldest.values():
            oldest.added(self.by_arrival)

    def remove(self, weighed: WeighedRequest) -> None:
        """Remove a request."""
        by_arrival = self.by_arrival
        end = MANY if len(by_arrival) > MANY and weighed.arrival < by_arrival[MANY].arrival else len(by_arrival)
        place = bisect_left(by_arrival, weighed.arrival, 0, end, key=_arrival)
        del by_arrival[place]
        if self._sorts_all:
            del self.by_weight[bisect_left(self.by_weight, weighed)]
        for oldest in self._oldest.values():
            oldest.removed(weighed, place, by_arrival)

    def oldest_by_weight(self, count: int) -> Sequence[WeighedRequest]:
        """Return the `count` requests that arrived first, in order of weight."""
        if count not in self._oldest:
            self._oldest[count] = OldestRequests(self.by_arrival, count)
        return self._oldest[count].by_weight


class WaitingPool:
    """The waiting requests by route."""

    def __init__(self, *, sorts_all: bool) -> None:
        """`sorts_all`: whether `heaviest`, `lightest` and `around` will be asked for."""
        self._sorts_all = sorts_all
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
        queue = self._routes.get(request.route)
        if queue is None:
            queue = self._routes[request.route] = RouteQueue(sorts_all=self._sorts_all)
        queue.add(weighed)

    def remove(self, request: RequestId) -> Request:
        """Remove and return a request."""
        weighed = self._waiting.pop(request)
        route = weighed.request.route
        queue = self._routes[route]
        queue.remove(weighed)
        if not queue.by_arrival:
            del self._routes[route]
        return weighed.request

    def first_arrived(self, routes: Collection[str], count: int) -> list[WeighedRequest]:
        """Return the `count` requests of these routes that arrived first, in order of arrival."""
        found = [weighed for queue in self._queues(routes) for weighed in queue.by_arrival[:count]]
        return sorted(found, key=_arrival)[:count]

    def first_by_weight(self, routes: Collection[str], count: int) -> Sequence[WeighedRequest]:
        """Return the same requests, in order of weight."""
        queues = self._queues(routes)
        return queues[0].oldest_by_weight(count) if len(queues) == 1 else sorted(self.first_arrived(routes, count))

    def heaviest(self, routes: Collection[str], count: int) -> list[WeighedRequest]:
        """Return the `count` largest requests of these routes, in order of weight."""
        return sorted([weighed for queue in self._queues(routes) for weighed in queue.by_weight[-count:]])[-count:]

    def lightest(self, routes: Collection[str], count: int) -> list[WeighedRequest]:
        """Return the `count` smallest requests of these routes, in order of weight."""
        return sorted([weighed for queue in self._queues(routes) for weighed in queue.by_weight[:count]])[:count]

    def around(self, routes: Collection[str], tokens: float) -> list[WeighedRequest]:
        """Return of each of these routes the largest request of at most this many tokens, and the smallest beyond, in
        order of weight.
        """
        found: list[WeighedRequest] = []
        for queue in self._queues(routes):
            beyond = bisect_right(queue.by_weight, tokens, key=_weight)
            found += queue.by_weight[max(0, beyond - 1) : beyond + 1]
        return sorted(found)

    def _queues(self, routes: Collection[str]) -> list[RouteQueue]:
        return [queue for route, queue in self._routes.items() if route in routes]


def _arrival(weighed: WeighedRequest) -> int:
    return weighed.arrival


def _weight(weighed: WeighedRequest) -> int:
    return weighed.weight

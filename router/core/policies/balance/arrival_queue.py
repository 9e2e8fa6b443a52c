"""Waiting requests by client in order of arrival, and the clients of a priority class in order.

A queue keeps one sorted list of clients per priority class. A client is in that of its class, at a *place* no later
than that of its first request, and may be in others. Whoever reads a list corrects what is out of date as far as it
reads: so the removal of a first request costs nothing more.

The first requests of all clients of a class are merged from these lists, some more than are asked for, and kept: most
often the next choice finds one of them gone, and nothing else changed.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush, heapreplace
from operator import itemgetter
from sys import maxsize
from typing import Final, Protocol

from router.core.model.request import ClientId
from router.core.policies.deficit.eligibility import PRIORITY_CLASSES, ROUND_ROBIN_CLASSES
from router.core.policies.dlpm.home_pool import PooledRequest
from router.core.policies.dlpm.queues_by_client import QueuesByClient

Arrived = tuple[int, PooledRequest]
"""A request and its arrival, which is unique."""
_request: Final = itemgetter(1)
AHEAD: Final = 4
"""If the kept requests of a class are used up, this many times as many are merged as are asked for."""
ClientPlace = tuple[int, int, "ClientArrivals"]
"""Where a client comes among the clients of its priority class: its last turn where clients take turns, else the
arrival of its first request, or less; its number in the queue, which is unique; and its requests."""


class WaitingClients(Protocol):
    """What `Eligibility` knows of the clients that wait."""

    def waiting_priority_class(self, client: ClientId, /) -> int | None:
        """Return a client's priority class; None if it is not eligible."""

    def last_turn(self, client: ClientId, /) -> int:
        """Return a number that rises with each of the client's turns, unique to it."""


class ClientArrivals:
    """The requests of one client in a queue, in order of arrival."""

    __slots__ = ("client", "number", "places", "requests")

    def __init__(self, client: ClientId, number: int) -> None:
        self.client = client
        self.number = number
        self.requests: list[Arrived] = []
        self.places: list[ClientPlace | None] = [None] * PRIORITY_CLASSES
        """By priority class, its place in that list; None if it is missing there."""


class FirstArrived:
    """The requests of a priority class in a queue that arrived first, over all its clients."""

    __slots__ = ("changes", "requests", "until")

    def __init__(self, requests: list[Arrived], until: int, changes: int) -> None:
        self.requests = requests
        """In order of arrival."""
        self.until = until
        """All requests of the class that arrived up to here are among them, as far as classes have not changed."""
        self.changes = changes
        """How many changes of priority classes are taken in."""

    def add(self, waiting: PooledRequest, *, of_class: bool) -> None:
        """Take in that a request entered the queue."""
        requests, arrival = self.requests, waiting.arrival
        if arrival <= self.until:
            if not requests or arrival > requests[-1][0]:
                self.until = arrival - 1
            elif of_class:
                insort(requests, (arrival, waiting))

    def remove(self, arrival: int) -> None:
        """Take in that a request left the queue."""
        requests = self.requests
        place = bisect_left(requests, (arrival,))
        if place < len(requests) and requests[place][0] == arrival:
            del requests[place]

    def exchange(self, own: Sequence[Arrived], most: int, *, of_class: bool) -> None:
        """Take in whether these, all requests of a client, are of the class now. `most`: how many are kept."""
        own = own[: bisect_left(own, (self.until + 1,))]
        if not own:
            return
        known = {arrival for arrival, _ in own}
        requests = [each for each in self.requests if each[0] not in known]
        if of_class:
            requests += own
            requests.sort()
            if len(requests) > most:
                self.until = requests[most - 1][0]
                del requests[most:]
        self.requests = requests


class ArrivalQueue:
    """The requests that are at home at one worker, or of one route that may go to any."""

    def __init__(self, eligibility: WaitingClients, by_client: QueuesByClient) -> None:
        """`eligibility` knows the priority class and the last turn of each waiting client. `by_client`: shared by the
        queues that learn together of new priority classes.
        """
        self._eligibility = eligibility
        self._by_client = by_client
        self._changes = by_client.changes
        self._clients: dict[ClientId, ClientArrivals] = {}
        self._places: tuple[list[ClientPlace], ...] = tuple([] for _ in range(PRIORITY_CLASSES))
        self._numbers = 0
        self._first: dict[int, FirstArrived] = {}
        """By priority class, as far as they were asked for."""

    def __len__(self) -> int:
        return len(self._clients)

    def add(self, waiting: PooledRequest) -> None:
        """Add a request."""
        client = waiting.request.client
        own_class = self._eligibility.waiting_priority_class(client)
        for priority_class, first in self._first.items():
            first.add(waiting, of_class=own_class == priority_class)
        arrivals = self._clients.get(client)
        if arrivals is None:
            self._numbers += 1
            arrivals = self._clients[client] = ClientArrivals(client, self._numbers)
            arrivals.requests.append((waiting.arrival, waiting))
            self._by_client.enter(client, self)
            if own_class is not None:
                self._place(arrivals, own_class, self._key(arrivals, own_class))
            return
        insort(arrivals.requests, (waiting.arrival, waiting))
        if arrivals.requests[0][1] is waiting:
            self._advance(arrivals, waiting.arrival)

    def _advance(self, arrivals: ClientArrivals, arrival: int) -> None:
        """A client's first request is one that arrived earlier."""
        for priority_class, place in enumerate(arrivals.places):
            if place is not None and priority_class not in ROUND_ROBIN_CLASSES and place[0] > arrival:
                self._remove_place(place, priority_class)
                self._place(arrivals, priority_class, arrival)

    def remove(self, waiting: PooledRequest) -> None:
        """Remove a request."""
        for first in self._first.values():
            first.remove(waiting.arrival)
        arrivals = self._clients[waiting.request.client]
        requests = arrivals.requests
        if requests[0][1] is waiting:  # most often, and its neighbours need not be looked at
            del requests[0]
        else:
            del requests[bisect_left(requests, (waiting.arrival,))]
        if not requests:
            del self._clients[arrivals.client]
            self._by_client.leave(arrivals.client, self)
            for priority_class, place in enumerate(arrivals.places):
                if place is not None:
                    self._remove_place(place, priority_class)

    def take_in_class(self, client: ClientId, priority_class: int) -> None:
        """Let a client that waits here be found in its new priority class."""
        arrivals = self._clients[client]
        if arrivals.places[priority_class] is None:
            self._place(arrivals, priority_class, self._key(arrivals, priority_class))

    def _key(self, arrivals: ClientArrivals, priority_class: int) -> int:
        """Return by what a client comes among those of its class now: later, it never comes earlier by it."""
        if priority_class in ROUND_ROBIN_CLASSES:
            return self._eligibility.last_turn(arrivals.client)
        return arrivals.requests[0][0]

    def _place(self, arrivals: ClientArrivals, priority_class: int, key: int) -> None:
        place = arrivals.places[priority_class] = (key, arrivals.number, arrivals)
        insort(self._places[priority_class], place)

    def _remove_place(self, place: ClientPlace, priority_class: int) -> None:
        places = self._places[priority_class]
        del places[bisect_left(places, place)]

    def clients(self, priority_class: int) -> Iterator[ClientArrivals]:
        """Yield the clients of a priority class: where they take turns, by their last turn, else by their first
        request. No request may come or go meanwhile.
        """
        places, eligibility, number = self._places[priority_class], self._eligibility, 0
        while number < len(places):
            known, _, arrivals = places[number]
            key = self._key(arrivals, priority_class)
            if eligibility.waiting_priority_class(arrivals.client) != priority_class:
                del places[number]
                arrivals.places[priority_class] = None
            elif key != known:
                del places[number]
                self._place(arrivals, priority_class, key)
            else:
                yield arrivals
                number += 1

    def of(self, client: ClientId) -> Sequence[Arrived]:
        """Return the requests of a client, in order of arrival."""
        arrivals = self._clients.get(client)
        return () if arrivals is None else arrivals.requests

    def first_requests(self, priority_class: int, count: int, before: int) -> list[Arrived]:
        """Return the first `count` requests of a class in which clients do not take turns, in order of arrival, as far
        as they arrived before `before`.
        """
        if before < maxsize:  # most often there are none
            places = self._places[priority_class]
            if not places or places[0][0] >= before:
                return []
            return _first_arrived(self.clients(priority_class), count, before)
        first = self._first.get(priority_class)
        if first is None or not self._take_changes(first, priority_class, count):
            return self._merge(priority_class, count).requests[:count]
        if len(first.requests) < count and first.until < maxsize:
            return self._merge(priority_class, AHEAD * count).requests[:count]
        return first.requests[:count]

    def _merge(self, priority_class: int, count: int) -> FirstArrived:
        """Find the first `count` requests of a class again."""
        requests = _first_arrived(self.clients(priority_class), count, maxsize)
        until = maxsize if len(requests) < count else requests[-1][0]
        first = self._first[priority_class] = FirstArrived(requests, until, self._changes.count)
        return first

    def _take_changes(self, first: FirstArrived, priority_class: int, count: int) -> bool:
        """Bring the first requests of a class up to date, if few clients have another class now."""
        if first.changes != self._changes.count:
            if (changed := self._changes.since(first.changes)) is None:
                return False
            for client in dict.fromkeys(changed):
                of_class = self._eligibility.waiting_priority_class(client) == priority_class
                first.exchange(self.of(client), AHEAD * count, of_class=of_class)
            first.changes = self._changes.count
        return True


def oldest(
    queues: Sequence[ArrivalQueue], priority_class: int, count: int, eligibility: WaitingClients
) -> list[PooledRequest]:
    """Return the first `count` requests of this priority class that wait in any of these queues, the oldest first.

    Where clients take turns, only those of the client whose turn it is. A request may wait in several of the queues.
    """
    if priority_class in ROUND_ROBIN_CLASSES:
        firsts = [arrivals.client for queue in queues if (arrivals := next(queue.clients(priority_class), None))]
        if not firsts:
            return []
        client = min(firsts, key=eligibility.last_turn)
        found = [queue.of(client)[:count] for queue in queues]
    else:
        found, before = [], maxsize
        for queue in queues:
            found.append(queue.first_requests(priority_class, count, before))
            if len(found[-1]) == count:
                before = found[-1][-1][0]
    found = [each for each in found if each]
    if len(found) == 1:
        return [*map(_request, found[0])]
    distinct = {arrival: waiting for each in found for arrival, waiting in each}
    return [distinct[arrival] for arrival in sorted(distinct)[:count]]


def _first_arrived(clients: Iterator[ClientArrivals], count: int, before: int) -> list[Arrived]:
    """Return the first `count` requests of these clients, which come in the order of their first requests, as far as
    they arrived before `before`.
    """
    found: list[Arrived] = []
    merged: list[tuple[int, int, list[Arrived]]] = []  # of each client: its next request's arrival and place
    upcoming = next(clients, None)
    first = maxsize if upcoming is None else upcoming.requests[0][0]
    while len(found) < count:
        if upcoming is not None and (not merged or first < merged[0][0]):
            if first >= before:
                break
            requests = upcoming.requests
            found.append(requests[0])
            if len(requests) > 1:
                heappush(merged, (requests[1][0], 1, requests))
            upcoming = next(clients, None)
            first = maxsize if upcoming is None else upcoming.requests[0][0]
        elif merged:
            arrival, place, requests = merged[0]
            if arrival >= before:
                break
            found.append(requests[place])
            place += 1
            if place < len(requests):
                heapreplace(merged, (requests[place][0], place, requests))
            else:
                heappop(merged)
        else:
            break
    return found

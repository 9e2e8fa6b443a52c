"""Waiting requests of many clients at one worker, each client's by longest prefix match.

The match of a waiting request changes with the worker's cache, and is exact whenever it is asked for, at a
cost that does not grow with the number that wait: growth is reported for the requests that it concerns
(`match_grew`), and loss is found when a request comes to the head: what is recorded of it is an upper bound.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from typing import NamedTuple

from router.core.model import ClientId, Request, RequestId


@dataclass(slots=True)
class Entry:
    """A waiting request."""

    request: Request
    arrival: int
    matched: int
    """Chunks; at least the true match."""


class Rank(NamedTuple):
    """The sort key of a request: longer match first, then earlier arrival."""

    unmatched: int
    arrival: int
    request: RequestId


class LongestMatchQueue:
    """For every client, a heap of its waiting requests."""

    def __init__(self, watch: Callable[[Request], int], unwatch: Callable[[RequestId], None]) -> None:
        """`watch` answers a request's match of now, in chunks, and begins to report its growth."""
        self._watch = watch
        self._unwatch = unwatch
        self._entries: dict[RequestId, Entry] = {}
        self._unmatched: dict[RequestId, Entry] = {}
        """Those that nothing was compared with yet: whoever waits alone is served without a match."""
        self._heaps: dict[ClientId, list[Rank]] = {}
        self._counts: dict[ClientId, int] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def clients(self) -> Collection[ClientId]:
        """The clients that have a request here, in the order in which their backlogs began."""
        return self._counts.keys()

    @property
    def requests(self) -> Collection[RequestId]:
        """All that wait, in order of arrival."""
        return self._entries.keys()

    def push(self, request: Request) -> None:
        """One more waits."""
        self._arrivals += 1
        entry = Entry(request, self._arrivals, 0)
        self._entries[request.id] = self._unmatched[request.id] = entry
        self._counts[request.client] = self._counts.get(request.client, 0) + 1

    def remove(self, request: RequestId) -> Request:
        """One waits no more."""
        entry = self._entries.pop(request)
        if self._unmatched.pop(request, None) is None:
            self._unwatch(request)
        client = entry.request.client
        self._counts[client] -= 1
        if not self._counts[client]:
            del self._counts[client]
            self._heaps.pop(client, None)
        return entry.request

    def match_grew(self, requests: Iterable[RequestId]) -> None:
        """Take in the longer match of these watched requests."""
        for request in requests:
            entry = self._entries[request]
            entry.matched = self._watch(entry.request)
            self._rank(entry)

    def longest(self, clients: Collection[ClientId]) -> Request | None:
        """The request with the longest match among those of these clients; of equals, the earliest."""
        if len(self._entries) == 1:
            (entry,) = self._entries.values()
            return entry.request if entry.request.client in clients else None
        for entry in self._unmatched.values():
            entry.matched = self._watch(entry.request)
            self._rank(entry)
        self._unmatched.clear()
        heads = [self._head(client) for client in clients]
        heapify(heads)
        while heads:
            entry = self._entries[heads[0].request]
            matched = self._watch(entry.request)
            if matched == entry.matched:
                return entry.request
            entry.matched = matched
            self._rank(entry)
            heapreplace(heads, self._head(entry.request.client))
        return None

    def _rank(self, entry: Entry) -> None:
        client = entry.request.client
        heap = self._heaps.setdefault(client, [])
        if len(heap) > 2 * self._counts[client]:
            # Ranks below the head outlive their requests: a client that never ran dry would heap them up.
            heap[:] = dict.fromkeys(filter(self._holds, heap))
            heapify(heap)
        heappush(heap, Rank(-entry.matched, entry.arrival, entry.request.id))

    def _holds(self, rank: Rank) -> bool:
        """Whether a rank is still true of a waiting request."""
        entry = self._entries.get(rank.request)
        return entry is not None and rank == (-entry.matched, entry.arrival, entry.request.id)

    def _head(self, client: ClientId) -> Rank:
        """The client's first rank that holds; those before it are dropped."""
        heap = self._heaps[client]
        while not self._holds(heap[0]):
            heappop(heap)
        return heap[0]

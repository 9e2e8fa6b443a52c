"""The waiting requests of one client: in order of arrival, and the longest prefix match first."""

from heapq import heapify, heappop, heappush
from typing import NamedTuple

from router.core.model.request import ClientId, Request
from router.core.policies.deficit.eligibility import PRIORITY_CLASSES


class RequestRank(NamedTuple):
    """The sort key of a request among its client's: longer match first, then earlier arrival."""

    unmatched: int
    arrival: int
    push: int
    """Unique among the requests of a queue, even if a request is pushed twice."""
    entry: "WaitingEntry"


ClientRank = tuple[int, RequestRank]
"""The sort key of a client in a priority class: its last turn, 0 where clients do not take turns, and the rank of its
first request."""


class WaitingEntry:
    """A waiting request."""

    __slots__ = ("arrival", "client_queue", "gone", "passed", "push", "rank", "request")

    def __init__(self, request: Request, arrival: int, push: int, client_queue: "ClientQueue") -> None:
        self.request = request
        self.arrival = arrival
        self.push = push
        self.client_queue = client_queue
        self.rank: RequestRank | None = None
        """The current rank; None before the first match and after removal."""
        self.passed = 0
        """How often another request went ahead because this one did not fit."""
        self.gone = False


class ClientQueue:
    """The waiting requests of one client, while it has any."""

    __slots__ = ("_first", "_order", "client", "offered", "ranks", "waiting")

    def __init__(self, client: ClientId) -> None:
        self.client = client
        self.waiting = 0
        """The number of waiting requests."""
        self._order: list[WaitingEntry] = []
        """Entries in order of arrival. Some are gone, and so are all before index `_first`. (An empty deque takes 600
        bytes.)"""
        self._first = 0
        self.ranks: list[RequestRank] = []
        """A heap of ranks. Some are stale."""
        self.offered: list[ClientRank | None] = [None] * PRIORITY_CLASSES
        """By priority class, the rank by which the queue finds this client, or an earlier one; None if the client is
        not in this heap."""

    def add(self, entry: WaitingEntry) -> None:
        """Add a waiting request."""
        self.waiting += 1
        self._order.append(entry)
        if len(self._order) > 2 * self.waiting + 16:
            self._order = [each for each in self._order if not each.gone]
            self._first = 0

    def close(self) -> None:
        """Drop references to removed entries, which refer to this object, when no request waits."""
        self._order = []
        self.ranks = []
        self.offered = [None] * PRIORITY_CLASSES

    @property
    def oldest(self) -> WaitingEntry:
        """The waiting request that arrived first."""
        while self._order[self._first].gone:
            self._first += 1
        return self._order[self._first]

    def rank(self, rank: RequestRank) -> None:
        """Add the rank of a waiting request."""
        if len(self.ranks) > 2 * self.waiting:
            # Stale ranks below the head would pile up for a client that always has a request waiting.
            self.ranks = [each for each in self.ranks if each.entry.rank is each]
            heapify(self.ranks)
        heappush(self.ranks, rank)

    @property
    def first(self) -> RequestRank:
        """The rank of its first request; all are ranked."""
        ranks = self.ranks
        while (first := ranks[0]).entry.rank is not first:  # it is stale
            heappop(ranks)
        return first

"""Waiting requests of many clients, of which the one with the longest prefix match goes first.

Which client may go, and before whom, is its *standing*, a small number that is told from outside: lower goes first,
None may not go. Among clients of equal standing the longest match decides, then the earlier arrival. The choice is
exact whenever it is made, at a cost that grows neither with the requests nor with the clients that wait: matches are
reported when they change, and of what was noted down before, what holds no more is found out at the head.

By match alone, a request that nothing like it was computed for would wait for as long as its client sends others; so
now and then a client's oldest goes.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final, NamedTuple

from router.core.model import ClientId, PassedOver, Request, RequestId
from router.core.policy import Fits, Turn

STANDINGS: Final = 2
"""How many different standings there are: 0 and 1."""
LOOK_PAST: Final = 8
"""Requests that do not fit which one choice looks past at most."""


@dataclass(slots=True)
class Entry:
    """A waiting request."""

    request: Request
    arrival: int
    matched: int = 0
    """Chunks."""
    passed: int = 0
    """How often another went in its turn because it did not fit."""


class Backlogged:
    """What waits of one client, in order of arrival, and how many have gone since it began to wait."""

    __slots__ = ("gone", "waiting")

    def __init__(self) -> None:
        self.gone = 0
        # A dict finds its first key by walking past all that were deleted before it.
        self.waiting: OrderedDict[RequestId, Entry] = OrderedDict()


class Rank(NamedTuple):
    """The sort key of a request: longer match first, then earlier arrival."""

    unmatched: int
    arrival: int
    request: RequestId
    client: ClientId


class Firsts:
    """Clients in the order of their first requests.

    What is kept of a client is a rank no later than that of its first request. So nothing is to be done when the first
    one goes, or loses its match: a rank that is no longer true is found out when it comes to the head.
    """

    __slots__ = ("heap", "offered")

    def __init__(self) -> None:
        self.heap: list[Rank] = []
        self.offered: dict[ClientId, Rank] = {}
        """By client the one rank in the heap that counts."""

    def offer(self, rank: Rank) -> None:
        """A client is to be found here by this rank, and by no other."""
        self.offered[rank.client] = rank
        heappush(self.heap, rank)
        if len(self.heap) > 2 * len(self.offered) + 16:
            self.heap[:] = self.offered.values()
            heapify(self.heap)

    def replace(self, rank: Rank) -> None:
        """The client at the head is to be found by this later rank."""
        self.offered[rank.client] = rank
        heapreplace(self.heap, rank)

    def drop(self) -> Rank:
        """The client at the head is not to be found here."""
        rank = heappop(self.heap)
        del self.offered[rank.client]
        return rank

    def head(self) -> Rank | None:
        """The earliest rank that counts."""
        while self.heap:
            rank = self.heap[0]
            if self.offered.get(rank.client) is rank:
                return rank
            heappop(self.heap)
        return None


class LongestMatchQueue:
    """For every client a heap of its requests, and for every standing a heap of the clients' first ones."""

    def __init__(
        self,
        watch: Callable[[Request], int],
        unwatch: Callable[[RequestId], None],
        standing: Callable[[ClientId], int | None],
        patience: int = 32,
        oldest_every: int = 0,
    ) -> None:
        """`watch` answers a request's match of now, in chunks, and begins to report its changes (`match_changed`).

        A request that does not fit is passed over `patience` times; then room is kept for it. Every so manieth time
        that a client has its turn, `oldest_every`, its oldest request goes, whatever its match; with 0 never.
        """
        self._watch = watch
        self._unwatch = unwatch
        self._standing = standing
        self._patience = patience
        self._oldest_every = oldest_every
        self._entries: dict[RequestId, Entry] = {}
        self._unmatched: dict[RequestId, Entry] = {}
        """Those that nothing was compared with yet: whoever waits alone is served without a match."""
        self._heaps: dict[ClientId, list[Rank]] = {}
        self._firsts = tuple(Firsts() for _ in range(STANDINGS))
        self._sidelined: dict[ClientId, None] = {}
        """Those that came to the head of a standing that they did not have; the others are among all of them."""
        self._backlogs: dict[ClientId, Backlogged] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request: RequestId) -> bool:
        return request in self._entries

    @property
    def requests(self) -> Collection[RequestId]:
        """All that wait, in order of arrival."""
        return self._entries.keys()

    def push(self, request: Request, arrival: int | None = None) -> None:
        """One more waits; `arrival` is its place among equals, if that is not the last."""
        self._arrivals += 1
        entry = Entry(request, self._arrivals if arrival is None else arrival)
        self._entries[request.id] = self._unmatched[request.id] = entry
        backlog = self._backlogs.get(request.client)
        if backlog is None:
            backlog = self._backlogs[request.client] = Backlogged()
        backlog.waiting[request.id] = entry

    def remove(self, request: RequestId) -> Request:
        """One waits no more."""
        entry = self._entries.pop(request)
        client = entry.request.client
        backlog = self._backlogs[client]
        del backlog.waiting[request]
        backlog.gone += 1
        if not backlog.waiting:
            del self._backlogs[client]
            self._heaps.pop(client, None)
            for firsts in self._firsts:
                firsts.offered.pop(client, None)
            self._sidelined.pop(client, None)
        if self._unmatched.pop(request, None) is None:
            self._unwatch(request)
        return entry.request

    def match_changed(self, requests: Iterable[RequestId]) -> None:
        """Take in the new match of these watched requests."""
        for request in requests:
            if request not in self._unmatched:
                entry = self._entries[request]
                matched = self._watch(entry.request)
                if matched != entry.matched:
                    self._rank(entry, matched)

    def stand(self, client: ClientId) -> None:
        """Take in the new standing of a client.

        Unless it was found at the head with the old one, it is among those of the new one already.
        """
        if client in self._sidelined:
            del self._sidelined[client]
            if head := self._head(self._heaps[client]):
                for firsts in self._firsts:
                    if client not in firsts.offered:
                        firsts.offer(head)

    def longest(self, fits: Fits) -> Turn | None:
        """See the function of this name."""
        return longest((self,), fits)

    @property
    def only(self) -> Request | None:
        """The request that waits here, if it waits alone and may go."""
        if len(self._entries) != 1:
            return None
        (entry,) = self._entries.values()
        return entry.request if self._standing(entry.request.client) is not None else None

    def first(self, standing: int) -> Rank | None:
        """The rank of the first request of this standing."""
        if self._unmatched:
            for entry in self._unmatched.values():
                self._rank(entry, self._watch(entry.request))
            self._unmatched.clear()
        firsts = self._firsts[standing]
        while (rank := firsts.head()) is not None:
            head = self._head(self._heaps[rank.client])
            if head is None:
                firsts.drop()
            elif head is not rank:
                firsts.replace(head)
            elif self._standing(rank.client) != standing:
                self._sideline(firsts)
            else:
                break
        return rank

    def set_aside(self, standing: int) -> Entry:
        """Take the first of this standing out, and with it its client, to look at what comes after it."""
        return self._entries[self._sideline(self._firsts[standing]).request]

    def put_back(self, entry: Entry, *, passed: bool) -> None:
        """Undo `set_aside`; another went in its turn if it was `passed`."""
        entry.passed += passed
        self.stand(entry.request.client)

    def may_be_passed(self, request: RequestId) -> bool:
        """Whether others may go in its turn."""
        return self._entries[request].passed < self._patience

    def turn_of(self, request: RequestId, fits: Fits) -> Request | None:
        """What goes when this request is first: now and then its client's oldest, if that fits, and else itself."""
        first = self._entries[request].request
        backlog = self._backlogs[first.client]
        if self._oldest_every and backlog.gone % self._oldest_every == self._oldest_every - 1:
            oldest = next(iter(backlog.waiting.values())).request
            if fits(oldest):
                return oldest
        return first if fits(first) else None

    def _rank(self, entry: Entry, matched: int) -> None:
        """Give a request with this match its place among its client's."""
        entry.matched = matched
        client = entry.request.client
        heap = self._heaps.get(client)
        if heap is None:
            heap = self._heaps[client] = []
        elif len(heap) > 2 * len(self._backlogs[client].waiting):
            # Ranks below the head outlive their requests: a client that never ran dry would heap them up.
            heap[:] = dict.fromkeys(filter(self._holds, heap))
            heapify(heap)
        rank = Rank(-matched, entry.arrival, entry.request.id, client)
        heappush(heap, rank)
        if heap[0] is rank:
            self._lead(rank)

    def _lead(self, rank: Rank) -> None:
        """Let a client be found by this rank, where it would be found later."""
        client = rank.client
        for firsts in self._firsts:
            offered = firsts.offered.get(client)
            if rank < offered if offered is not None else client not in self._sidelined:
                firsts.offer(rank)

    def _sideline(self, firsts: Firsts) -> Rank:
        """Take out the client at the head of a standing."""
        rank = firsts.drop()
        self._sidelined[rank.client] = None
        return rank

    def _holds(self, rank: Rank) -> bool:
        """Whether a rank is still true of a waiting request."""
        entry = self._entries.get(rank.request)
        return entry is not None and rank.unmatched == -entry.matched and rank.arrival == entry.arrival

    def _head(self, heap: list[Rank]) -> Rank | None:
        """A client's first rank that holds, if it has one; those before it are dropped."""
        while heap and not self._holds(heap[0]):
            heappop(heap)
        return heap[0] if heap else None


def longest(queues: Sequence[LongestMatchQueue], fits: Fits) -> Turn | None:
    """The request whose turn it is in these queues together, or one that fits in its stead; None if none may go now.

    Those that were passed over are counted as such, so this is to be asked when the answer will go.
    """
    if len(queues) == 1 and len(queues[0]) == 1:
        only = queues[0].only
        return Turn(only) if only is not None and fits(only) else None
    aside: list[tuple[LongestMatchQueue, Entry]] = []
    request = _choose(queues, fits, aside)
    for queue, entry in aside:
        queue.put_back(entry, passed=request is not None)
    return None if request is None else Turn(request, tuple(PassedOver(e.request.id, "did not fit") for _, e in aside))


def _choose(
    queues: Sequence[LongestMatchQueue], fits: Fits, aside: list[tuple[LongestMatchQueue, Entry]]
) -> Request | None:
    """Find the next; what does not fit is set aside."""
    for standing in range(STANDINGS):
        while True:
            firsts = [(rank, n) for n, queue in enumerate(queues) if (rank := queue.first(standing)) is not None]
            if not firsts:
                break
            rank, n = min(firsts)
            queue = queues[n]
            request = queue.turn_of(rank.request, fits)
            if request is not None:
                return request
            if not queue.may_be_passed(rank.request) or len(aside) == LOOK_PAST:
                return None
            aside.append((queue, queue.set_aside(standing)))
    return None

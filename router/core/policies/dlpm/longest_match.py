"""Waiting requests of many clients, of which the one with the longest prefix match goes first.

Which client may go, and before whom, is its *standing*, a small number that is told from outside: lower goes first,
None may not go. Among clients of equal standing the longest match decides, then the earlier arrival. The choice is
exact whenever it is made, at a cost that grows neither with the requests nor with the clients that wait: matches are
reported when they change, and of what was noted down before, what holds no more is found out at the head.

By match alone, a request that nothing like it was computed for would wait for as long as its client sends others; so
now and then a client's oldest goes.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from sys import maxsize
from typing import Final, NamedTuple

from router.core.model.commands import PassedOver
from router.core.model.request import ClientId, Request, RequestId
from router.core.policies.base import Fits, Turn
from router.core.policies.deficit.eligibility import ROUND_ROBIN_CLASSES, PRIORITY_CLASSES

MAX_SET_ASIDE: Final = 8
"""Requests that do not fit which one choice looks past at most."""
NO_TURN: Final = maxsize
"""Later than any."""


class RequestRank(NamedTuple):
    """The sort key of a request: its client's turn, where that counts, then longer match, then earlier arrival."""

    turn: int
    """0 where clients do not go in turn."""
    unmatched: int
    arrival: int
    push: int
    """No two requests of a queue have the same, even if one came twice."""
    entry: "WaitingEntry"


class WaitingEntry:
    """A waiting request."""

    __slots__ = ("arrival", "backlog", "gone", "passed", "push", "rank", "request")

    def __init__(self, request: Request, arrival: int, push: int, backlog: "ClientQueue") -> None:
        self.request = request
        self.arrival = arrival
        self.push = push
        self.backlog = backlog
        self.rank: RequestRank | None = None
        """The one that holds; None before the first match, and once it is gone."""
        self.passed = 0
        """How often another went in its turn because it did not fit."""
        self.gone = False


class ClientQueue:
    """What waits of one client, from the first to the last."""

    __slots__ = ("_first", "_order", "client", "gone", "offered", "ranks", "waiting")

    def __init__(self, client: ClientId) -> None:
        self.client = client
        self.waiting = 0
        """How many."""
        self.gone = 0
        """How many have gone since it began to wait."""
        self._order: list[WaitingEntry] = []
        """In order of arrival; some are gone, and all before the first index. (A deque is 600 bytes when empty.)"""
        self._first = 0
        self.ranks: list[RequestRank] = []
        """A heap; some hold no more."""
        self.offered: list[RequestRank | None] = [None] * PRIORITY_CLASSES
        """By standing the rank by which it is found: that of its first request, or an earlier one."""

    def add(self, entry: WaitingEntry) -> None:
        """One more waits."""
        self.waiting += 1
        self._order.append(entry)
        if len(self._order) > 2 * self.waiting + 16:
            self._order = [each for each in self._order if not each.gone]
            self._first = 0

    def close(self) -> None:
        """Nothing waits any more: let go of what has gone, which refers to this."""
        self._order = []
        self.ranks = []
        self.offered = [None] * PRIORITY_CLASSES

    @property
    def oldest(self) -> WaitingEntry:
        """The one that came first, of those that wait."""
        while self._order[self._first].gone:
            self._first += 1
        return self._order[self._first]

    def rank(self, rank: RequestRank) -> None:
        """Note the rank of one that waits."""
        if len(self.ranks) > 2 * self.waiting:
            # Ranks below the head outlive their requests: a client that never ran dry would heap them up.
            self.ranks = [each for each in self.ranks if each.entry.rank is each]
            heapify(self.ranks)
        heappush(self.ranks, rank)

    def clean(self) -> None:
        """Drop what holds no more from the head of the ranks."""
        while self.ranks and self.ranks[0].entry.rank is not self.ranks[0]:
            heappop(self.ranks)


class LongestMatchQueue:
    """For every client a heap of its requests, and for every standing a heap of the clients by their first ones.

    A client is in each of these by a rank no later than that of its first request. So nothing is to be done when the
    first one goes or loses its match, and seldom when the standing changes: what is not true is found out at the head.
    """

    def __init__(
        self,
        watch: Callable[[Request], int],
        unwatch: Callable[[RequestId], None],
        priority_class: Callable[[ClientId], int | None],
        max_passes: int = 32,
        oldest_every: int = 0,
        turn: Callable[[ClientId], int] | None = None,
    ) -> None:
        """`watch` answers a request's match of now, in chunks, and begins to report its changes (`match_changed`).

        A request that does not fit is passed over `max_passes` times; then room is kept for it. In one of `oldest_every`
        turns of a client its oldest request goes, whatever its match; with 0 in none. `turn`: when a client had its
        last turn, by which those of the standings `ROUND_ROBIN_CLASSES` go; a turn never becomes earlier.
        """
        self._watch = watch
        self._unwatch = unwatch
        self._priority_class = priority_class
        self._max_passes = max_passes
        self._oldest_every = oldest_every
        self._turn = turn
        self._entries: dict[RequestId, WaitingEntry] = {}
        self._unmatched: dict[RequestId, WaitingEntry] = {}
        """Those that nothing was compared with yet: whoever waits alone is served without a match."""
        self._backlogs: dict[ClientId, ClientQueue] = {}
        self._firsts: tuple[list[RequestRank], ...] = tuple([] for _ in range(PRIORITY_CLASSES))
        self._sidelined: dict[ClientId, ClientQueue] = {}
        """Those that are in one of these heaps no more: at its head they had another standing."""
        self._pushes = 0

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
        client = request.client
        backlog = self._backlogs.get(client)
        if backlog is None:
            backlog = self._backlogs[client] = ClientQueue(client)
        self._pushes += 1
        entry = WaitingEntry(request, self._pushes if arrival is None else arrival, self._pushes, backlog)
        self._entries[request.id] = self._unmatched[request.id] = entry
        backlog.add(entry)

    def remove(self, request: RequestId) -> Request:
        """One waits no more."""
        entry = self._entries.pop(request)
        entry.gone = True
        if entry.rank is None:
            del self._unmatched[request]
        else:
            self._unwatch(request)
            entry.rank = None
        backlog = entry.backlog
        backlog.gone += 1
        backlog.waiting -= 1
        if not backlog.waiting:
            del self._backlogs[backlog.client]
            self._sidelined.pop(backlog.client, None)
            backlog.close()
        return entry.request

    def match_changed(self, requests: Iterable[RequestId]) -> None:
        """Take in the new match of these watched requests."""
        for request in requests:
            entry = self._entries[request]
            if entry.rank is not None:
                unmatched = -self._watch(entry.request)
                if unmatched != entry.rank.unmatched:
                    self._rank(entry, unmatched)

    def update_priority(self, client: ClientId) -> None:
        """Take in the new standing of a client."""
        backlog = self._sidelined.pop(client, None)
        if backlog is not None and backlog.ranks:
            for priority_class, offered in enumerate(backlog.offered):
                if offered is None:
                    self._offer(self._in_turn(backlog.ranks[0], priority_class), priority_class)

    def longest(self, fits: Fits) -> Turn | None:
        """See the function of this name."""
        return longest((self,), fits)

    @property
    def only(self) -> Request | None:
        """The request that waits here, if it waits alone and may go."""
        if len(self._entries) != 1:
            return None
        (entry,) = self._entries.values()
        return entry.request if self._priority_class(entry.request.client) is not None else None

    def first(self, priority_class: int, before: RequestRank | None = None) -> RequestRank | None:
        """The rank of the first request of this standing; None if there is none, or if it comes after `before`."""
        if self._unmatched:
            for entry in self._unmatched.values():
                self._rank(entry, -self._watch(entry.request))
            self._unmatched.clear()
        firsts = self._firsts[priority_class]
        while firsts:
            rank = firsts[0]
            if before is not None and rank[:3] > before[:3]:
                break
            backlog = rank.entry.backlog
            if backlog.offered[priority_class] is not rank:
                heappop(firsts)
                continue
            backlog.clean()
            if (head := self._in_turn(backlog.ranks[0], priority_class)) != rank:
                backlog.offered[priority_class] = head
                heapreplace(firsts, head)
            elif self._priority_class(backlog.client) != priority_class:
                self.set_aside(priority_class)
            else:
                return rank
        return None

    def set_aside(self, priority_class: int) -> WaitingEntry:
        """Take the first of this standing out, and with it its client, to look at what comes after it."""
        entry = heappop(self._firsts[priority_class]).entry
        entry.backlog.offered[priority_class] = None
        self._sidelined[entry.backlog.client] = entry.backlog
        return entry

    def put_back(self, entry: WaitingEntry, *, passed: bool) -> None:
        """Undo `set_aside`; another went in its turn if it was `passed`."""
        entry.passed += passed
        self.update_priority(entry.request.client)

    def may_be_passed(self, entry: WaitingEntry) -> bool:
        """Whether others may go in its turn."""
        return entry.passed < self._max_passes

    def request_to_serve(self, first: WaitingEntry, fits: Fits) -> Request | None:
        """What goes when this request is first: now and then its client's oldest, if that fits, and else itself."""
        if self._oldest_every and first.backlog.gone % self._oldest_every == self._oldest_every - 1:
            oldest = first.backlog.oldest.request
            if fits(oldest):
                return oldest
        return first.request if fits(first.request) else None

    def _rank(self, entry: WaitingEntry, unmatched: int) -> None:
        """Give a request its place among its client's."""
        rank = entry.rank = RequestRank(0, unmatched, entry.arrival, entry.push, entry)
        backlog = entry.backlog
        backlog.rank(rank)
        if backlog.ranks[0] is rank:
            for priority_class, offered in enumerate(backlog.offered):
                placed = self._in_turn(rank, priority_class)
                if placed < offered if offered is not None else backlog.client not in self._sidelined:
                    self._offer(placed, priority_class)

    def _in_turn(self, rank: RequestRank, priority_class: int) -> RequestRank:
        """What a request is ranked by among those of a standing.

        Where clients go in turn, one that loses some of its prefix here, as its negative match says, comes after all
        that lose none.
        """
        if self._turn is None or priority_class not in ROUND_ROBIN_CLASSES:
            return rank
        turn = NO_TURN if rank.unmatched > 0 else self._turn(rank.entry.request.client)
        return RequestRank(turn, *rank[1:])

    def _offer(self, rank: RequestRank, priority_class: int) -> None:
        """Let a client be found by this rank, and by no other."""
        rank.entry.backlog.offered[priority_class] = rank
        firsts = self._firsts[priority_class]
        heappush(firsts, rank)
        if len(firsts) > 2 * len(self._backlogs) + 16:
            # What was offered before stays below the head: most of these.
            offered = [backlog.offered[priority_class] for backlog in self._backlogs.values()]
            firsts[:] = [each for each in offered if each is not None]
            heapify(firsts)


def longest(queues: Sequence[LongestMatchQueue], fits: Fits) -> Turn | None:
    """The request whose turn it is in these queues together, or one that fits in its stead; None if none may go now.

    Those that were passed over are counted as such, so this is to be asked when the answer will go.
    """
    if len(queues) == 1 and len(queues[0]) == 1:
        only = queues[0].only
        return Turn(only) if only is not None and fits(only) else None
    aside: list[tuple[LongestMatchQueue, WaitingEntry]] = []
    request = _choose(queues, fits, aside)
    for queue, entry in aside:
        queue.put_back(entry, passed=request is not None)
    if request is None:
        return None
    # One that waits in several of the queues was looked at in each.
    passed = dict.fromkeys(entry.request.id for _, entry in aside)
    return Turn(request, tuple(PassedOver(each, "did not fit") for each in passed))


def _choose(
    queues: Sequence[LongestMatchQueue], fits: Fits, aside: list[tuple[LongestMatchQueue, WaitingEntry]]
) -> Request | None:
    """Find the next; what does not fit is set aside."""
    for priority_class in range(PRIORITY_CLASSES):
        while True:
            best = chosen = None
            for queue in reversed(queues):  # of equals the first queue's
                if (rank := queue.first(priority_class, best)) is not None:
                    best, chosen = rank, queue
            if best is None or chosen is None:
                break
            request = chosen.request_to_serve(best.entry, fits)
            if request is not None:
                return request
            if not chosen.may_be_passed(best.entry) or len(aside) == MAX_SET_ASIDE:
                return None
            aside.append((chosen, chosen.set_aside(priority_class)))
    return None

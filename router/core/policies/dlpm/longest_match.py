"""The waiting requests of many clients: the one with the longest prefix match goes first.

A client's *priority class*, a small number given from outside, decides whether and before which clients it may be
served: lower goes first, and None is not eligible. Among clients of one class the longest match decides, then the
earlier arrival. The choice is always exact, at a cost that grows neither with the waiting requests nor with the waiting
clients: changes of a match are reported, and stale heap entries are discarded when they reach the head.

By match alone, a request with no similar request before it would wait as long as its client sends others. So one that
stays its client's oldest for many turns goes next, whatever its match.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from operator import attrgetter, itemgetter
from typing import Final, Protocol

from router.core.model.commands import PassedOver
from router.core.model.request import ClientId, Request, RequestId
from router.core.policies.base import Fits, Turn
from router.core.policies.deficit.eligibility import PRIORITY_CLASSES, ROUND_ROBIN_CLASSES
from router.core.policies.dlpm.client_queue import ClientQueue, ClientRank, RequestRank, WaitingEntry
from router.core.policies.dlpm.queues_by_client import QueuesByClient

MAX_PASSED: Final = 8
"""The most requests that do not fit that one choice looks past."""
LOOKS: Final = (1, MAX_PASSED + 1)
"""How many requests a choice looks at, and then at how many, if none of them goes. Most often the first one does."""
NO_TURN: Final = 1 << 160
"""Later than any turn, with or without rounds."""
Leader = tuple[tuple[int, int, int, int], WaitingEntry]
"""A client's priority class and rank, without what is unique in one queue only, and its first request. (A plain tuple,
because many are made.)"""
_rank_of = itemgetter(0)
_arrival_of = attrgetter("arrival")


class TurnTimes(Protocol):
    """When clients have their turns."""

    clock: int
    """While it stands, no waiting client gets another turn. Read only."""

    def last_turn(self, client: ClientId, /) -> int:
        """Return a number that rises with each of the client's turns, unique to it. No `turn` of the client is less."""

    def turn(self, request: Request, unmatched: int) -> int:
        """Return when a client has its turn with a request, given minus the request's match in chunks. Earlier is
        less.
        """


class LongestMatchQueue:
    """A heap of requests per client, and a heap of clients, by their first requests, per priority class.

    A client is in the heap of its class, and may be in others. In each, its rank is no later than that of its first
    request. So nothing needs to be done when the first request goes or loses its match, and little when the priority
    class changes: what is wrong is corrected at the head.
    """

    def __init__(
        self,
        watch: Callable[[Request], int],
        unwatch: Callable[[RequestId], None],
        priority_class: Callable[[ClientId], int | None],
        max_passes: int = 32,
        oldest_every: int = 0,
        turns: TurnTimes | None = None,
        by_client: QueuesByClient | None = None,
    ) -> None:
        """`watch` returns a request's current match in chunks and starts to report its changes to `match_changed`.

        A request that does not fit is passed over `max_passes` times; then room is kept for it. In one of
        `oldest_every` turns of a client, or of as many as it has requests waiting if these are more, its oldest request
        is looked at; if that is the same as the last time, it goes. 0: it is never looked at. `turns` orders the
        classes of `ROUND_ROBIN_CLASSES`; a turn becomes earlier only by a longer match. `by_client`: shared by the
        queues that are looked at together.
        """
        self._watch = watch
        self._unwatch = unwatch
        self._priority_class = priority_class
        self._max_passes = max_passes
        self.oldest_every: Final = oldest_every
        """In one of how many turns of a client its oldest request is looked at; see `__init__`."""
        self._turns = turns
        self._entries: dict[RequestId, WaitingEntry] = {}
        self._unmatched: dict[RequestId, WaitingEntry] = {}
        """Requests that were not compared yet. A request that waits alone is served without a match."""
        self._client_queues: dict[ClientId, ClientQueue] = {}
        self._firsts: tuple[list[ClientRank], ...] = tuple([] for _ in range(PRIORITY_CLASSES))
        self.by_client: Final = QueuesByClient() if by_client is None else by_client
        self._leaders: list[Leader] = []
        """What was found when `leaders` were last sought."""
        self._leaders_sought = 0
        """How many were sought."""
        self._leaders_at = 0
        """The changes of this queue until then."""
        self._classes_at = 0
        """The changes of priority classes until then, or until later ones that concern no client here."""
        self._turns_at = 0
        """The clock of the turns then, or later if no leader had got another turn."""
        self.pushes = 0
        """How often a request entered. Read only."""
        self.newest: Request | None = None
        """The request that entered last; it may be gone. Read only."""
        self.changes = 0
        """How often a request left or got another match. Changes of classes and turns do not count. Read only."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request: RequestId) -> bool:
        return request in self._entries

    @property
    def requests(self) -> Collection[RequestId]:
        """All waiting requests, in order of arrival."""
        return self._entries.keys()

    def push(self, request: Request, arrival: int | None = None) -> None:
        """Add a request. `arrival`: its position among equal matches, last by default."""
        client = request.client
        client_queue = self._client_queues.get(client)
        if client_queue is None:
            client_queue = self._client_queues[client] = ClientQueue(client)
            self.by_client.enter(client, self)
        self.pushes += 1
        self.newest = request
        entry = WaitingEntry(request, self.pushes if arrival is None else arrival, self.pushes, client_queue)
        self._entries[request.id] = self._unmatched[request.id] = entry
        client_queue.add(entry)

    def remove(self, request: RequestId) -> Request:
        """Remove a request."""
        self.changes += 1
        entry = self._entries.pop(request)
        entry.gone = True
        if entry.rank is None:
            del self._unmatched[request]
        else:
            self._unwatch(request)
            entry.rank = None
        client_queue = entry.client_queue
        client_queue.waiting -= 1
        if not client_queue.waiting:
            del self._client_queues[client_queue.client]
            self.by_client.leave(client_queue.client, self)
            client_queue.close()
            if not self._entries:
                self._forget_removed()
        return entry.request

    def _forget_removed(self) -> None:
        """Drop what refers to removed entries, when none is left."""
        self._leaders = []
        for firsts in self._firsts:
            firsts.clear()

    def match_changed(self, requests: Iterable[RequestId]) -> None:
        """Take in the new match of these watched requests."""
        for request in requests:
            entry = self._entries[request]
            if entry.rank is not None:
                unmatched = -self._watch(entry.request)
                if unmatched != entry.rank.unmatched:
                    self._rank(entry, unmatched)

    def update_priority(self, client: ClientId, priority_class: int | None) -> None:
        """Take in the new priority class of a client; None if it is not eligible."""
        self.by_client.update_priority(client, priority_class)

    def take_in_class(self, client: ClientId, priority_class: int) -> None:
        """Let a client that waits here be found in its new priority class."""
        client_queue = self._client_queues[client]
        if client_queue.ranks and client_queue.offered[priority_class] is None:
            rank = client_queue.ranks[0]
            self._offer(client_queue, (self._turn_of(rank, priority_class), rank), priority_class)

    def longest(self, fits: Fits) -> Turn | None:
        """Return the request of this queue that goes next, of those that fit; None if none may go."""
        return longest((self,), fits)

    @property
    def next_request(self) -> Request | None:
        """The request that goes next if each fits; None if none may go. Counts as no turn of its client."""
        leaders = self.leaders(1)
        if not leaders:
            return None
        first = leaders[0][1]
        client, queues = first.request.client, (self,)
        oldest = _oldest_to_look_at(client, queues)
        if oldest is not None and self.by_client.was_oldest(client, oldest.id):
            return oldest
        return first.request

    @property
    def only(self) -> Request | None:
        """The waiting request, if it is the only one and its client is eligible."""
        if len(self._entries) != 1:
            return None
        (entry,) = self._entries.values()
        return entry.request if self._priority_class(entry.request.client) is not None else None

    def leaders(self, count: int) -> Sequence[Leader]:
        """Return the first request of each eligible client, in the order in which they go, at most `count`.

        They are kept: most looks come after events that change none of them.
        """
        self._compare_new()
        if count > self._leaders_sought or not self._leaders_are_current():
            self._leaders, self._leaders_sought = self._find_leaders(count), count
            self._leaders_at, self._classes_at = self.changes, self.by_client.changes.count
            if self._turns is not None:
                self._turns_at = self._turns.clock
        return self._leaders[:count]

    def _leaders_are_current(self) -> bool:
        """Return whether the leaders that are known are those that would be found now."""
        return self._leaders_at == self.changes and self._classes_are_current() and self._turns_are_current()

    def _classes_are_current(self) -> bool:
        """Return whether no client that waits here got another priority class."""
        changes = self.by_client.changes
        if self._classes_at != changes.count:
            changed = changes.since(self._classes_at)
            if changed is None or not self._client_queues.keys().isdisjoint(changed):
                return False
            self._classes_at = changes.count
        return True

    def _turns_are_current(self) -> bool:
        """Return whether no leader has had a turn. Any other client that has had one comes later than before."""
        turns = self._turns
        if turns is not None and self._turns_at != turns.clock:
            for order, entry in self._leaders:
                if order[0] not in ROUND_ROBIN_CLASSES:  # nor are those after it
                    break
                if order[1] not in (NO_TURN, turns.turn(entry.request, order[2])):
                    return False
            self._turns_at = turns.clock
        return True

    def _find_leaders(self, count: int) -> list[Leader]:
        """Find the first `count` leaders. Each leaves its heap until the others are found, unless all are sought."""
        if count == 1:
            return self._find_leader()
        if count >= len(self._client_queues):
            return self._all_leaders()
        leaders: list[Leader] = []
        taken: list[tuple[int, ClientRank]] = []
        wanted = count
        for priority_class, firsts in enumerate(self._firsts):
            while wanted and firsts and (first := self._first_client(priority_class)) is not None:
                turn, rank = first
                leaders.append(((priority_class, turn, rank.unmatched, rank.arrival), rank.entry))
                wanted -= 1
                if wanted:
                    heappop(firsts)
                    rank.entry.client_queue.offered[priority_class] = None
                    taken.append((priority_class, first))
        for priority_class, first in taken:
            first[1].entry.client_queue.offered[priority_class] = first
            heappush(self._firsts[priority_class], first)
        return leaders

    def _find_leader(self) -> list[Leader]:
        for priority_class, firsts in enumerate(self._firsts):
            if firsts and (first := self._first_client(priority_class)) is not None:
                turn, rank = first
                return [((priority_class, turn, rank.unmatched, rank.arrival), rank.entry)]
        return []

    def _all_leaders(self) -> list[Leader]:
        leaders: list[Leader] = []
        for client, client_queue in self._client_queues.items():
            if (priority_class := self._priority_class(client)) is not None:
                rank = client_queue.first
                turn = self._turn_of(rank, priority_class)
                leaders.append(((priority_class, turn, rank.unmatched, rank.arrival), rank.entry))
        leaders.sort(key=_rank_of)
        return leaders

    def _compare_new(self) -> None:
        """Rank the requests that were not compared yet."""
        if self._unmatched:
            for entry in self._unmatched.values():
                self._rank(entry, -self._watch(entry.request))
            self._unmatched.clear()

    def _first_client(self, priority_class: int) -> ClientRank | None:
        """Return the rank at the head of the heap of this priority class, after what is wrong there is corrected; None
        if it is empty.
        """
        firsts = self._firsts[priority_class]
        turns = self._turns if priority_class in ROUND_ROBIN_CLASSES else None
        while firsts:
            offered = firsts[0]
            known_turn, known = offered
            client_queue = known.entry.client_queue
            if client_queue.offered[priority_class] != offered:
                heappop(firsts)
                continue
            if turns is not None and (turn := turns.last_turn(client_queue.client)) > known_turn:
                # Most often: it had a turn, at whatever worker. Its requests need not be looked at yet.
                rank = client_queue.ranks[0]
            else:
                rank = client_queue.first
                turn = self._turn_of(rank, priority_class)
                if turn == known_turn and rank is known:
                    if self._priority_class(client_queue.client) == priority_class:
                        return offered
                    heappop(firsts)
                    client_queue.offered[priority_class] = None
                    continue
            corrected = client_queue.offered[priority_class] = turn, rank
            heapreplace(firsts, corrected)
        return None

    def may_be_passed(self, entry: WaitingEntry) -> bool:
        """Return whether other requests may go ahead of this one."""
        return entry.passed < self._max_passes

    def client_queue(self, client: ClientId) -> ClientQueue | None:
        """Return the requests of a client that wait here; None if it has none."""
        return self._client_queues.get(client)

    def _rank(self, entry: WaitingEntry, unmatched: int) -> None:
        """Set the rank of a request among its client's requests."""
        self.changes += 1
        rank = entry.rank = RequestRank(unmatched, entry.arrival, entry.push, entry)
        client_queue = entry.client_queue
        client_queue.rank(rank)
        if client_queue.ranks[0] is rank:
            own_class = self._priority_class(client_queue.client)
            for priority_class, offered in enumerate(client_queue.offered):
                if offered is not None or priority_class == own_class:
                    placed = self._turn_of(rank, priority_class), rank
                    if offered is None or placed < offered:
                        self._offer(client_queue, placed, priority_class)

    def _turn_of(self, rank: RequestRank, priority_class: int) -> int:
        """Return when a client has its turn with a request; 0 in a priority class in which clients do not take turns.

        Where they do, a request that loses some of its prefix here, which its negative match shows, comes after all
        that lose none.
        """
        if self._turns is None or priority_class not in ROUND_ROBIN_CLASSES:
            return 0
        return NO_TURN if rank.unmatched > 0 else self._turns.turn(rank.entry.request, rank.unmatched)

    def _offer(self, client_queue: ClientQueue, rank: ClientRank, priority_class: int) -> None:
        """Make this rank the one by which a client is found."""
        client_queue.offered[priority_class] = rank
        firsts = self._firsts[priority_class]
        heappush(firsts, rank)
        if len(firsts) > 2 * len(self._client_queues) + 16:
            # Most of these ranks are stale and below the head.
            offered = [client_queue.offered[priority_class] for client_queue in self._client_queues.values()]
            firsts[:] = [each for each in offered if each is not None]
            heapify(firsts)


def longest(queues: Sequence[LongestMatchQueue], fits: Fits, *, unlikely: bool = False) -> Turn | None:
    """Return the request whose turn it is in these queues together, or one that fits in its place; None if none may go
    now.

    `unlikely`: whether the first request will hardly fit, so that as many are found at once as are looked at.

    Requests that were passed over are counted as such, so call this only when the answer will be dispatched.
    """
    if len(queues) == 1 and len(queues[0]) == 1:
        only = queues[0].only
        return Turn(only) if only is not None and fits(only) else None
    misfits: list[WaitingEntry] = []
    request = _choose(queues, fits, LOOKS[1:] if unlikely else LOOKS, misfits)
    if request is None:
        return None
    for entry in misfits:
        entry.passed += 1
    # A request that waits in several queues was looked at in each.
    passed = dict.fromkeys([entry.request.id for entry in misfits])
    return Turn(request, tuple([PassedOver(each, "did not fit") for each in passed]))


def _choose(
    queues: Sequence[LongestMatchQueue], fits: Fits, looks: Iterable[int], misfits: list[WaitingEntry]
) -> Request | None:
    """Find the next request. Those before it that do not fit are added to `misfits`. `looks`: as `LOOKS`."""
    for count in looks:
        leaders = _first_of(queues, count)
        for queue, (_, entry) in leaders[len(misfits) :]:
            if (request := _request_to_serve(entry, fits, queues)) is not None:
                return request
            if not queue.may_be_passed(entry) or len(misfits) == MAX_PASSED:
                return None
            misfits.append(entry)
        if len(leaders) < count:
            return None
    return None


def _request_to_serve(first: WaitingEntry, fits: Fits, queues: Sequence[LongestMatchQueue]) -> Request | None:
    """Return the request to serve when this one is first: the oldest of its client in these queues, if it has been that
    for long and fits; otherwise this one. Counts the turn; None if none fits.
    """
    client, by_client = first.request.client, queues[0].by_client
    oldest = _oldest_to_look_at(client, queues)
    if oldest is not None and by_client.stayed_oldest(client, oldest.id) and fits(oldest):
        by_client.restart_turns(client)
        return oldest
    if not fits(first.request):
        return None
    by_client.note_turn(client)
    return first.request


def _oldest_to_look_at(client: ClientId, queues: Sequence[LongestMatchQueue]) -> Request | None:
    """Return the oldest request of a client in these queues if it is to be looked at in the client's next turn."""
    oldest_every = queues[0].oldest_every
    if not oldest_every or (turns := queues[0].by_client.turns_since_look(client) + 1) < oldest_every:
        return None
    here = [each for queue in queues if (each := queue.client_queue(client)) is not None]
    if turns < sum([each.waiting for each in here]):
        return None
    return min([each.oldest for each in here], key=_arrival_of).request


def _first_of(queues: Sequence[LongestMatchQueue], count: int) -> list[tuple[LongestMatchQueue, Leader]]:
    """Return the first leaders of these queues together, at most `count`; of equal ones that of the first queue is
    first.
    """
    if len(queues) == 1:
        return [(queues[0], leader) for leader in queues[0].leaders(count)]
    leaders = [(queue, leader) for queue in queues for leader in queue.leaders(count)]
    leaders.sort(key=_order_of)
    return leaders[:count]


def _order_of(leader: tuple[LongestMatchQueue, Leader]) -> tuple[int, int, int, int]:
    return leader[1][0]

"""The waiting requests of one pool, each at home at some workers or free to go to any.

A request is at home at the workers that hold most of its prefix. It leaves home permanently when it has waited for a
multiple of the time that its prefix takes to compute: then any worker may take it, and at home it still goes first.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from heapq import heapify, heappop, heappush
from itertools import repeat
from math import ceil, inf
from operator import attrgetter
from typing import Final, NamedTuple

from router.core.cache.held_chunks import HeldChunks
from router.core.model.prompt_key import CHUNK_BYTES
from router.core.model.request import ClientId, Request, RequestId, WorkerId
from router.core.policies.context import FleetView
from router.core.policies.dlpm.fleet_loads import FleetLoads
from router.core.policies.dlpm.longest_match import LongestMatchQueue
from router.core.policies.dlpm.queues_by_client import QueuesByClient

_arrival = attrgetter("arrival")
_size = attrgetter("size")
MOST_HOMES: Final = 3
"""The most homes of a request. If more workers hold its prefix, those with the lowest load are its homes."""
CHANGES_AT_ONCE: Final = 32
"""Up to this many changed matches are taken in at once, in about a millisecond."""
CHANGES_SECONDS: Final = 0.002
"""Time from taking in some of more changed matches to taking in the next ones."""


class PooledRequest:
    """A request in the pool."""

    __slots__ = (
        "able",
        "arrival",
        "chunk_tokens",
        "homes",
        "leaves_home_at",
        "matched",
        "passed",
        "request",
        "since",
        "tokens",
    )

    def __init__(
        self,
        request: Request,
        arrival: int,
        since: float,
        tokens: int,
        chunk_tokens: float,
        able: Mapping[WorkerId, int],
        matched: HeldChunks,
    ) -> None:
        self.request = request
        self.arrival = arrival
        self.since = since
        self.tokens = tokens
        """Estimated input tokens at its arrival."""
        self.chunk_tokens = chunk_tokens
        """Estimated tokens per chunk of the request."""
        self.able = able
        """The workers that may serve it, each with its number in the order in which they joined."""
        self.matched = matched
        """What these workers held of it at the last change that mattered to its homes or its place among others."""
        self.homes: dict[WorkerId, None] = {}
        """The workers that hold most of its prefix; empty if it would lose little on any worker."""
        self.leaves_home_at: float | None = None
        """The time from which any worker may take it; None if any may already."""
        self.passed = 0
        """How often a later request went ahead of it because that one balanced the workers' loads better."""

    @property
    def away_match(self) -> int:
        """Its match for a worker that is not its home: the chunks that all workers hold, less those that it loses away
        from home.

        So a worker that is no request's home starts with new prompts, before it computes what another worker holds.
        """
        common = self._common(self.matched)
        return common - self.matched.most if self.homes else common

    def keeps_place(self, before: HeldChunks) -> bool:
        """Return whether the request keeps its homes and its place among others, now that its match has changed."""
        now = self.matched
        return (
            len(self.homes) in (0, MOST_HOMES)
            and now.most == before.most
            and self._common(now) == self._common(before)
            and all(now.by_worker.get(home) == before.by_worker.get(home) for home in self.homes)
        )

    def _common(self, matched: HeldChunks) -> int:
        """Return the chunks that all workers hold."""
        return matched.least if len(matched.by_worker) == len(self.able) else 0

    def may_go(self, worker: WorkerId, now: float) -> bool:
        """Return whether this worker may take the request."""
        return worker in self.takers(now)

    def takers(self, now: float) -> Mapping[WorkerId, object]:
        """Return the workers that may take the request."""
        return self.able if self.leaves_home_at is None or self.leaves_home_at <= now else self.homes


class HomeDeadline(NamedTuple):
    """The time at which a request leaves home, unless its home changes before."""

    at: float
    request: RequestId


class HomePool:
    """The waiting requests by id: one queue per worker of requests at home there, and one per route of requests free to
    go anywhere.
    """

    def __init__(
        self,
        view: FleetView,
        loads: FleetLoads,
        new_queue: Callable[[Callable[[Request], int], QueuesByClient], LongestMatchQueue],
        *,
        loss: int,
        wait_factor: float,
    ) -> None:
        """`loads`: of all workers of the pool. `new_queue` makes a queue, given a function that returns a request's
        match in chunks, and the queues of each client.

        `loss`: see `DlpmHomeParameters.home_loss`, in tokens. `wait_factor`: see `DlpmHomeParameters.home_patience`.
        """
        self._view = view
        self._loads = loads
        self._by_client = QueuesByClient()
        self._new_queue = new_queue
        self._loss = loss
        self._wait_factor = wait_factor
        self._waiting: dict[RequestId, PooledRequest] = {}
        self.waiting: Final[Mapping[RequestId, PooledRequest]] = self._waiting
        """Read only."""
        self._homes: dict[WorkerId, LongestMatchQueue] = {}
        self.homes: Final[Mapping[WorkerId, LongestMatchQueue]] = self._homes
        """The queue of requests at home at each worker. Read only."""
        self._any_worker: dict[str, LongestMatchQueue] = {}
        """By route, the queue of requests that have no home or have left it."""
        self._home_deadlines: list[HomeDeadline] = []
        self._arrivals = 0
        self._changes: deque[tuple[WorkerId, PooledRequest]] = deque()
        """Changed matches that are not taken in yet, each at one worker. Some of the requests may be gone."""
        self._next_changes = inf
        """When the next of them are taken in."""

    @property
    def class_changes(self) -> int:
        """How often a client that waits got another priority class."""
        return self._by_client.changes.count

    def __getitem__(self, request: RequestId) -> PooledRequest:
        return self._waiting[request]

    @property
    def next_deadline(self) -> float:
        """The time at which the next request leaves home, or more changed matches are taken in; infinite without."""
        while self._home_deadlines and not self._is_current(self._home_deadlines[0]):
            heappop(self._home_deadlines)
        leaving = self._home_deadlines[0].at if self._home_deadlines else inf
        return min(leaving, self._next_changes)

    def queues_for(self, worker: WorkerId, routes: Collection[str]) -> list[LongestMatchQueue]:
        """Return the non-empty queues that a worker may take from; the queue of requests at home there comes last."""
        queues = [queue for route, queue in self._any_worker.items() if route in routes]
        if len(home := self._homes[worker]):
            queues.append(home)
        return queues

    def choose_homes(self, request: Request, now: float) -> PooledRequest:
        """Choose the homes of a request that arrived now. Only `enter` lets it wait."""
        able = self._view.able(request)
        tokens = self._view.input_tokens(request)
        chunk_tokens = tokens * CHUNK_BYTES / max(sum(map(_size, request.prompts)), 1)
        held = self._view.chunks_held(request, able)
        self._arrivals += 1
        waiting = PooledRequest(request, self._arrivals, now, tokens, chunk_tokens, able, held)
        if held.most:
            waiting.homes = self._find_homes(waiting)
            waiting.leaves_home_at = self._home_deadline(waiting)
        return waiting

    def enter(self, waiting: PooledRequest) -> None:
        """Add a request to the pool. Its matches have not changed since `choose_homes`."""
        self._waiting[waiting.request.id] = waiting
        self._view.begin_watch(waiting.request)
        for worker in waiting.homes:
            self._push_home(waiting, worker)
        self._note_deadline(waiting)

    def remove(self, request: RequestId) -> Request:
        """Remove a request from the pool."""
        waiting = self._waiting.pop(request)
        if not self._waiting:
            self._home_deadlines.clear()
            self._changes.clear()
            self._next_changes = inf
        self._view.unwatch(request)
        for worker in waiting.homes:
            self._remove_home(waiting, worker)
        if waiting.leaves_home_at is None:
            self._leave_free(waiting)
        return waiting.request

    def update_priority(self, client: ClientId, priority_class: int | None) -> None:
        """Take in the new priority class of a client; None if it is not eligible."""
        self._by_client.update_priority(client, priority_class)

    def match_changed(self, worker: WorkerId, requests: Iterable[RequestId]) -> None:
        """The match of these requests at this worker changed. Those that arrived first choose their homes first.

        Thousands may share a prefix, and to choose a home for each takes too long for one event. So if there are many,
        they keep their homes for some moments.
        """
        self._changes.extend(
            zip(repeat(worker), sorted([self._waiting[request] for request in requests], key=_arrival))
        )
        if len(self._changes) <= CHANGES_AT_ONCE:
            self._take_in_changes(CHANGES_AT_ONCE)
        elif self._next_changes == inf:
            self._next_changes = -inf

    def pass_time(self, now: float) -> None:
        """Take in some of the matches that changed, if many did and it is time for that, and let the requests leave
        home that have waited there long enough.
        """
        if self._next_changes <= now:
            # With at least a part of them, they cannot pile up, however many come.
            self._take_in_changes(max(CHANGES_AT_ONCE, len(self._changes) // 128))
            self._next_changes = now + CHANGES_SECONDS if self._changes else inf
        if self._home_deadlines and self._home_deadlines[0].at <= now:
            self._release_from_home(now)

    def _take_in_changes(self, most: int) -> None:
        for _ in range(min(most, len(self._changes))):
            worker, waiting = self._changes.popleft()
            if self._waiting.get(waiting.request.id) is waiting and worker in waiting.able:
                self._match_changed(waiting, worker)

    def _match_changed(self, waiting: PooledRequest, worker: WorkerId) -> None:
        before = waiting.matched
        self._refresh_match(waiting)
        # Most changes change nothing.
        if worker in waiting.homes or waiting.leaves_home_at is not None or not waiting.keeps_place(before):
            self._assign_homes(waiting)
            if worker in waiting.homes:
                self._reorder_home(waiting, worker)
            if waiting.leaves_home_at is None:
                self._reorder_free(waiting)
        self._watch_narrowly(waiting)

    def worker_joined(self, worker: WorkerId) -> None:
        """The new worker is a home for requests that have none."""
        if worker not in self._homes:
            self._homes[worker] = self._new_queue(
                lambda request: self._waiting[request.id].matched.at(worker), self._by_client
            )
        for waiting in self._waiting.values():
            if worker in self._view.able(waiting.request):
                self._rematch(waiting)

    def served_only_by(self, worker: WorkerId) -> list[Request]:
        """Return the requests that no other worker serves."""
        return [each.request for each in self._waiting.values() if [*each.able] == [worker]]

    def worker_left(self, worker: WorkerId) -> None:
        """Find other homes for requests that were at home there. Requests that only this worker served were removed
        before.
        """
        for waiting in self._waiting.values():
            if worker in waiting.able:
                self._rematch(waiting)
        del self._homes[worker]

    def _release_from_home(self, now: float) -> None:
        """Let requests that have waited long enough for their home go to any worker."""
        while self._home_deadlines and self._home_deadlines[0].at <= now:
            leaving = heappop(self._home_deadlines)
            if self._is_current(leaving):
                self._release(self._waiting[leaving.request])

    def current_match(self, waiting: PooledRequest) -> HeldChunks:
        """Return what the workers that may serve a request of the pool hold of it now."""
        self._refresh_match(waiting)
        return waiting.matched

    def _watch_narrowly(self, waiting: PooledRequest) -> None:
        """Look no more at changes that leave a request its homes and its place among others; see `keeps_place`."""
        if waiting.leaves_home_at is None and len(waiting.homes) in (0, MOST_HOMES):
            self._view.watch_narrowly(waiting.request, waiting.homes, waiting.able)

    def _refresh_match(self, waiting: PooledRequest) -> None:
        waiting.able = self._view.able(waiting.request)
        waiting.matched = self._view.watch(waiting.request, waiting.able)

    def _rematch(self, waiting: PooledRequest) -> None:
        """Requeue a request after workers joined or left."""
        self._refresh_match(waiting)
        self._assign_homes(waiting)
        if waiting.leaves_home_at is None:
            self._reorder_free(waiting)
        self._watch_narrowly(waiting)

    def _assign_homes(self, waiting: PooledRequest) -> None:
        """Move a request to the queues of its present homes. A request that may go to any worker keeps that right."""
        homes = self._find_homes(waiting)
        for worker in waiting.homes:
            if worker not in homes:
                self._remove_home(waiting, worker)
        for worker in homes:
            if worker not in waiting.homes:
                self._push_home(waiting, worker)
        waiting.homes = homes
        if waiting.leaves_home_at is not None:
            waiting.leaves_home_at = self._home_deadline(waiting)
            self._note_deadline(waiting)

    def _find_homes(self, waiting: PooledRequest) -> dict[WorkerId, None]:
        """Return the workers that hold most of a request's prefix, at most `MOST_HOMES`; none if it would lose little
        on any worker.
        """
        matched, able = waiting.matched, waiting.able
        if not waiting.chunk_tokens:  # the request has no prompt
            return {}
        enough = ceil(matched.most - self._loss / waiting.chunk_tokens)
        held = matched.by_worker
        homes = {worker: None for worker in waiting.homes if worker in able and held.get(worker, 0) >= enough}
        if len(homes) == MOST_HOMES:
            return homes
        holders = matched.at_least(enough) if enough > 0 else able
        if len(holders) == len(able):
            return {}
        if len(holders) > MOST_HOMES:
            others = self._loads.least_loaded(holders, homes, MOST_HOMES - len(homes))
        else:
            others = sorted(holders, key=able.__getitem__)
        homes.update(dict.fromkeys(others))
        return homes

    def _push_home(self, waiting: PooledRequest, worker: WorkerId) -> None:
        self._enter_home(waiting, worker)
        self._loads.add_at_home(worker, 1)

    def _remove_home(self, waiting: PooledRequest, worker: WorkerId) -> None:
        self._leave_home(waiting, worker)
        self._loads.add_at_home(worker, -1)

    def _enter_home(self, waiting: PooledRequest, worker: WorkerId) -> None:
        self._homes[worker].push(waiting.request, waiting.arrival)

    def _leave_home(self, waiting: PooledRequest, worker: WorkerId) -> None:
        self._homes[worker].remove(waiting.request.id)

    def _note_deadline(self, waiting: PooledRequest) -> None:
        """Note when a request leaves home. A request without a home may go to any worker at once."""
        if waiting.leaves_home_at is None:
            self._release(waiting)
            return
        heappush(self._home_deadlines, HomeDeadline(waiting.leaves_home_at, waiting.request.id))
        if len(self._home_deadlines) > 2 * len(self._waiting) + 16:
            # Each change of a match leaves a deadline, most of them long before it is over.
            self._home_deadlines = [
                HomeDeadline(at, name)
                for name, each in self._waiting.items()
                if (at := each.leaves_home_at) is not None
            ]
            heapify(self._home_deadlines)

    def _home_deadline(self, waiting: PooledRequest) -> float | None:
        """Return the time until which a request waits for its home; None without a home."""
        if not waiting.homes:
            return None
        best = max(waiting.homes, key=waiting.matched.at)
        prefix = int(waiting.matched.at(best) * waiting.chunk_tokens)
        return waiting.since + self._wait_factor * self._view.prefill_seconds(best, prefix)

    def _release(self, waiting: PooledRequest) -> None:
        """Let any worker take a request. At home it still goes first."""
        waiting.leaves_home_at = None
        self._enter_free(waiting)
        # Without homes, what was known may be out of date: as estimates change, a short match begins to count.
        if waiting.homes or waiting.keeps_place(self._view.watch(waiting.request, waiting.able)):
            self._watch_narrowly(waiting)

    def _enter_free(self, waiting: PooledRequest) -> None:
        route = waiting.request.route
        if route not in self._any_worker:
            self._any_worker[route] = self._new_queue(
                lambda request: self._waiting[request.id].away_match, self._by_client
            )
        self._any_worker[route].push(waiting.request, waiting.arrival)

    def _leave_free(self, waiting: PooledRequest) -> None:
        route = waiting.request.route
        self._any_worker[route].remove(waiting.request.id)
        if not len(self._any_worker[route]):
            del self._any_worker[route]

    def _reorder_home(self, waiting: PooledRequest, worker: WorkerId) -> None:
        """The match of a request at its home changed."""
        self._homes[worker].match_changed((waiting.request.id,))

    def _reorder_free(self, waiting: PooledRequest) -> None:
        """The match of a request that any worker may take changed."""
        self._any_worker[waiting.request.route].match_changed((waiting.request.id,))

    def _is_current(self, leaving: HomeDeadline) -> bool:
        """Return whether the request of this deadline still waits for the same home."""
        waiting = self._waiting.get(leaving.request)
        return waiting is not None and waiting.leaves_home_at == leaving.at

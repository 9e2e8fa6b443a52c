"""The waiting requests of one pool, each at home at some workers or free to go to any, and its workers by load.

A request is at home at the workers that hold most of its prefix. It leaves home for good when it has waited for a
multiple of the time that its prefix takes to compute: then any worker may take it, and at home it still goes first.

The workers are kept in order of their load from the changes that the fleet reports. The order of dispatch is by
requests in flight, and of equals the worker that was sent nothing for longest. The order in which homes are chosen also
counts the requests that wait at home there, and of equals takes the worker that joined first.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush, nsmallest
from math import ceil, inf
from operator import attrgetter
from typing import Final, NamedTuple

from router.core.cache.match_watch import HeldChunks
from router.core.model.prompt_key import CHUNK_BYTES
from router.core.model.request import ClientId, Request, RequestId, WorkerId
from router.core.policies.context import FleetView
from router.core.policies.dlpm.longest_match import LongestMatchQueue, SidelinedClients

FEW: Final = 16
"""This many workers or fewer are compared one by one."""
LoadKey = tuple[int, int, WorkerId]
"""The load, what decides between equals, and the worker."""


class LoadOrder:
    """Workers in the order of their keys. A change costs O(log workers), and moving their references."""

    def __init__(self) -> None:
        self._keys: dict[WorkerId, LoadKey] = {}
        self._ordered: list[LoadKey] = []

    def __iter__(self) -> Iterator[LoadKey]:
        """Iterate in order. The order must not change meanwhile."""
        return iter(self._ordered)

    def of(self, worker: WorkerId) -> LoadKey:
        """Return a worker's key."""
        return self._keys[worker]

    def set(self, worker: WorkerId, load: int, tie: int) -> None:
        """Set a worker's key."""
        key, known = (load, tie, worker), self._keys.get(worker)
        if key != known:
            if known is not None:
                del self._ordered[bisect_left(self._ordered, known)]
            self._keys[worker] = key
            insort(self._ordered, key)

    def remove(self, worker: WorkerId) -> None:
        """Remove a worker, if it is there."""
        if (key := self._keys.pop(worker, None)) is not None:
            del self._ordered[bisect_left(self._ordered, key)]

    def with_load(self, load: int) -> list[WorkerId]:
        """Return the workers with exactly this load."""
        ordered = self._ordered
        start, end = bisect_left(ordered, (load,)), bisect_left(ordered, (load + 1,))
        return [worker for _, _, worker in ordered[start:end]]

    def least(self, wanted: Callable[[WorkerId], bool], count: int) -> list[WorkerId]:
        """Return the first of the wanted workers, at most `count`."""
        found: list[WorkerId] = []
        for _, _, worker in self._ordered:
            if wanted(worker):
                found.append(worker)
                if len(found) == count:
                    break
        return found


@dataclass(slots=True)
class PoolWorker:
    """A worker of the pool."""

    joined: int
    """Its number in the order in which workers joined the fleet."""
    added: int
    """The same for the pool, which a worker leaves when it is ejected."""
    at_home: int = 0
    """The requests that wait at home there."""
    last_dispatch: int = 0
    """The number of the last request dispatched there, counted over all workers."""


class FleetLoads:
    """The loads of a pool's workers."""

    def __init__(self, view: FleetView) -> None:
        self._view = view
        self._workers: dict[WorkerId, PoolWorker] = {}
        self._with_room = LoadOrder()
        self._by_homes = LoadOrder()
        self._longest_homes = LoadOrder()
        self._dispatches = self._added = 0

    def add(self, worker: WorkerId) -> None:
        """Add a worker, with nothing at home there."""
        self._added += 1
        self._workers[worker] = PoolWorker(self._view.joined(worker), self._added)
        self._update(worker)

    def remove(self, worker: WorkerId) -> None:
        """Remove a worker."""
        del self._workers[worker]
        self._with_room.remove(worker)
        self._by_homes.remove(worker)
        self._longest_homes.remove(worker)

    def dispatched(self, worker: WorkerId) -> None:
        """Note that a request is sent to a worker. The fleet then reports its load as changed."""
        self._dispatches += 1
        self._workers[worker].last_dispatch = self._dispatches

    def add_at_home(self, worker: WorkerId, change: int) -> None:
        """Note that this many more requests wait at home at a worker; negative if fewer. Ignored once it is removed."""
        if (entry := self._workers.get(worker)) is None:
            return
        entry.at_home += change
        self._by_homes.set(worker, entry.at_home + self._view.in_flight(worker), entry.joined)
        if entry.at_home:
            self._longest_homes.set(worker, -entry.at_home, entry.added)
        else:
            self._longest_homes.remove(worker)

    @property
    def with_room(self) -> LoadOrder:
        """The workers with room for any request, by requests in flight; of equals, the one that waited longest."""
        self._take_changes()
        return self._with_room

    @property
    def longest_home_without_room(self) -> WorkerId | None:
        """The worker without room at which most requests wait at home; None if none wait at any."""
        with_room = self._view.with_room
        return next(iter(self._longest_homes.least(lambda worker: worker not in with_room, 1)), None)

    def least_loaded(
        self, workers: Mapping[WorkerId, object], besides: Mapping[WorkerId, object], count: int
    ) -> Iterable[WorkerId]:
        """Return those of these workers, `besides` others, that have the lowest load with what waits at home there."""
        self._take_changes()
        if len(workers) > FEW:
            return self._by_homes.least(lambda worker: worker in workers and worker not in besides, count)
        keys = [self._by_homes.of(worker) for worker in workers if worker not in besides]
        return [worker for _, _, worker in nsmallest(count, keys)]

    def _take_changes(self) -> None:
        for worker in self._view.take_changed_loads():
            if worker in self._workers:
                self._update(worker)

    def _update(self, worker: WorkerId) -> None:
        entry = self._workers[worker]
        in_flight = self._view.with_room.get(worker)
        if in_flight is None:
            in_flight = self._view.in_flight(worker)
            self._with_room.remove(worker)
        else:
            self._with_room.set(worker, in_flight, entry.last_dispatch)
        self._by_homes.set(worker, entry.at_home + in_flight, entry.joined)


_arrival = attrgetter("arrival")
_size = attrgetter("size")
MOST_HOMES: Final = 3
"""The most homes of a request. If more workers hold its prefix, those with the lowest load are its homes."""


@dataclass(slots=True)
class PooledRequest:
    """A request in the pool."""

    request: Request
    arrival: int
    since: float
    tokens: int
    """Estimated input tokens at its arrival."""
    chunk_tokens: float
    """Estimated tokens per chunk of the request."""
    able: Mapping[WorkerId, int]
    """The workers that may serve it, each with its number in the order in which they joined."""
    matched: HeldChunks
    """What these workers held of it at the last change that mattered to its homes or its place among others."""
    homes: dict[WorkerId, None] = field(default_factory=dict)
    """The workers that hold most of its prefix; empty if it would lose little on any worker."""
    leaves_home_at: float | None = inf
    """The time from which any worker may take it; None if any may already."""
    passed: int = 0
    """How often a later request went ahead of it because that one balanced the workers' loads better."""

    @property
    def away_match(self) -> int:
        """Its match for a worker that is not its home: the chunks that all workers hold, less those that it loses away
        from home.

        So a worker that is no request's home starts with new prompts before it computes anew what another worker holds.
        """
        common = self._common(self.matched)
        return common - self.matched.most if self.homes else common

    def keeps_place(self, before: HeldChunks) -> bool:
        """Whether the request keeps its homes and its place among others, now that its match has changed."""
        now = self.matched
        return (
            len(self.homes) == MOST_HOMES
            and now.most == before.most
            and self._common(now) == self._common(before)
            and all(now.by_worker.get(home) == before.by_worker.get(home) for home in self.homes)
        )

    def _common(self, matched: HeldChunks) -> int:
        """The chunks that all workers hold."""
        return matched.least if len(matched.by_worker) == len(self.able) else 0

    def may_go(self, worker: WorkerId, now: float) -> bool:
        """Whether this worker may take the request."""
        if self.leaves_home_at is None or self.leaves_home_at <= now:
            return worker in self.able
        return worker in self.homes


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
        new_queue: Callable[[Callable[[Request], int], SidelinedClients], LongestMatchQueue],
        *,
        loss: int,
        wait_factor: float,
    ) -> None:
        """`loads`: of all workers of the pool. `new_queue` makes a queue, given a function that returns a request's
        match in chunks, and the clients that are missing from any of the queues.

        `loss`: see `DlpmHomeParameters.home_loss`, in tokens. `wait_factor`: see `DlpmHomeParameters.home_patience`.
        """
        self._view = view
        self._loads = loads
        self._sidelined = SidelinedClients()
        self._new_queue = new_queue
        self._loss = loss
        self._wait_factor = wait_factor
        self._waiting: dict[RequestId, PooledRequest] = {}
        self._homes: dict[WorkerId, LongestMatchQueue] = {}
        self.homes: Final[Mapping[WorkerId, LongestMatchQueue]] = self._homes
        """The queue of requests at home at each worker. Read only."""
        self._any_worker: dict[str, LongestMatchQueue] = {}
        """By route, the queue of requests that have no home or have left it."""
        self._home_deadlines: list[HomeDeadline] = []
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __getitem__(self, request: RequestId) -> PooledRequest:
        return self._waiting[request]

    @property
    def next_deadline(self) -> float:
        """The time at which the next request leaves home; infinite if none will."""
        while self._home_deadlines and not self._is_current(self._home_deadlines[0]):
            heappop(self._home_deadlines)
        return self._home_deadlines[0].at if self._home_deadlines else inf

    def queues_for(self, worker: WorkerId, routes: Collection[str]) -> list[LongestMatchQueue]:
        """The non-empty queues that a worker may take from; the queue of requests at home there comes last."""
        queues = [queue for route, queue in self._any_worker.items() if route in routes]
        if len(home := self._homes[worker]):
            queues.append(home)
        return queues

    def choose_homes(self, request: Request, now: float) -> PooledRequest:
        """Choose the homes of a request that arrived now. Only `enter` lets it wait."""
        able = self._view.able(request)
        tokens, _ = self._view.size_and_match(request)
        chunk_tokens = tokens * CHUNK_BYTES / max(sum(map(_size, request.prompts)), 1)
        held = self._view.chunks_held(request, able)
        self._arrivals += 1
        waiting = PooledRequest(request, self._arrivals, now, tokens, chunk_tokens, able, held)
        waiting.homes = self._find_homes(waiting)
        waiting.leaves_home_at = self._home_deadline(waiting)
        return waiting

    def enter(self, waiting: PooledRequest) -> None:
        """Add a request to the pool. Its matches have not changed since `choose_homes`."""
        self._waiting[waiting.request.id] = waiting
        self._view.watch(waiting.request, waiting.able)
        for worker in waiting.homes:
            self._push_home(waiting, worker)
        self._note_deadline(waiting)

    def remove(self, request: RequestId) -> Request:
        """Remove a request from the pool."""
        waiting = self._waiting.pop(request)
        if not self._waiting:
            self._home_deadlines.clear()
        self._view.unwatch(request)
        for worker in waiting.homes:
            self._remove_home(waiting, worker)
        if waiting.leaves_home_at is None:
            self._leave_free(waiting)
        return waiting.request

    def update_priority(self, client: ClientId, priority_class: int | None) -> None:
        """Take in the new priority class of a client; None if it is not eligible."""
        self._sidelined.update_priority(client, priority_class)

    def match_changed(self, worker: WorkerId, requests: Iterable[RequestId]) -> None:
        """The match of these requests at this worker changed. Those that arrived first choose their homes first."""
        for waiting in sorted([self._waiting[name] for name in requests], key=_arrival):
            if worker in waiting.able:
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
                lambda request: self._waiting[request.id].matched.at(worker), self._sidelined
            )
        for waiting in self._waiting.values():
            if worker in self._view.able(waiting.request):
                self._rematch(waiting)

    def served_only_by(self, worker: WorkerId) -> list[Request]:
        """The requests that no other worker serves."""
        return [each.request for each in self._waiting.values() if [*each.able] == [worker]]

    def worker_left(self, worker: WorkerId) -> None:
        """Find other homes for requests that were at home there. Requests that only this worker served were removed
        before.
        """
        for waiting in self._waiting.values():
            if worker in waiting.able:
                self._rematch(waiting)
        del self._homes[worker]

    def release_from_home(self, now: float) -> None:
        """Let requests that have waited long enough for their home go to any worker."""
        while self._home_deadlines and self._home_deadlines[0].at <= now:
            leaving = heappop(self._home_deadlines)
            if self._is_current(leaving):
                self._release(self._waiting[leaving.request])

    def current_match(self, waiting: PooledRequest) -> HeldChunks:
        """What the workers that may serve a request hold of it now, whether it is in the pool or about to enter."""
        if waiting.request.id in self._waiting:
            self._refresh_match(waiting)
        return waiting.matched

    def _watch_narrowly(self, waiting: PooledRequest) -> None:
        """Look no more at changes that leave a request its homes and its place among others; see `keeps_place`."""
        if waiting.leaves_home_at is None and len(waiting.homes) == MOST_HOMES:
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
        """The workers that hold most of a request's prefix, at most `MOST_HOMES`; none if it would lose little on any
        worker.
        """
        matched, able = waiting.matched, waiting.able
        if not waiting.chunk_tokens:  # the request has no prompt
            return {}
        enough = ceil(matched.most - self._loss / waiting.chunk_tokens)
        homes: dict[WorkerId, None] = {}
        for worker in waiting.homes:
            if worker in able and matched.at(worker) >= enough:
                homes[worker] = None
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
        else:
            heappush(self._home_deadlines, HomeDeadline(waiting.leaves_home_at, waiting.request.id))

    def _home_deadline(self, waiting: PooledRequest) -> float | None:
        """The time until which a request waits for its home; None without a home."""
        if not waiting.homes:
            return None
        best = max(waiting.homes, key=waiting.matched.at)
        prefix = int(waiting.matched.at(best) * waiting.chunk_tokens)
        return waiting.since + self._wait_factor * self._view.prefill_seconds(best, prefix)

    def _release(self, waiting: PooledRequest) -> None:
        """Let any worker take a request. At home it still goes first."""
        waiting.leaves_home_at = None
        self._enter_free(waiting)
        self._watch_narrowly(waiting)

    def _enter_free(self, waiting: PooledRequest) -> None:
        route = waiting.request.route
        if route not in self._any_worker:
            self._any_worker[route] = self._new_queue(
                lambda request: self._waiting[request.id].away_match, self._sidelined
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
        """Whether the request of this deadline still waits for the same home."""
        waiting = self._waiting.get(leaving.request)
        return waiting is not None and waiting.leaves_home_at == leaving.at

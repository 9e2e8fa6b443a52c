"""The waiting requests of one pool, each at home at some workers or free to go to any.

A request is at home at the workers that hold most of its prefix. It leaves home for good when it has waited for a
multiple of the time that its prefix takes to compute: then any worker may take it, and at home it still goes first.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import Final, NamedTuple

from router.core.model.prompt_key import CHUNK_BYTES
from router.core.model.request import ClientId, Request, RequestId, WorkerId
from router.core.policies.context import FleetView
from router.core.policies.dlpm.longest_match import LongestMatchQueue

MOST_HOMES: Final = 3
"""The most homes of a request. If more workers hold its prefix, those with the lowest load are its homes."""


@dataclass(slots=True)
class PooledRequest:
    """A request in the pool."""

    request: Request
    arrival: int
    since: float
    chunk_tokens: float
    """Estimated tokens per chunk of the request."""
    matched: Mapping[WorkerId, int]
    """Cached chunks, by worker."""
    homes: dict[WorkerId, None] = field(default_factory=dict)
    """The workers that hold most of its prefix; empty if it would lose little on any worker."""
    leaves_home_at: float | None = inf
    """The time from which any worker may take it; None if any may already."""

    @property
    def away_match(self) -> int:
        """Its match for a worker that is not its home: the chunks that all workers hold, less those that it loses away
        from home.

        So a worker that is no request's home starts with new prompts before it computes anew what another worker holds.
        """
        common = min(self.matched.values())
        return common - max(self.matched.values()) if self.homes else common

    def may_go(self, worker: WorkerId, now: float) -> bool:
        """Whether this worker may take the request."""
        if self.leaves_home_at is None or self.leaves_home_at <= now:
            return worker in self.matched
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
        new_queue: Callable[[Callable[[Request], int]], LongestMatchQueue],
        *,
        loss: int,
        wait_factor: float,
    ) -> None:
        """`new_queue` makes a queue, given a function that returns a request's match in chunks.

        `loss`: see `DlpmHomeParameters.home_loss`, in tokens. `wait_factor`: see `DlpmHomeParameters.home_patience`.
        """
        self._view = view
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

    def place(self, request: Request, tokens: int, now: float) -> PooledRequest:
        """Find the homes of a request with this many input tokens that arrived now. It does not wait before `enter`."""
        size = sum([prompt.size for prompt in request.prompts])
        chunk_tokens = tokens * CHUNK_BYTES / max(size, 1)
        matched = self._view.chunks_held(request, self._view.able(request))
        self._arrivals += 1
        waiting = PooledRequest(request, self._arrivals, now, chunk_tokens, matched)
        waiting.homes = self._find_homes(waiting)
        waiting.leaves_home_at = self._home_deadline(waiting)
        return waiting

    def enter(self, waiting: PooledRequest) -> None:
        """Add a placed request to the pool. Its matches have not changed since `place`."""
        self._waiting[waiting.request.id] = waiting
        self._view.watch(waiting.request, waiting.matched)
        for worker in waiting.homes:
            self._homes[worker].push(waiting.request, waiting.arrival)
        self._note_deadline(waiting)

    def remove(self, request: RequestId) -> Request:
        """Remove a request from the pool."""
        waiting = self._waiting.pop(request)
        if not self._waiting:
            self._home_deadlines.clear()
        self._view.unwatch(request)
        for worker in waiting.homes:
            self._homes[worker].remove(request)
        if waiting.leaves_home_at is None:
            route = waiting.request.route
            self._any_worker[route].remove(request)
            if not len(self._any_worker[route]):
                del self._any_worker[route]
        return waiting.request

    def update_priority(self, client: ClientId) -> None:
        """Take in the new priority class of a client."""
        for queue in self._homes.values():
            queue.update_priority(client)
        for queue in self._any_worker.values():
            queue.update_priority(client)

    def match_changed(self, worker: WorkerId, requests: Iterable[RequestId]) -> None:
        """The match of these requests at this worker changed."""
        for name in requests:
            waiting = self._waiting[name]
            self._refresh_match(waiting)
            self._assign_homes(waiting)
            if worker in waiting.homes:
                self._homes[worker].match_changed((name,))
            if waiting.leaves_home_at is None:
                self._any_worker[waiting.request.route].match_changed((name,))

    def worker_joined(self, worker: WorkerId) -> None:
        """The new worker is a home for requests that have none."""
        if worker not in self._homes:
            self._homes[worker] = self._new_queue(lambda request: self._waiting[request.id].matched[worker])
        for waiting in self._waiting.values():
            if worker in self._view.able(waiting.request):
                self._rematch(waiting)

    def served_only_by(self, worker: WorkerId) -> list[Request]:
        """The requests that no other worker serves."""
        return [each.request for each in self._waiting.values() if [*each.matched] == [worker]]

    def worker_left(self, worker: WorkerId) -> None:
        """Find other homes for requests that were at home there. Requests that only this worker served were removed
        before.
        """
        for waiting in self._waiting.values():
            if worker in waiting.matched:
                self._rematch(waiting)
        del self._homes[worker]

    def release_from_home(self, now: float) -> None:
        """Let requests that have waited long enough for their home go to any worker."""
        while self._home_deadlines and self._home_deadlines[0].at <= now:
            leaving = heappop(self._home_deadlines)
            if self._is_current(leaving):
                self._release(self._waiting[leaving.request])

    def _refresh_match(self, waiting: PooledRequest) -> None:
        waiting.matched = self._view.watch(waiting.request, self._view.able(waiting.request))

    def _rematch(self, waiting: PooledRequest) -> None:
        """Requeue a request after workers joined or left."""
        self._refresh_match(waiting)
        self._assign_homes(waiting)
        if waiting.leaves_home_at is None:
            self._any_worker[waiting.request.route].match_changed((waiting.request.id,))

    def _assign_homes(self, waiting: PooledRequest) -> None:
        """Move a request to the queues of its present homes. A request that may go to any worker keeps that right."""
        homes = self._find_homes(waiting)
        for worker in waiting.homes:
            if worker not in homes:
                self._homes[worker].remove(waiting.request.id)
        for worker in homes:
            if worker not in waiting.homes:
                self._homes[worker].push(waiting.request, waiting.arrival)
        waiting.homes = homes
        if waiting.leaves_home_at is not None:
            waiting.leaves_home_at = self._home_deadline(waiting)
            self._note_deadline(waiting)

    def _find_homes(self, waiting: PooledRequest) -> dict[WorkerId, None]:
        """The workers that hold most of a request's prefix, at most `MOST_HOMES`; none if it would lose little on any
        worker.
        """
        matched = waiting.matched
        if not waiting.chunk_tokens:  # the request has no prompt
            return {}
        enough = max(matched.values()) - self._loss / waiting.chunk_tokens
        homes = {worker: None for worker in waiting.homes if worker in matched and matched[worker] >= enough}
        if len(homes) == MOST_HOMES:
            return homes
        others = [worker for worker, chunks in matched.items() if chunks >= enough and worker not in homes]
        found = len(homes) + len(others)
        if found == len(matched):
            return {}
        if found > MOST_HOMES:
            others.sort(key=self._load)
        homes.update(dict.fromkeys(others[: MOST_HOMES - len(homes)]))
        return homes

    def _load(self, worker: WorkerId) -> int:
        return len(self._homes[worker]) + self._view.in_flight(worker)

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
        best = max(waiting.homes, key=waiting.matched.__getitem__)
        prefix = int(waiting.matched[best] * waiting.chunk_tokens)
        return waiting.since + self._wait_factor * self._view.prefill_seconds(best, prefix)

    def _release(self, waiting: PooledRequest) -> None:
        """Let any worker take a request. At home it still goes first."""
        waiting.leaves_home_at = None
        route = waiting.request.route
        if route not in self._any_worker:
            self._any_worker[route] = self._new_queue(lambda request: self._waiting[request.id].away_match)
        self._any_worker[route].push(waiting.request, waiting.arrival)

    def _is_current(self, leaving: HomeDeadline) -> bool:
        """Whether the request of this deadline still waits for the same home."""
        waiting = self._waiting.get(leaving.request)
        return waiting is not None and waiting.leaves_home_at == leaving.at

"""Where the requests of one pool wait: at home at some workers, or anywhere.

A request is at home at the workers that hold most of its prefix. It leaves home for good when it has waited for some
times as long as its prefix takes to compute anew: then any worker may take it, and at home it still comes first.
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
"""In how many queues a request waits at most: of more that hold its prefix, those with the least to do."""


@dataclass(slots=True)
class PooledRequest:
    """A request in the pool."""

    request: Request
    arrival: int
    since: float
    chunk_tokens: float
    """Estimated tokens of each of its chunks."""
    matched: Mapping[WorkerId, int]
    """Chunks, by worker."""
    homes: dict[WorkerId, None] = field(default_factory=dict)
    """The workers that hold most of its prefix; none where it would lose little anywhere."""
    leaves_home_at: float | None = inf
    """When any worker may take it; None where any may."""

    @property
    def away_match(self) -> int:
        """Its match for a worker that is not its home: chunks that all hold, less what it loses away from home.

        So a worker that none is at home at begins with what is new before it computes anew what another holds.
        """
        common = min(self.matched.values())
        return common - max(self.matched.values()) if self.homes else common

    def may_go(self, worker: WorkerId, now: float) -> bool:
        """Whether this worker may take it."""
        if self.leaves_home_at is None or self.leaves_home_at <= now:
            return worker in self.matched
        return worker in self.homes


class HomeDeadline(NamedTuple):
    """A request leaves home at this time, unless its home has changed."""

    at: float
    request: RequestId


class HomePool:
    """What waits, by id; one queue for what is at home at each worker, and one by route for what may go anywhere."""

    def __init__(
        self,
        view: FleetView,
        new_queue: Callable[[Callable[[Request], int]], LongestMatchQueue],
        *,
        loss: int,
        wait_factor: float,
    ) -> None:
        """`new_queue`: makes one, of what it is told of a request's match, in chunks.

        `loss`: see `DlpmHomeParameters.home_loss`, in tokens; `wait_factor`: its `home_patience`.
        """
        self._view = view
        self._new_queue = new_queue
        self._loss = loss
        self._wait_factor = wait_factor
        self._waiting: dict[RequestId, PooledRequest] = {}
        self._homes: dict[WorkerId, LongestMatchQueue] = {}
        self.homes: Final[Mapping[WorkerId, LongestMatchQueue]] = self._homes
        """What is at home at each worker; to be asked only."""
        self._any_worker: dict[str, LongestMatchQueue] = {}
        """What has no home, or has left it, by route."""
        self._home_deadlines: list[HomeDeadline] = []
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __getitem__(self, request: RequestId) -> PooledRequest:
        return self._waiting[request]

    @property
    def next_deadline(self) -> float:
        """When the next request leaves home; infinite if none will."""
        while self._home_deadlines and not self._is_current(self._home_deadlines[0]):
            heappop(self._home_deadlines)
        return self._home_deadlines[0].at if self._home_deadlines else inf

    def queues_for(self, worker: WorkerId, routes: Collection[str]) -> list[LongestMatchQueue]:
        """Those that are not empty of which a worker may take, that of what is at home there last."""
        queues = [queue for route, queue in self._any_worker.items() if route in routes]
        if len(home := self._homes[worker]):
            queues.append(home)
        return queues

    def place(self, request: Request, tokens: int, now: float) -> PooledRequest:
        """Find its homes for one that came now, with so many input tokens. It does not wait before it is to `enter`."""
        size = sum([prompt.size for prompt in request.prompts])
        chunk_tokens = tokens * CHUNK_BYTES / max(size, 1)
        matched = self._view.chunks_held(request, self._view.able(request))
        self._arrivals += 1
        waiting = PooledRequest(request, self._arrivals, now, chunk_tokens, matched)
        waiting.homes = self._find_homes(waiting)
        waiting.leaves_home_at = self._home_deadline(waiting)
        return waiting

    def enter(self, waiting: PooledRequest) -> None:
        """One more waits, where it was placed; since then no match has changed."""
        self._waiting[waiting.request.id] = waiting
        self._view.watch(waiting.request, waiting.matched)
        for worker in waiting.homes:
            self._homes[worker].push(waiting.request, waiting.arrival)
        self._note_deadline(waiting)

    def remove(self, request: RequestId) -> Request:
        """One waits no more."""
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
        """Take in the new standing of a client."""
        for queue in self._homes.values():
            queue.update_priority(client)
        for queue in self._any_worker.values():
            queue.update_priority(client)

    def match_changed(self, worker: WorkerId, requests: Iterable[RequestId]) -> None:
        """The match of these at this worker is another."""
        for name in requests:
            waiting = self._waiting[name]
            self._refresh_match(waiting)
            self._assign_homes(waiting)
            if worker in waiting.homes:
                self._homes[worker].match_changed((name,))
            if waiting.leaves_home_at is None:
                self._any_worker[waiting.request.route].match_changed((name,))

    def worker_joined(self, worker: WorkerId) -> None:
        """It is home to what has none."""
        if worker not in self._homes:
            self._homes[worker] = self._new_queue(lambda request: self._waiting[request.id].matched[worker])
        for waiting in self._waiting.values():
            if worker in self._view.able(waiting.request):
                self._rematch(waiting)

    def served_only_by(self, worker: WorkerId) -> list[Request]:
        """Those that no other worker serves."""
        return [each.request for each in self._waiting.values() if [*each.matched] == [worker]]

    def worker_left(self, worker: WorkerId) -> None:
        """What was at home there finds another; what it alone served has been removed."""
        for waiting in self._waiting.values():
            if worker in waiting.matched:
                self._rematch(waiting)
        del self._homes[worker]

    def release_from_home(self, now: float) -> None:
        """Free those that have waited long enough for their home."""
        while self._home_deadlines and self._home_deadlines[0].at <= now:
            leaving = heappop(self._home_deadlines)
            if self._is_current(leaving):
                self._release(self._waiting[leaving.request])

    def _refresh_match(self, waiting: PooledRequest) -> None:
        waiting.matched = self._view.watch(waiting.request, self._view.able(waiting.request))

    def _rematch(self, waiting: PooledRequest) -> None:
        """Let a request wait where it belongs now that the workers are others."""
        self._refresh_match(waiting)
        self._assign_homes(waiting)
        if waiting.leaves_home_at is None:
            self._any_worker[waiting.request.route].match_changed((waiting.request.id,))

    def _assign_homes(self, waiting: PooledRequest) -> None:
        """Let a request wait where it is at home now; once it may go anywhere, it may for good."""
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
        """The workers that hold most of its prefix, at most a few; none where it would lose little anywhere."""
        matched = waiting.matched
        if not waiting.chunk_tokens:  # it has no prompt
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
        """Note when a request leaves its home; without one it may go anywhere at once."""
        if waiting.leaves_home_at is None:
            self._release(waiting)
        else:
            heappush(self._home_deadlines, HomeDeadline(waiting.leaves_home_at, waiting.request.id))

    def _home_deadline(self, waiting: PooledRequest) -> float | None:
        """When a request has waited long enough for its home; None without one."""
        if not waiting.homes:
            return None
        best = max(waiting.homes, key=waiting.matched.__getitem__)
        prefix = int(waiting.matched[best] * waiting.chunk_tokens)
        return waiting.since + self._wait_factor * self._view.prefill_seconds(best, prefix)

    def _release(self, waiting: PooledRequest) -> None:
        """Let any worker take a request; at home it still comes first."""
        waiting.leaves_home_at = None
        route = waiting.request.route
        if route not in self._any_worker:
            self._any_worker[route] = self._new_queue(lambda request: self._waiting[request.id].away_match)
        self._any_worker[route].push(waiting.request, waiting.arrival)

    def _is_current(self, leaving: HomeDeadline) -> bool:
        """Whether it still waits, and for the same home."""
        waiting = self._waiting.get(leaving.request)
        return waiting is not None and waiting.leaves_home_at == leaving.at

"""The waiting requests of one pool, in order of arrival while its workers step together."""

from collections.abc import Callable, Collection
from typing import TypeVar

from router.core.model.request import Request, WorkerId
from router.core.policies.balance.arrival_queue import ArrivalQueue
from router.core.policies.context import FleetView
from router.core.policies.deficit.eligibility import Eligibility
from router.core.policies.dlpm.fleet_loads import FleetLoads
from router.core.policies.dlpm.home_pool import HomePool, PooledRequest
from router.core.policies.dlpm.longest_match import LongestMatchQueue
from router.core.policies.dlpm.queues_by_client import QueuesByClient

K = TypeVar("K", WorkerId, str)


class ArrivalPool(HomePool):
    """A `HomePool` that keeps its requests in order of arrival instead of by longest match, while that is asked for.

    Then each request is in the queues of its homes or, once any worker may take it, only in that of its route: among
    the requests that a worker may take, those at home there do not go first.
    """

    def __init__(
        self,
        view: FleetView,
        loads: FleetLoads,
        new_queue: Callable[[Callable[[Request], int], QueuesByClient], LongestMatchQueue],
        *,
        loss: int,
        wait_factor: float,
        eligibility: Eligibility,
    ) -> None:
        """`eligibility` knows the priority class and the last turn of each waiting client. The rest: see `HomePool`."""
        super().__init__(view, loads, new_queue, loss=loss, wait_factor=wait_factor)
        self._eligibility = eligibility
        self._ordered = False
        self._at_home: dict[WorkerId, ArrivalQueue] = {}
        """By worker, the requests that wait for it because they are at home there."""
        self._free: dict[str, ArrivalQueue] = {}
        """By route, the requests that any worker may take."""

    def keep_order(self, *, ordered: bool) -> None:
        """Keep requests in order of arrival from now on, or by longest match."""
        if ordered == self._ordered:
            return
        for waiting in self._waiting.values():
            for worker in waiting.homes:
                self._leave_home(waiting, worker)
            if waiting.leaves_home_at is None:
                self._leave_free(waiting)
        self._ordered = ordered
        for waiting in self._waiting.values():
            for worker in waiting.homes:
                self._enter_home(waiting, worker)
            if waiting.leaves_home_at is None:
                self._enter_free(waiting)

    def by_arrival(self, worker: WorkerId, routes: Collection[str]) -> list[ArrivalQueue]:
        """Return the queues in order of arrival that a worker may take from; none of them is empty."""
        queues = [queue for route, queue in self._free.items() if route in routes]
        if (home := self._at_home.get(worker)) is not None:
            queues.append(home)
        return queues

    def _enter_home(self, waiting: PooledRequest, worker: WorkerId) -> None:
        if not self._ordered:
            super()._enter_home(waiting, worker)
        elif waiting.leaves_home_at is not None:
            self._enter(self._at_home, worker, waiting)

    def _leave_home(self, waiting: PooledRequest, worker: WorkerId) -> None:
        if not self._ordered:
            super()._leave_home(waiting, worker)
        elif waiting.leaves_home_at is not None:
            _leave(self._at_home, worker, waiting)

    def _release(self, waiting: PooledRequest) -> None:
        if self._ordered:
            for worker in waiting.homes:
                _leave(self._at_home, worker, waiting)
        super()._release(waiting)

    def _enter_free(self, waiting: PooledRequest) -> None:
        if self._ordered:
            self._enter(self._free, waiting.request.route, waiting)
        else:
            super()._enter_free(waiting)

    def _leave_free(self, waiting: PooledRequest) -> None:
        if self._ordered:
            _leave(self._free, waiting.request.route, waiting)
        else:
            super()._leave_free(waiting)

    def _reorder_home(self, waiting: PooledRequest, worker: WorkerId) -> None:
        if not self._ordered:
            super()._reorder_home(waiting, worker)

    def _reorder_free(self, waiting: PooledRequest) -> None:
        if not self._ordered:
            super()._reorder_free(waiting)

    def _enter(self, queues: dict[K, ArrivalQueue], key: K, waiting: PooledRequest) -> None:
        queue = queues.get(key)
        if queue is None:
            queue = queues[key] = ArrivalQueue(self._eligibility, self._by_client)
        queue.add(waiting)


def _leave(queues: dict[K, ArrivalQueue], key: K, waiting: PooledRequest) -> None:
    queue = queues[key]
    queue.remove(waiting)
    if not len(queue):
        del queues[key]

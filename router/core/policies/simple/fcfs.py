"""First come, first served: in one worker's queue, and from one pool for all workers."""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import inf

from router.core.model.commands import Deficit
from router.core.model.cost import Charge
from router.core.model.request import ClientId, Request, RequestId, WorkerId
from router.core.policies.base import Candidate, Choice, Fits, Order, Policy, Properties, Turn
from router.core.policies.context import PolicyContext
from router.core.policies.simple.balancers import lightest


class Fcfs(Order):
    """Serves the request that has waited longest."""

    def __init__(self, context: PolicyContext, worker: WorkerId) -> None:  # noqa: ARG002 - the factory's signature
        # An OrderedDict, because a plain dict finds its first key by walking past all deleted ones.
        self._waiting: OrderedDict[RequestId, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, request: Request) -> None:
        self._waiting[request.id] = request

    def remove(self, request: RequestId) -> Request:
        return self._waiting.pop(request)

    def pass_through(self, request: Request, now: float) -> bool:  # noqa: ARG002 - the protocol's signature
        return True

    def select(self, fits: Fits, now: float) -> Turn | None:  # noqa: ARG002 - time does not matter here
        """No request passes the head."""
        head = next(iter(self._waiting.values()), None)
        return Turn(head) if head is not None and fits(head) else None

    def waiting(self) -> Collection[RequestId]:
        return self._waiting.keys()


@dataclass(frozen=True, slots=True)
class PooledArrival:
    """A request in the pool, with its position in the order of arrival."""

    request: Request
    arrival: int


class PooledFcfs(Policy):
    """One queue for all workers: a worker that serves the model and has room takes the request that has waited
    longest.
    """

    next_deadline = inf

    def __init__(self, context: PolicyContext) -> None:
        self.properties = Properties(pooled=True, work_conserving=True)
        self._view = context.view
        self._backlog = context.backlog
        self._routes: dict[str, OrderedDict[RequestId, PooledArrival]] = {}
        self._waiting: dict[RequestId, Request] = {}
        self._arrivals = 0
        self._turn = 0

    def enqueue(self, request: Request, now: float) -> None:
        self._waiting[request.id] = request
        self._arrivals += 1
        self._routes.setdefault(request.route, OrderedDict())[request.id] = PooledArrival(request, self._arrivals)
        self._backlog.add(request.worker, request.client, now)

    def withdraw(self, request: RequestId, now: float) -> None:
        waiting = self._waiting.pop(request)
        queue = self._routes[waiting.route]
        del queue[request]
        if not queue:
            del self._routes[waiting.route]
        self._backlog.remove(waiting.worker, waiting.client, now)

    def next(self, now: float) -> Choice | None:
        """A model whose workers are full does not block other models, and a full worker does not block other
        workers.
        """
        heads = [next(iter(queue.values())) for queue in self._routes.values()]
        for request in (head.request for head in sorted(heads, key=lambda head: head.arrival)):
            able = [w for w in self._view.able(request) if self._view.admits(w, request)]
            if able:
                self.withdraw(request.id, now)
                return Choice(request, self.resend(request, able, now), "room")
        return None

    def resend(self, request: Request, workers: Sequence[WorkerId], now: float) -> WorkerId:  # noqa: ARG002
        """Choose the worker with the fewest requests in flight."""
        self._turn += 1
        return lightest([Candidate(w, 0, 0, self._view.in_flight(w)) for w in workers], self._turn).worker

    def worker_left(self, worker: WorkerId, now: float) -> list[Request]:  # noqa: ARG002 - a pool has no queue to move
        orphans = [request for request in self._waiting.values() if not self._view.able(request)]
        for request in orphans:
            self.withdraw(request.id, now)
        return orphans

    def request_charged(self, charge: Charge) -> None:
        """Do nothing: this policy keeps no counters."""

    def request_started(self, request: Request, worker: WorkerId) -> None:
        """Do nothing: this policy does not track requests in flight."""

    def request_ended(self, request: Request, worker: WorkerId) -> None:
        """Do nothing: this policy does not track requests in flight."""

    def match_changed(self, worker: WorkerId, requests: Iterable[RequestId]) -> None:
        """Do nothing: this policy ignores prefixes."""

    def worker_joined(self, worker: WorkerId, now: float) -> None:
        """Do nothing: `next` asks the view for workers."""

    def deficit(self, client: ClientId, worker: WorkerId) -> Deficit:  # noqa: ARG002 - this policy keeps no deficits
        return Deficit()

"""RPM limits: a fixed number of requests per minute for each client, served first come, first served.

VTC is compared with this in "Fairness in Serving Large Language Models", section 5.1: "subsequent requests are blocked
until the limit resets at the start of the next minute". Here, too, they wait until a minute has room for them, in the
order in which their client sent them. (The code published with that paper rejects them instead; here the queue's time
to live does that.) Workers may idle meanwhile: this policy is not work-conserving.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from math import inf
from typing import Final, NamedTuple

from router.core.model.commands import Deficit
from router.core.model.cost import Charge
from router.core.model.request import ClientId, Request, RequestId, WorkerId
from router.core.policies.base import Choice, Policy, Properties
from router.core.policies.context import PolicyContext
from router.core.policies.simple.fcfs import PooledFcfs
from router.core.policies.simple.simple_parameters import RpmParameters

MINUTE: Final = 60.0
"""In seconds."""


class HeldRequest(NamedTuple):
    """A request that waits for a minute with room for it."""

    arrival: int
    request: Request


class Rpm(Policy):
    """Applies the limit before one queue for all workers."""

    def __init__(self, context: PolicyContext) -> None:
        self.properties = Properties(pooled=True)
        self._limit = context.parameters.of(RpmParameters).limit
        self._view = context.view
        self._backlog = context.backlog
        self._pool = PooledFcfs(context)
        self._minute = 0
        self._accepted: dict[ClientId, int] = {}
        """The number of each client's requests that passed the limit in this minute."""
        self._held: dict[ClientId, OrderedDict[RequestId, HeldRequest]] = {}
        self._clients: dict[RequestId, ClientId] = {}
        """The client of each held request."""
        self._arrivals = 0

    def enqueue(self, request: Request, now: float) -> None:
        self._advance(now)
        if self._accepted.get(request.client, 0) < self._limit:
            self._accept(request, now)
            return
        self._arrivals += 1
        held = self._held.setdefault(request.client, OrderedDict())
        held[request.id] = HeldRequest(self._arrivals, request)
        self._clients[request.id] = request.client
        self._backlog.add(request.worker, request.client, now)

    def withdraw(self, request: RequestId, now: float) -> None:
        """A request that passed the limit stays counted."""
        if request in self._clients:
            self._release(request, now)
        else:
            self._pool.withdraw(request, now)

    def next(self, now: float) -> Choice | None:
        self._advance(now)
        return self._pool.next(now)

    def resend(self, request: Request, workers: Sequence[WorkerId], now: float) -> WorkerId:
        """The request has passed the limit already."""
        return self._pool.resend(request, workers, now)

    @property
    def next_deadline(self) -> float:
        return (self._minute + 1) * MINUTE if self._held else inf

    def _advance(self, now: float) -> None:
        """Start the minute of `now`, unless it has started: accept, in order of arrival, the held requests that it has
        room for.
        """
        minute = int(now // MINUTE)
        if minute <= self._minute:
            return
        self._minute = minute
        self._accepted.clear()
        admitted = [held for queue in self._held.values() for held in islice(queue.values(), self._limit)]
        for held in sorted(admitted):
            self._accept(held.request, now)
            self._release(held.request.id, now)

    def _accept(self, request: Request, now: float) -> None:
        self._accepted[request.client] = self._accepted.get(request.client, 0) + 1
        self._pool.enqueue(request, now)

    def _release(self, request: RequestId, now: float) -> None:
        """Stop holding a request."""
        client = self._clients.pop(request)
        queue = self._held[client]
        held = queue.pop(request)
        if not queue:
            del self._held[client]
        self._backlog.remove(held.request.worker, client, now)

    def worker_left(self, worker: WorkerId, now: float) -> list[Request]:
        held = [held.request for queue in self._held.values() for held in queue.values()]
        orphans = [request for request in held if not self._view.able(request)]
        for request in orphans:
            self.withdraw(request.id, now)
        return orphans + self._pool.worker_left(worker, now)

    def request_charged(self, charge: Charge) -> None:
        """Do nothing: the limit counts requests, not cost."""

    def request_started(self, request: Request, worker: WorkerId) -> None:
        """Do nothing: this policy does not track requests in flight."""

    def request_ended(self, request: Request, worker: WorkerId) -> None:
        """Do nothing: this policy does not track requests in flight."""

    def match_changed(self, worker: WorkerId, requests: Iterable[RequestId]) -> None:
        """Do nothing: this policy ignores prefixes."""

    def worker_joined(self, worker: WorkerId, now: float) -> None:
        """Do nothing: the pool asks the view for workers."""

    def deficit(self, client: ClientId, worker: WorkerId) -> Deficit:  # noqa: ARG002 - this policy keeps no deficits
        return Deficit()

"""What the scheduler gives a policy when it builds it: a view of the fleet and the prefix map, parameters, and shares.

One `PolicyContext` serves all parts of a policy.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Protocol, TypeVar

from router.core.cache.held_chunks import HeldChunks
from router.core.clients.backlog import Backlog
from router.core.clients.debtors import DEBTOR_LIMIT
from router.core.clients.shares import Shares
from router.core.fleet.in_flight import InFlightTable
from router.core.model.cost import LinearCost
from router.core.model.request import BarrierId, Request, RequestId, WorkerId
from router.core.predict.output_length import OutputPredictions

P = TypeVar("P")


class FleetView(Protocol):
    """What a policy can ask about the fleet and the prefix map."""

    def serving(self, route: str) -> Mapping[WorkerId, int]:
        """Return the workers that requests of this shared route may be sent to, in the order in which they joined, each
        with its number in this order.
        """

    def able(self, request: Request) -> Mapping[WorkerId, int]:
        """Return the workers that a request may go to, as in `serving`. The mapping never changes."""

    def joined(self, worker: WorkerId) -> int:
        """Return the worker's number in the order in which workers joined."""

    def in_flight(self, worker: WorkerId) -> int:
        """Return the number of requests that were dispatched to a worker and have not ended."""

    def context_tokens(self, worker: WorkerId) -> int:
        """Return the sum over all requests in flight at a worker of their whole contexts: prompts, cached or not, and
        output so far. What has not started counts as if it had.
        """

    def in_flight_table(self, worker: WorkerId) -> InFlightTable:
        """Return the table whose `context_tokens` are the worker's at any time, to read only. After a worker has left,
        ask for a new one.
        """

    def barrier(self, worker: WorkerId) -> BarrierId | None:
        """Return the group of workers that a worker steps together with; None if it waits for no other."""

    def kv_tokens(self, worker: WorkerId) -> int | None:
        """Return the capacity of the worker's KV cache, in tokens; None if it does not report it."""

    def free_places(self, worker: WorkerId) -> float:
        """Return how many more requests the limit of the worker's window allows in flight; infinite without a limit."""

    def has_room(self, worker: WorkerId) -> bool:
        """Return whether the worker's window has room for any request."""

    @property
    def with_room(self) -> Mapping[WorkerId, int]:
        """The workers that have room for any request, each with its number of requests in flight. Some may have left,
        or be out of use.
        """

    @property
    def changed_loads(self) -> dict[WorkerId, None]:
        """The workers whose `in_flight` or room may have changed; some may be out of use. Whoever reads these removes
        them.
        """

    def admits(self, worker: WorkerId, request: Request) -> bool:
        """Return whether the worker's window has room for this request."""

    def room(self, worker: WorkerId) -> float:
        """Return the most uncached input tokens with which a request may go to the worker now: infinite without a
        limit, and negative if none may go.
        """

    def uncached_tokens(self, worker: WorkerId, request: Request) -> int:
        """Return the input tokens of a request that the worker would have to compute now."""

    def findable(self, request: Request, worker: WorkerId, matched: int, /) -> int:
        """Return how many of the `matched` tokens held by a worker a request would find there if it were sent now."""

    def input_tokens(self, request: Request) -> int:
        """Return the estimated size of a request's input, in tokens."""

    def prefill_seconds(self, worker: WorkerId, tokens: float) -> float:
        """Return the time that the worker needs to prefill this many uncached input tokens while no other request waits
        there.
        """

    def decode_seconds(self, worker: WorkerId) -> float:
        """Return the duration of one engine step without prefill; 0 before one was observed."""

    def output_tokens(self, request: Request) -> float:
        """Return the predicted output of a request, in tokens."""

    def rate(self, workers: Collection[WorkerId]) -> float | None:
        """Return the service rate of these workers together, in cost units per second, while they have no room for
        more; None before it was observed.
        """

    def speed(self, worker: WorkerId) -> float:
        """Return the worker's measured service rate over the mean of the known rates of the fleet; 1 if the worker's
        rate is unknown.
        """

    def match(self, request: Request) -> Mapping[WorkerId, int]:
        """Input tokens of a request in each worker's prefix cache. Workers that hold none are left out."""

    def size_and_match(self, request: Request) -> tuple[int, Mapping[WorkerId, int]]:
        """`input_tokens` and `match` of a request."""

    def expected_match(self, request: Request) -> Mapping[WorkerId, int]:
        """Return the match as it will be once the requests that wait now have been served."""

    def promise(self, request: Request, worker: WorkerId, now: float) -> None:
        """Note that the request will wait for this worker, so that `expected_match` counts its prefix there."""

    def release(self) -> None:
        """Drop all promises, because no request waits."""

    def watch(self, request: Request, workers: Mapping[WorkerId, object]) -> HeldChunks:
        """Return the match at these workers, and report its next change at any worker to `match_changed`, unless
        `watch_narrowly` follows.
        """

    def begin_watch(self, request: Request) -> None:
        """Watch a request as `watch` does, whose answer is known from `chunks_held`."""

    def watch_narrowly(self, request: Request, workers: Collection[WorkerId], able: Mapping[WorkerId, object]) -> None:
        """Report changes of a watched request's match, until it is watched again, only if they are at these workers, or
        change the most chunks that any worker holds, or those that all workers hold. `able`: the workers that the
        request may go to; the mapping must not change.
        """

    def watch_at(self, request: Request, worker: WorkerId) -> int:
        """Return the match at this worker, in chunks, and report its next change there to `match_changed`."""

    def unwatch(self, request: RequestId) -> None:
        """Stop reporting changes of a request's match."""

    def chunks_held(self, request: Request, workers: Mapping[WorkerId, object]) -> HeldChunks:
        """Return what `watch` would, without watching the request."""

    def shared_routes(self, worker: WorkerId) -> Collection[str]:
        """Return the routes that the worker has by the models that it serves, as all workers that do the same."""

    def routes(self, worker: WorkerId) -> Collection[str]:
        """Return the routes (`Request.route`) whose requests may be sent to the worker."""

    def reorders(self, worker: WorkerId) -> bool:
        """Return whether the worker's engine serves by longest match instead of in order of arrival."""


class Parameters:
    """The frozen parameters of each policy family, by class. A family that was not given uses its defaults."""

    def __init__(self, *parameters: object) -> None:
        self._by_class = {type(p): p for p in parameters}

    def of(self, family: type[P]) -> P:
        """Return the parameters of this class."""
        found = self._by_class.get(family)
        return found if isinstance(found, family) else family()


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """Everything that a policy is built from."""

    view: FleetView
    cost: LinearCost
    random: Random
    parameters: Parameters
    backlog: Backlog
    debtors: int = DEBTOR_LIMIT
    """How many forgotten clients one queue remembers because they are in debt."""
    shares: Shares = field(default_factory=Shares)
    """The clients' weights. Updated with each request before the policy sees it, and with its end after the policy."""
    outputs: OutputPredictions = field(default_factory=OutputPredictions)
    """Teaches the output predictors that the policy adds."""

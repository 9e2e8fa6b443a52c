"""What a policy is built into: the fleet and the prefix map as it may ask about them, its parameters, and who shares.

Given at its construction, by the scheduler; one `PolicyContext` for all parts of a policy.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol, TypeVar

from router.core.clients.backlog import Backlog
from router.core.clients.recent_clients import DEBTOR_LIMIT
from router.core.clients.shares import Shares
from router.core.model.cost import LinearCost
from router.core.model.request import Request, RequestId, WorkerId

P = TypeVar("P")


class FleetView(Protocol):
    """What a policy may ask about the fleet and the prefix map."""

    def serving(self, model: str) -> Sequence[WorkerId]:
        """The workers that serve this model, in the order in which they joined."""

    def able(self, request: Request) -> Sequence[WorkerId]:
        """The workers that a request may go to, in the order in which they joined."""

    def in_flight(self, worker: WorkerId) -> int:
        """Requests dispatched to a worker and not ended."""

    def has_room(self, worker: WorkerId) -> bool:
        """Whether the worker's window has room for anything."""

    def with_room(self, workers: Iterable[WorkerId]) -> Mapping[WorkerId, int]:
        """Those of these workers that have room for anything, each with what is `in_flight` there."""

    def admits(self, worker: WorkerId, request: Request) -> bool:
        """Whether the worker's window has room for this request."""

    def input_tokens(self, request: Request) -> int:
        """The estimated size of a request's input."""

    def prefill_seconds(self, worker: WorkerId, tokens: float) -> float:
        """How long the worker takes over so many uncached input tokens, when nothing else waits there."""

    def decode_seconds(self, worker: WorkerId) -> float:
        """How long one of the worker's steps takes without the prefill in it; 0 before that was seen."""

    def output_tokens(self, request: Request) -> float:
        """The output that a request is likely to have."""

    def rate(self, workers: Collection[WorkerId]) -> float | None:
        """Cost units that these workers serve in a second without room for more; None before that was seen."""

    def speed(self, worker: WorkerId) -> float:
        """The worker's measured service rate over the mean of those known in the fleet; 1 where its own is not."""

    def match(self, request: Request) -> Mapping[WorkerId, int]:
        """Input tokens that each worker's prefix cache holds; workers that hold none are left out."""

    def expected_match(self, request: Request) -> Mapping[WorkerId, int]:
        """The match as it will be when what waits now has had its turn."""

    def promise(self, request: Request, worker: WorkerId, now: float) -> None:
        """The request will wait for this worker."""

    def release(self) -> None:
        """No request waits."""

    def watch(self, request: Request, workers: Collection[WorkerId]) -> Mapping[WorkerId, int]:
        """The match at these workers, in chunks; its next change is reported to `match_changed`."""

    def unwatch(self, request: RequestId) -> None:
        """End a watch."""

    def chunks_held(self, request: Request, workers: Collection[WorkerId]) -> Mapping[WorkerId, int]:
        """What `watch` would return, of a request that is not to be followed."""

    def models(self, worker: WorkerId) -> Collection[str]:
        """Names, adapters included, that the worker answers to."""

    def routes(self, worker: WorkerId) -> Collection[str]:
        """The routes (`Request.route`) of the requests that may be sent to the worker."""

    def reorders(self, worker: WorkerId) -> bool:
        """Whether the worker's engine does not serve in order of arrival, but by longest match."""


class Parameters:
    """The frozen parameters of each family, by their class; a family that has none given has its defaults."""

    def __init__(self, *parameters: object) -> None:
        self._by_class = {type(p): p for p in parameters}

    def of(self, family: type[P]) -> P:
        """The parameters of this class."""
        found = self._by_class.get(family)
        return found if isinstance(found, family) else family()


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """What a policy is built into."""

    view: FleetView
    cost: LinearCost
    random: Random
    parameters: Parameters
    backlog: Backlog
    debtors: int = DEBTOR_LIMIT
    """How many clients one queue remembers for their debts alone."""
    shares: Shares = field(default_factory=Shares)
    """Where a client's weight is asked for; told of each request before the policy is, and of its end after it."""

"""The scheduler's answers to an event: where to send a request, which requests to reject, and when to wake the
scheduler.

Times and tokens are as in `events` and `request`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from router.core.model.load import Limits, Load
from router.core.model.request import ClientId, Leg, RequestId, WorkerId


class Refusal(StrEnum):
    """Why a request was rejected instead of waiting any longer."""

    QUEUE_FULL = "rejected-saturated"
    """The queue is full, and no client has more waiting by weight than the client of this request."""
    CLIENT_FULL = "rejected-client-saturated"
    """The client has as much waiting as one client is allowed."""
    DISPLACED = "rejected-displaced"
    """The request was waiting and made room for a client that has less waiting by weight."""
    EXPIRED = "rejected-ttl-expired"
    """The request waited for its whole time to live."""
    NO_WORKER = "rejected-no-endpoints"
    NO_RETRY = "rejected-no-retry"
    """The request failed, and it has failed at every worker, is out of tries, or the retry budget is used up."""


@dataclass(frozen=True, slots=True)
class Deficit:
    """A client's deficit at one worker, in cost units; None for a part of the policy that keeps no deficits."""

    placement: float | None = None
    order: float | None = None


class PassedOver(NamedTuple):
    """A request that was next in order but could not be dispatched, and the reason."""

    request: RequestId
    reason: str


class Decision(NamedTuple):
    """What the scheduler knew when it dispatched a request, for explanations. Nothing depends on it."""

    client: ClientId
    match: Mapping[WorkerId, int]
    """Input tokens that each worker was believed to hold; workers that held none are omitted."""
    deficit: Deficit
    """The client's deficit at the chosen worker, before this request was charged."""
    load: Load
    """Load of the chosen worker, without this request."""
    limits: Limits | None
    """Limits of the chosen worker's window; None if it has none."""
    passed_over: tuple[PassedOver, ...]


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send this request to this worker now."""

    request: RequestId
    worker: WorkerId
    cached_tokens: int
    """Input tokens that the worker's prefix cache is predicted to hold."""
    why: str
    """What decided the worker and the turn, in one or two words."""
    decision: Decision
    leg: Leg = Leg.WHOLE
    """What the worker computes of it."""
    partner: WorkerId | None = None
    """The worker that computes the other part at the same time. Of two such commands, that for the prompt is the first.
    """


@dataclass(frozen=True, slots=True)
class Reject:
    """Reject this request; the scheduler has dropped it."""

    request: RequestId
    reason: Refusal
    retry_after: float | None = None
    """Seconds after which a retry may find room; None if that cannot be estimated."""


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send `Ticked` at this time. Replaces the previous `WakeAt`."""

    time: float


Command = Dispatch | Reject | WakeAt

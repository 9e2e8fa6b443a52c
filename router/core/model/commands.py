"""What the scheduler answers to an event: what to send where, what to turn away, when to be woken.

Times and tokens as in `model`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from router.core.model.load import Limits, Load
from router.core.model.request import ClientId, RequestId, WorkerId


class Refusal(StrEnum):
    """Why a request that waited, or would have to, is turned away."""

    QUEUE_FULL = "rejected-saturated"
    """As much waits as may, and nobody has more of it by weight than its client."""
    CLIENT_FULL = "rejected-client-saturated"
    """As much of its client's waits as may."""
    DISPLACED = "rejected-displaced"
    """It waited, and made room for a client that has less waiting by weight."""
    EXPIRED = "rejected-ttl-expired"
    NO_WORKER = "rejected-no-endpoints"
    NO_RETRY = "rejected-no-retry"
    """It failed, and at every worker or as often as it may, or too many do."""


@dataclass(frozen=True, slots=True)
class Deficit:
    """A client's credit at one worker, in cost units, as far as the policy keeps any."""

    placement: float | None = None
    order: float | None = None


class PassedOver(NamedTuple):
    """A request whose turn it was, had something not stood in its way."""

    request: RequestId
    reason: str


class Decision(NamedTuple):
    """What the scheduler knew when it dispatched a request, for whoever asks why; nothing follows from it."""

    client: ClientId
    match: Mapping[WorkerId, int]
    """Input tokens that each worker was believed to hold; workers that held none are left out."""
    credit: Deficit
    """At the worker chosen, before this request was charged."""
    load: Load
    """Of the worker chosen, before this request."""
    limits: Limits | None
    """Of its window; None without any."""
    passed_over: tuple[PassedOver, ...]


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send this request to this worker now."""

    request: RequestId
    worker: WorkerId
    cached_tokens: int
    """How much of its input the worker's prefix cache is predicted to hold."""
    why: str
    """What decided the worker and the turn, in a word or two."""
    decision: Decision


@dataclass(frozen=True, slots=True)
class Reject:
    """Turn this request away; it is gone from the scheduler."""

    request: RequestId
    reason: Refusal
    retry_after: float | None = None
    """Seconds after which a new try may find room; None where that cannot be told."""


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send `Ticked` at this time; replaces the `WakeAt` before it."""

    time: float


Command = Dispatch | Reject | WakeAt

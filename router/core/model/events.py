"""The events that the scheduler takes. Its answers are in `commands`.

Times are seconds on the caller's monotonic clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple, get_args

from router.core.model.cost import Tokens
from router.core.model.prompt_key import PromptKey
from router.core.model.request import ClientId, Leg, Request, RequestId, Usage, Worker, WorkerId


@dataclass(frozen=True, slots=True)
class Arrived:
    """A client's request arrived and waits to be dispatched."""

    request: Request
    again: bool = False
    """Whether it arrived in an earlier run of the scheduler already."""


@dataclass(frozen=True, slots=True)
class Started:
    """The engine produced the first token of a dispatched request: its prefill is over."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class Progressed:
    """Cumulative output tokens of any number of running requests, batched by the caller."""

    output_tokens: Mapping[RequestId, int]


@dataclass(frozen=True, slots=True)
class Finished:
    """A request was answered in full."""

    request: RequestId
    usage: Usage | None = None
    answers: tuple[PromptKey, ...] = ()
    """The prompt followed by the answer, as the next turn will begin; one key per choice."""
    ended_turn: bool | None = None
    """Whether the answer ends an agent's turn, so that a person is to speak next. False if it asks for a tool, whose
    result soon follows. None if it does not say.
    """


class Fault(StrEnum):
    """Why a request did not get its whole answer."""

    CALL = "call"
    """The call itself: no worker would answer it. Also used if the cause is unknown."""
    FULL = "full"
    """The engine has as much work as it accepts."""
    ERROR = "error"
    """The engine answered with an error of its own; another engine may fail on this request, too."""
    BROKEN = "broken"
    """The worker refused the connection, closed it early, hung, or sent an invalid answer."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A dispatched request ended without its whole answer, and not because of its client."""

    request: RequestId
    accepted: bool
    """Whether the engine may have begun to compute. If not, the client is refunded in full."""
    usage: Usage | None = None
    fault: Fault = Fault.CALL
    leg: Leg = Leg.WHOLE
    """Which of two workers that have the request at once has failed; the other one is stopped. Else of no importance.
    """


@dataclass(frozen=True, slots=True)
class Returned:
    """A dispatched request came back without its whole answer and is to be sent to a worker that has not failed it.

    The request has had its turn: it goes ahead of all waiting requests as soon as such a worker has room, and the
    client is not charged again for what it already paid at the first worker. The scheduler answers with a Reject if
    there is no such worker or no try is left.
    """

    request: RequestId
    accepted: bool
    """Whether the engine may have begun to compute. If not, nothing is charged for this try."""
    fault: Fault
    usage: Usage | None = None
    begun: bool = False
    """Whether the client already has part of the answer. Then only the rest is requested, which does not count as a
    retry.
    """
    leg: Leg = Leg.WHOLE
    """As in `Failed`."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prefill worker has computed the prompt of a request that was sent there, and keeps it for a decode worker.

    The scheduler answers with a second Dispatch for the same request: to a decode worker, or to a prefill worker again
    if no decode worker has room before the prompt is too old. There is no answer if a decode worker has the
    request already.
    """

    request: RequestId
    usage: Usage | None = None
    """Of the prefill. Its output token is not part of the answer and costs nothing."""
    decoding: bool = False
    """Whether a decode worker has the request already."""


@dataclass(frozen=True, slots=True)
class HandoffLost:
    """A request was dispatched to a decode worker and not sent there, because its prompt is no longer to be had from
    the prefill worker. It is prefilled again at no cost to its client.
    """

    request: RequestId


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The client left while its request was queued or dispatched. The client pays for what was computed."""

    request: RequestId
    usage: Usage | None = None
    front_died: bool = False
    """Whether not the client left but its front died, so that the client may repeat the call (`Undelivered`)."""


class ChargedRequest(NamedTuple):
    """What a live request was charged in the counters and accounts that were saved with it."""

    request: RequestId
    client: ClientId
    worker: WorkerId | None
    """Where it was; None while it waited."""
    charged: Tokens
    """Charged for its present attempt: to the policy's counters and, once it has started, to the client's account."""
    started: bool
    earlier: Tokens | None
    """Charged for earlier attempts; None while nothing was charged for the prompt."""
    leg: Leg = Leg.WHOLE
    """What the worker computed of it. A request that two workers had at once has two rows, that for the prompt first.
    """
    day: int = 0
    """The day on which the saved usage has this charge, in days since 1970-01-01."""

    @property
    def pays_prompt(self) -> bool:
        """Whether the present attempt pays for the prompt."""
        return self.earlier is None and self.leg is not Leg.DECODE


@dataclass(frozen=True, slots=True)
class Held:
    """Requests of an earlier run are about to be reported: the scheduler has just taken over from it, or a front is
    late. Until `Released`, no worker has room.
    """

    charged: tuple[ChargedRequest, ...] = ()
    """The live requests of the restored state, the first time."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """An earlier run of the scheduler sent this request to this worker; more events say what has become of it since.

    Reported after `Held`. What the saved state says was charged for the attempt is charged no second time.
    """

    request: Request
    worker: WorkerId
    cached_tokens: int
    """Input tokens that were predicted to be cached there."""
    saved: bool = True
    """Whether the request had arrived when the state was saved, so that the state may hold what it was charged."""
    leg: Leg = Leg.WHOLE
    """What the worker computes of it."""
    partner: WorkerId | None = None
    """As in `Dispatch`: if the worker computes the prompt, the same of its partner follows."""


@dataclass(frozen=True, slots=True)
class Released:
    """The requests of the earlier run have been reported."""

    complete: bool = True
    """Whether all of them have been. If not, a late front may report some."""


@dataclass(frozen=True, slots=True)
class FrontAway:
    """The connection to a front is broken, so that nobody reports how its requests go on or that they have ended.

    Until `FrontBack`, or until they end, workers have room as if they did not have these requests.
    """

    requests: tuple[RequestId, ...]
    """Its requests that workers have; the others are cancelled until it is back."""


@dataclass(frozen=True, slots=True)
class FrontBack:
    """A front that was away reports on its requests again."""

    requests: tuple[RequestId, ...]
    """Those of its requests that workers have."""


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A worker may be sent requests from now on. For a known worker, its facts are replaced."""

    worker: Worker


@dataclass(frozen=True, slots=True)
class CacheReport:
    """An engine's metrics of its prefix cache. Counts start with the engine; None if it does not count."""

    block_tokens: int | None = None
    """Tokens in each block of the cache."""
    born: float | None = None
    """When the counters began, in seconds on the engine's own clock."""
    computed_tokens: float | None = None
    """Prompt tokens computed. Used to detect that the counters were reset."""
    hit_tokens: float | None = None
    """Prompt tokens found in the cache."""
    evicted_tokens: float | None = None
    idle_seconds: float | None = None
    """Total time for which evicted blocks had been unused when they were evicted."""
    idle_blocks: float | None = None
    """Number of blocks in `idle_seconds`."""
    asleep: bool = False
    """Whether the engine has released its cache's memory (sleep mode)."""
    caches: bool | None = None
    """Whether the engine caches prefixes at all; None if it does not report that."""

    def began_anew(self, before: "CacheReport") -> bool:
        """Return whether the counters belong to another process than those of `before`."""
        if None not in (self.born, before.born) and self.born != before.born:
            return True
        pairs = (
            (before.computed_tokens, self.computed_tokens),
            (before.hit_tokens, self.hit_tokens),
            (before.evicted_tokens, self.evicted_tokens),
        )
        return any(old is not None and new is not None and new < old for old, new in pairs)


@dataclass(frozen=True, slots=True)
class WorkReport:
    """Tokens that an engine's metrics say it has computed for any client since its counters began.

    None if the engine does not count them.
    """

    input_tokens: float | None = None
    """Prompt tokens, without those found in a cache."""
    output_tokens: float | None = None


@dataclass(frozen=True, slots=True)
class WorkerReported:
    """A worker's own metrics at this moment."""

    worker: WorkerId
    running: int
    waiting: int
    kv_tokens: int | None = None
    cache: CacheReport | None = None
    places: int | None = None
    """The most requests that the worker runs at a time; None if it does not report that."""
    work: WorkReport | None = None


@dataclass(frozen=True, slots=True)
class WorkerAnswered:
    """A worker answered a poll without reporting its load."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    """Send a worker nothing more. What runs there still ends by its own events."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Evicted:
    """A worker evicted this many tokens from its prefix cache; None if it dropped all of them."""

    worker: WorkerId
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class BlocksFollowed:
    """From now on, a worker's KV events say which blocks its cache holds, or say it with different parameters than
    before.
    """

    worker: WorkerId
    block_tokens: int
    """Tokens in each block of the worker."""
    ranks: int = 1
    """Data-parallel ranks, each with its own cache."""
    complete: bool = True
    """Whether no event was missed since the cache was empty. If not, the worker may hold more blocks than were
    reported.
    """


@dataclass(frozen=True, slots=True)
class BlocksChanged:
    """A change that a worker's KV events report of its cache. Apply the fields in their order."""

    worker: WorkerId
    rank: int = 0
    cleared: bool = False
    removed: bytes = b""
    """Hashes as in `BlockKey`. No hash is both removed and stored."""
    stored: bytes = b""


@dataclass(frozen=True, slots=True)
class BlocksLost:
    """A worker's KV events can no longer be read."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Credited:
    """An operator gives a client this much service ahead of others, in every queue that knows the client.

    The cost is added to the client's deficit, or subtracted from its virtual counter. The theorem keeps q_i at or below
    Q^u; with this event q_i may exceed Q^u by the cost, so the bound on the gap is wider by cost / w from then on. A
    counter that is reset loses what is left of the credit: because no request of the client waits or, in VTC, because
    the client begins to wait. Policies without counters of service ignore this event. So do D²LPM's deficits per
    worker, which say where a client is served and not how much.
    """

    client: ClientId
    cost: float
    """Cost units; positive."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """An operator asks to forget a client now, as if it had been away for long.

    What the client owes is kept, so no bound changes. A client with a request waiting or in flight is not forgotten.
    """

    client: ClientId


@dataclass(frozen=True, slots=True)
class DayBegan:
    """From now on, usage counts on this day. Decides nothing."""

    day: int
    """Days since 1970-01-01 (UTC)."""


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed. Sent at the time of the last `WakeAt`."""


Event = (
    Arrived
    | Started
    | Progressed
    | Finished
    | Failed
    | Returned
    | Prefilled
    | HandoffLost
    | Cancelled
    | Held
    | Resumed
    | Released
    | FrontAway
    | FrontBack
    | WorkerJoined
    | WorkerReported
    | WorkerAnswered
    | WorkerLeft
    | Evicted
    | BlocksFollowed
    | BlocksChanged
    | BlocksLost
    | Credited
    | Forgotten
    | DayBegan
    | Ticked
)
EVENTS: Final[tuple[type[Event], ...]] = get_args(Event)
"""All types of events."""

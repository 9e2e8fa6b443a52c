"""The events that the scheduler takes. What it answers stands in `commands`.

Times are seconds on the caller's monotonic clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, get_args

from router.core.model.prompt_key import PromptKey
from router.core.model.request import ClientId, Request, RequestId, Usage, Worker, WorkerId


@dataclass(frozen=True, slots=True)
class Arrived:
    """A client's request is here and waits to be placed."""

    request: Request


@dataclass(frozen=True, slots=True)
class Started:
    """The engine produced the first token of a dispatched request: its prefill is over."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class Progressed:
    """Output tokens so far (cumulative) of any number of running requests; batched by the caller."""

    output_tokens: Mapping[RequestId, int]


@dataclass(frozen=True, slots=True)
class Finished:
    """A request is answered in full."""

    request: RequestId
    usage: Usage | None = None
    answers: tuple[PromptKey, ...] = ()
    """Prompt and answer together, as they will stand at the head of the next turn; one key per choice."""


class Fault(StrEnum):
    """What stood in the way of an answer."""

    CALL = "call"
    """The call itself: no worker would answer it, or nobody knows better."""
    FULL = "full"
    """The engine has as much to do as it takes."""
    ERROR = "error"
    """The engine answered with an error of its own; another may do the same with this request."""
    BROKEN = "broken"
    """The worker took no connection, broke off, hung or answered nonsense."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A dispatched request ended without its whole answer, and not because of its client."""

    request: RequestId
    accepted: bool
    """Whether the engine may have begun to compute: if not, the client is refunded in full."""
    usage: Usage | None = None
    fault: Fault = Fault.CALL


@dataclass(frozen=True, slots=True)
class Returned:
    """A dispatched request comes back without its whole answer, and is to go to a worker that has not failed it.

    It has had its turn: it goes before all that wait, as soon as such a worker has room, and what the first one was
    paid for it is not charged again. A Reject answers where there is none, or no more tries are left.
    """

    request: RequestId
    accepted: bool
    """Whether the engine may have begun to compute: if not, nothing is owed for this try."""
    fault: Fault
    usage: Usage | None = None
    begun: bool = False
    """Whether its client has a part of the answer: then the rest of it is asked for, which is no retry."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The client left, whether its request was queued or dispatched; it pays for what was computed."""

    request: RequestId
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A worker may be sent requests from now on; for one that is known, its facts are replaced."""

    worker: Worker


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What an engine's metrics say about its prefix cache; counts since it started, None where it does not count."""

    block_tokens: int | None = None
    """What the cache is divided into."""
    born: float | None = None
    """When its counters began, in seconds of its own clock."""
    computed_tokens: float | None = None
    """Of prompts; counted to see that the count began anew."""
    hit_tokens: float | None = None
    """Of prompts, found in the cache."""
    evicted_tokens: float | None = None
    idle_seconds: float | None = None
    """How long blocks had lain unused when they were evicted, added up ..."""
    idle_blocks: float | None = None
    """... over so many."""
    asleep: bool = False
    """Whether it has given up its cache's memory."""
    caches: bool | None = None
    """Whether prefixes are cached at all; None where it does not tell."""

    def began_anew(self, before: "CacheReport") -> bool:
        """Whether another process counts now than counted before."""
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
    """What an engine's metrics say that it has computed, for whomever, since its counters began.

    None where it does not count.
    """

    input_tokens: float | None = None
    """Of prompts, without what was found in a cache."""
    output_tokens: float | None = None


@dataclass(frozen=True, slots=True)
class WorkerReported:
    """What a worker's own metrics say at this moment."""

    worker: WorkerId
    running: int
    waiting: int
    kv_tokens: int | None = None
    cache: CacheReport | None = None
    places: int | None = None
    """The most requests that it runs at a time, where it tells."""
    work: WorkReport | None = None


@dataclass(frozen=True, slots=True)
class WorkerAnswered:
    """A worker answered a poll, and told nothing of its load."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    """A worker is sent nothing more; what is running there still ends by its own events."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Evicted:
    """A worker dropped this many tokens from its prefix cache, or all of them."""

    worker: WorkerId
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class BlocksFollowed:
    """A worker's own events tell from now on what blocks its cache holds, or tell it differently from before."""

    worker: WorkerId
    block_tokens: int
    """Tokens in each of its blocks."""
    ranks: int = 1
    """Data-parallel ranks, each with a cache of its own."""
    complete: bool = True
    """Whether no event was missed since its cache was empty; if not, it may hold more than was told."""


@dataclass(frozen=True, slots=True)
class BlocksChanged:
    """What a worker's own events say of its cache; to be taken in the order of the fields."""

    worker: WorkerId
    rank: int = 0
    cleared: bool = False
    removed: bytes = b""
    """Hashes as in `BlockKey`; a hash is not both removed and stored."""
    stored: bytes = b""


@dataclass(frozen=True, slots=True)
class BlocksLost:
    """A worker's own events cannot be read any more."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Credited:
    """An operator gives a client this much service before others, in every queue that knows it.

    It is added to the client's deficit counter, or taken from its virtual one: q_i, which the theorem holds at or below
    Q^u, may be that much higher, and so the bound on the gap is wider by cost / w from then on. A counter that is set
    anew, because nobody waits or, in VTC, because its client begins to wait, loses what is left of it. Policies
    without counters of service, and D²LPM's counters of workers, which say where and not how much, do nothing.
    """

    client: ClientId
    cost: float
    """In cost units; positive."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """An operator wants a client forgotten now, as one that has not come for long; what it owes is kept, so no bound
    changes. One that has anything under way is not.
    """

    client: ClientId


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed; sent when the last `WakeAt` is due."""


Event = (
    Arrived
    | Started
    | Progressed
    | Finished
    | Failed
    | Returned
    | Cancelled
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
    | Ticked
)
EVENTS: Final[tuple[type[Event], ...]] = get_args(Event)
"""All types of events."""

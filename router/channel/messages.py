"""The messages between a front and the scheduler. Each can be encoded (`codec`), so it can cross a process boundary.

A front sends the events of its requests, facts about workers that only a front finds out, and questions. The scheduler
sends exactly one reply to each submission of a request (its assignment, its refusal, or that it was withdrawn), the
workers as they change, and answers. Messages in one direction arrive in the order in which they were sent.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Generic, NewType, TypeVar

from router.core.clients.rate_limits import OwnerLimits, Shortage
from router.core.model.commands import Deficit, Reject
from router.core.model.events import (
    Arrived,
    Cancelled,
    Failed,
    Finished,
    HandoffLost,
    Prefilled,
    Progressed,
    Resumed,
    Returned,
    Started,
)
from router.core.model.request import ClientId, Connector, Leg, Request, RequestId, Role, WorkerId

TicketId = NewType("TicketId", int)
"""Number of an admitted call; unique in its front."""

A_co = TypeVar("A_co", covariant=True)

LaterEvent = Started | Progressed | Finished | Failed | Returned | Prefilled | HandoffLost | Cancelled
"""The events of a request after its arrival."""
FrontEvent = Arrived | LaterEvent


@dataclass(frozen=True, slots=True)
class UnreachableWorker:
    """A worker refused a connection, or gave no sign of life when it was asked for one."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class FieldsRefused:
    """A worker refused fields that the router had added to a call."""

    worker: WorkerId
    path: str
    fields: frozenset[str]


@dataclass(frozen=True, slots=True)
class CallEnded:
    """An admitted call ended. It may never have been counted."""

    ticket: TicketId
    tokens: int | None
    """Tokens that it used; None if its estimate is the best that is known."""


@dataclass(frozen=True, slots=True)
class ResponseStored:
    """A worker stores a response for a client."""

    response: str
    client: ClientId
    worker: WorkerId


@dataclass(frozen=True, slots=True)
class ResponseChanged:
    """A worker has cancelled a stored response, deleted it, or changed it in another way.

    The front that forwarded the call reports it, and the scheduler tells all fronts: any of them may stream or follow
    the response.
    """

    response: str
    deleted: bool


@dataclass(frozen=True, slots=True)
class Superseded:
    """The front obeys another replica's scheduler from now on, and this is the last that it says to this one."""

    epoch: int
    """The other one's, which is higher."""


class Question(Generic[A_co]):
    """A question whose answer has the type `A_co`."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class BeginCall(Question[Shortage | None]):
    """May a call of these owners begin? If the answer is None, it is counted until `CallEnded`."""

    ticket: TicketId
    owners: tuple[OwnerLimits, ...]
    """The client and its group, as far as they have limits."""


@dataclass(frozen=True, slots=True)
class TakeInput(Question[Shortage | None]):
    """May a counted call use this many input tokens? If the answer is None, they are taken from its limits."""

    ticket: TicketId
    tokens: int


@dataclass(frozen=True, slots=True)
class AdmitNewClient(Question[bool]):
    """May this anonymous client be known by its own id? Not if its address brought too many new clients this minute."""

    client: ClientId
    address: str
    per_minute: float


@dataclass(frozen=True, slots=True)
class FindResponse(Question[WorkerId | None]):
    """Which worker keeps this response of this client? None if it is not known, or the worker is out of service."""

    response: str
    client: ClientId


@dataclass(frozen=True, slots=True)
class IsOfAnother(Question[bool]):
    """Does another client own the response with this id?"""

    response: str
    client: ClientId


AnyQuestion = BeginCall | TakeInput | AdmitNewClient | FindResponse | IsOfAnother
AnswerValue = Shortage | WorkerId | bool | None


REPEATED: Final = 0
"""Number of a question that was granted by an earlier run of the scheduler: it is to be counted, not asked."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A question, and the number under which its answer is expected."""

    number: int
    question: AnyQuestion


class MetricKind(StrEnum):
    """How the values of several fronts are combined: both are summed, but counts outlive their front."""

    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class FrontMetric:
    """A metric of one front."""

    name: str
    kind: MetricKind
    text: str
    labels: tuple[str, ...] = ()
    rows: tuple[tuple[tuple[str, ...], float], ...] = ()
    """Values by the values of the labels."""


@dataclass(frozen=True, slots=True)
class ProcessLoad:
    """How busy one process is."""

    cpu_seconds: float
    """CPU time since its start."""
    loop_lag: float
    """Longest delay of its event loop in the last half minute, in seconds."""
    calls: int = 0
    """Calls in flight."""
    channel_delay: float = 0.0
    """Seconds in which the scheduler answered the last probe of a front."""
    restarts: int = 0
    """How often the process was started again after it had died."""
    memory_bytes: int = 0
    """Its resident memory; 0 where there is no /proc."""
    open_files: int = 0
    """Its open file descriptors; 0 where there is no /proc."""
    started: float = 0.0
    """When it was started, in seconds since 1970; 0 where there is no /proc."""


@dataclass(frozen=True, slots=True)
class FrontMeasured:
    """What a front in its own process has counted. Replaces what it reported before."""

    metrics: tuple[FrontMetric, ...]
    load: ProcessLoad


@dataclass(frozen=True, slots=True)
class WaitedBefore:
    """A request that waited in an earlier run of the scheduler, and waits on."""

    own_id: RequestId
    """Its id in its front."""
    request: Request
    """Under the id that the scheduler had for it."""


@dataclass(frozen=True, slots=True)
class RanBefore:
    """An attempt that an earlier run of the scheduler has sent to its worker. What has become of it follows."""

    own_id: RequestId
    """The request's id in its front."""
    resumed: Resumed
    """Under the id that the scheduler had for the request."""


@dataclass(frozen=True, slots=True)
class AllReported:
    """The front has reported all that an earlier run of the scheduler had of it."""

    messages: int
    """How many messages the front has sent to any run, this one included."""


Fact = UnreachableWorker | FieldsRefused | CallEnded | ResponseStored | ResponseChanged | FrontMeasured | Superseded
"""What a front reports besides its requests."""
FrontMessage = FrontEvent | WaitedBefore | RanBefore | AllReported | Fact | Ask


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds of silence after which a worker is given up; None for never."""

    first_token: float | None = None
    between_tokens: float | None = None
    whole: float | None = None
    """For an answer that is not streamed."""


@dataclass(frozen=True, slots=True)
class PlacementRecord:
    """Why the scheduler chose a worker, and what it knew then; for traces."""

    decided: float
    """When, in seconds of the monotonic clock that all processes of a machine share."""
    why: str
    """What decided the worker and the turn, in one or two words."""
    match_tokens: int
    """Input tokens that this worker's prefix cache was believed to hold."""
    longest_match_tokens: int
    """The same of the worker that was believed to hold most."""
    deficit: Deficit
    """The client's deficits at this worker, before the request was charged."""
    in_flight: int
    """Requests in flight at this worker, without this one."""
    passed_over: int
    """Requests that were ahead in the queue and could not be sent."""


@dataclass(frozen=True, slots=True)
class PrefillBeside:
    """The prefill worker that is to be sent a request together with the decode worker of its assignment."""

    worker: WorkerId
    cached_tokens: int
    """Input tokens that its prefix cache is predicted to hold."""
    timeouts: Timeouts
    placement: PlacementRecord | None = None
    """None unless calls are traced."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Send this request to this worker now."""

    request: RequestId
    worker: WorkerId
    cached_tokens: int
    """Input tokens that the worker's prefix cache is predicted to hold."""
    timeouts: Timeouts
    known_as: RequestId | None = None
    """The id under which the scheduler and the workers know the request, where it is not the front's own: another front
    has a request with that id in flight."""
    leg: Leg = Leg.WHOLE
    """What the worker computes of it."""
    prefill: PrefillBeside | None = None
    """The worker that computes the prompt at the same time; None unless this one waits for that."""
    placement: PlacementRecord | None = None
    """None unless calls are traced."""


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The request ended in its front before it was assigned or refused. Until this reply its id is in use."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class WorkerCard:
    """What a front needs to know about one worker."""

    id: WorkerId
    url: str
    api_key: str | None = None
    healthy: bool = False
    models: frozenset[str] = frozenset()
    """The names it last listed; kept while it is down, so that a call for them is refused as busy, not as unknown."""
    parents: Mapping[str, str] = field(default_factory=dict)
    """For each of these names that is an adapter, its base model."""
    vocabulary: int | None = None
    """The number of token ids of its model; None if the engine does not report it or checks ids itself."""
    embeds: bool = False
    """Whether the engine reports that it computes embeddings only."""
    context_tokens: int | None = None
    """The most tokens of prompt and answer together; None if the engine does not report it."""
    engine: str = ""
    version: str | None = None
    refused_fields: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """The fields that it has refused although its version should accept them, by path."""
    block_tokens: int | None = None
    """Tokens in a block of its cache while its KV events are followed, else None."""
    rank: int | None = None
    """The data-parallel rank that calls to its URL must name; None if they name none."""
    has_ranks: bool = False
    """Whether several ranks are behind its URL, so that a client's call must not name one."""
    role: Role = Role.BOTH
    connector: Connector | None = None
    """What carries KV caches from or to it, if it has a role."""
    bootstrap_port: int | None = None
    """Where decode workers ask for what it has prefilled, at the host of its URL; None if they do not."""
    transfer_engine: str | None = None
    """The id by which decode workers with Mooncake know it; None if it has none, or it is not known."""


@dataclass(frozen=True, slots=True)
class WorkerChanged:
    """A worker is new or has changed."""

    card: WorkerCard


@dataclass(frozen=True, slots=True)
class WorkerRemoved:
    """A worker is no longer part of the fleet, and no request is in flight there."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to a question."""

    number: int
    answer: AnswerValue


@dataclass(frozen=True, slots=True)
class Saved:
    """The scheduler's saved state covers this many messages of the front, see `UnsavedHistory`."""

    messages: int


@dataclass(frozen=True, slots=True)
class Continued:
    """The connection of the front was lost, and the run of the scheduler still has all that the front had.

    What either side has missed is sent again.
    """

    messages: int
    """How many messages of the front have been handled."""


@dataclass(frozen=True, slots=True)
class Settled:
    """The front was given up, and what it had is settled: it can only begin again."""


SchedulerMessage = (
    Assignment
    | Reject
    | Withdrawn
    | WorkerChanged
    | WorkerRemoved
    | ResponseChanged
    | Answered
    | Saved
    | Continued
    | Settled
)

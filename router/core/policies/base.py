"""How a policy is built: a placement says which worker's queue, an order says which request of a queue next.

`QueuedPolicy` joins one of each. A policy that binds late, from one pool for all workers, implements `Policy`
itself. A policy owns the requests that wait, from `enqueue` until `next` gives them out or `withdraw` takes
them away; everything else about a request belongs to the scheduler.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from router.core.model.commands import Deficit, PassedOver
from router.core.model.cost import Charge
from router.core.model.request import ClientId, GroupId, Request, RequestId, WorkerId
from router.core.model.saved import Counters, Groups, SavedCounter
from router.core.policies.context import PolicyContext


@dataclass(frozen=True, slots=True)
class Properties:
    """What a policy promises; the conformance suite holds it to that."""

    gap_quantum: float | None = None
    """Q^u, in cost units, of a policy under which the service of two clients that are backlogged in the same
    queue differs by no more than a constant (DLPM paper, Theorem 4.1), with the debt that a client may go with; None
    where nothing bounds it."""
    locality: bool = False
    """Requests that share a prefix tend to the same worker."""
    pooled: bool = False
    """One queue for all workers."""
    work_conserving: bool = False
    """No worker with room idles while a request waits elsewhere that would lose no prefix by going there."""


class Candidate(NamedTuple):
    """A worker that may take a request."""

    worker: WorkerId
    cached_tokens: int
    """How much of the request's input its prefix cache will hold when what waits there now has had its turn."""
    extend_tokens: int
    """The rest of the input."""
    load: int
    """Requests that wait for it or run there."""


class Placed(NamedTuple):
    """A placement's answer."""

    worker: WorkerId
    why: str


Fits = Callable[[Request], bool]
"""Whether the worker's window has room for a request."""


class Turn(NamedTuple):
    """An order's answer."""

    request: Request
    passed: tuple[PassedOver, ...] = ()
    """Those whose turn it was before."""


class Choice(NamedTuple):
    """The next request to dispatch, and where to."""

    request: Request
    worker: WorkerId
    why: str
    passed: tuple[PassedOver, ...] = ()
    """Those whose turn it was before."""


class Policy(Protocol):
    """Owns what waits, and says what goes next and where."""

    properties: Properties

    def enqueue(self, request: Request, now: float) -> None:
        """Take a request that some worker serves."""

    def withdraw(self, request: RequestId, now: float) -> None:
        """Give up a waiting request: its client left or its time is over."""

    def next(self, now: float) -> Choice | None:
        """Give out one request that its worker's window admits, or None when nothing may go; asked while any waits."""

    def resend(self, request: Request, workers: Sequence[WorkerId], now: float) -> WorkerId:
        """A request that has had its turn and lost its worker goes to one of these, which have room for it.

        It is dispatched like one that `next` gives out.
        """

    @property
    def next_deadline(self) -> float:
        """When `next` may have another answer although nothing has happened, or infinite; asked while any waits."""

    def request_charged(self, charge: Charge) -> None:
        """A dispatched request's bill changed; the first change comes with its dispatch."""

    def request_started(self, request: Request, worker: WorkerId) -> None:
        """A dispatched request produced its first token."""

    def request_ended(self, request: Request, worker: WorkerId) -> None:
        """A dispatched request ended, however it did."""

    def match_changed(self, worker: WorkerId, requests: Iterable[RequestId]) -> None:
        """The match of these watched requests at this worker is another; to be watched anew."""

    def worker_joined(self, worker: WorkerId, now: float) -> None:
        """A worker may be used."""

    def worker_left(self, worker: WorkerId, now: float) -> list[Request]:
        """A worker may not be used; its queue is placed anew. Returns those that no worker serves now."""

    def deficit(self, client: ClientId, worker: WorkerId) -> Deficit:
        """The client's credit at a worker."""

    def grant(self, client: ClientId, cost: float) -> None:  # noqa: ARG002 - some keep nothing
        """A client that is known may be served so much more before others, in cost units; see `Credited`."""
        return

    def forget(self, client: ClientId) -> None:  # noqa: ARG002 - some keep nothing
        """A client that has nothing under way is to be remembered for what it owes alone."""
        return

    def forget_worker(self, worker: WorkerId) -> None:  # noqa: ARG002 - some keep nothing
        """A worker that left, and at which nothing runs, is not remembered any more."""
        return

    def saved(self) -> Iterator[Counters | Groups]:
        """All counters, as each piece is when it is asked for; changes nothing."""
        return iter(())

    def restore(self, counters: Counters | Groups) -> None:  # noqa: ARG002 - some keep none
        """Begin with these; asked before anything else, with what `saved` gave."""
        return


class Placement(Protocol):
    """Answers: which worker's queue does this request wait in?"""

    locality: ClassVar[bool] = False

    steal_loss: int | None = None
    """Input tokens found in a prefix cache that a request may lose by being taken over by a worker with nothing to
    do; None where no request is taken over."""

    def advance(self, now: float) -> None:
        """It is this late; told before each placement."""

    def place(self, request: Request, candidates: Sequence[Candidate]) -> Placed:
        """Pick one of the candidates; there is at least one."""

    def book(self, request: Request, candidate: Candidate) -> None:
        """The request will wait for this worker, be it placed there or taken over: charge it in advance."""

    def unplace(self, request: RequestId) -> None:
        """The request waits there no more: it is dispatched, withdrawn or placed anew. Undo the booking."""

    def request_dispatched(self, request: RequestId, now: float) -> None:
        """A request is on its way, whether it had to wait or not; told before `unplace`."""

    def request_charged(self, charge: Charge) -> None:
        """A dispatched request's bill changed."""

    def request_ended(self, request: RequestId) -> None:
        """It ended."""

    def worker_left(self, worker: WorkerId) -> None:
        """A worker is gone."""

    def deficit(self, client: ClientId, worker: WorkerId) -> float | None:
        """The client's counter for this worker, where the placement keeps one."""

    def forget(self, client: ClientId) -> None:  # noqa: ARG002 - some keep nothing
        """See `Policy`."""
        return

    def forget_worker(self, worker: WorkerId) -> None:  # noqa: ARG002 - some keep nothing
        """See `Policy`."""
        return

    def saved(self) -> Iterator[SavedCounter]:
        """All counters."""
        return iter(())

    def restore(self, rows: Iterable[SavedCounter]) -> None:  # noqa: ARG002 - some keep none
        """Begin with these."""
        return


class Order(Protocol):
    """Answers, for one worker's queue: which request goes next?"""

    def __len__(self) -> int:
        """How many wait."""

    def push(self, request: Request) -> None:
        """One more request waits."""

    def remove(self, request: RequestId) -> Request:
        """A request waits no more: it is dispatched, withdrawn or placed anew."""

    def pass_through(self, request: Request, now: float) -> bool:
        """Let a request go that finds nobody waiting, as if it had waited for no time; False if it must wait."""
        self.push(request)
        turn = self.select(lambda _: True, now)
        self.remove(request.id)
        return turn is not None

    def select(self, fits: Fits, now: float) -> Turn | None:
        """The request whose turn it is, which stays in the queue; None if none may go now.

        One that does not fit may be passed over, if the order allows it, but not for ever.
        """

    def waiting(self) -> Collection[RequestId]:
        """All that wait, in order of arrival."""

    def request_dispatched(self, request: Request, now: float) -> None:
        """A request of this queue is on its way."""

    def request_charged(self, charge: Charge) -> None:
        """The bill of a request dispatched from here changed."""

    def request_started(self, request: Request) -> None:
        """It produced its first token."""

    def request_ended(self, request: Request) -> None:
        """It ended."""

    def match_changed(self, requests: Iterable[RequestId]) -> None:
        """The match of these watched requests at this worker is another; to be watched anew."""

    def deficit(self, client: ClientId) -> float | None:
        """The client's counter in this queue, where the order keeps one."""

    def grant(self, client: ClientId, cost: float) -> None:  # noqa: ARG002 - some keep nothing
        """See `Policy`."""
        return

    def forget(self, client: ClientId) -> None:  # noqa: ARG002 - some keep nothing
        """See `Policy`."""
        return

    def saved(self) -> Iterator[tuple[ClientId, float, float]]:
        """All counters: client, value and scale."""
        return iter(())

    def restore(self, client: ClientId, value: float, scale: float) -> None:  # noqa: ARG002 - some keep none
        """Begin one with this; asked in the order in which they were saved."""
        return

    def saved_groups(self) -> Iterator[tuple[GroupId, float, float]]:
        """The same of groups, where the order counts what they have as if each was one client."""
        return iter(())

    def restore_group(self, group: GroupId, value: float, scale: float) -> None:  # noqa: ARG002 - some keep none
        """Begin one of these."""
        return

    @classmethod
    def gap_quantum(cls, context: PolicyContext) -> float | None:
        """See `Properties`."""


class PlacementFactory(Protocol):
    """A placement's class."""

    locality: bool

    def __call__(self, context: PolicyContext) -> Placement:
        """Build the placement of one scheduler."""


class OrderFactory(Protocol):
    """An order's class."""

    def gap_quantum(self, context: PolicyContext) -> float | None:
        """See `Properties`."""

    def __call__(self, context: PolicyContext, worker: WorkerId) -> Order:
        """Build the order of one worker's queue."""


PolicyFactory = Callable[[PolicyContext], Policy]

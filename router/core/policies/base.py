"""The protocols that a policy is built from.

A `Placement` chooses the worker whose queue a request joins; an `Order` chooses which request of one queue goes next;
`QueuedPolicy` combines one of each. A policy that keeps one pool for all workers and binds late implements `Policy`
itself. A policy owns a waiting request from `enqueue` until `next` returns it or `withdraw` removes it; everything else
about a request belongs to the scheduler.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from router.core.model.commands import Deficit, PassedOver
from router.core.model.cost import Charge
from router.core.model.prompt_key import PromptKey
from router.core.model.request import ClientId, GroupId, Request, RequestId, WorkerId
from router.core.model.saved import Counters, Groups, SavedCounter
from router.core.policies.context import PolicyContext


@dataclass(frozen=True, slots=True)
class Properties:
    """What a policy promises; the conformance suite checks it."""

    gap_quantum: float | None = None
    """Q^u plus the largest debt with which a client may still be served, in cost units. Under such a policy the service
    of two clients that are backlogged in the same queue differs by at most a constant (DLPM paper, Theorem 4.1). None
    if nothing bounds the difference."""
    locality: bool = False
    """True if requests that share a prefix tend to go to the same worker."""
    pooled: bool = False
    """True if one queue serves all workers."""
    work_conserving: bool = False
    """True if no worker with room idles while a request that would lose no cached prefix there waits for another
    worker."""
    follows_calls: bool = False
    """True if `call_began`, `answer_ended` and `call_ended` are to be called; False if the policy does not use them."""


class Candidate(NamedTuple):
    """A worker that a request may be placed on."""

    worker: WorkerId
    cached_tokens: int
    """Input tokens that the worker's prefix cache will hold once the requests that wait there now have been served."""
    extend_tokens: int
    """Input tokens that the worker must compute: the rest of the input."""
    load: int
    """Requests that wait for the worker or run on it."""


class Placed(NamedTuple):
    """The worker that a placement chose, and why."""

    worker: WorkerId
    why: str


Fits = Callable[[Request], bool]
"""Returns whether the worker's window has room for a request."""


class Turn(NamedTuple):
    """The request that an order chose."""

    request: Request
    passed: tuple[PassedOver, ...] = ()
    """Requests that were ahead of it and did not fit."""


class Choice(NamedTuple):
    """The next request to dispatch, and its worker."""

    request: Request
    worker: WorkerId
    why: str
    passed: tuple[PassedOver, ...] = ()
    """Requests that were ahead of it and did not fit."""


class Policy(Protocol):
    """Owns the waiting requests and decides which one goes next, and to which worker."""

    properties: Properties

    def enqueue(self, request: Request, now: float) -> None:
        """Add a request that at least one worker serves."""

    def withdraw(self, request: RequestId, now: float) -> None:
        """Remove a waiting request because its client left or it expired."""

    def queue_newcomer(self, now: float) -> None:  # noqa: ARG002 - most policies queue each request at once
        """Queue a request that was to be dispatched without waiting, because nothing may be dispatched for now."""
        return

    def next(self, now: float) -> Choice | None:
        """Remove and return one request that its worker's window admits, or None if none may go. Called only while
        requests wait.
        """

    def resend(self, request: Request, workers: Sequence[WorkerId], now: float) -> WorkerId:
        """Choose a worker, among these with room, for a request that was dispatched and lost its worker.

        The request is dispatched like one that `next` returned.
        """

    @property
    def next_deadline(self) -> float:
        """The time at which `next` may give another answer although no event arrived; infinite if there is none. Read
        only while requests wait.
        """

    def resume(self, request: Request, worker: WorkerId, now: float) -> None:  # noqa: ARG002 - some policies keep no state
        """Count a request as dispatched to this worker, which is present: an earlier run has sent it there."""
        return

    def request_sent(self, request: Request, charge: Charge, uncached: int, output: float) -> Deficit:  # noqa: ARG002 - few policies follow what runs
        """A request that `next` or `resend` has returned is on its way, and this is the first charge for it.

        `uncached`: its input tokens that the worker is not believed to hold; `output`: its predicted output tokens.
        Returns the client's deficits before the charge.
        """
        deficit = self.deficit(charge.client, charge.worker)
        self.request_charged(charge)
        return deficit

    def request_charged(self, charge: Charge) -> None:
        """The bill of a dispatched request changed. The first change, at the dispatch, comes by `request_sent`, or here
        if an earlier run has sent the request.
        """

    def request_started(self, request: Request, worker: WorkerId) -> None:
        """A dispatched request produced its first token."""

    def request_ended(self, request: Request, worker: WorkerId) -> None:
        """A dispatched request ended, in whatever way."""

    def call_began(self, request: Request, now: float) -> None:  # noqa: ARG002 - most policies follow no sessions
        """A request is live: it arrived, or its worker returned it. Called before the policy is given it."""
        return

    def answer_ended(self, request: Request, answers: tuple[PromptKey, ...], ended_turn: bool | None) -> None:  # noqa: ARG002
        """A request was answered in full; the arguments are those of `Finished`. Called before `call_ended`."""
        return

    def call_ended(self, request: Request, now: float) -> None:  # noqa: ARG002 - most policies follow no sessions
        """A request is not live any more, or its worker returned it. Nothing else about it follows."""
        return

    def match_changed(self, worker: WorkerId, requests: Iterable[RequestId]) -> None:
        """The prefix match of these watched requests at this worker changed. Each must be watched again."""

    def on_cache_lost(self, worker: WorkerId) -> None:  # noqa: ARG002 - most policies ask what is cached
        """A worker dropped all that its prefix cache held."""
        return

    def worker_joined(self, worker: WorkerId, now: float) -> None:
        """A worker became available."""

    def worker_left(self, worker: WorkerId, now: float) -> list[Request]:
        """A worker became unavailable: place its queue again. Returns the requests that no remaining worker serves."""

    def deficit(self, client: ClientId, worker: WorkerId) -> Deficit:
        """Return the client's deficits at a worker."""

    def grant(self, client: ClientId, cost: float) -> None:  # noqa: ARG002 - some policies keep no state
        """Let a known client be served this much more before others, in cost units; see `Credited`."""
        return

    def forget(self, client: ClientId) -> None:  # noqa: ARG002 - some policies keep no state
        """The client has no request waiting or in flight: keep its counters only if it is in debt."""
        return

    def forget_worker(self, worker: WorkerId) -> None:  # noqa: ARG002 - some policies keep no state
        """Discard the state of a worker that left and on which nothing runs."""
        return

    def saved(self) -> Iterator[Counters | Groups]:
        """Yield all counters, each piece as it is when it is requested. Changes nothing."""
        return iter(())

    def restore(self, counters: Counters | Groups) -> None:  # noqa: ARG002 - some policies keep no counters
        """Load counters that `saved` yielded. Called before anything else."""
        return


class Placement(Protocol):
    """Chooses the worker whose queue a request joins."""

    locality: ClassVar[bool] = False

    steal_loss: int | None = None
    """Cached input tokens that a request may lose when an idle worker takes it over; None if no request is taken
    over."""

    def advance(self, now: float) -> None:  # noqa: ARG002 - some placements keep no state
        """Move the placement's clock to `now`. Called before each `place`."""
        return

    def place(self, request: Request, candidates: Sequence[Candidate]) -> Placed:
        """Choose one of the candidates. There is at least one."""

    def book(self, request: Request, candidate: Candidate) -> None:  # noqa: ARG002 - some placements keep no state
        """Charge the client in advance for a request that now waits for this worker, because it was placed there or
        taken over.
        """
        return

    def unplace(self, request: RequestId) -> None:  # noqa: ARG002 - some placements keep no state
        """Undo the booking of a request that no longer waits there: it was dispatched, withdrawn or moved."""
        return

    def request_dispatched(self, request: RequestId, now: float) -> None:  # noqa: ARG002 - some placements keep no state
        """A request was dispatched, with or without waiting. Called before `unplace`."""
        return

    def resume(self, request: Request, worker: WorkerId) -> None:  # noqa: ARG002 - some policies keep no state
        """A request that an earlier run sent to this worker counts as dispatched."""
        return

    def request_charged(self, charge: Charge) -> None:  # noqa: ARG002 - some placements keep no state
        """The bill of a dispatched request changed."""
        return

    def request_ended(self, request: RequestId) -> None:  # noqa: ARG002 - some placements keep no state
        """A dispatched request ended."""
        return

    def worker_left(self, worker: WorkerId) -> None:  # noqa: ARG002 - some placements keep no state
        """A worker left."""
        return

    def deficit(self, client: ClientId, worker: WorkerId) -> float | None:  # noqa: ARG002 - some placements keep no state
        """Return the client's deficit at this worker; None if the placement keeps none."""
        return None

    def forget(self, client: ClientId) -> None:  # noqa: ARG002 - some policies keep no state
        return

    def forget_worker(self, worker: WorkerId) -> None:  # noqa: ARG002 - some policies keep no state
        return

    def saved(self) -> Iterator[SavedCounter]:
        """Yield all counters."""
        return iter(())

    def restore(self, rows: Iterable[SavedCounter]) -> None:  # noqa: ARG002 - some policies keep no counters
        """Load saved counters."""
        return


class Order(Protocol):
    """Chooses which request of one worker's queue goes next."""

    def __len__(self) -> int: ...

    def push(self, request: Request) -> None:
        """Add a request to the queue."""

    def remove(self, request: RequestId) -> Request:
        """Remove and return a request that was dispatched, withdrawn or moved."""

    def pass_through(self, request: Request, now: float) -> bool:
        """Decide whether a request that finds the queue empty may go at once, with the same effects as if it had waited
        for no time.
        """
        self.push(request)
        turn = self.select(lambda _: True, now)
        self.remove(request.id)
        return turn is not None

    def select(self, fits: Fits, now: float) -> Turn | None:
        """Return the request whose turn it is, which stays in the queue; None if none may go now.

        An order may pass over a request that does not fit, but not for ever.
        """

    def next_request(self, now: float) -> Request | None:
        """Return the request whose turn it would be if each fitted; None if none may go now. It has no turn yet."""
        turn = self.select(lambda _: True, now)
        return None if turn is None else turn.request

    def waiting(self) -> Collection[RequestId]:
        """Return all waiting requests, in order of arrival."""

    def request_dispatched(self, request: Request, now: float) -> None:  # noqa: ARG002 - some orders keep no state
        """A request of this queue was dispatched."""
        return

    def resume(self, request: Request, now: float) -> None:
        """Count a request as dispatched from this queue: an earlier run has sent it to the worker."""
        self.request_dispatched(request, now)

    def request_charged(self, charge: Charge) -> None:  # noqa: ARG002 - some orders keep no state
        """The bill of a request dispatched from this queue changed."""
        return

    def request_started(self, request: Request) -> None:  # noqa: ARG002 - some orders keep no state
        """A request dispatched from this queue produced its first token."""
        return

    def request_ended(self, request: Request) -> None:  # noqa: ARG002 - some orders keep no state
        """A request dispatched from this queue ended."""
        return

    def match_changed(self, requests: Iterable[RequestId]) -> None:  # noqa: ARG002 - some orders keep no state
        """The prefix match of these watched requests at this worker changed. Each must be watched again."""
        return

    def deficit(self, client: ClientId) -> float | None:  # noqa: ARG002 - some orders keep no state
        """Return the client's deficit in this queue; None if the order keeps none."""
        return None

    def grant(self, client: ClientId, cost: float) -> None:  # noqa: ARG002 - some policies keep no state
        return

    def forget(self, client: ClientId) -> None:  # noqa: ARG002 - some policies keep no state
        return

    def saved(self) -> Iterator[tuple[ClientId, float, float]]:
        """Yield each client with its counter's value and scale (`SavedCounter`)."""
        return iter(())

    def restore(self, client: ClientId, value: float, scale: float) -> None:  # noqa: ARG002 - some policies keep no counters
        """Load one counter. Called in the order in which the counters were saved."""
        return

    def saved_groups(self) -> Iterator[tuple[GroupId, float, float]]:
        """Yield each group with the value and scale of its counter, if the order also counts a group as if it were one
        client.
        """
        return iter(())

    def restore_group(self, group: GroupId, value: float, scale: float) -> None:  # noqa: ARG002 - some policies keep no counters
        """Load the counter of one group."""
        return


PlacementFactory = Callable[[PolicyContext], Placement]


@dataclass(frozen=True, slots=True)
class OrderFactory:
    """How the queues of a policy are ordered."""

    build: Callable[[PolicyContext, WorkerId], Order]
    """Builds the order of one worker's queue."""
    gap_quantum: Callable[[PolicyContext], float] | None = None
    """Returns the quantum of the gap bound under this order, in cost units; None if nothing bounds the gap."""


PolicyFactory = Callable[[PolicyContext], Policy]

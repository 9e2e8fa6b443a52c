"""Live requests (arrived and not ended), and the queue of those that a worker returned for a retry."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf

from router.core.clients.service_gap import Outstanding
from router.core.fleet.health import HealthRules, RetryBudget
from router.core.model.cost import Tokens
from router.core.model.events import Fault, Returned
from router.core.model.request import Request, RequestId, WorkerId


class RequestStage(Enum):
    """Where a request is in its lifecycle; the table in `scheduler` says what moves it."""

    WAITING = auto()
    IN_FLIGHT = auto()
    STARTED = auto()
    RETURNED = auto()


@dataclass(slots=True)
class RequestState:
    """A request from its arrival to its end, across all its attempts."""

    request: Request
    waiting_since: float
    """When the request began to wait, for its first dispatch or for a retry, in seconds."""
    stage: RequestStage = RequestStage.WAITING
    worker: WorkerId | None = None
    """The worker of the current attempt; None while the request waits."""
    outstanding: Outstanding = field(init=False, repr=False)
    """What the latest dispatch was expected to cost; unset before the first dispatch."""
    charged: Tokens | None = None
    """Tokens charged for earlier attempts; None while the prompt is not charged."""
    failed_workers: tuple[WorkerId, ...] = ()
    """The workers that returned the request, except those that had no room."""
    tries: int = 0
    """How many of these had accepted the request: a failed connection attempt costs nothing and is not counted."""
    suspects: tuple[WorkerId, ...] = ()
    """Those of the failed workers that are to blame if another worker completes the request."""

    @property
    def charged_output(self) -> int:
        """Output tokens charged for earlier attempts."""
        return 0 if self.charged is None else self.charged.output

    @property
    def resumed_output(self) -> int:
        """Output tokens from which the next worker continues; an answer that is not streamed begins anew."""
        return self.charged_output if self.request.streamed else 0


class RetryQueue:
    """Requests that a worker returned and that wait for another worker, first come, first served."""

    def __init__(self, rules: HealthRules, time_to_live: float) -> None:
        """`time_to_live`: longest wait of a request, in seconds."""
        self._tries = rules.tries
        self._time_to_live = time_to_live
        self._budget = RetryBudget(rules.budget, rules.floor)
        self._requests: dict[RequestId, RequestState] = {}
        self.requests: Mapping[RequestId, RequestState] = self._requests
        """Read-only view."""

    def count_arrival(self) -> None:
        """Count an arrival of a new request, which raises the retry budget."""
        self._budget.add_request()

    def add(self, state: RequestState, event: Returned, now: float, *, in_use: bool) -> bool:
        """Queue a request that its worker returned. Returns False if it must not be tried again.

        An engine that has no room has not failed: the request waits as if it had never been sent. A worker that took no
        connection, or refused the router, is not tried again, but it has computed nothing, so such an attempt costs
        neither a try nor retry budget.

        The retry budget limits retries while failures go on. A request that fails after its worker went out of use
        (`in_use` is False) was sent before that: however many such requests there are, they have one cause, which
        occurs once.
        """
        self._requests[state.request.id] = state
        worker, state.stage, state.worker = state.worker, RequestStage.RETURNED, None
        if event.fault is Fault.FULL or worker is None:
            return True
        state.waiting_since = now
        state.failed_workers += (worker,)
        if event.fault is Fault.ERROR:
            state.suspects += (worker,)
        if not event.accepted:
            return self._tries > 1
        state.tries += 1
        return state.tries < self._tries and (event.begun or not in_use or self._budget.take(now))

    def remove(self, request: RequestId) -> None:
        """Remove a request from the queue."""
        del self._requests[request]

    def expired(self, now: float) -> list[RequestState]:
        """Return the requests whose time to live is over; they stay queued until they are removed."""
        return [state for state in self._requests.values() if state.waiting_since + self._time_to_live <= now]

    @property
    def next_deadline(self) -> float:
        """When the next request expires, in seconds; infinite if none waits."""
        return min([state.waiting_since + self._time_to_live for state in self._requests.values()], default=inf)

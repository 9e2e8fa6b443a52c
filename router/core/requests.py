"""Requests between their arrival and their end, and those of them that came back from a worker."""

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
    """Where a request is in its life."""

    WAITING = auto()
    IN_FLIGHT = auto()
    STARTED = auto()
    RETURNED = auto()


@dataclass(slots=True)
class RequestState:
    """A request between its arrival and its end."""

    request: Request
    waiting_since: float
    """When it began to wait, for its turn or for another worker."""
    stage: RequestStage = RequestStage.WAITING
    worker: WorkerId | None = None
    outstanding: Outstanding = field(init=False, repr=False)
    """What was believed of it at its dispatch; there from then on."""
    charged: Tokens | None = None
    """What workers that it came back from were paid for it; None while its prompt is not paid."""
    failed_workers: tuple[WorkerId, ...] = ()
    """Those workers, but for the ones that had no room."""
    tries: int = 0
    """At those of them that took it: to ask in vain for a connection costs nobody anything."""
    suspects: tuple[WorkerId, ...] = ()
    """Those of them that will be to blame if another worker does it."""

    @property
    def charged_output(self) -> int:
        """Output tokens that other workers were paid for."""
        return 0 if self.charged is None else self.charged.output

    @property
    def resumed_output(self) -> int:
        """Those of them that the next worker goes on from; an answer that comes whole begins anew."""
        return self.charged_output if self.request.streamed else 0


class RetryQueue:
    """What came back from a worker and waits for another, first come, first served."""

    def __init__(self, rules: HealthRules, time_to_live: float) -> None:
        """`time_to_live`: seconds that each may wait."""
        self._tries = rules.tries
        self._time_to_live = time_to_live
        self._budget = RetryBudget(rules.budget, rules.floor)
        self._lives: dict[RequestId, RequestState] = {}
        self.requests: Mapping[RequestId, RequestState] = self._lives
        """To be looked at only."""

    def count_arrival(self) -> None:
        """A request arrived, which raises the budget of retries."""
        self._budget.request()

    def add(self, live: RequestState, event: Returned, now: float, *, in_use: bool) -> bool:
        """A request came back from its worker; whether it may be tried again.

        An engine that has no room has failed nothing: the request waits as if it had never been sent. One that took no
        connection, or refused the router, is not asked again, but has computed nothing, so that the retry is free.

        The budget is for failures that go on. What its worker fails when it is `in_use` no more was sent before that:
        however much it is, it is of one fault and comes once.
        """
        self._lives[live.request.id] = live
        worker, live.stage, live.worker = live.worker, RequestStage.RETURNED, None
        if event.fault is Fault.FULL or worker is None:
            return True
        live.waiting_since = now
        live.failed_workers += (worker,)
        if event.fault is Fault.ERROR:
            live.suspects += (worker,)
        if not event.accepted:
            return self._tries > 1
        live.tries += 1
        return live.tries < self._tries and (event.begun or not in_use or self._budget.take(now))

    def remove(self, request: RequestId) -> None:
        """It waits no more."""
        del self._lives[request]

    def expired(self, now: float) -> list[RequestState]:
        """Those whose time is over; they stay until they are removed."""
        return [live for live in self._lives.values() if live.waiting_since + self._time_to_live <= now]

    @property
    def next_deadline(self) -> float:
        """When the next one expires; infinite without any."""
        return min([live.waiting_since + self._time_to_live for live in self._lives.values()], default=inf)

"""Retries: the requests that workers returned, how many may be tried again, and which workers can try them."""

from collections.abc import Collection
from dataclasses import replace
from math import inf
from typing import Final

from router.core.fleet.health import HealthRules
from router.core.fleet.worker_fleet import WorkerFleet
from router.core.model.events import Fault, Returned
from router.core.model.request import Request, Role, WorkerId, decode_route
from router.core.requests import RequestState

BUDGET_SECONDS: Final = 10.0
"""Time in which the floor of the retry budget is refilled."""


class RetryBudget:
    """Limit on retries: a share of all requests, so that failures do not multiply, and a few more."""

    def __init__(self, share: float, floor: int) -> None:
        """`share`: retries per request. `floor`: retries refilled in `BUDGET_SECONDS`, without any requests."""
        self._share = share
        self._floor = floor
        self._left = float(floor)
        self._most = 10.0 * max(floor, 1)
        self._since = 0.0
        self._requests = 0
        """The requests whose shares are in the budget."""

    def take(self, now: float, requests: int) -> bool:
        """Use one retry. Returns False if none is left. `requests`: all that have come by now, each of which adds its
        share.
        """
        new, self._requests = requests - self._requests, requests
        self._left = min(self._left + new * self._share, self._most)
        if self._left < self._floor:
            self._left = min(self._floor, self._left + (now - self._since) * self._floor / BUDGET_SECONDS)
        self._since = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class RetryQueue:
    """Requests that a worker returned and that wait for another worker, first come, first served."""

    def __init__(self, rules: HealthRules, time_to_live: float) -> None:
        """`time_to_live`: longest wait of a request, in seconds."""
        self._tries = rules.tries
        self._time_to_live = time_to_live
        self._budget = RetryBudget(rules.budget, rules.floor)
        self._requests: dict[RequestState, None] = {}
        self.requests: Collection[RequestState] = self._requests.keys()
        """Read-only view."""
        self._to_ask: dict[RequestState, None] = {}
        """Those for which a worker is in use, as far as is known."""
        self._changes = 0
        """How often the fleet had changed when all were asked for last."""

    def add(
        self, state: RequestState, event: Returned, worker: WorkerId, now: float, *, in_use: bool, arrivals: int
    ) -> bool:
        """Queue a request that this worker returned. Returns False if it must not be tried again.

        An engine that has no room has not failed: the request waits as if it had never been sent. A worker that took no
        connection, or refused the router, is not tried again, but it has computed nothing, so such an attempt costs
        neither a try nor retry budget.

        The retry budget limits retries while failures go on. A request that fails after its worker went out of use
        (`in_use` is False) was sent before that: however many such requests there are, they have one cause, which
        occurs once. `arrivals`: the new requests that have come by now, each of which adds its share to the budget.
        """
        self._requests[state] = self._to_ask[state] = None
        if event.fault is Fault.FULL:
            return True
        state.waiting_since = now
        state.failed_workers += (worker,)
        if event.fault is Fault.ERROR:
            state.suspects += (worker,)
        if not event.accepted:
            return self._tries > 1
        state.tries += 1
        return state.tries < self._tries and (event.begun or not in_use or self._budget.take(now, arrivals))

    def add_lost(self, state: RequestState) -> None:
        """Queue a request that must be prefilled again though no worker has failed it."""
        self._requests[state] = self._to_ask[state] = None

    def remove(self, state: RequestState) -> None:
        """Remove a request from the queue."""
        del self._requests[state]
        self._to_ask.pop(state, None)

    def to_ask(self, changes: int) -> list[RequestState]:
        """Return the requests for which workers are to be looked for: all once the fleet has changed, otherwise those
        that are not set aside. `changes`: see `WorkerFleet.changes`.
        """
        if changes != self._changes:
            self._changes = changes
            self._to_ask = dict(self._requests)
        return list(self._to_ask)

    def set_aside(self, state: RequestState) -> None:
        """Let a request wait for an ejected worker, as no other is left, until the fleet changes."""
        del self._to_ask[state]

    def expired(self, now: float) -> list[RequestState]:
        """Return the requests whose time to live is over; they stay queued until they are removed."""
        return [state for state in self._requests if state.waiting_since + self._time_to_live <= now]

    @property
    def next_deadline(self) -> float:
        """When the next request expires, in seconds; infinite if none waits."""
        return min([state.waiting_since + self._time_to_live for state in self._requests], default=inf)


class RetryWorkers:
    """The workers to which a returned request can go: none that has failed it."""

    def __init__(self, fleet: WorkerFleet) -> None:
        self._fleet = fleet

    def able_to_retry(self, state: RequestState) -> tuple[Request, list[WorkerId]]:
        """Return the workers in use that can serve a request, with or without room, and what to place there of it."""
        request = state.request
        workers = self._able_to_begin(state.untried(self._fleet.candidates(request)), state)
        if not workers and (substitutes := self._fleet.substitutes(request)):
            return replace(request, whole=True), state.untried(substitutes)
        return request, workers

    def decoders(self, state: RequestState) -> list[WorkerId]:
        """Return the decode workers in use."""
        return state.untried(self._fleet.serving(decode_route(state.request.model)))

    def may_begin(self, state: RequestState, worker: WorkerId) -> bool:
        """Return whether a decode worker has room for the request, if this prefill worker needs one at once."""
        if not self._fleet[worker].worker.hands_over_at_once:
            return True
        return any(self._fleet[decoder].admits(1) for decoder in self.decoders(state))

    def _able_to_begin(self, workers: list[WorkerId], state: RequestState) -> list[WorkerId]:
        """Leave out the prefill workers while no decode worker in use is left to try: a prompt does not keep until one
        comes back, and would be computed for nothing if none does.
        """
        if not self._fleet.serving(decode_route(state.request.model)) or self.decoders(state):
            return workers
        return [worker for worker in workers if self._fleet[worker].worker.role is not Role.PREFILL]

    def one_comes_back(self, state: RequestState) -> bool:
        """Return whether an ejected worker serves a returned request once it is readmitted, as it would a request that
        waits in the queue.
        """
        fleet, request, decode = self._fleet, state.request, decode_route(state.request.model)
        if not fleet.ejected:
            return False
        if request.worker is not None:
            return fleet.bound_comes_back(request) and request.worker not in state.failed_workers
        if state.untried(fleet.substitutes_coming_back(request)):
            return True
        ejected = state.untried(fleet.coming_back(request.shared_route))
        first = [fleet[worker].worker for worker in (*state.untried(fleet.candidates(request)), *ejected)]
        if any(worker.role is not Role.PREFILL for worker in first):
            return True
        return bool(first) and bool(self.decoders(state) or state.untried(fleet.coming_back(decode)))

"""Prompts that prefill workers have computed and that wait for a decode worker.

Prefill and decode may be done by different workers. A request then has two attempts: one at a prefill worker, which
keeps the prompt's KV cache, and one at a decode worker, which fetches it. In between it waits here, for the decode
worker that the policy chooses once one has room ("Tackling the Data-Parallel Load Balancing Bottleneck in LLM Serving",
section 2: decode ranks admit from a pool of prefilled requests).

A hand-off is perishable. A prefill worker frees what nobody has fetched when its lease is over, and vLLM answers a
later read with status 200 and other text than the model's. So nothing is sent to a decode worker that has waited for
longer than `seconds`; it is prefilled again. And the pool is kept shallow: a prefill begins only while the prompts
under way and in the pool are fewer than the requests that decode workers are expected to admit in half that time.

With other connectors both workers are called at once, so nothing waits here: a prefill begins only if a decode worker
has room for the request. (A learned window has room a little before the engine has, see `RequestLimit`.)
"""

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import replace
from math import inf
from typing import Final

from router.core.clients.fairness import Fairness, Outstanding
from router.core.fleet.worker_fleet import WorkerFleet
from router.core.fleet.worker_state import WorkerState
from router.core.model.request import Leg, Request, RequestId, Role, WorkerId, decode_route
from router.core.predict.sliding_sum import SlidingSum, TimedAmount
from router.core.requests import Handoff, RequestState


class HandoffPool:
    """The requests that are prefilled and at no decode worker, the oldest first."""

    def __init__(self, seconds: float, fairness: Fairness) -> None:
        """`seconds`: the greatest age of a hand-off that is sent to a decode worker.

        `fairness`: counts a pooled request as outstanding until it is removed.
        """
        self._seconds = seconds
        self._fairness = fairness
        self._requests: dict[RequestState, Handoff] = {}
        self.requests: Final[Collection[RequestState]] = self._requests.keys()
        """Read-only view."""

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, state: RequestState) -> bool:
        return state in self._requests

    def __iter__(self) -> Iterator[RequestState]:
        """Iterate over the requests as they are now: they may be removed meanwhile."""
        return iter(tuple(self._requests))

    def add(self, state: RequestState, handoff: Handoff) -> None:
        """Let a prefilled request wait for a decode worker."""
        self._requests[state] = state.handoff = handoff

    def remove(self, state: RequestState) -> None:
        """Remove a request that is dispatched, lost or cancelled."""
        handoff = self._requests.pop(state)
        self._fairness.attempt_ended(state.request, handoff.worker, handoff.outstanding)

    def expired(self, now: float) -> list[RequestState]:
        """Return the requests that have waited for too long; they stay until they are removed."""
        return [state for state, handoff in self._requests.items() if handoff.since + self._seconds <= now]

    def kept_by(self, worker: WorkerId) -> list[RequestState]:
        """Return the requests whose prompts this prefill worker keeps."""
        return [state for state, handoff in self._requests.items() if handoff.worker == worker]

    @property
    def next_deadline(self) -> float:
        """When the next hand-off becomes too old, in seconds; infinite if none waits."""
        return min([handoff.since + self._seconds for handoff in self._requests.values()], default=inf)


class PrefillGate:
    """Pauses the prefill workers while they have prefilled, or are about to, all that can be decoded soon.

    Prefill workers of the same models share a limit: the requests for which their decode workers have room now, plus as
    many as ended there in the last half of the time for which a hand-off keeps.
    """

    def __init__(self, fleet: WorkerFleet, pool: HandoffPool, seconds: float) -> None:
        """`seconds`: as in `HandoffPool`."""
        self._fleet = fleet
        self._pool = pool
        self._half = seconds / 2
        self._ended: defaultdict[WorkerId, SlidingSum] = defaultdict(lambda: SlidingSum(self._half))
        """By decode worker, the attempts that ended there lately."""

    def decode_ended(self, worker: WorkerState, now: float) -> None:
        """Note that an attempt ended at a decode worker."""
        self._ended[worker.worker.id].add(TimedAmount(now, 1.0))

    def open_or_close(self, now: float) -> None:
        """Pause the prefill workers whose hand-offs would wait for too long, and let the others go on."""
        tiers: defaultdict[frozenset[str], list[WorkerState]] = defaultdict(list)
        for state in self._fleet:
            if state.worker.hands_over_at_once:
                state.set_paused(now, paused=not any(map(self._fleet.can_decode, state.worker.models)))
            elif state.worker.role is Role.PREFILL:
                tiers[state.worker.models].append(state)
            elif state.paused:
                state.set_paused(now, paused=False)
        for models, prefillers in tiers.items():
            pooled = sum(1 for state in self._pool if state.request.model in models and self._takes_slot(state))
            under_way = sum(state.load.requests for state in prefillers)
            paused = pooled + under_way >= self._slots(models, now)
            for state in prefillers:
                state.set_paused(now, paused=paused)
        for gone in self._ended.keys() - self._fleet.states.keys():
            del self._ended[gone]

    def _takes_slot(self, state: RequestState) -> bool:
        """Return whether a decode worker in use can decode a pooled request. If all have failed it, it waits for an
        ejected one, and takes no slot of those in use.
        """
        return not state.failed_workers or bool(state.untried(self._fleet.serving(decode_route(state.request.model))))

    def _slots(self, models: Collection[str], now: float) -> float:
        """Return how many requests the decode workers of these models are expected to admit soon."""
        workers = {worker for model in models for worker in self._fleet.serving(decode_route(model))}
        slots = 0.0
        for worker in workers:
            slots += self._fleet[worker].free_slots
            if (ended := self._ended.get(worker)) is not None:
                ended.advance(now)
                slots += ended.total
        return slots


def pooled_outstanding(outstanding: Outstanding) -> Outstanding:
    """Return what is still to be computed of a prefilled request, for the bound on the service gap."""
    return Outstanding(outstanding.expected_output)


def rest_of(request: Request) -> Request:
    """Return what is left to place of a prefilled request. It has no prompt, so that no cache attracts it."""
    return replace(request, prompts=(), blocks=(), prefilled=True)


def rest_beside(request: Request) -> Request:
    """Return the part of a request that a decode worker computes while a prefill worker has the request, too: to the
    policy, another request.
    """
    return replace(rest_of(request), id=RequestId(f"{request.id}\0decode"))


def role_of(leg: Leg) -> Role:
    """Return the role of a worker that was sent this part of a request."""
    if leg is Leg.WHOLE:
        return Role.BOTH
    return Role.PREFILL if leg is Leg.PREFILL else Role.DECODE

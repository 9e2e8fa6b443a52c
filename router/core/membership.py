"""Which workers there are and what is known of them: they join, report, fail, are ejected for a while, and leave.

A worker that fails too often is ejected, unless no other worker serves one of its models: it is sent no more requests,
and its queue is given to other workers, until it is readmitted on trial. A silent worker is sent nothing in any case,
and is ejected in the same way until it answers again. A worker that leaves is sent nothing more; the requests that run
there end by their own events, and after that the worker is forgotten.
"""

from collections.abc import Callable, Sequence
from typing import assert_never

from router.core.cache.prefix_map import PrefixMap
from router.core.clients.fairness import Fairness
from router.core.fleet.worker_fleet import WorkerFleet
from router.core.fleet.worker_state import WorkerState
from router.core.model.events import (
    BlocksChanged,
    BlocksFollowed,
    BlocksLost,
    Evicted,
    Fault,
    WorkerAnswered,
    WorkerJoined,
    WorkerLeft,
    WorkerReported,
)
from router.core.model.request import Request, Role, Worker, WorkerId, decode_route
from router.core.policies.base import Policy
from router.core.predict.output_length import OutputPredictions
from router.core.requests import RequestState

WorkerEvent = (
    WorkerJoined | WorkerReported | WorkerAnswered | WorkerLeft | Evicted | BlocksFollowed | BlocksChanged | BlocksLost
)


class Membership:
    """Applies what is reported of workers to the fleet, the prefix map and the policy."""

    def __init__(
        self,
        fleet: WorkerFleet,
        prefixes: PrefixMap,
        outputs: OutputPredictions,
        policy: Policy,
        fairness: Fairness,
        requeue: Callable[[Sequence[Request], float], None],
    ) -> None:
        """`requeue`: called whenever a worker's queue is dissolved, with the requests that the policy gave up."""
        self._fleet = fleet
        self._prefixes = prefixes
        self._mirror = prefixes.mirror
        self._blocks = prefixes.blocks
        self._outputs = outputs
        self._policy = policy
        self._fairness = fairness
        self._requeue = requeue

    def apply(self, event: WorkerEvent, now: float) -> None:
        """Apply an event about a worker. An event that only concerns a known worker changes nothing if the worker is
        unknown.
        """
        match event:
            case WorkerReported() | WorkerAnswered():
                self._apply_report(event, now)
            case WorkerJoined():
                self._join(event, now)
            case WorkerLeft(worker):
                self._leave(worker, now)
            case Evicted(worker, tokens):
                if tokens is None:
                    self._mirror.drop(worker)
                    self._blocks.clear(worker)
                    self._policy.on_cache_lost(worker)
                else:
                    self._mirror.evict(worker, tokens)
            case BlocksChanged():
                self._blocks.change(event)
            case BlocksFollowed(worker):
                if self._is_present(worker):
                    self._blocks.follow(event)
            case BlocksLost(worker):
                self._blocks.unfollow(worker)
            case _:
                assert_never(event)

    def note_unpinned(self) -> None:
        """Note that a request can name no rank: from the first one on, some workers serve what others do not."""
        if not self._fleet.had_unpinned:
            self._fleet.had_unpinned = True
            self._fairness.set_alike(alike=self._fleet.alike)

    def note_whole(self) -> None:
        """Note that one engine must compute all of a request: prefill workers cannot serve what others can."""
        if not self._fleet.had_whole:
            self._fleet.had_whole = True
            self._fairness.set_alike(alike=self._fleet.alike)

    def on_failure(self, worker: WorkerId, fault: Fault, now: float) -> None:
        """Note that a call failed at a worker, after the attempt there has been closed."""
        if fault is Fault.BROKEN:
            self._blame(worker, now)
        elif fault is Fault.FULL and worker in self._fleet:
            self._fleet[worker].on_overload(now)
        elif fault is Fault.ERROR and worker in self._fleet:
            self._fleet[worker].mark_alive(now)

    def blame_suspects(self, state: RequestState, now: float) -> None:
        """Count a failure of each worker suspected for a request: another worker has completed it, or there is one
        suspect only.
        """
        suspects, state.suspects = state.suspects, ()
        for worker in suspects:
            self._blame(worker, now)

    def _blame(self, worker: WorkerId, now: float) -> None:
        """Count a failure that is the worker's fault. It may open the circuit breaker, unless the worker cannot be
        spared.
        """
        if not self._is_present(worker):
            return
        state = self._fleet[worker]
        until = state.health.on_failure(now)
        if until is not None and not self._eject(worker, until, now):
            state.health.reset()
        state.refresh(now)

    def readmit(self, now: float) -> None:
        """Readmit on trial the workers that were ejected for long enough, or without which some model has no worker."""
        for worker in self._fleet.to_readmit(now):
            alone = self._decoding_alone(self._fleet[worker].worker)
            self._fleet.readmit(worker, now)
            self._policy.worker_joined(worker, now)
            self._relieve(alone, now)

    def eject_silent(self, now: float) -> None:
        """Eject workers that do not answer and can be spared, so that the requests waiting for them go to others."""
        for worker in self._fleet.to_eject():
            self._eject(worker, now, now)

    def _eject(self, worker: WorkerId, until: float, now: float) -> bool:
        """Eject a worker, and those that step together with it; returns False if they cannot be spared."""
        if worker in self._fleet.ejected:
            self._fleet.eject(worker, until)
            return True
        if not self._fleet.can_spare(worker):
            return False
        for each in self._fleet.group(worker):
            if each not in self._fleet.ejected:
                self._fleet.eject(each, until)
                self._requeue(self._policy.worker_left(each, now), now)
        return True

    def forget_if_gone(self, state: WorkerState) -> None:
        """Forget a worker that has left if nothing runs there any more. Called whenever something ended there.

        What clients owe there is kept in case the worker comes back, but only for a limited number of departed workers.
        """
        worker = state.worker.id
        self._fleet.forget_if_gone(state)
        if worker not in self._fleet.states:
            self._fairness.worker_left(worker)
            self._mirror.forget_worker(worker)
            for gone in self._fleet.to_forget():
                self._fairness.forget_worker(gone)
                self._policy.forget_worker(gone)
                self._outputs.forget_worker(gone)
                self._mirror.forget_worker(gone)

    def _is_present(self, worker: WorkerId) -> bool:
        return worker in self._fleet and not self._fleet[worker].left

    def _apply_report(self, event: WorkerReported | WorkerAnswered, now: float) -> None:
        if event.worker not in self._fleet:
            return
        self._fleet[event.worker].mark_answering(now)
        if isinstance(event, WorkerAnswered):
            self._fleet[event.worker].on_empty_report(now)
        else:
            self._fleet.on_report(event, now)
            if event.kv_tokens is not None:
                self._mirror.set_capacity(event.worker, event.kv_tokens)
            if event.cache is not None and self._mirror.apply_report(event.worker, event.cache, now):
                self._policy.on_cache_lost(event.worker)

    def _join(self, event: WorkerJoined, now: float) -> None:
        worker = event.worker
        present = self._is_present(worker.id)
        known = self._fleet[worker.id].worker if present else worker
        models = known.models if present else frozenset[str]()
        ejected = was_ejected = worker.id in self._fleet.ejected
        unserved: Sequence[Request] | None = None
        if not models <= worker.models or (known.role, known.takes) != (worker.role, worker.takes):
            # The worker serves fewer models now, or other parts of requests, or other requests: what it does not serve
            # any more must not wait for it.
            unserved = self._remove(worker.id, now)
            models, ejected = frozenset(), False
        alone = self._decoding_alone(worker)
        self._fleet.join(worker, back=not present or (was_ejected and not ejected))
        self._fleet[worker.id].mark_answering(now)
        self._mirror.update_worker(worker)
        if not ejected and (not models or models != worker.models or known.barrier != worker.barrier):
            self._policy.worker_joined(worker.id, now)
            self._relieve(alone, now)
        if unserved is not None:
            self._requeue(unserved, now)
        self._fairness.set_alike(alike=self._fleet.alike)

    def _decoding_alone(self, worker: Worker) -> Sequence[WorkerId]:
        """Return the decode workers that serve whole requests and need not once this prefill worker has joined."""
        if worker.role is not Role.PREFILL:
            return ()
        alone = worker.models - self._fleet.prefilled_models
        return [*dict.fromkeys(each for model in alone for each in self._fleet.serving(decode_route(model)))]

    def _relieve(self, alone: Sequence[WorkerId], now: float) -> None:
        """Place the requests again that wait for these decode workers: their prompts are prefilled from now on."""
        for worker in alone:
            self._fleet.eject(worker, now)  # as the policy is told: meanwhile it serves nothing
            unserved = self._policy.worker_left(worker, now)
            self._fleet.readmit(worker, now)
            self._policy.worker_joined(worker, now)
            self._requeue(unserved, now)

    def _leave(self, worker: WorkerId, now: float) -> None:
        if not self._is_present(worker):
            return
        state = self._fleet[worker]
        self._requeue(self._remove(worker, now), now)
        self._prefixes.drop(worker)
        self._blocks.unfollow(worker)
        self.forget_if_gone(state)
        self._fairness.set_alike(alike=self._fleet.alike)

    def _remove(self, worker: WorkerId, now: float) -> Sequence[Request]:
        """Take a worker out of the fleet and the policy. Returns the requests for which the policy has no other
        worker.
        """
        state = self._fleet[worker]
        ejected = worker in self._fleet.ejected
        self._fleet.leave(worker)
        unserved: Sequence[Request] = ()
        if not ejected:
            if self._fleet.ejected:
                self.readmit(now)
            unserved = self._policy.worker_left(worker, now)
        self._fleet.forget_if_gone(state)
        return unserved

"""Which workers there are and what they say: they join, report, fail, are left out for a while, and leave.

A worker that fails too often is barred, unless it alone serves a model: it takes no more requests, and its queue is
placed anew, until it is tried again. One that says nothing any more is sent nothing in any case, and barred likewise,
until it speaks. One that leaves is sent nothing more; what runs there ends by its own events, and then nothing of it is
remembered.
"""

from collections.abc import Callable, Sequence
from typing import assert_never

from router.core.cache.prefix_map import PrefixMap
from router.core.clients.fairness import Fairness
from router.core.fleet.cluster import Cluster
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
from router.core.model.request import Request, WorkerId
from router.core.policies.base import Policy
from router.core.requests import RequestState

WorkerEvent = (
    WorkerJoined | WorkerReported | WorkerAnswered | WorkerLeft | Evicted | BlocksFollowed | BlocksChanged | BlocksLost
)


class Membership:
    """Carries over to cluster, prefixes and policy what is heard of workers."""

    def __init__(
        self,
        cluster: Cluster,
        prefixes: PrefixMap,
        policy: Policy,
        fairness: Fairness,
        place_anew: Callable[[Sequence[Request], float], None],
    ) -> None:
        """`place_anew`: told each time that a worker's queue was dissolved, of the requests that the policy gave up."""
        self._cluster = cluster
        self._prefixes = prefixes
        self._mirror = prefixes.mirror
        self._blocks = prefixes.blocks
        self._policy = policy
        self._fairness = fairness
        self._place_anew = place_anew

    def apply(self, event: WorkerEvent, now: float) -> None:
        """Something was heard of a worker; of one that is not known, what only concerns a known one changes nothing."""
        match event:
            case WorkerReported() | WorkerAnswered():
                self._answer(event, now)
            case WorkerJoined():
                self._join(event, now)
            case WorkerLeft(worker):
                self._leave(worker, now)
            case Evicted(worker, tokens):
                if tokens is None:
                    self._mirror.drop(worker)
                    self._blocks.clear(worker)
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

    def on_failure(self, worker: WorkerId, fault: Fault, now: float) -> None:
        """A call failed at this worker, and nothing of it is there any more."""
        if fault is Fault.BROKEN:
            self._blame(worker, now)
        elif fault is Fault.FULL and worker in self._cluster:
            self._cluster[worker].on_overload(now)
        elif fault is Fault.ERROR and worker in self._cluster:
            self._cluster[worker].mark_alive(now)

    def blame_suspects(self, live: RequestState, now: float) -> None:
        """The workers under suspicion for a request are to blame: another has done it, or there was just one."""
        suspects, live.suspects = live.suspects, ()
        for worker in suspects:
            self._blame(worker, now)

    def _blame(self, worker: WorkerId, now: float) -> None:
        """A call failed by this worker's fault: that may open its breaker, unless it alone serves a model."""
        if not self._is_present(worker):
            return
        state = self._cluster[worker]
        until = state.health.on_failure(now)
        if until is not None and not self._bar(worker, until, now):
            state.health.reset()
        state.refresh(now)

    def readmit(self, now: float) -> None:
        """Try the workers that have been barred for long enough, or whom nobody stands in for."""
        for worker in self._cluster.to_readmit(now):
            self._cluster.readmit(worker, now)
            self._policy.worker_joined(worker, now)

    def eject_silent(self, now: float) -> None:
        """Let what waits for a worker that says nothing go to others, if there are any."""
        for worker in self._cluster.to_eject():
            self._bar(worker, now, now)

    def _bar(self, worker: WorkerId, until: float, now: float) -> bool:
        """Leave a worker out; False if it cannot be spared."""
        if worker in self._cluster.ejected:
            self._cluster.eject(worker, until)
            return True
        if not self._cluster.can_spare(worker):
            return False
        self._cluster.eject(worker, until)
        self._place_anew(self._policy.worker_left(worker, now), now)
        return True

    def forget_if_gone(self, worker: WorkerId) -> None:
        """Something ended at a worker: if it left and nothing runs there any more, forget it.

        What its clients owe there is remembered for the case that it comes back, but not of any number of workers.
        """
        if worker not in self._cluster.states:
            self._fairness.worker_left(worker)
            self._mirror.forget(worker)
            for gone in self._cluster.to_forget():
                self._fairness.forget_worker(gone)
                self._policy.forget_worker(gone)
                self._mirror.forget(gone)

    def _is_present(self, worker: WorkerId) -> bool:
        return worker in self._cluster and not self._cluster[worker].left

    def _answer(self, event: WorkerReported | WorkerAnswered, now: float) -> None:
        if event.worker not in self._cluster:
            return
        self._cluster[event.worker].mark_alive(now)
        if isinstance(event, WorkerAnswered):
            self._cluster[event.worker].on_empty_report(now)
        else:
            self._cluster.on_report(event, now)
            if event.kv_tokens is not None:
                self._mirror.set_capacity(event.worker, event.kv_tokens)
            if event.cache is not None:
                self._mirror.apply_report(event.worker, event.cache, now)

    def _join(self, event: WorkerJoined, now: float) -> None:
        worker = event.worker
        present = self._is_present(worker.id)
        models = self._cluster[worker.id].worker.models if present else frozenset[str]()
        barred = tried_anew = worker.id in self._cluster.ejected
        displaced: Sequence[Request] | None = None
        if not models <= worker.models:
            # What it no longer serves must not wait for it.
            displaced = self._vacate(worker.id, now)
            models, barred = frozenset(), False
        self._cluster.join(worker, back=not present or (tried_anew and not barred))
        self._cluster[worker.id].mark_alive(now)
        self._mirror.update_worker(worker)
        if not barred and (not models or models != worker.models):
            self._policy.worker_joined(worker.id, now)
        if displaced is not None:
            self._place_anew(displaced, now)
        self._fairness.set_alike(alike=self._cluster.alike)

    def _leave(self, worker: WorkerId, now: float) -> None:
        if not self._is_present(worker):
            return
        self._place_anew(self._vacate(worker, now), now)
        self._prefixes.drop(worker)
        self._blocks.unfollow(worker)
        self.forget_if_gone(worker)
        self._fairness.set_alike(alike=self._cluster.alike)

    def _vacate(self, worker: WorkerId, now: float) -> Sequence[Request]:
        """Take a worker out; its queue is placed anew. Returns the requests that no other worker serves."""
        barred = worker in self._cluster.ejected
        self._cluster.leave(worker)
        if barred:
            return ()
        if self._cluster.ejected:
            self.readmit(now)
        return self._policy.worker_left(worker, now)

"""The workers as the core knows them, and the models that they serve."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from math import inf
from typing import Final

from router.core.fleet.health import DEFAULT_RULES, Condition, HealthRules, SilenceTimeout
from router.core.fleet.window import Window
from router.core.fleet.worker_index import WorkerIndex
from router.core.fleet.worker_state import WorkerState
from router.core.model.events import WorkerReported
from router.core.model.request import (
    Request,
    Role,
    Takes,
    Worker,
    WorkerId,
    decode_route,
    own_route,
    unpinned_route,
    whole_route,
)
from router.core.predict.output_length import OutputPredictions

DEPARTED_LIMIT: Final = 256
"""Workers remembered after they left: for their clients' debts there, and to limit trust when they come back."""


@dataclass(slots=True)
class Returns:
    """What is known of ejected workers that come back."""

    by_route: dict[str, list[WorkerId]] = field(default_factory=dict)
    """What `WorkerFleet.coming_back` returns."""
    next_at: float | None = None
    """What `WorkerFleet.next_readmission` returns; None before it was asked for."""
    is_missed: bool = False
    """Whether some of the requests of one of them have no other worker; known with `next_at`."""


class WorkerFleet:
    """All workers by id, in the order in which they joined."""

    def __init__(
        self,
        window: Window,
        rules: HealthRules = DEFAULT_RULES,
        departed: int = DEPARTED_LIMIT,
        outputs: OutputPredictions | None = None,
        *,
        decode_alone: bool = True,
    ) -> None:
        """`window`: template for each worker's window. `departed`: how many departed workers are remembered. `outputs`:
        teaches each worker's mean output. `decode_alone`: whether decode workers serve whole requests while a model has
        no prefill worker in use.
        """
        self._window = window
        self._rules = rules
        self._most_departed = departed
        self._outputs = outputs or OutputPredictions()
        self._states: dict[WorkerId, WorkerState] = {}
        self.states: Mapping[WorkerId, WorkerState] = self._states
        """Read-only view; always the same object."""
        self.index = WorkerIndex()
        self.rates = self.index.rates
        self._joined = count()
        self._decode_alone = decode_alone
        self.has_roles = False
        """Whether any worker has another role than both."""
        self._serving: dict[str, dict[WorkerId, int]] = {}
        self._candidates: dict[tuple[str, bool, bool, bool], Mapping[WorkerId, int]] = {}
        """What `candidates` returns for requests that are bound to no worker: by model, and by what decides the route.
        """
        self._returns = Returns()
        """What was found since the last change."""
        self.changes = 0
        """Rises whenever who serves what, who is ejected or who is silent may have changed."""
        self.prefilled_models: frozenset[str] = frozenset()
        """The models that a prefill worker in use serves."""
        self._routes: dict[WorkerId, frozenset[str]] = {}
        self._silence_timeouts: dict[WorkerId, SilenceTimeout] = {}
        """What is learned of how long workers are silent; kept while they are away, as they stay as slow."""
        self._departed: dict[WorkerId, bool] = {}
        """Workers that left and have not come back, the latest last; whether their trust is limited when they come
        back.
        """
        self.ejected: dict[WorkerId, float] = {}
        """Ejected workers and the earliest time of their readmission: an open breaker, or silence until they answer."""
        self.held = False
        """Whether no worker may be sent anything, see `Held`."""
        self._has_ranks = False
        """Whether there ever were ranks behind a common URL. Before, no request is unpinned."""
        self.had_unpinned = False
        """Whether there ever was an unpinned request."""
        self.had_whole = False
        """Whether there ever was a request that one engine must compute while others have two parts."""
        self.silent_workers: list[WorkerId] = []
        """Workers found silent. Some may have answered since, or be gone."""

    def __iter__(self) -> Iterator[WorkerState]:
        return iter(self._states.values())

    def __contains__(self, worker: WorkerId) -> bool:
        return worker in self._states

    def __getitem__(self, worker: WorkerId) -> WorkerState:
        return self._states[worker]

    def last_sign(self, worker: WorkerId) -> float:
        """Return when a call last showed that a worker lives; -inf if it is unknown or none has."""
        state = self._states.get(worker)
        return -inf if state is None else state.last_sign

    def serving(self, route: str) -> Mapping[WorkerId, int]:
        """Return the workers that requests of this shared route may be sent to, in the order in which they joined, each
        with its number in this order. Never changes: the next call may return another object.
        """
        found = self._serving.get(route)
        if found is None:
            found = {s.worker.id: s.joined for s in self._states.values() if self._serves(s, route)}
            if found:  # clients can invent any number of model names, so unknown ones are not cached
                self._serving[route] = found
        return found

    def candidates(self, request: Request) -> Mapping[WorkerId, int]:
        """Return the workers that this request may be sent to, as `serving` does."""
        if request.worker is None:
            kind = request.model, request.prefilled, request.pinned, request.whole
            if (found := self._candidates.get(kind)) is None:
                found = self.serving(request.shared_route)
                if found:  # as in `serving`
                    self._candidates[kind] = found
            return found
        whole = self.serving(self._route_of_bound(request))
        return {request.worker: whole[request.worker]} if request.worker in whole else {}

    def _route_of_bound(self, request: Request) -> str:
        """Return the shared route of a request that is bound to a worker: only the worker that has computed all of a
        conversation stores it. A place of a session may also be at a worker that computes prompts only.
        """
        is_stored = not request.in_place
        return whole_route(request.model) if is_stored and self.has_roles and request.pinned else request.shared_route

    def bound_comes_back(self, request: Request) -> bool:
        """Return whether the one worker that a request is bound to is ejected, and when it comes back is known."""
        worker = request.worker
        if worker is None or worker not in self.ejected or not self._has_route(worker, self._route_of_bound(request)):
            return False
        return self._readmission(worker) < inf

    def routes(self, worker: WorkerId) -> frozenset[str]:
        """Return the routes of a worker's requests: the shared ones, and one of its own."""
        found = self._routes.get(worker)
        if found is None:
            known = self._states[worker].worker
            found = known.shared_routes | {own_route(worker)}
            if self._has_ranks or self.has_roles:
                found |= self._occasional_routes(known)
            self._routes[worker] = found
        return found

    def coming_back(self, route: str) -> Sequence[WorkerId]:
        """Return the ejected workers that requests of this shared route may be sent to once they are readmitted. Only
        those whose time is known: a silent worker may never answer. Ask only for routes of dispatched requests: each
        is kept until something changes.
        """
        found = self._returns.by_route.get(route)
        if found is None:
            found = [each for each in self.ejected if self._has_route(each, route) and self._readmission(each) < inf]
            self._returns.by_route[route] = found
        return found

    def _serves(self, state: WorkerState, route: str) -> bool:
        return self.in_use(state.worker.id) and self._has_route(state.worker.id, route)

    def _has_route(self, worker: WorkerId, route: str) -> bool:
        known = self._states[worker].worker
        return route in known.shared_routes or route in self._occasional_routes(known)

    def _occasional_routes(self, worker: Worker) -> frozenset[str]:
        """Return the routes that a worker has beside its own kind's because no worker of another kind needs them for
        itself: those of unpinned and of whole requests, and that of a model without prefill workers at decode workers.
        """
        if worker.role is Role.PREFILL or worker.takes is Takes.UNPINNED:
            return frozenset()
        found = set(map(unpinned_route, worker.models)) if worker.takes is Takes.ALL else set()
        if worker.role is Role.BOTH:
            found.update(map(whole_route, worker.models))
        elif self._decode_alone and worker.connector.decodes_alone:
            found.update(worker.models - self.prefilled_models)
        return frozenset(found)

    def substitutes(self, request: Request) -> Collection[WorkerId]:
        """Return the workers that may compute all of a request that no prefill worker can prefill; none for a request
        that only one worker can serve.
        """
        return self.serving(whole_route(request.model)) if self._has_substitutes(request) else ()

    def substitutes_coming_back(self, request: Request) -> Collection[WorkerId]:
        """Return those that will be such workers, as `coming_back` does."""
        return self.coming_back(whole_route(request.model)) if self._has_substitutes(request) else ()

    def _has_substitutes(self, request: Request) -> bool:
        return request.worker is None and self.has_roles and self._decode_alone

    def can_decode(self, model: str) -> bool:
        """Return whether a decode worker of this model has room for one more request now."""
        return any(self._states[worker].admits(1) for worker in self.serving(decode_route(model)))

    def _note_change(self) -> None:
        """Note that other workers than before may serve a request, or come back."""
        self.changes += 1
        self._returns = Returns()

    def _forget_routes(self) -> None:
        """Find again who serves what, because workers joined, left or were ejected."""
        self._note_change()
        self._serving.clear()
        self._candidates.clear()
        had_roles = self.has_roles
        apart = [state for state in self._states.values() if state.worker.role is not Role.BOTH]
        self.has_roles = bool(apart)
        if had_roles or apart:
            self._routes.clear()
            prefill = [
                state.worker for state in apart if state.worker.role is Role.PREFILL and self.in_use(state.worker.id)
            ]
            self.prefilled_models = frozenset(model for worker in prefill for model in worker.models)

    @property
    def alike(self) -> bool:
        """Whether all present workers, ejected or not, serve the same requests, as far as any were seen."""
        present = [state.worker for state in self._states.values() if not state.left]
        seen = [worker for worker in present if worker.takes is not Takes.UNPINNED or self.had_unpinned]
        if self.had_whole and self.has_roles:
            return False
        return len({(worker.models, worker.takes is Takes.UNPINNED) for worker in seen}) <= 1

    def in_use(self, worker: WorkerId) -> bool:
        """Return whether a worker is sent requests: it is present and not ejected."""
        state = self._states.get(worker)
        return state is not None and not state.left and worker not in self.ejected

    def can_spare(self, worker: WorkerId) -> bool:
        """Return whether all requests of a worker, and of those that step together with it, have another worker."""
        group = self.group(worker)
        routes = {route for each in group for route in self._states[each].worker.shared_routes}
        return all(self._is_served_without(group, route) for route in routes)

    def _is_served_without(self, group: Collection[WorkerId], route: str) -> bool:
        if any(each not in group for each in self.serving(route)):
            return True
        return route in self.prefilled_models and self._decode_alone and bool(self.serving(whole_route(route)))

    def group(self, worker: WorkerId) -> list[WorkerId]:
        """Return the present workers that step together with a worker, itself among them."""
        barrier = self._states[worker].worker.barrier
        if barrier is None:
            return [worker]
        return [each for each, state in self._states.items() if state.worker.barrier == barrier and not state.left]

    def eject(self, worker: WorkerId, until: float) -> None:
        """Send a worker nothing until this time, nor before it answers, because its breaker opened or it is silent."""
        self.ejected[worker] = max(until, self.ejected.get(worker, until))
        self._forget_routes()

    def readmit(self, worker: WorkerId, now: float) -> None:
        """Send an ejected worker requests again. A breaker that was open becomes half-open."""
        del self.ejected[worker]
        self._forget_routes()
        state = self._states[worker]
        if state.health.condition is Condition.OPEN:
            state.health.half_open()
        state.refresh(now)

    def to_readmit(self, now: float) -> list[WorkerId]:
        """Return the ejected workers whose time is over, and that of all that step together with them, or without which
        some of their requests have no worker. Visits them only if there are any.
        """
        self._note_answers()
        if self.next_readmission > now and not self._returns.is_missed:
            return []
        return [each for each in self.ejected if self._readmission(each) <= now or self._misses(each)]

    def _misses(self, worker: WorkerId) -> bool:
        """Return whether some of the requests of an ejected worker have no other worker."""
        return not all(self.serving(route) for route in self._states[worker].worker.shared_routes)

    def _readmission(self, worker: WorkerId) -> float:
        """Return when a worker may be readmitted, with its whole group; infinite while one of that is silent."""
        group = self.group(worker)
        if any(self._states[each].silent for each in group):
            return inf
        return max(self.ejected.get(each, -inf) for each in group)

    def to_eject(self) -> list[WorkerId]:
        """Return the silent workers that are not ejected yet."""
        self._note_answers()
        return [each for each in self.silent_workers if each not in self.ejected and not self._states[each].left]

    def _note_answers(self) -> None:
        """Forget the silent workers that have answered since, or are gone."""
        states = self._states
        silent = [worker for worker in self.silent_workers if worker in states and states[worker].silent]
        if len(silent) < len(self.silent_workers):
            self.silent_workers = silent
            self._note_change()

    def join(self, worker: Worker, *, back: bool = True) -> None:
        """Add a worker, or update the facts of a known one. A known KV capacity is kept if the new facts have none.

        A worker that was away and is `back` has its trust limited at first.
        """
        state = self._states.get(worker.id)
        back = back and (self._departed.get(worker.id, False) or (state is not None and state.left))
        self._departed.pop(worker.id, None)
        if state is None:
            state = WorkerState(worker, self._window.fresh(), self.index, self._rules, next(self._joined))
            state.silence_timeout = self._silence_timeouts.setdefault(worker.id, state.silence_timeout)
            self._states[worker.id] = state
            self.rates.add(worker.id, state.service_rate)
            self._outputs.add(state.mean_output, worker.id)
        else:
            state.worker = replace(worker, kv_tokens=worker.kv_tokens or state.worker.kv_tokens)
            state.left = state.paused = False
        if back:
            state.health.half_open()
        if worker.kv_tokens is not None:
            state.set_kv_capacity(worker.kv_tokens)
        self._forget_routes()
        self._routes.pop(worker.id, None)
        if worker.takes is not Takes.ALL and not self._has_ranks:
            self._has_ranks = True
            self._routes.clear()

    def leave(self, worker: WorkerId) -> None:
        """Send a worker nothing more. It is known until `forget_if_gone`."""
        state = self._states[worker]
        state.left = True
        self.ejected.pop(worker, None)
        self._forget_routes()

    def remember(self, worker: WorkerId) -> None:
        """Remember a worker from before a restart like one that left, until it joins."""
        if worker not in self._states:
            self._depart(worker, distrusted=False)

    def to_forget(self) -> Sequence[WorkerId]:
        """Remove and return the workers that left longest ago, beyond the limit of departed workers."""
        gone = [*islice(self._departed, max(0, len(self._departed) - self._most_departed))]
        for worker in gone:
            del self._departed[worker]
            self._silence_timeouts.pop(worker, None)
        return gone

    def on_report(self, event: WorkerReported, now: float) -> None:
        """Update a worker by its metrics. A known KV capacity is kept until another one is reported."""
        state = self._states[event.worker]
        if event.kv_tokens is not None and event.kv_tokens != state.worker.kv_tokens:
            state.set_kv_capacity(event.kv_tokens)
        state.on_report(event.running, event.waiting, event.places, now, event.work)

    def rate_of_all(self) -> float | None:
        """Return the rate of all workers that have not left."""
        return self.rates.together([worker for worker, state in self._states.items() if not state.left])

    @property
    def next_readmission(self) -> float:
        """When the next ejected worker may be readmitted, in seconds; infinite if none will be."""
        returns = self._returns
        if returns.next_at is None:
            returns.next_at = min(map(self._readmission, self.ejected), default=inf)
            returns.is_missed = any(map(self._misses, self.ejected))
        return returns.next_at

    def advance(self, now: float) -> None:
        """Update the workers whose deadlines are over at this time."""
        for worker in self.index.due(now):
            state = self._states[worker]
            state.advance(now)
            if state.silent and worker not in self.silent_workers:
                self.silent_workers.append(worker)
                self._note_change()

    def forget_if_gone(self, state: WorkerState) -> None:
        """Forget a worker that has left if nothing runs there any more."""
        worker = state.worker.id
        if state.left and not (state.running or state.in_flight.aside) and worker in self._states:
            del self._states[worker]
            self._outputs.remove(state.mean_output, worker)
            self._routes.pop(worker, None)
            if state.worker.role is not Role.BOTH:
                self._forget_routes()
            self._depart(worker, distrusted=True)
            self.index.remove(worker)

    def _depart(self, worker: WorkerId, *, distrusted: bool) -> None:
        self._departed.pop(worker, None)
        self._departed[worker] = distrusted

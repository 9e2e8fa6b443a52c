"""The workers as the core knows them, and the models that they serve."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from math import inf

from router.core.fleet.health import DEFAULT_RULES, Condition, HealthRules
from router.core.fleet.window import Window
from router.core.fleet.worker_state import WorkerState
from router.core.model.events import WorkerReported
from router.core.model.request import Request, RequestId, Worker, WorkerId, own_route

DEPARTED_LIMIT = 256
"""Workers remembered that left: what their clients owe there, and that they are trusted little by little again."""
SPEED_TOLERANCE = 1.25
"""Workers whose rates differ by no more are equally fast: rates differ with what is served, too."""


class Cluster:
    """All workers by id, in the order in which they joined."""

    def __init__(self, window: Window, rules: HealthRules = DEFAULT_RULES, departed: int = DEPARTED_LIMIT) -> None:
        """`window`: each worker gets one like it; `departed`: how many are remembered of those that left."""
        self._window = window
        self._rules = rules
        self._most_departed = departed
        self._states: dict[WorkerId, WorkerState] = {}
        self.states: Mapping[WorkerId, WorkerState] = self._states
        """To be looked at only; one object for good."""
        self._serving: dict[str, list[WorkerId]] = {}
        self._routes: dict[WorkerId, frozenset[str]] = {}
        self._deadlines: dict[WorkerId, float] = {}
        self._departed: dict[WorkerId, bool] = {}
        """Those that left and have not come back, the last of them last; whether they are trusted little by little
        when they do.
        """
        self.ejected: dict[WorkerId, float] = {}
        """Those that are sent nothing, and until when at least: while their breaker is open, or until they speak."""
        self.silent_workers: list[WorkerId] = []
        """Those that said nothing for too long; some may have spoken since, or be gone."""

    def __iter__(self) -> Iterator[WorkerState]:
        return iter(self._states.values())

    def __contains__(self, worker: WorkerId) -> bool:
        return worker in self._states

    def __getitem__(self, worker: WorkerId) -> WorkerState:
        return self._states[worker]

    def serving(self, model: str) -> list[WorkerId]:
        """The workers that a request for this model may be sent to."""
        found = self._serving.get(model)
        if found is None:
            found = [s.worker.id for s in self._states.values() if self._serves(s, model)]
            if found:  # names that nobody serves are the clients' to invent, without end
                self._serving[model] = found
        return found

    def candidates(self, request: Request) -> list[WorkerId]:
        """The workers that this request may be sent to."""
        serving = self.serving(request.model)
        if request.worker is None:
            return serving
        return [worker for worker in serving if worker == request.worker]

    def routes(self, worker: WorkerId) -> frozenset[str]:
        """Those of the requests that a worker may be sent: its models, and one of its own."""
        found = self._routes.get(worker)
        if found is None:
            found = self._routes[worker] = self._states[worker].worker.models | {own_route(worker)}
        return found

    def _serves(self, state: WorkerState, model: str) -> bool:
        return not state.left and state.worker.id not in self.ejected and model in state.worker.models

    @property
    def alike(self) -> bool:
        """Whether all workers that are there serve the same models, whether they are left out for a while or not."""
        return len({state.worker.models for state in self._states.values() if not state.left}) <= 1

    def in_use(self, worker: WorkerId) -> bool:
        """Whether anything is sent to a worker: it is there, and not left out."""
        state = self._states.get(worker)
        return state is not None and not state.left and worker not in self.ejected

    def can_spare(self, worker: WorkerId) -> bool:
        """Whether everything that a worker serves is served by others, too."""
        return all(len(self.serving(model)) > 1 for model in self._states[worker].worker.models)

    def eject(self, worker: WorkerId, until: float) -> None:
        """Its breaker opened, or it is silent: send it nothing until then, nor before it speaks."""
        self.ejected[worker] = max(until, self.ejected.get(worker, until))
        self._serving.clear()

    def readmit(self, worker: WorkerId, now: float) -> None:
        """Its time is over; if its breaker was open, it is half-open now."""
        del self.ejected[worker]
        self._serving.clear()
        state = self._states[worker]
        if state.health.condition is Condition.OPEN:
            state.health.half_open()
        state.refresh(now)

    def to_readmit(self, now: float) -> list[WorkerId]:
        """The barred ones whose time is over, or without whom a model of theirs is served by nobody."""
        return [
            worker
            for worker, until in self.ejected.items()
            if (until <= now and not self._states[worker].silent)
            or not all(self.serving(model) for model in self._states[worker].worker.models)
        ]

    def to_eject(self) -> list[WorkerId]:
        """Those that are silent and not barred for it."""
        states = self._states
        self.silent_workers = [worker for worker in self.silent_workers if worker in states and states[worker].silent]
        return [each for each in self.silent_workers if each not in self.ejected and not states[each].left]

    def join(self, worker: Worker, *, back: bool = True) -> None:
        """Add a worker, or take new facts of one that is known; a capacity once told stays.

        One that was away and is `back` is trusted again little by little.
        """
        state = self._states.get(worker.id)
        back = back and (self._departed.get(worker.id, False) or (state is not None and state.left))
        self._departed.pop(worker.id, None)
        if state is None:
            state = WorkerState(worker, self._window.fresh(), self._deadlines, self._rules)
            self._states[worker.id] = state
        else:
            state.worker = replace(worker, kv_tokens=worker.kv_tokens or state.worker.kv_tokens)
            state.left = False
        if back:
            state.health.half_open()
        if worker.kv_tokens is not None:
            state.set_kv_capacity(worker.kv_tokens)
        self._serving.clear()
        self._routes.pop(worker.id, None)

    def leave(self, worker: WorkerId) -> None:
        """Send it nothing more; forget it once nothing runs there."""
        self._states[worker].left = True
        self.ejected.pop(worker, None)
        self._serving.clear()
        self._forget(worker)

    def remember(self, worker: WorkerId) -> None:
        """It was there before a restart, and is remembered like one that left until it comes."""
        if worker not in self._states:
            self._depart(worker, distrusted=False)

    def to_forget(self) -> Sequence[WorkerId]:
        """Those that left longest ago, as many as are too many; they are remembered no more."""
        gone = [*islice(self._departed, max(0, len(self._departed) - self._most_departed))]
        for worker in gone:
            del self._departed[worker]
        return gone

    def on_report(self, event: WorkerReported, now: float) -> None:
        """Take in a worker's metrics; a capacity once told stays until another is."""
        state = self._states[event.worker]
        if event.kv_tokens is not None and event.kv_tokens != state.worker.kv_tokens:
            state.set_kv_capacity(event.kv_tokens)
        state.on_report(event.running, event.waiting, event.places, now, event.work)

    def remove(self, request: RequestId, worker: WorkerId, now: float, *, computed: bool) -> None:
        """A dispatched request ended. `computed`: at least in part, and not turned away."""
        state = self._states[worker]
        state.remove(request, now, computed=computed)
        if state.left:
            self._forget(worker)

    def rate(self, workers: Collection[WorkerId]) -> float | None:
        """Cost units that these workers serve in a second without room for more; None before that was seen.

        Those of which it was not seen are taken to be like the mean of the others.
        """
        paces = [self._states[worker].service_rate for worker in workers]
        rates = [rate for pace in paces if (rate := pace.rate or pace.least_rate) is not None]
        return sum(rates) * len(paces) / len(rates) if rates else None

    def rate_of_all(self) -> float | None:
        """That of all workers that have not left."""
        return self.rate([worker for worker, state in self._states.items() if not state.left])

    def speed(self, worker: WorkerId) -> float:
        """A worker's service rate over the mean of those known; 1 where its own is about that, or not known.

        Known is the rate of a worker that had no room for more, and of one that serves more than these even so: one
        that has little to do serves little, however fast it is.
        """
        paces = {state.worker.id: state.service_rate for state in self._states.values()}
        rates = {each: rate for each, pace in paces.items() if (rate := pace.rate) is not None}
        if not rates:
            return 1.0
        full = sum(rates.values()) / len(rates)
        for each, pace in paces.items():
            if each not in rates and (least := pace.least_rate) is not None and least > full:
                rates[each] = least
        mean = sum(rates.values()) / len(rates)
        speed = rates[worker] / mean if worker in rates else 1.0
        return 1.0 if 1 / SPEED_TOLERANCE < speed < SPEED_TOLERANCE else speed

    @property
    def next_deadline(self) -> float:
        """When something here changes by time alone; infinite if nothing does."""
        deadline = min(self._deadlines.values()) if self._deadlines else inf
        for worker, until in self.ejected.items():
            if until < deadline and not self._states[worker].silent:
                deadline = until
        return deadline

    def advance(self, now: float) -> None:
        """Take in that it is now this time."""
        deadlines = self._deadlines
        if not deadlines or min(deadlines.values()) > now:
            return
        for worker in [worker for worker, deadline in deadlines.items() if deadline <= now]:
            state = self._states[worker]
            state.advance(now)
            if state.silent and worker not in self.silent_workers:
                self.silent_workers.append(worker)

    def _forget(self, worker: WorkerId) -> None:
        state = self._states[worker]
        if state.left and not state.running:
            del self._states[worker]
            self._routes.pop(worker, None)
            self._depart(worker, distrusted=True)
            self._deadlines.pop(worker, None)

    def _depart(self, worker: WorkerId, *, distrusted: bool) -> None:
        self._departed.pop(worker, None)
        self._departed[worker] = distrusted

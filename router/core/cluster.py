"""The workers as the core knows them: their models, and what is in flight at each."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from router.core.model import RequestId, Worker, WorkerId, WorkerReported
from router.core.pace import Pace
from router.core.window import Load, Window


@dataclass(slots=True)
class InFlight:
    """A request dispatched to a worker, as the window counts it."""

    uncached_tokens: int
    unstarted: bool


@dataclass(slots=True)
class WorkerState:
    """One worker and what runs there. One that left stays until the last of its requests has ended."""

    worker: Worker
    window: Window
    pace: Pace = field(default_factory=Pace)
    left: bool = False
    running: dict[RequestId, InFlight] = field(default_factory=dict)
    unstarted: int = 0
    unstarted_tokens: int = 0
    engine_running: int = 0
    engine_waiting: int = 0

    @property
    def load(self) -> Load:
        """What the window looks at."""
        return Load(len(self.running), self.unstarted, self.unstarted_tokens)

    def add(self, request: RequestId, uncached_tokens: int, *, streamed: bool) -> None:
        """Count a dispatched request. One that does not stream never shows its start, so it counts as started."""
        self.running[request] = InFlight(uncached_tokens, streamed)
        if streamed:
            self.unstarted += 1
            self.unstarted_tokens += uncached_tokens

    def start(self, request: RequestId, now: float) -> None:
        """Its first token is here: it waits no more."""
        flight = self.running[request]
        if flight.unstarted:
            self._count_started(flight)
            self.window.started(flight.uncached_tokens, now)

    def _count_started(self, flight: InFlight) -> None:
        flight.unstarted = False
        self.unstarted -= 1
        self.unstarted_tokens -= flight.uncached_tokens

    def remove(self, request: RequestId) -> None:
        """It ended."""
        flight = self.running.pop(request)
        if flight.unstarted:
            self._count_started(flight)


class Cluster:
    """All workers by id, in the order in which they joined."""

    def __init__(self, window: Window) -> None:
        """`window`: each worker gets one like it."""
        self._window = window
        self._states: dict[WorkerId, WorkerState] = {}
        self._serving: dict[str, list[WorkerId]] = {}

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
            found = [s.worker.id for s in self._states.values() if not s.left and model in s.worker.models]
            if found:  # names that nobody serves are the clients' to invent, without end
                self._serving[model] = found
        return found

    def join(self, worker: Worker) -> None:
        """Add a worker, or take new facts of one that is known, departed or not; a capacity once told stays."""
        state = self._states.get(worker.id)
        if state is None:
            self._states[worker.id] = WorkerState(worker, self._window.fresh())
        else:
            state.worker = replace(worker, kv_tokens=worker.kv_tokens or state.worker.kv_tokens)
            state.left = False
        self._serving.clear()

    def leave(self, worker: WorkerId) -> None:
        """Send it nothing more; forget it once nothing runs there."""
        self._states[worker].left = True
        self._serving.clear()
        self._forget(worker)

    def report(self, event: WorkerReported) -> None:
        """Take in a worker's metrics; a capacity once told stays until another is."""
        state = self._states[event.worker]
        state.engine_running = event.running
        state.engine_waiting = event.waiting
        state.window.reported(state.load, event.running, event.waiting)
        if event.kv_tokens is not None and event.kv_tokens != state.worker.kv_tokens:
            state.worker = replace(state.worker, kv_tokens=event.kv_tokens)

    def remove(self, request: RequestId, worker: WorkerId) -> None:
        """A dispatched request ended."""
        self._states[worker].remove(request)
        self._forget(worker)

    def speed(self, worker: WorkerId) -> float:
        """A worker's service rate over the mean of the known rates; 1 where its own is not known."""
        own = self._states[worker].pace.rate
        if own is None:
            return 1.0
        known = [rate for state in self._states.values() if (rate := state.pace.rate) is not None]
        return own * len(known) / sum(known)

    def _forget(self, worker: WorkerId) -> None:
        state = self._states[worker]
        if state.left and not state.running:
            del self._states[worker]

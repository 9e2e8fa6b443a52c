"""A fleet in virtual time on which anything may happen: clients with many habits in front of unpredictable engines.

Everything follows from a `Scenario`, so a failing one can be run again.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import ceil
from random import Random

from router.core.model.commands import Dispatch, Reject, WakeAt
from router.core.model.cost import Tokens
from router.core.model.events import (
    Arrived,
    Cancelled,
    Event,
    Evicted,
    Failed,
    Finished,
    Progressed,
    Started,
    Ticked,
    WorkerJoined,
    WorkerLeft,
)
from router.core.model.request import BarrierId, ClientId, Request, RequestId, Usage, Worker, WorkerId
from router.core.policies.base import PolicyFactory
from router.core.policies.context import Parameters
from router.core.scheduler import Scheduler
from router.core.scheduler_settings import SchedulerSettings
from tests.core.scenario import CHUNK_TOKENS, key
from tests.core.theorem_books import Books

STEP_SECONDS = 0.05
MODELS = ("llama", "adapter")
"""The models that every worker serves, unless a scenario says otherwise."""


class Cached(Enum):
    """What an engine finds cached of a client's inputs."""

    AS_PREDICTED = "as predicted"
    NOTHING = "nothing"
    EVERYTHING = "everything"
    ANYTHING = "anything"


@dataclass(frozen=True, slots=True)
class Habits:
    """What a client sends and what becomes of it. Shares are fractions of its requests."""

    weight: float = 1.0
    model: str | None = None
    """The only model that it asks for; None if it asks for any of `MODELS`."""
    at_once: int = 4
    """Requests kept outstanding."""
    shared: int = 0
    """Chunks with which all its prompts begin; clients with the same number share them."""
    own: int = 4
    """Maximum of further chunks in a prompt."""
    density: float | None = None
    """Tokens per byte of text, known to the engine only; None for prompts of token ids."""
    limit: int = 20
    """Maximum of output tokens per request."""
    stops_early: bool = False
    streamed: float = 1.0
    pinned: float = 0.0
    """Share that only one worker may take."""
    cached: Cached = Cached.AS_PREDICTED
    reports_usage: float = 1.0
    """Share whose usage the engine reports."""
    refused: float = 0.0
    broken: float = 0.0
    cancelled: float = 0.0
    leaves: float = 0.0
    """Probability per step of a pause."""
    returns: float = 0.3
    """Probability per step that a pause ends."""


@dataclass(frozen=True, slots=True)
class EngineSize:
    """How much an engine does in one step."""

    slots: int = 8
    prefill_tokens: int = 512
    decode_tokens: int = 4
    """Output tokens of each running request in one step."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A fleet, its clients, and all that is random."""

    clients: tuple[Habits, ...]
    workers: int = 1
    models: tuple[frozenset[str], ...] = ()
    """What each worker serves, if not all serve `MODELS`. Then books compare clients that ask for the same model."""
    settings: SchedulerSettings = field(default_factory=SchedulerSettings)
    parameters: tuple[object, ...] = ()
    """Parameters of the policy families."""
    engine: EngineSize = field(default_factory=EngineSize)
    steps: int = 100
    seed: int = 0
    evictions: float = 0.0
    """Probability per step that a cache loses something."""
    flaps: float = 0.0
    """Probability per step that a worker leaves; it soon comes back."""
    reorders: bool = False
    """Whether the first worker reports that its engine orders by longest match."""
    barrier: BarrierId | None = None
    """The group of all workers, if policies are to believe that they step together."""


@dataclass(slots=True)
class Job:
    """A request in an engine, and what will become of it."""

    request: Request
    size: int
    found: int
    """Input tokens found cached."""
    output: int
    reports_usage: bool
    refused: bool
    breaks_at: int | None
    produced: int = 0
    prefilled: int = 0


class Engine:
    """Serves in order of arrival: one prefill at a time, and decodes beside it for all other running requests."""

    def __init__(self, size: EngineSize) -> None:
        self._size = size
        self._queue: deque[Job] = deque()
        self.running: list[Job] = []

    def submit(self, job: Job) -> None:
        self._queue.append(job)

    def abort(self, request: RequestId) -> Job | None:
        """Drop a request; returns None if it is not here."""
        for jobs in (self._queue, self.running):
            for job in jobs:
                if job.request.id == request:
                    jobs.remove(job)
                    return job
        return None

    def step(self) -> Iterator[Event]:
        """Run one step; yields its events in order."""
        yield from self._prefill()
        for job in self.running:
            job.produced = min(job.output, job.produced + self._size.decode_tokens)
        progress = {job.request.id: job.produced for job in self.running if job.request.streamed and job.produced}
        if progress:
            yield Progressed(progress)
        for job in list(self.running):
            if job.breaks_at is not None and job.produced >= job.breaks_at:
                self.running.remove(job)
                yield Failed(job.request.id, accepted=True, usage=usage(job))
            elif job.produced == job.output:
                self.running.remove(job)
                yield Finished(job.request.id, usage(job), job.request.prompts)

    def _prefill(self) -> Iterator[Event]:
        budget = self._size.prefill_tokens
        while self._queue and budget > 0 and len(self.running) < self._size.slots:
            job = self._queue[0]
            if job.refused:
                self._queue.popleft()
                yield Failed(job.request.id, accepted=False)
                continue
            computed = min(budget, job.size - job.found - job.prefilled)
            budget -= computed
            job.prefilled += computed
            if job.prefilled == job.size - job.found:
                self.running.append(self._queue.popleft())
                if job.request.streamed:
                    yield Started(job.request.id)


def usage(job: Job) -> Usage | None:
    """Return the engine's usage of a request as far as it was computed."""
    return Usage(job.size, job.produced, job.found) if job.reports_usage else None


Reporting = Callable[[Event], Sequence[Event]]


class Fleet:
    """Clients, a scheduler, engines, and the books kept about them."""

    def __init__(self, scenario: Scenario, policy: PolicyFactory, reporting: Reporting = lambda event: [event]) -> None:
        """`reporting`: maps an event to those reported to the scheduler."""
        self._scenario = scenario
        self._reporting = reporting
        self._random = Random(scenario.seed)
        settings = scenario.settings
        self.scheduler = Scheduler(policy, settings, Parameters(*scenario.parameters), Random(0))
        self.properties = self.scheduler.policy.properties
        self.quantum = self.properties.gap_quantum or 0.0
        self._clients = {ClientId(f"c{number}"): habits for number, habits in enumerate(scenario.clients)}
        weights = {client: habits.weight for client, habits in self._clients.items()}
        estimate = self.scheduler.estimates.input_tokens
        accounts, limit = self.scheduler.ledger, settings.cached_in_flight

        def estimated(request: RequestId) -> Tokens | None:
            attempt = self.scheduler.attempts.get(request)
            return attempt.bill.tokens if attempt is not None and attempt.bill.started else None

        self.books = Books(
            settings.cost,
            self.quantum,
            weights,
            limit,
            estimate,
            served=lambda client: accounts.accounts[client].served,
            estimated=estimated,
            comparable=self._ask_alike if scenario.models else None,
        )
        self.scheduler.backlog.subscribe(self.books)
        self._engines = {WorkerId(f"w{number}"): Engine(scenario.engine) for number in range(scenario.workers)}
        self._requests: dict[RequestId, Request] = {}
        """Live requests."""
        self._dispatched: dict[RequestId, WorkerId] = {}
        self._away: set[ClientId] = set()
        self._left: set[WorkerId] = set()
        self._arrivals = 0
        self._now = 0.0
        self._wake: float | None = None

    def run(self) -> Iterator[None]:
        """Run the scenario; yields after every event. Raises `UnfairError`."""
        for number, worker in enumerate(self._engines):
            self._tell(WorkerJoined(self._facts(worker, number)))
        for _ in range(self._scenario.steps):
            self._now += STEP_SECONDS
            for event in self._happenings():
                self._tell(event)
                yield

    def _facts(self, worker: WorkerId, number: int) -> Worker:
        reorders = self._scenario.reorders and number == 0
        models = self._scenario.models[number] if self._scenario.models else frozenset(MODELS)
        return Worker(worker, models, reorders=reorders, barrier=self._scenario.barrier)

    def _ask_alike(self, one: ClientId, other: ClientId) -> bool:
        return self._clients[one].model == self._clients[other].model

    def _happenings(self) -> Iterator[Event]:
        if self._wake is not None and self._wake <= self._now:
            self._wake = None
            yield Ticked()
        for client, habits in self._clients.items():
            yield from self._behave(client, habits)
        yield from self._mishaps()
        for engine in self._engines.values():
            yield from engine.step()

    def _behave(self, client: ClientId, habits: Habits) -> Iterator[Event]:
        mine = [request.id for request in self._requests.values() if request.client == client]
        if client in self._away:
            if self._chance(habits.returns):
                self._away.discard(client)
        elif self._chance(habits.leaves):
            self._away.add(client)
        else:
            for _ in range(habits.at_once - len(mine)):
                yield Arrived(self._request(client, habits))
        if mine and self._chance(habits.cancelled):
            yield self._cancel(self._random.choice(mine))

    def _request(self, client: ClientId, habits: Habits) -> Request:
        self._arrivals += 1
        own = "".join(self._random.choices("abcdefghijklmnop", k=self._random.randint(1, max(1, habits.own))))
        limit = self._random.randint(0, habits.limit)
        return Request(
            RequestId(f"{client}r{self._arrivals}"),
            client,
            habits.model or self._random.choice(MODELS),
            (key("!" * habits.shared + own, exact=habits.density is None),),
            limit,
            streamed=self._chance(habits.streamed),
            weight=habits.weight,
            worker=self._random.choice([*self._engines]) if self._chance(habits.pinned) else None,
        )

    def _cancel(self, request: RequestId) -> Event:
        worker = self._dispatched.get(request)
        job = None if worker is None else self._engines[worker].abort(request)
        return Cancelled(request, None if job is None else usage(job))

    def _mishaps(self) -> Iterator[Event]:
        for number, worker in enumerate(self._engines):
            if self._chance(self._scenario.evictions):
                yield Evicted(worker, self._random.choice([None, CHUNK_TOKENS, 10 * CHUNK_TOKENS]))
            if worker in self._left:
                if self._chance(0.5):
                    self._left.discard(worker)
                    yield WorkerJoined(self._facts(worker, number))
            elif self._chance(self._scenario.flaps):
                self._left.add(worker)
                yield WorkerLeft(worker)

    def _chance(self, share: float) -> bool:
        return self._random.random() < share

    def _tell(self, event: Event) -> None:
        self._end(event)
        if isinstance(event, Arrived):
            self._requests[event.request.id] = event.request
        commands = [
            command for reported in self._reporting(event) for command in self.scheduler.handle(reported, self._now)
        ]
        self.books.note(event, commands, pooled=self.properties.pooled)
        for command in commands:
            match command:
                case Dispatch():
                    self._submit(command)
                case Reject(request):
                    del self._requests[request]
                case WakeAt(time):
                    self._wake = time

    def _end(self, event: Event) -> None:
        if isinstance(event, Finished | Failed | Cancelled):
            del self._requests[event.request]
            self._dispatched.pop(event.request, None)

    def _submit(self, dispatch: Dispatch) -> None:
        request = self._requests[dispatch.request]
        self._dispatched[request.id] = dispatch.worker
        habits = self._clients[request.client]
        size = sum(prompt.tokens or ceil(prompt.size * (habits.density or 1)) for prompt in request.prompts)
        limit = request.output_limit or 0
        output = self._random.randint(0, limit) if habits.stops_early else limit
        self._engines[dispatch.worker].submit(
            Job(
                request,
                size,
                self._found(habits.cached, dispatch.cached_tokens, size),
                output,
                reports_usage=self._chance(habits.reports_usage),
                refused=self._chance(habits.refused),
                breaks_at=self._random.randint(0, output) if self._chance(habits.broken) else None,
            )
        )

    def _found(self, cached: Cached, predicted: int, size: int) -> int:
        match cached:
            case Cached.AS_PREDICTED:
                return min(predicted, size)
            case Cached.NOTHING:
                return 0
            case Cached.EVERYTHING:
                return size
            case Cached.ANYTHING:
                return self._random.randint(0, size)

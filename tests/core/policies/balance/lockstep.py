"""Ranks in lockstep before one scheduler: each step lasts as long as the fullest rank's, in virtual time."""

from collections.abc import Iterable, Iterator
from random import Random
from typing import NamedTuple

from router.core.clients.queue_limits import WaitingLimits
from router.core.fleet.window import FixedWindow
from router.core.model.commands import Dispatch, WakeAt
from router.core.model.events import Arrived, Event, Finished, Progressed, Ticked, WorkerJoined
from router.core.model.prompt_key import PromptKey
from router.core.model.request import BarrierId, ClientId, Request, RequestId, Usage, Worker, WorkerId
from router.core.policies.context import Parameters
from router.core.policies.registry import POLICIES
from router.core.predict.output_length import TrueOutputs
from router.core.scheduler import Scheduler
from router.core.scheduler_settings import SchedulerSettings

MODEL = "llama"
STEP_SECONDS = 0.02
"""What a step lasts with nothing to read."""


class Job(NamedTuple):
    """A request as its engine knows it."""

    client: str
    prompt: int
    """In tokens."""
    output: int


class Lockstep:
    """A saturated group: as many requests wait as its client keeps outstanding."""

    def __init__(self, policy: str, *parameters: object, ranks: int, places: int, token_seconds: float) -> None:
        """`places`: requests that a rank runs at once. `token_seconds`: what each token of the fullest rank adds to a
        step.
        """
        self._jobs: dict[RequestId, Job] = {}
        truth = TrueOutputs(lambda request: self._jobs[request.id].output)
        settings = SchedulerSettings(window=FixedWindow(places, 10**9), waiting=WaitingLimits(10**6, 1e9))
        self.scheduler = Scheduler(POLICIES[policy], settings, Parameters(*parameters, truth), Random(0))
        self._token_seconds = token_seconds
        self.now = 0.0
        self._wake_at: float | None = None
        self._ranks: dict[WorkerId, dict[RequestId, int]] = {WorkerId(f"rank{n}"): {} for n in range(ranks)}
        """The output so far of what each rank runs."""
        self.tokens = 0
        self.imbalances: list[int] = []
        """The fullest rank's load less the lightest one's, in each step."""
        self._arrived: dict[RequestId, float] = {}
        self.waits: list[float] = []
        self.outstanding: dict[str, int] = {}
        """By client."""
        for number, worker in enumerate(self._ranks):
            facts = Worker(worker, frozenset([MODEL]), rank=number, barrier=BarrierId("group"))
            self._feed(WorkerJoined(facts))

    def serve(self, jobs: Iterable[Job], outstanding: int, steps: int) -> None:
        """Let each client keep so many of its jobs outstanding, for so many steps of the group."""
        waiting: Iterator[Job] = iter(jobs)
        for _ in range(steps):
            for job in waiting:
                self._arrive(job)
                if sum(self.outstanding.values()) >= outstanding:
                    break
            self._step()

    def _arrive(self, job: Job) -> None:
        name = RequestId(f"r{len(self._jobs)}")
        self._jobs[name] = job
        self._arrived[name] = self.now
        self.outstanding[job.client] = self.outstanding.get(job.client, 0) + 1
        self._feed(Arrived(Request(name, ClientId(job.client), MODEL, (PromptKey(b"", 1, job.prompt),))))

    def _step(self) -> None:
        loads = [
            sum(self._jobs[name].prompt + output for name, output in running.items())
            for running in self._ranks.values()
        ]
        assert loads == [self.scheduler.fleet[worker].context_tokens for worker in self._ranks]
        self.imbalances.append(max(loads) - min(loads))
        self.now += STEP_SECONDS + self._token_seconds * max(loads)
        if self._wake_at is not None and self._wake_at <= self.now:
            self._wake_at = None
            self._feed(Ticked())
        for running in self._ranks.values():
            for name in running:
                running[name] += 1
                self.tokens += 1
        self._feed(Progressed({name: output for running in self._ranks.values() for name, output in running.items()}))
        for running in self._ranks.values():
            for name in [name for name, output in running.items() if output >= self._jobs[name].output]:
                del running[name]
                job = self._jobs[name]
                self.outstanding[job.client] -= 1
                self._feed(Finished(name, Usage(job.prompt, job.output, 0)))

    def _feed(self, event: Event) -> None:
        for command in self.scheduler.handle(event, self.now):
            match command:
                case Dispatch(request):
                    self._ranks[command.worker][request] = 0
                    self.waits.append(self.now - self._arrived[request])
                case WakeAt(time):
                    self._wake_at = time

    @property
    def imbalance(self) -> float:
        """The mean imbalance, in tokens."""
        return sum(self.imbalances) / len(self.imbalances)

    @property
    def throughput(self) -> float:
        """Output tokens per second."""
        return self.tokens / self.now


def long_contexts(seed: int, clients: int) -> Iterator[Job]:
    """Yield jobs whose prompts and outputs have heavy tails, the clients in turn."""
    random, number = Random(seed), 0
    while True:
        prompt, output = random.lognormvariate(7.5, 1.1), random.lognormvariate(3.0, 1.0)
        yield Job(f"client{number % clients}", int(min(64_000, max(32, prompt))), int(min(300, max(1, output))))
        number += 1

"""A scheduler driven by a test: one short method per event, and a clock that only the test moves.

A prompt is written with one letter per chunk of 32 tokens: "doc?" and "doc!" share three chunks, 96 tokens.
"""

from collections.abc import Collection
from dataclasses import replace
from random import Random

from router.core.fleet.window import FixedWindow
from router.core.model.commands import Command, Deficit, Dispatch, Refusal, Reject, WakeAt
from router.core.model.events import (
    Arrived,
    Cancelled,
    Event,
    Evicted,
    Failed,
    Finished,
    Prefilled,
    Progressed,
    Started,
    Ticked,
    WorkerJoined,
    WorkerLeft,
)
from router.core.model.prompt_key import CHUNK_BYTES, PromptHasher, PromptKey
from router.core.model.request import (
    BarrierId,
    ClientId,
    Connector,
    GroupId,
    Leg,
    Request,
    RequestId,
    Role,
    Usage,
    Worker,
    WorkerId,
)
from router.core.policies.base import PolicyFactory
from router.core.policies.context import Parameters
from router.core.policies.registry import POLICIES
from router.core.scheduler import Scheduler
from router.core.scheduler_settings import SchedulerSettings

CHUNK_TOKENS = 32
MODEL = "llama"
HASHER = PromptHasher(b"a secret")

ONE_AT_A_TIME = SchedulerSettings(window=FixedWindow(requests=1))
"""So that the order in which requests go is the order in which they are selected."""


def key(text: str, *, exact: bool = True) -> PromptKey:
    """Hash a prompt of one letter per chunk; unless `exact`, its tokens are to be estimated."""
    rendered = b"".join(letter.encode() * CHUNK_BYTES for letter in text)
    return HASHER.prompt(rendered, CHUNK_TOKENS * len(text) if exact else None).key


class Scene:
    """One scheduler, with its front and engines played by the test."""

    def __init__(
        self,
        policy: str | PolicyFactory,
        *parameters: object,
        workers: Collection[str] = ("w1",),
        settings: SchedulerSettings | None = None,
    ) -> None:
        """`parameters`: of the policy's families."""
        self.now = 0.0
        factory = POLICIES[policy] if isinstance(policy, str) else policy
        self.scheduler = Scheduler(factory, settings or SchedulerSettings(), Parameters(*parameters), Random(0))
        self.requests: dict[RequestId, Request] = {}
        self.dispatched: dict[RequestId, Dispatch] = {}
        """In the order of their dispatch; of two for one request at once, that to the decode worker."""
        self.prefilling: dict[RequestId, Dispatch] = {}
        """The last dispatch of each request to a prefill worker."""
        self.refusals: dict[RequestId, Refusal] = {}
        self.wake_at: float | None = None
        self._output: dict[RequestId, int] = {}
        for worker in workers:
            self.join(worker)

    def feed(self, event: Event) -> list[Command]:
        """Feed an event to the scheduler now, and apply the commands that follow."""
        commands = self.scheduler.handle(event, self.now)
        for command in commands:
            match command:
                case Dispatch(request, leg=leg):
                    self.dispatched[request] = command
                    if leg is Leg.PREFILL:
                        self.prefilling[request] = command
                case Reject(request, reason):
                    self.refusals[request] = reason
                case WakeAt(time):
                    self.wake_at = time
        self.scheduler.ledger.check_conservation()
        return commands

    def join(
        self,
        worker: str,
        *models: str,
        reorders: bool = False,
        engine: str = "",
        barrier: str | None = None,
        role: Role = Role.BOTH,
        connector: Connector = Connector.NIXL,
    ) -> None:
        """Let a worker join. `barrier`: the group that it steps together with."""
        served, group = frozenset(models or [MODEL]), None if barrier is None else BarrierId(barrier)
        joined = Worker(WorkerId(worker), served, engine=engine, reorders=reorders, barrier=group, role=role)
        self.feed(WorkerJoined(replace(joined, connector=connector)))

    def leave(self, worker: str) -> None:
        self.feed(WorkerLeft(WorkerId(worker)))

    def evict(self, worker: str, tokens: int | None = None) -> None:
        self.feed(Evicted(WorkerId(worker), tokens))

    def wait(self, seconds: float) -> None:
        """Let time pass, and wake the scheduler if it asked for that."""
        self.now += seconds
        if self.wake_at is not None and self.wake_at <= self.now:
            self.wake_at = None
            self.feed(Ticked())

    def arrive(
        self,
        client: str,
        prompt: str,
        *,
        limit: int = 0,
        weight: float = 1.0,
        model: str = MODEL,
        streamed: bool = True,
        group: str | None = None,
        anew: Collection[str] = (),
        answers: int = 1,
        only: str | None = None,
        whole: bool = False,
        retry_key: bytes | None = None,
        beam_search: bool = False,
    ) -> RequestId:
        """Let a client send a prompt and ask for at most `limit` output tokens; a group has weight 1.

        `anew`: the engines that compute the prompt in full, whatever they have cached. `only`: the worker that may take
        it. `whole`: whether one engine must compute it all. `retry_key` and `beam_search`: as in `Request`.
        """
        request = RequestId(f"{client}{len(self.requests) + 1}")
        self.requests[request] = Request(
            request,
            ClientId(client),
            model,
            (key(prompt),),
            limit,
            streamed=streamed,
            weight=weight,
            group=None if group is None else GroupId(group),
            computed_anew_by=frozenset(anew),
            answers=answers,
            worker=None if only is None else WorkerId(only),
            whole=whole,
            retry_key=retry_key,
            beam_search=beam_search,
        )
        self.feed(Arrived(self.requests[request]))
        return request

    def start(self, request: RequestId) -> None:
        self.feed(Started(request))

    def prefill(self, request: RequestId, *, cached: int | None = None) -> None:
        """Let a prefill worker compute a request's prompt and keep it."""
        self.feed(Prefilled(request, self._usage(request, 1, cached)))

    def progress(self, request: RequestId, output: int) -> None:
        self._output[request] = output
        self.feed(Progressed({request: output}))

    def finish(
        self, request: RequestId, output: int | None = None, *, cached: int | None = None, answer: str = ""
    ) -> None:
        """Let the engine answer in full; by default, with what streamed and what was predicted."""
        self.feed(Finished(request, self._usage(request, output, cached), (key(answer),) if answer else ()))

    def cancel(self, request: RequestId, output: int | None = None) -> None:
        """Let the client leave; `output`: the output tokens that the engine reports for it."""
        self.feed(Cancelled(request, None if output is None else self._usage(request, output, None)))

    def refuse(self, request: RequestId) -> None:
        """Let the engine refuse the call before accepting it."""
        self.feed(Failed(request, accepted=False))

    def fail(self, request: RequestId) -> None:
        """Let the engine break off."""
        self.feed(Failed(request, accepted=True))

    def serve(self, request: RequestId, output: int = 0, *, answer: str = "") -> None:
        """Start and finish a request at once."""
        self.start(request)
        self.finish(request, output, answer=answer)

    def serve_all(self) -> None:
        """Serve all requests in flight, and those dispatched then, until none waits."""
        while running := self.scheduler.attempts:
            self.serve(next(iter(running)))

    @property
    def order(self) -> list[RequestId]:
        """The dispatched requests, first to last."""
        return list(self.dispatched)

    def worker_of(self, request: RequestId) -> WorkerId:
        return self.dispatched[request].worker

    def deficit(self, client: str, worker: str = "w1") -> Deficit:
        return self.scheduler.policy.deficit(ClientId(client), WorkerId(worker))

    def charged(self, client: str) -> float:
        """What the client was charged so far, in cost units."""
        return self.scheduler.settings.cost(self.scheduler.ledger.accounts[ClientId(client)].charged)

    def _usage(self, request: RequestId, output: int | None, cached: int | None) -> Usage:
        size = self.scheduler.estimates.input_tokens(self.requests[request])
        sent = self.prefilling.get(request, self.dispatched[request])
        found = sent.cached_tokens if cached is None else cached
        return Usage(size, self._output.get(request, 0) if output is None else output, found)

"""A scheduler with a gate for sessions, driven by a test: a fleet with small caches, and calls that grow."""

from collections.abc import Mapping
from dataclasses import replace

from router.core.clients.queue_limits import WaitingLimits
from router.core.fleet.window import FixedWindow
from router.core.model.events import Arrived, Finished, WorkerJoined
from router.core.model.request import ClientId, Request, RequestId, Role, SessionId, Takes, Usage, Worker, WorkerId
from router.core.policies.registry import POLICIES
from router.core.policies.sessions.session_gate import SessionGate, gated
from router.core.policies.sessions.session_parameters import SessionParameters
from router.core.scheduler_settings import SchedulerSettings
from tests.core.scenario import CHUNK_TOKENS, MODEL, Scene, key

ROOM = SchedulerSettings(
    window=FixedWindow(requests=100, unstarted_tokens=10**6), waiting=WaitingLimits(time_to_live=1e6), match_minimum=32
)
SMALL = SessionParameters(fill=1.0, idle=40.0, idle_after_turn=5.0, turn=2.0, growth=0, grace=0)


class GatedScene(Scene):
    """A fleet whose workers' caches hold few chunks of 32 tokens each."""

    def __init__(
        self,
        *,
        kv_chunks: int | None = 10,
        workers: tuple[str, ...] = ("w1",),
        policy: str = "dlpm_home",
        parameters: SessionParameters | None = SMALL,
        settings: SchedulerSettings = ROOM,
    ) -> None:
        """`parameters`: of the gate; None for no gate."""
        factory = POLICIES[policy] if parameters is None else gated(POLICIES[policy], parameters)
        super().__init__(factory, workers=(), settings=settings)
        self._kv_tokens = None if kv_chunks is None else kv_chunks * CHUNK_TOKENS
        for worker in workers:
            self.come(worker)

    @property
    def gate(self) -> SessionGate:
        gate = self.scheduler.policy
        assert isinstance(gate, SessionGate)
        return gate

    @property
    def reserved(self) -> Mapping[WorkerId, int]:
        """The chunks reserved at each worker."""
        return {worker: tokens // CHUNK_TOKENS for worker, tokens in self.gate.places}

    def come(self, worker: str, takes: Takes = Takes.ALL, role: Role = Role.BOTH) -> None:
        """Let a worker join that reports its capacity."""
        self.feed(WorkerJoined(Worker(WorkerId(worker), frozenset([MODEL]), self._kv_tokens, takes=takes, role=role)))

    def call(
        self,
        client: str,
        prompt: str,
        session: str | None = None,
        *,
        weight: float = 1.0,
        last: bool = False,
        pinned: bool = True,
    ) -> RequestId:
        """Let a client's session make a call."""
        name = RequestId(f"{client}{len(self.requests) + 1}")
        request = Request(name, ClientId(client), MODEL, (key(prompt),), weight=weight)
        label = None if session is None else SessionId(session)
        self.requests[name] = replace(request, session=label, last_of_session=last, pinned=pinned)
        self.feed(Arrived(self.requests[name]))
        return name

    def answer(self, request: RequestId, answer: str = "", *, output: int = 0, ended_turn: bool = False) -> None:
        """Serve a dispatched request. `answer`: the prompt and what follows it."""
        self.start(request)
        usage = Usage(self.scheduler.estimates.input_tokens(self.requests[request]), output, 0)
        self.feed(Finished(request, usage, (key(answer),) if answer else (), ended_turn))

    def is_paused(self, request: RequestId) -> bool:
        session = self.gate.session_of(request)
        return session is not None and request in session.paused

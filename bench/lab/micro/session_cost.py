"""Measure what the gate for agent sessions adds to the cost of a decision.

Two schedulers with the same sessions in a closed loop, one with the gate before its policy. All workers are busy, and
many calls wait: in the policy, or before the gate, since not all contexts fit into what the sessions may have of the KV
cache. In each turn one call ends, and the session that has been without a call for longest makes its next one. The cost
is the CPU time of the scheduler for both. The KV cache itself is large, so that without the gate no eviction makes a
decision dearer.
"""

from collections import deque
from dataclasses import dataclass
from random import Random
from statistics import median
from time import process_time_ns
from typing import Final, NamedTuple

from router.core.clients.queue_limits import WaitingLimits
from router.core.fleet.window import FixedWindow
from router.core.model.commands import Dispatch
from router.core.model.events import Arrived, Event, Finished, Started, WorkerJoined
from router.core.model.prompt_key import CHUNK_BYTES, Prompt, PromptHasher
from router.core.model.request import ClientId, Request, RequestId, SessionId, Usage, Worker, WorkerId
from router.core.policies.context import Parameters
from router.core.policies.registry import POLICIES
from router.core.policies.sessions.session_gate import SessionGate, gated
from router.core.policies.sessions.session_parameters import SessionParameters
from router.core.scheduler import Scheduler
from router.core.scheduler_settings import SchedulerSettings

MODEL: Final = "m"
WORKERS: Final = 8
KV_TOKENS: Final = 10**8
"""Of each worker."""
SESSIONS, WAITING = 2000, 500
"""Sessions, and how many of their calls wait."""
CONTEXT: Final = 4096
"""Bytes of a session's first prompt."""
GROWTH: Final = 2 * CHUNK_BYTES
"""Bytes of an answer, and of what follows it in the next prompt."""
LONGEST: Final = CONTEXT + 4 * GROWTH
"""Bytes of a prompt after which the session goes on with its first one."""
BYTES_PER_TOKEN: Final = 4
MEAN_TOKENS: Final = (CONTEXT + LONGEST) // 2 // BYTES_PER_TOKEN
"""Of the prompts."""
OUTPUT: Final = 20
SECONDS_BETWEEN: Final = 0.02


@dataclass(frozen=True, slots=True)
class SessionSetting:
    """The setting of a measurement."""

    policy: str
    gate: bool
    sessions: int = SESSIONS
    waiting: int = WAITING
    clients: int = 50
    in_flight: int = 32
    """Requests in flight at each worker."""


class OpenSession(NamedTuple):
    """A session between two calls."""

    number: int
    first: Prompt
    next: Prompt
    """Its next prompt."""


def _continued(prompt: Prompt, more: bytes) -> Prompt:
    return prompt.continued(more, len(more) // BYTES_PER_TOKEN)


class SessionFleet:
    """A scheduler with full windows and sessions that call again and again."""

    def __init__(self, setting: SessionSetting) -> None:
        self._setting = setting
        self._random = Random(1)
        self._now = 0.0
        self._calls = 0
        self._running: list[RequestId] = []
        self._live: dict[RequestId, tuple[Request, OpenSession]] = {}
        settings = SchedulerSettings(
            window=FixedWindow(setting.in_flight, unstarted_tokens=10**9),
            waiting=WaitingLimits(10 * setting.sessions, 1e9),
        )
        policy = POLICIES[setting.policy]
        if setting.gate:
            policy = gated(policy, _parameters(setting))
        self.scheduler = Scheduler(policy, settings, Parameters(), Random(0))
        for number in range(WORKERS):
            self._handle(WorkerJoined(Worker(WorkerId(f"w{number}"), frozenset([MODEL]), KV_TOKENS)))
        self._idle: deque[OpenSession] = deque()
        self._begin(setting)
        self.turns(setting.sessions)

    def _begin(self, setting: SessionSetting) -> None:
        """Let all sessions but those that are to wait make a call that is answered, then as many as the workers run
        another one, and then the rest their first.
        """
        hasher = PromptHasher(b"a secret of the benchmark")
        texts = [self._random.randbytes(CONTEXT) for _ in range(setting.sessions)]
        first = [hasher.prompt(text, CONTEXT // BYTES_PER_TOKEN) for text in texts]
        sessions = [OpenSession(number, prompt, prompt) for number, prompt in enumerate(first)]
        self._idle += sessions[setting.waiting :]
        for _ in range(len(self._idle)):
            self._call()
            self._end()
        for _ in range(WORKERS * setting.in_flight):
            self._call()
        self._idle.extendleft(sessions[: setting.waiting])
        for _ in range(setting.waiting):
            self._call()

    @property
    def paused(self) -> int:
        """How many calls the gate holds back."""
        policy = self.scheduler.policy
        return len(policy.paused) if isinstance(policy, SessionGate) else 0

    def turns(self, count: int) -> int:
        """Let `count` calls end and as many begin; return the CPU nanoseconds that they took."""
        return sum([self._end() + self._call() for _ in range(count)])

    def _call(self) -> int:
        self._now += SECONDS_BETWEEN
        session = self._idle.popleft()
        name, client = RequestId(f"r{self._calls}"), ClientId(f"client {session.number % self._setting.clients}")
        self._calls += 1
        label = SessionId(f"session {session.number}")
        request = Request(name, client, MODEL, (session.next.key,), 64, session=label)
        self._live[name] = request, session
        return self._handle(Arrived(request))

    def _end(self) -> int:
        name = self._running.pop(self._random.randrange(len(self._running)))
        request, session = self._live.pop(name)
        answered = _continued(session.next, self._random.randbytes(GROWTH))
        following = _continued(answered, self._random.randbytes(GROWTH))
        if following.key.size > LONGEST:
            following = session.first
        self._idle.append(session._replace(next=following))
        size = self.scheduler.estimates.input_tokens(request)
        self._handle(Started(name))
        return self._handle(Finished(name, Usage(size, OUTPUT, size), (answered.key,), ended_turn=False))

    def _handle(self, event: Event) -> int:
        began = process_time_ns()
        commands = self.scheduler.handle(event, self._now)
        spent = process_time_ns() - began
        self._running += [command.request for command in commands if isinstance(command, Dispatch)]
        return spent


def _parameters(setting: SessionSetting) -> SessionParameters:
    """Return a gate that has room for all sessions but those that are to wait."""
    room = (setting.sessions - setting.waiting) * MEAN_TOKENS
    return SessionParameters(fill=room / (WORKERS * KV_TOKENS), growth=0, grace=0)


def compare_gate(policy: str, rounds: int, turns: int) -> tuple[float, float, float, int]:
    """Return the median CPU microseconds of a turn without and with the gate, their median ratio, and how many calls
    the gate holds back at the end.
    """
    without, gated_ = (SessionFleet(SessionSetting(policy, gate)) for gate in (False, True))
    spent = [(without.turns(turns) / turns / 1000, gated_.turns(turns) / turns / 1000) for _ in range(rounds)]
    ratio = median([after / before for before, after in spent])
    return median([before for before, _ in spent]), median([after for _, after in spent]), ratio, gated_.paused

"""An emulated engine in virtual time: its steps are appointments.

Steps in which all that runs only decodes are planned ahead and taken in one jump. A plan is a promise, not a deed: who
submits or aborts before its end has the engine first take the steps that have begun by then, and no more, so that it
finds it as if it had stepped one by one.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from bench.sim.agenda import Agenda, Rank
from workers.engine.engine import Engine
from workers.engine.model import Output, Request
from workers.engine.waiting import QueueMeter

SHORTEST_PLAN = 2
LONGEST_PLAN = 1024


class Plan(NamedTuple):
    """Steps to come, in which every member gains one token each."""

    seconds: Sequence[float]
    ends: Sequence[float]
    visible: Sequence[float]
    """When the router sees what each put out."""
    members: "Sequence[Progress]"


class Progress:
    """How far a request is: what the engine has put out, and how much of that the router has seen."""

    __slots__ = ("answer", "cached_tokens", "delivered", "plan")

    def __init__(self) -> None:
        self.answer: list[int] = []
        self.cached_tokens: int | None = None
        """Of its prompt; None before the first token."""
        self.delivered = 0
        self.plan: Plan | None = None

    def seen(self, now: float) -> int:
        """Tokens that have reached the router."""
        return self.delivered + (bisect_right(self.plan.visible, now) if self.plan is not None else 0)


class EmulatedWorker:
    """Steps one engine for as long as it has work."""

    def __init__(
        self,
        engine: Engine,
        place: int,
        agenda: Agenda,
        latency: float,
        deliver: Callable[[str, bool], None],
        *,
        jumps: bool,
        publish: Callable[[], Callable[[], None] | None] | None = None,
    ) -> None:
        """An idle worker.

        `place`: its own among all workers. `deliver`: told of each request's first token and of its last (True), this
        `latency` in seconds after the end of the step. `publish`: asked after every step, what is to be done then
        beside that; without `jumps` alone.
        """
        self.engine = engine
        self._busy_seconds = 0.0
        self._next = 0.0
        self.waiting = QueueMeter()
        self._place = place
        self._agenda = agenda
        self._latency = latency
        self._deliver = deliver
        self._jumps = jumps
        self._publish = publish
        self._requests: dict[str, Progress] = {}
        self._plan: Plan | None = None
        self._reach = SHORTEST_PLAN
        self._stepping = False
        self._turn = 0

    def submit(self, request: Request, progress: Progress) -> None:
        """Hand it to the engine; raises what the engine raises."""
        self.catch_up()
        self.engine.submit(request)
        self._requests[request.id] = progress
        self._measure()
        if not self._stepping:
            self._stepping = True
            self._step_at(self._agenda.now)

    def abort(self, request: str) -> None:
        """Let the engine forget it, if it is there."""
        self.catch_up()
        if self.engine.abort(request):
            del self._requests[request]
            self._measure()

    def busy_seconds(self) -> float:
        """How long steps have run until now."""
        self.catch_up()
        return self._busy_seconds - max(0.0, self._next - self._agenda.now)

    def catch_up(self) -> None:
        """Have the engine take the steps that began before now, and leave the rest of the plan."""
        if self._plan is not None:
            steps = 1 + bisect_left(self._plan.ends, self._agenda.now)
            if steps < len(self._plan.ends):
                self._step_at(self._plan.ends[steps - 1])
                self._reach = max(SHORTEST_PLAN, steps)
            self._jump(self._plan, min(steps, len(self._plan.ends)))

    def _step_at(self, time: float) -> None:
        """Begin the next step then, and not when it was meant to before."""
        self._turn += 1
        self._next = time
        self._agenda.at(time, partial(self._step, self._turn), Rank.STEP, self._place)

    def _step(self, turn: int) -> None:
        """Begin the next step, or a plan, or rest."""
        if turn != self._turn:
            return
        if self._plan is not None:
            self._reach = min(2 * self._reach, LONGEST_PLAN)
            self._jump(self._plan, len(self._plan.ends))
        if not self.engine.has_work:
            self._stepping = False
        elif seconds := self.engine.lookahead(self._reach) if self._jumps else []:
            self._plan = self._planned(seconds)
            self._step_at(self._plan.ends[-1])
        else:
            self._single_step()

    def _single_step(self) -> None:
        waiting = self.engine.waiting
        elapsed, outputs = self.engine.step()
        self._busy_seconds += elapsed
        if self.engine.waiting != waiting or self.engine.last_step_prefilled:
            self._measure()
        end = self._agenda.now + elapsed
        members, marks = self._take(outputs)
        news = self._publish() if self._publish is not None else None
        if news is not None:
            self._agenda.at(end + self._latency, news, Rank.DELIVERY, self._place)
        if members:
            self._agenda.at(end + self._latency, partial(self._tell, members, marks), Rank.DELIVERY, self._place)
        self._step_at(end)

    def _take(self, outputs: Sequence[Output]) -> tuple[Sequence[Progress], Sequence[tuple[str, bool]]]:
        """Note what a step put out; whose tokens these are, and which of them are a request's first, or its last."""
        requests, members, marks = self._requests, [], []
        for name, token, finish, cached_tokens in outputs:
            progress = requests[name]
            if not progress.answer:
                progress.cached_tokens = cached_tokens
                marks.append((name, False))
            progress.answer.append(token)
            members.append(progress)
            if finish:
                del requests[name]
                marks.append((name, True))
        return members, marks

    def _tell(self, members: Sequence[Progress], marks: Sequence[tuple[str, bool]]) -> None:
        """The tokens of a step reach the router, and with them the beginnings and the ends of some requests."""
        _see_one_more(members)
        for name, last in marks:
            self._deliver(name, last)

    def _planned(self, seconds: Sequence[float]) -> Plan:
        ends = list(accumulate(seconds, initial=self._agenda.now))[1:]
        members = [self._requests[name] for name in self.engine.running_ids]
        plan = Plan(seconds, ends, [end + self._latency for end in ends], members)
        for member in members:
            member.plan = plan
        return plan

    def _jump(self, plan: Plan, steps: int) -> None:
        """Carry out the plan's first steps, and forget the rest."""
        self._plan = None
        for name, tokens in self.engine.jump(steps):
            self._requests[name].answer += tokens
        for seconds in plan.seconds[:steps]:
            self._busy_seconds += seconds
        seen = bisect_right(plan.visible, self._agenda.now, hi=steps)
        for member in plan.members:
            member.plan = None
            member.delivered += seen
        for visible in plan.visible[seen:steps]:
            self._agenda.at(visible, partial(_see_one_more, plan.members), Rank.DELIVERY, self._place)

    def _measure(self) -> None:
        """Note how much waits in the engine: that changes by submission, abortion and steps that prefill."""
        self.waiting.observe(self._agenda.now, self.engine)


def _see_one_more(members: Sequence[Progress]) -> None:
    """A token of each reaches the router."""
    for member in members:
        member.delivered += 1

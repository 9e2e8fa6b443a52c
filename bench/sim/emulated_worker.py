"""An emulated engine in virtual time: its steps are scheduled actions.

Steps that only decode all running requests are planned ahead and taken in one jump. A plan can be cut short: before a
submit or abort in its middle, the engine takes the steps that have begun by then, and no more, so that its state is the
same as if it had stepped one by one.
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
    """Planned steps, in each of which every member gains one token."""

    seconds: list[float]
    ends: list[float]
    visible: list[float]
    """When the router sees the output of each step."""
    members: "Sequence[Progress]"


class Progress:
    """The progress of a request: what the engine has generated, and how much of that the router has seen."""

    __slots__ = ("answer", "cached_tokens", "delivered", "plan")

    def __init__(self) -> None:
        self.answer: list[int] = []
        self.cached_tokens: int | None = None
        """Cached tokens of its prompt; None before the first token."""
        self.delivered = 0
        self.plan: Plan | None = None

    def seen(self, now: float) -> int:
        """Return how many tokens have reached the router."""
        return self.delivered + (bisect_right(self.plan.visible, now) if self.plan is not None else 0)


class EmulatedWorker:
    """Steps one engine while it has work."""

    rank: int | None = None
    """Its number among the ranks of its group; None for an engine by itself."""

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
        """Create an idle worker.

        `place`: the worker's number, different for each worker. `deliver`: called with each request's first token, and
        with its last (True), `latency` seconds after the end of the step. `publish`: called after every step; what it
        returns is called `latency` seconds after the end of the step. Requires `jumps` to be false.
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
        self._horizon = SHORTEST_PLAN
        self._stepping = False
        self._step_number = 0

    def submit(self, request: Request, progress: Progress) -> None:
        """Submit a request to the engine. Raises what the engine raises."""
        self.catch_up()
        self.engine.submit(request)
        self._requests[request.id] = progress
        self._measure()
        self._wake()

    def abort(self, request: str) -> None:
        """Abort a request, if the engine holds it."""
        self.catch_up()
        if self.engine.abort(request):
            del self._requests[request]
            self._measure()

    def busy_seconds(self) -> float:
        """Return the total seconds of steps until now."""
        self.catch_up()
        return self._busy_seconds - max(0.0, self._next - self._agenda.now)

    def catch_up(self) -> None:
        """Take the planned steps that began before now, and drop the rest of the plan."""
        if self._plan is not None:
            steps = 1 + bisect_left(self._plan.ends, self._agenda.now)
            if steps < len(self._plan.ends):
                self._step_at(self._plan.ends[steps - 1])
                self._horizon = max(SHORTEST_PLAN, steps)
            self._jump(self._plan, min(steps, len(self._plan.ends)))

    def _wake(self) -> None:
        """Begin to step, if the engine was idle."""
        if not self._stepping:
            self._stepping = True
            self._step_at(self._agenda.now)

    def _step_at(self, time: float) -> None:
        """Schedule the next step for `time`, in place of the time scheduled before."""
        self._step_number += 1
        self._next = time
        self._agenda.at(time, partial(self._step, self._step_number), Rank.STEP, self._place)

    def _step(self, number: int) -> None:
        """Begin the next step or plan; stop if there is no work. Ignored if another step was scheduled since."""
        if number != self._step_number:
            return
        if self._plan is not None:
            self._horizon = min(2 * self._horizon, LONGEST_PLAN)
            self._jump(self._plan, len(self._plan.ends))
        if not self.engine.has_work:
            self._stepping = False
        elif seconds := self.engine.lookahead(self._horizon) if self._jumps else []:
            self._plan = self._planned(seconds)
            self._step_at(self._plan.ends[-1])
        else:
            self._single_step()

    def _single_step(self) -> None:
        waiting = self.engine.waiting
        elapsed, outputs = self.engine.step()
        if self.engine.waiting != waiting or self.engine.last_step_prefilled:
            self._measure()
        self._step_at(self._finish_at_end(elapsed, outputs))

    def _finish_at_end(self, elapsed: float, outputs: Sequence[Output]) -> float:
        """Deliver the outputs of a step that begins now. Returns when it ends."""
        self._busy_seconds += elapsed
        end = self._agenda.now + elapsed
        members, marks = self._record_outputs(outputs)
        publication = self._publish() if self._publish is not None else None
        if publication is not None:
            self._agenda.at(end + self._latency, publication, Rank.DELIVERY, self._place)
        if members:
            self._agenda.at(
                end + self._latency, partial(self._deliver_tokens, members, marks), Rank.DELIVERY, self._place
            )
        return end

    def _record_outputs(self, outputs: Sequence[Output]) -> tuple[Sequence[Progress], Sequence[tuple[str, bool]]]:
        """Record what a step generated. Returns whose tokens these are, and which are a request's first or last."""
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

    def _deliver_tokens(self, members: Sequence[Progress], marks: Sequence[tuple[str, bool]]) -> None:
        """Deliver the tokens of a step to the router, and the first and last tokens of requests among them."""
        _see_one_more(members)
        for name, last in marks:
            self._deliver(name, last)

    def _planned(self, seconds: list[float]) -> Plan:
        ends = list(accumulate(seconds, initial=self._agenda.now))[1:]
        members = [self._requests[name] for name in self.engine.running_ids]
        plan = Plan(seconds, ends, [end + self._latency for end in ends], members)
        for member in members:
            member.plan = plan
        return plan

    def _jump(self, plan: Plan, steps: int) -> None:
        """Take the first `steps` of the plan and drop the rest."""
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
        """Record the engine's queue, which changes by submits, aborts and prefill steps."""
        self.waiting.observe(self._agenda.now, self.engine)


def _see_one_more(members: Sequence[Progress]) -> None:
    """Deliver one token of each member to the router."""
    for member in members:
        member.delivered += 1

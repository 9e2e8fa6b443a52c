"""Ranks in step in virtual time: one scheduled action begins the next step of all engines of a group.

A rank that only decodes is left alone for some steps, of which the group needs no more than their durations and loads;
the engine takes them in one jump when something else happens at this rank. What happens at one rank does not end the
plans of the others: in a busy group, a request arrives or ends somewhere at every second step.
"""

from collections.abc import Sequence

from bench.report.records import GroupTotals
from bench.sim.agenda import Agenda, Rank
from bench.sim.emulated_worker import EmulatedWorker, Plan
from workers.engine.barrier import StepTotals, dummy_seconds
from workers.engine.model import Output

LONGEST_PLAN = 16
"""Steps; every poll of the metrics ends the plans."""


def totals_since(now: StepTotals, before: StepTotals, ranks: int) -> GroupTotals:
    """Return what was added to a group's totals after `before` was copied."""
    return GroupTotals(
        ranks=ranks,
        steps=now.steps - before.steps,
        step_seconds=now.seconds - before.seconds,
        attention_seconds=now.attention_seconds - before.attention_seconds,
        spread_tokens=now.spread - before.spread,
        idle_tokens=now.idle - before.idle,
        room_tokens=now.room - before.room,
    )


class EmulatedRank(EmulatedWorker):
    """One engine of a group: it takes requests as any engine does, and steps when its group does."""

    group: "EmulatedGroup"
    """Set when it joins the group."""
    _own_seconds: Sequence[float] = ()
    """What the steps of the plan would take this rank by itself."""
    _planned_load = 0
    """Its load in the first step of the plan."""
    _outputs: Sequence[Output] = ()
    """What the step that has begun produces, unless it is planned."""

    def catch_up(self) -> None:
        """Take the planned steps that have begun, and drop the rest of the plan."""
        if self._plan is not None:
            self._jump(self._plan, len(self._plan.ends))

    def begin_step(self) -> tuple[float, int]:
        """Begin the next step. Returns the seconds that it takes this rank by itself, and its load."""
        if self._plan is None or len(self._plan.ends) == len(self._own_seconds):
            self.catch_up()
            if not self.engine.has_work:
                self._outputs = ()
                return dummy_seconds(self.engine), 0
            if not self._begin_plan():
                return self._step_engine()
        assert self._plan is not None
        taken = len(self._plan.ends)
        return self._own_seconds[taken], self._planned_load + taken * len(self._plan.members)

    def end_step_at(self, end: float, seconds: float) -> None:
        """Deliver, at the end of the step that has begun, what it produces. `seconds`: what it takes the group."""
        if self._plan is None:
            self._next = self._finish_at_end(seconds, self._outputs)
        else:
            self._plan.seconds.append(seconds)
            self._plan.ends.append(end)
            self._plan.visible.append(end + self._latency)
            self._next = end

    def _wake(self) -> None:
        self.group.wake()

    def _begin_plan(self) -> bool:
        """Plan the next steps if they only decode. Returns whether they do."""
        self._own_seconds = self.engine.lookahead(LONGEST_PLAN) if self._jumps else ()
        if not self._own_seconds:
            return False
        members = [self._requests[name] for name in self.engine.running_ids]
        self._plan = Plan([], [], [], members)
        for member in members:
            member.plan = self._plan
        self._planned_load = self.engine.running_context + len(members)
        return True

    def _step_engine(self) -> tuple[float, int]:
        waiting = self.engine.waiting
        own, self._outputs = self.engine.step()
        if self.engine.waiting != waiting or self.engine.last_step_prefilled:
            self._measure()
        return own, self.engine.last_step_context


class EmulatedGroup:
    """Steps the ranks of one group while any of them has work."""

    def __init__(self, agenda: Agenda, place: int) -> None:
        """Create a group without ranks. `place`: a number that no other group or worker has."""
        self.ranks: list[EmulatedRank] = []
        self.totals = StepTotals()
        self._agenda = agenda
        self._place = place
        self._stepping = False

    def join(self, rank: EmulatedRank) -> None:
        """Add a rank. Call for all ranks before the first request."""
        rank.group, rank.rank = self, len(self.ranks)
        self.ranks.append(rank)
        self._dummy_seconds = max(dummy_seconds(each.engine) for each in self.ranks)

    def wake(self) -> None:
        """Begin to step, if the group was idle."""
        if not self._stepping:
            self._stepping = True
            self._step_at(self._agenda.now)

    def _step_at(self, time: float) -> None:
        self._agenda.at(time, self._step, Rank.STEP, self._place)

    def _step(self) -> None:
        begun = [rank.begin_step() for rank in self.ranks]
        if not any(rank.engine.has_work for rank in self.ranks) and not any(load for _, load in begun):
            self._stepping = False
            return
        seconds = max(own for own, _ in begun)
        self.totals.add(seconds, [load for _, load in begun], self._dummy_seconds)
        end = self._agenda.now + seconds
        for rank in self.ranks:
            rank.end_step_at(end, seconds)
        self._step_at(end)

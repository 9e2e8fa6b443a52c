"""Ranks in step in virtual time: one scheduled action steps all engines of a group.

No plans and jumps as for a single engine: in a busy group a request arrives or ends at nearly every step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.report.records import GroupTotals
from bench.sim.agenda import Agenda, Rank
from bench.sim.emulated_worker import EmulatedWorker
from workers.engine.barrier import Barrier, GroupStep
from workers.engine.model import Output


@dataclass(slots=True)
class StepTotals:
    """Sums over the steps of a group; fields never decrease. Loads are tokens of context."""

    steps: int = 0
    seconds: float = 0.0
    attention_seconds: float = 0.0
    """What the steps took beyond a step of dummy batches."""
    spread: int = 0
    """The largest less the smallest load."""
    idle: int = 0
    """What each rank's load lacks to the largest, over all ranks."""
    room: int = 0
    """The largest load times the number of ranks."""

    def add(self, step: GroupStep, dummy_seconds: float) -> None:
        """Count one step."""
        largest, room = max(step.loads), max(step.loads) * len(step.loads)
        self.steps += 1
        self.seconds += step.seconds
        self.attention_seconds += step.seconds - dummy_seconds
        self.spread += largest - min(step.loads)
        self.idle += room - sum(step.loads)
        self.room += room

    def since(self, before: "StepTotals", ranks: int) -> GroupTotals:
        """Return what was added after `before` was copied."""
        return GroupTotals(
            ranks=ranks,
            steps=self.steps - before.steps,
            step_seconds=self.seconds - before.seconds,
            attention_seconds=self.attention_seconds - before.attention_seconds,
            spread_tokens=self.spread - before.spread,
            idle_tokens=self.idle - before.idle,
            room_tokens=self.room - before.room,
        )


class EmulatedRank(EmulatedWorker):
    """One engine of a group: it takes requests as any engine does, and steps when its group does."""

    group: "EmulatedGroup"
    """Set when it joins the group."""

    def _wake(self) -> None:
        self.group.wake()

    def take_step(self, seconds: float, outputs: Sequence[Output]) -> None:
        """Deliver what this rank has produced in a step of the group that begins now and takes `seconds`."""
        if self.engine.waiting or self.engine.last_step_prefilled:
            self._measure()
        self._next = self._finish_at_end(seconds, outputs)


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
        self._barrier = Barrier([each.engine for each in self.ranks])

    def wake(self) -> None:
        """Begin to step, if the group was idle."""
        if not self._stepping:
            self._stepping = True
            self._step_at(self._agenda.now)

    def _step_at(self, time: float) -> None:
        self._agenda.at(time, self._step, Rank.STEP, self._place)

    def _step(self) -> None:
        step = self._barrier.step()
        if step is None:
            self._stepping = False
            return
        self.totals.add(step, max(self._barrier.dummy_seconds))
        for rank, outputs in zip(self.ranks, step.outputs, strict=True):
            rank.take_step(step.seconds, outputs)
        self._step_at(self._agenda.now + step.seconds)

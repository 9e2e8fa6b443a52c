"""Ranks in step: engines of one data-parallel group, each step of which ends with a collective of all of them.

After vLLM's `DPEngineCoreProc` (`v1/engine/core.py`) and SGLang's DP attention: a step lasts as long as that of the
slowest rank, and while any rank has work, a rank without work takes part with a dummy batch. The barrier changes when
tokens exist, and nothing else: each rank schedules, caches and samples as it would alone.

PURE: no clock, no I/O. A request that is submitted while a step lasts joins at its end, with the next `step`.

Left out: the padding of all ranks' batches to the largest (vLLM with CUDA graphs), and the steps for which idle ranks
run on after the last request.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from workers.engine.engine import Engine
from workers.engine.hardware import Batch
from workers.engine.model import Output


@dataclass(frozen=True, slots=True)
class GroupStep:
    """One step of all ranks; the sequences have one entry for each rank."""

    seconds: float
    """The duration: that of the slowest rank."""
    loads: Sequence[int]
    """Tokens of context that each rank read; 0 for a dummy batch."""
    outputs: Sequence[Sequence[Output]]
    """The tokens of each rank, which exist at the end of the step."""
    stalled: bool
    """True if no rank computed anything: nothing will, before memory is released or the KV of a prompt arrives."""


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

    def add(self, seconds: float, loads: Sequence[int], dummy: float) -> None:
        """Count a step with these loads. `dummy`: seconds of a step of dummy batches."""
        largest = max(loads)
        room = largest * len(loads)
        self.steps += 1
        self.seconds += seconds
        self.attention_seconds += seconds - dummy
        self.spread += largest - min(loads)
        self.idle += room - sum(loads)
        self.room += room


def dummy_seconds(rank: Engine) -> float:
    """Return what a step without work takes a rank."""
    return rank.hardware.step_seconds(Batch())


class Barrier:
    """The ranks of one group."""

    def __init__(self, ranks: Sequence[Engine]) -> None:
        """Group these engines. Raises ValueError if there is none."""
        if not ranks:
            raise ValueError("a group needs a rank")
        self.ranks = ranks

    @property
    def has_work(self) -> bool:
        """True if a rank has a request, waiting or running."""
        return any(rank.has_work for rank in self.ranks)

    def step(self) -> GroupStep | None:
        """Run one step of every rank. Returns None, and changes nothing, if no rank has work."""
        if not self.has_work:
            return None
        seconds, loads, outputs, stalled = 0.0, list[int](), list[Sequence[Output]](), True
        for rank in self.ranks:
            working = rank.has_work
            own, produced = rank.step() if working else (dummy_seconds(rank), [])
            stalled = stalled and (not working or rank.stalled)
            seconds = max(seconds, own)
            loads.append(rank.last_step_context if working else 0)
            outputs.append(produced)
        return GroupStep(seconds, loads, outputs, stalled)

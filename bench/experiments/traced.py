"""Experiments that have more to show where a public trace is given."""

from dataclasses import dataclass
from typing import ClassVar

from bench.experiments.experiment import Experiment
from bench.traces import Trace


@dataclass(frozen=True)
class TracedExperiment(Experiment):
    """One with cells that play a trace; without it, it has the others."""

    kind: ClassVar[str]
    """Of the trace: one of `bench.traces.READERS`."""
    trace: Trace | None = None

"""Experiments that have more to show, or to show it of, where public traces are given."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from bench.lab.frame.experiment import Experiment
from bench.workloads.recorded.sessions import Sessions
from bench.workloads.recorded.traces import Trace


@dataclass(frozen=True)
class TracedExperiment(Experiment):
    """One that plays traces; without them it has other cells, or stand-ins for them."""

    kinds: ClassVar[Sequence[str]]
    """Of the traces: those of `bench.workloads.recorded.traces.READERS`, and `bench.workloads.recorded.sessions.KIND`."""
    traces: Mapping[str, Trace | Sessions] = field(default_factory=dict, hash=False)
    """By kind."""

"""Experiments that can also replay public traces."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from bench.lab.frame.experiment import Experiment
from bench.workloads.recorded.sessions import Sessions
from bench.workloads.recorded.traces import Trace


@dataclass(frozen=True)
class TracedExperiment(Experiment):
    """An experiment that replays traces; without them it has other cells, or stand-ins for them."""

    kinds: ClassVar[Sequence[str]]
    """The kinds of traces: `bench.workloads.recorded.traces.READERS` and `bench.workloads.recorded.sessions.KIND`."""
    traces: Mapping[str, Trace | Sessions] = field(default_factory=dict, hash=False)
    """The traces by kind."""

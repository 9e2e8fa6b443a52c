"""The input of a simulation: the fleet, the policy and the traffic."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final

from bench.workloads.parts.traffic import Workload
from router.core.policies.base import PolicyFactory
from router.core.policies.registry import POLICIES
from router.core.scheduler_settings import SchedulerSettings
from router.runtime.mistakes import unknown
from workers.engine.engine import DEFAULT_HARDWARE, Engine, create_engine, default_config
from workers.engine.hardware import HARDWARE, Batch, Hardware, RankSteps, rank
from workers.engine.model import Dialect, EngineConfig, Order

MODEL: Final = "emulated"
"""What all workers of a simulation serve, beside adapters of their own."""
FRONT_REPORT_SECONDS: Final = 0.5
"""How often a front reports the new output of its streams (`router.channel.client`), in seconds.

It also reports a stream as soon as it has 64 new tokens.
"""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One emulated worker. None means the default of the dialect or of the hardware.

    Raises ValueError if the hardware is unknown or a size is invalid.
    """

    hardware: str = DEFAULT_HARDWARE
    speed: float = 1.0
    """Speed relative to the hardware."""
    dialect: Dialect = "vllm"
    order: Order = "fcfs"
    kv_tokens: int | None = None
    block_size: int | None = None
    max_running: int | None = None
    max_batched_tokens: int | None = None
    max_queued: int | None = None
    joins: float = 0.0
    """Seconds after which the worker joins the fleet."""
    leaves: float = inf
    """Seconds after which no more requests are sent to the worker."""
    crashes: bool = False
    """True if everything running there fails when the worker leaves, instead of running to its end."""
    reports_capacity: bool = True
    """True if the worker's metrics report how many tokens its cache holds."""
    adapters: tuple[str, ...] = ()
    """Further models that it serves."""
    steps: RankSteps | None = None
    """Step times of a decode rank, in place of the hardware's."""
    barrier: str | None = None
    """Workers with equal barriers are ranks of one group and step together; None for an engine by itself."""

    def __post_init__(self) -> None:
        if self.hardware not in HARDWARE:
            raise ValueError(unknown("hardware", self.hardware, HARDWARE))
        if not 0 < self.speed < inf:
            raise ValueError("speed must be positive and finite")
        if not 0 <= self.joins < self.leaves:
            raise ValueError("a worker joins before it leaves")
        self._config()

    def engine(self, seed: int = 0) -> Engine:
        """Build an engine, idle and empty."""
        return create_engine(self._config(seed), _paced(self._hardware, self.speed))

    @property
    def _hardware(self) -> Hardware:
        hardware = HARDWARE[self.hardware]
        return hardware if self.steps is None else rank(hardware.kv_tokens, self.steps)

    def _config(self, seed: int = 0) -> EngineConfig:
        return default_config(
            self.dialect,
            self._hardware,
            kv_tokens=self.kv_tokens,
            block_size=self.block_size,
            max_running=self.max_running,
            max_batched_tokens=self.max_batched_tokens,
            order=self.order,
            max_queued=self.max_queued,
            seed=seed,
        )


def _paced(hardware: Hardware, speed: float) -> Hardware:
    if speed == 1.0:
        return hardware

    def step_seconds(batch: Batch) -> float:
        return hardware.step_seconds(batch) / speed

    return replace(hardware, step_seconds=step_seconds)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A whole simulation; equal scenarios give equal records.

    Raises ValueError if a value is invalid.
    """

    policy: str
    workload: Workload
    workers: tuple[WorkerSpec, ...] = (WorkerSpec(),)
    seconds: float = 60.0
    """Virtual time (s) at which the simulation ends."""
    warmup: float = 0.0
    """Seconds at the start that are not measured."""
    seed: int = 0
    settings: SchedulerSettings = field(default_factory=SchedulerSettings)
    parameters: tuple[object, ...] = ()
    """Parameters of the policy's families, for `router.core.policies.base.Parameters`."""
    drain: bool = False
    """True to run calls that arrived before the end, and programs that began, to their ends; no others arrive."""
    latency: float = 0.0005
    """Seconds from the router to an engine, and the same back."""
    progress_seconds: float = 0.1
    """Interval (s) at which output is reported and charged. The published results were measured with 0.1, but those of
    ranks in step with `FRONT_REPORT_SECONDS`, the default of `bench simulate`.
    """
    poll_seconds: float = 0.5
    """Interval (s) at which each worker reports its metrics."""
    oracle: bool = False
    """True if the router knows what the engines' caches really hold, which no real router can."""
    kv_events: bool = False
    """True if the workers publish KV events and the router follows them."""
    cells: int = 0
    """Schedulers that each have a part of the workers, with D²LPM's placement among them (`bench.sim.cells`); 0 for one
    scheduler and no placement before it.
    """
    gate: Callable[[PolicyFactory], PolicyFactory] | None = None
    """Puts a gate for sessions before the policy; None for none."""
    jumps: bool = True
    """True to take steps in which nothing changes at once; the records are the same either way."""

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(unknown("policy", self.policy, POLICIES))
        if not self.workers:
            raise ValueError("a simulation needs a worker")
        lives = {(each.barrier, each.joins, each.leaves, each.crashes) for each in self.workers if each.barrier}
        if len(lives) > len({barrier for barrier, *_ in lives}):
            raise ValueError("the ranks of a barrier join, leave and crash together")
        if not 0 <= self.cells <= len(self.workers):
            raise ValueError("each cell has a worker")
        if self.cells and (self.oracle or self.kv_events or self.gate is not None):
            raise ValueError("cells know no oracle, no KV events and no gate")
        if not 0 <= self.warmup < self.seconds < inf:
            raise ValueError("seconds must be finite, and more than the warm-up")
        if self.latency < 0 or self.progress_seconds <= 0 or self.poll_seconds <= 0:
            raise ValueError("latency must not be negative, and intervals must be positive")

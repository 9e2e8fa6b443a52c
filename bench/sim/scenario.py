"""What a simulation is given: the fleet, the policy and the traffic."""

from dataclasses import dataclass, field, replace
from math import inf

from bench.workloads.parts.traffic import Workload
from router.core.policies.registry import POLICIES
from router.core.settings import SchedulerSettings
from workers.engine.engine import DEFAULT_HARDWARE, Engine, create_engine, default_config
from workers.engine.hardware import HARDWARE, Batch, Hardware
from workers.engine.model import Dialect, EngineConfig, Order


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One emulated worker. None means the dialect's or the hardware's own default.

    Raises ValueError for hardware that nobody knows or sizes that make no sense.
    """

    hardware: str = DEFAULT_HARDWARE
    speed: float = 1.0
    """How many times faster than this hardware."""
    dialect: Dialect = "vllm"
    order: Order = "fcfs"
    kv_tokens: int | None = None
    block_size: int | None = None
    max_running: int | None = None
    max_batched_tokens: int | None = None
    max_queued: int | None = None
    joins: float = 0.0
    """Seconds after which the router hears of it."""
    leaves: float = inf
    """Seconds after which it is sent nothing more."""
    crashes: bool = False
    """Whether everything that runs there fails when it leaves, instead of running to its end."""
    tell_capacity: bool = True
    """Whether its metrics say how many tokens its cache holds."""

    def __post_init__(self) -> None:
        if self.hardware not in HARDWARE:
            raise ValueError(f"unknown hardware {self.hardware!r}, known: {', '.join(HARDWARE)}")
        if not 0 < self.speed < inf:
            raise ValueError("speed must be positive and finite")
        if not 0 <= self.joins < self.leaves:
            raise ValueError("a worker joins before it leaves")
        self._config()

    def engine(self, seed: int = 0) -> Engine:
        """Build it, idle and empty."""
        return create_engine(self._config(seed), _paced(HARDWARE[self.hardware], self.speed))

    def _config(self, seed: int = 0) -> EngineConfig:
        return default_config(
            self.dialect,
            HARDWARE[self.hardware],
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

    Raises ValueError where something makes no sense.
    """

    policy: str
    workload: Workload
    workers: tuple[WorkerSpec, ...] = (WorkerSpec(),)
    seconds: float = 60.0
    """When it ends, in virtual time."""
    warmup: float = 0.0
    """From when on it is measured, in seconds since the beginning."""
    seed: int = 0
    settings: SchedulerSettings = field(default_factory=SchedulerSettings)
    parameters: tuple[object, ...] = ()
    """Of the policy's families, for `router.core.policies.base.Parameters`."""
    drain: bool = False
    """Whether calls that came before the end are then run to theirs, and programs that began, though no more arrive."""
    latency: float = 0.0005
    """Seconds from the router to an engine, and as many back."""
    progress_seconds: float = 0.1
    """How long output goes uncharged, as in `router.channel.host`."""
    poll_seconds: float = 0.5
    """How often each worker reports its metrics."""
    oracle: bool = False
    """Whether the router is told what the engines' caches really hold, which no router can be."""
    kv_events: bool = False
    """Whether the workers publish what their caches store and drop, and the router follows that."""
    jumps: bool = True
    """Whether steps in which nothing changes are taken at once; the records are the same either way."""

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"unknown policy {self.policy!r}, known: {', '.join(POLICIES)}")
        if not self.workers:
            raise ValueError("a simulation needs a worker")
        if not 0 <= self.warmup < self.seconds < inf:
            raise ValueError("seconds must be finite, and more than the warm-up")
        if self.latency < 0 or self.progress_seconds <= 0 or self.poll_seconds <= 0:
            raise ValueError("latency must not be negative, and intervals must be positive")

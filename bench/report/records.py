"""The records of a run: one for each call, the service of each client over time, and each worker's totals."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from bench.workloads.parts.traffic import Outcome
from router.core.model.cost import LinearCost

CLIENT_VIEW: Final = LinearCost(cached=1.0)
"""Price of a token as the client sees it, cached or not (`ServiceSample.client_service`)."""


class Record(NamedTuple):
    """One call. Times are seconds since the beginning, None for what did not happen."""

    id: str
    client: str
    outcome: Outcome
    arrived: float
    dispatched: float | None
    started: float | None
    """When the router saw the first token; None for calls that do not stream."""
    finished: float | None
    worker: str | None
    why: str | None
    """The reason for the choice of worker, in the policy's words."""
    input_tokens: int
    cached_tokens: int | None
    """Cached tokens of the input, as reported by the engine."""
    predicted_cached_tokens: int | None
    output_tokens: int
    program: str | None = None
    """The client's program that the call belongs to; None if it belongs to none."""
    program_calls: int = 1
    """The number of calls of that program if none fails."""
    fresh_tokens: int | None = None
    """Input tokens that no cache can hold, because no earlier call of its session had them; None if not known."""


class WorkerTotals(NamedTuple):
    """One worker's totals in the measured time."""

    busy_seconds: float
    steps: int
    prompt_tokens: int
    """Tokens of prompts answered by a first token, cached ones included."""
    prefix_queries: int
    prefix_hits: int
    output_tokens: int
    evicted_tokens: int
    preempted_requests: int
    waiting_requests_p95: float
    """Requests waiting inside the engine, weighted by time."""
    waiting_tokens_p95: float
    """Uncached tokens of these requests."""
    service_gap: float
    """The largest `router.core.clients.fairness`, sampled at every poll and every report of progress."""
    service_gap_bound: float | None
    """None if the policy has no bound."""


class GroupTotals(NamedTuple):
    """The totals of ranks in step in the measured time: sums over the steps that began in it.

    Loads are tokens of context: L of a rank is what all its running sequences hold.
    """

    ranks: int
    steps: int
    step_seconds: float
    attention_seconds: float
    """What the steps took beyond a step without any context."""
    spread_tokens: int
    """max L - min L, the imbalance as BalanceRoute's tables have it (6.1)."""
    idle_tokens: int
    """sum of max L - L over the ranks, the imbalance of its theory (3.1)."""
    room_tokens: int
    """max L times the number of ranks."""


class CellTotals(NamedTuple):
    """The totals of one cell: a scheduler with a part of the workers."""

    workers: int
    decisions: int
    """Requests that it has dispatched."""
    service_gap: float
    """The largest gap between two clients that waited in the cell, sampled as that of a worker."""
    service_gap_bound: float | None
    """None if the policy has no bound."""


class ServiceSample(NamedTuple):
    """The service of each client until `time`, not divided by weights."""

    time: float
    service: Mapping[str, float]
    """In cost units, by the router's own cost: extend + 2 · output tokens."""
    client_service: Mapping[str, float]
    """As the client sees it, whatever was cached: input + 2 · output tokens (DLPM paper, 6.1)."""


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a run; `bench.report.summary.summarise` computes its figures."""

    seconds: float
    """When measuring ended."""
    warmup: float
    """When measuring began."""
    records: tuple[Record, ...]
    """In order of arrival."""
    workers: Mapping[str, WorkerTotals]
    weights: Mapping[str, float]
    """The weights of all clients of the workload."""
    timeline: tuple[ServiceSample, ...]
    """Sampled at every poll, and when measuring began and ended."""
    groups: Mapping[str, GroupTotals] = field(default_factory=dict)
    """Ranks in step, by the name of their barrier."""
    cells: Sequence[CellTotals] = ()
    """Empty without cells."""

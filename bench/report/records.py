"""What a simulation leaves: one record for each call, the service of each client over time, and each worker's sums."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from bench.workloads.parts.traffic import Outcome
from router.core.model.cost import LinearCost

CLIENT_VIEW: Final = LinearCost(cached=1.0)
"""Price of a token as the client sees it, cached or not (see `ServiceSample`)."""


class Record(NamedTuple):
    """One call; times in seconds since the beginning, None where it did not come to that."""

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
    """What decided the worker, in the policy's words."""
    input_tokens: int
    cached_tokens: int | None
    """Of the input, by the engine's word."""
    predicted_cached_tokens: int | None
    output_tokens: int
    program: str | None = None
    """Which of its client's programs it belongs to; None where each call is for itself."""
    program_calls: int = 1
    """How many calls that program has if all goes well."""


class WorkerTotals(NamedTuple):
    """One worker's sums in the time that was measured."""

    busy_seconds: float
    steps: int
    prompt_tokens: int
    """Of prompts that were answered by a first token, cached ones included."""
    prefix_queries: int
    prefix_hits: int
    output_tokens: int
    evicted_tokens: int
    preempted_requests: int
    waiting_requests_p95: float
    """Requests that waited in the engine itself, weighted by time."""
    waiting_tokens_p95: float
    """Uncached tokens of those."""
    service_gap: float
    """The largest seen, sampled at every poll and with every report of progress; see `router.core.clients.service_gap`."""
    service_gap_bound: float | None
    """None where nothing bounds it."""


class ServiceSample(NamedTuple):
    """What each client had been served until then, not divided by weights."""

    time: float
    service: Mapping[str, float]
    """In cost units: with the router's own cost, extend + 2 · output tokens."""
    client_service: Mapping[str, float]
    """As the client sees it, whatever was cached: input + 2 · output tokens (DLPM paper, 6.1)."""


@dataclass(frozen=True, slots=True)
class Result:
    """A simulation's outcome; `bench.report.summary.summarise` makes figures of it."""

    seconds: float
    """When measuring ended."""
    warmup: float
    """When it began."""
    records: tuple[Record, ...]
    """In order of arrival."""
    workers: Mapping[str, WorkerTotals]
    weights: Mapping[str, float]
    """Of every client of the workload."""
    timeline: tuple[ServiceSample, ...]
    """At every poll, and when measuring began and ended."""

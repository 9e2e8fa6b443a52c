"""Record what happens in a simulation, without changing it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

from bench.report.records import CLIENT_VIEW, CellTotals, GroupTotals, Record, Result, ServiceSample, WorkerTotals
from bench.sim.cells import Cells
from bench.sim.emulated_group import EmulatedGroup, totals_since
from bench.sim.emulated_worker import EmulatedWorker
from bench.sim.in_flight_call import InFlightCall
from bench.workloads.parts.traffic import Outcome
from router.core.model.request import RequestId, WorkerId
from router.core.scheduler import Scheduler
from workers.engine.barrier import StepTotals
from workers.engine.model import Counters


class Baseline(NamedTuple):
    """An engine's totals when measuring began."""

    busy_seconds: float
    counters: Counters


class SimulationRecorder:
    """Records one simulation."""

    def __init__(
        self,
        scheduler: Scheduler,
        workers: Mapping[WorkerId, EmulatedWorker],
        groups: Mapping[str, EmulatedGroup],
        weights: Mapping[str, float],
        cells: Cells | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._cells = cells
        self._cell_gaps: list[float] = []
        self._cell_baselines: Sequence[CellTotals] = ()
        self._cell_totals: Sequence[CellTotals] = ()
        self._workers = workers
        self._groups = groups
        self._weights = weights
        self._began = self._ended = inf
        self._records: dict[RequestId, Record | None] = {}
        self._timeline: list[ServiceSample] = []
        self._gaps: dict[WorkerId, float] = {}
        self._baselines: dict[WorkerId, Baseline] = {}
        self._totals: dict[str, WorkerTotals] = {}
        self._group_baselines: dict[str, StepTotals] = {}
        self._group_totals: dict[str, GroupTotals] = {}

    def begin(self, now: float) -> None:
        """Start measuring."""
        self._began = now
        self._gaps.clear()
        if self._cells is not None:
            self._cell_baselines = self._cells.totals()
            self._cell_gaps = [0.0 for _ in self._cell_baselines]
        self.sample_service(now)
        for name, worker in self._workers.items():
            worker.waiting.reset(now)
            self._baselines[name] = Baseline(worker.busy_seconds(), replace(worker.engine.counters))
        self._group_baselines = {name: replace(group.totals) for name, group in self._groups.items()}

    def end(self, now: float) -> None:
        """Stop measuring."""
        self.sample_gaps()
        self.sample_service(now)
        self._ended = now
        if self._cells is not None:
            self._cell_totals = [
                cell._replace(decisions=cell.decisions - before.decisions, service_gap=gap)
                for cell, before, gap in zip(self._cells.totals(), self._cell_baselines, self._cell_gaps, strict=True)
            ]
        for name, worker in self._workers.items():
            self._totals[name] = self._worker(name, worker, now)
        for barrier, group in self._groups.items():
            before = self._group_baselines.get(barrier, StepTotals())
            self._group_totals[barrier] = totals_since(group.totals, before, len(group.ranks))

    def arrived(self, flight: InFlightCall) -> None:
        """Reserve the place of a call among the records, which are in order of arrival."""
        self._records[flight.request.id] = None

    def record(self, flight: InFlightCall, outcome: Outcome, now: float) -> None:
        """Record a call that has ended, or that the end of the simulation cut off."""
        self._records[flight.request.id] = Record(
            id=flight.request.id,
            client=flight.client.name,
            outcome=outcome,
            arrived=flight.arrived,
            dispatched=flight.dispatched_at,
            started=flight.started,
            finished=None if outcome is Outcome.UNFINISHED else now,
            worker=flight.worker,
            why=flight.why,
            input_tokens=len(flight.call.prompt),
            cached_tokens=flight.cached_tokens,
            predicted_cached_tokens=flight.predicted_cached_tokens,
            output_tokens=flight.output_seen(now),
            program=flight.call.program,
            program_calls=flight.call.program_calls,
            fresh_tokens=flight.call.fresh_tokens,
        )

    def sample_gaps(self) -> None:
        """Sample every worker's service gap, or every cell's, and keep the largest."""
        if self._cells is not None:
            gaps = [cell.fairness.gap(None) for cell in self._cells.schedulers]
            self._cell_gaps = list(map(max, gaps, self._cell_gaps or gaps))
            return
        pooled = self._scheduler.policy.properties.pooled
        fairness = self._scheduler.fairness
        shared = fairness.gap(None) if pooled else 0.0
        for name in self._workers:
            gap = shared if pooled else fairness.gap(name)
            if gap > self._gaps.get(name, 0.0):
                self._gaps[name] = gap

    def sample_service(self, now: float) -> None:
        """Sample the service of every client."""
        cost = self._scheduler.settings.cost
        served = {str(client): account.served for client, account in self._scheduler.ledger.accounts.items()}
        actual = {client: cost(tokens) for client, tokens in served.items()}
        seen = {client: CLIENT_VIEW(tokens) for client, tokens in served.items()}
        self._timeline.append(ServiceSample(now, actual, seen))

    def result(self) -> Result:
        """Return all records and samples."""
        records = tuple(record for record in self._records.values() if record is not None)
        return Result(
            self._ended,
            self._began,
            records,
            self._totals,
            self._weights,
            tuple(self._timeline),
            self._group_totals,
            self._cell_totals,
        )

    def _worker(self, name: WorkerId, worker: EmulatedWorker, now: float) -> WorkerTotals:
        busy, before = self._baselines.get(name, Baseline(0.0, Counters()))
        busy_now, counters = worker.busy_seconds(), worker.engine.counters
        scheduler = self._scheduler if self._cells is None else self._cells.cell_of(name)
        properties = scheduler.policy.properties
        queue = None if properties.pooled else name
        return WorkerTotals(
            busy_seconds=busy_now - busy,
            steps=counters.steps - before.steps,
            prompt_tokens=counters.prompt_tokens - before.prompt_tokens,
            prefix_queries=counters.prefix_queries - before.prefix_queries,
            prefix_hits=counters.prefix_hits - before.prefix_hits,
            output_tokens=counters.generation_tokens - before.generation_tokens,
            evicted_tokens=counters.evicted_tokens - before.evicted_tokens,
            preempted_requests=counters.preempted_requests - before.preempted_requests,
            waiting_requests_p95=worker.waiting.requests.percentile(now, 0.95),
            waiting_tokens_p95=worker.waiting.tokens.percentile(now, 0.95),
            service_gap=self._gaps.get(name, 0.0),
            service_gap_bound=scheduler.fairness.bound(queue, properties.gap_quantum),
        )

"""Cells: schedulers that each have a part of the workers, and D²LPM's placement of requests among them.

To the placement a cell is a worker: it keeps a deficit q_{i,w} of each client i at each cell w, and one cache mirror
for a whole cell. It is a `Scheduler` like the others, whose window is infinite, so that no request waits before it: a
request waits in its cell, in the order of the cell's own policy. Every event about a request goes to both; events about
a worker go to its cell alone.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from random import Random
from typing import Final

from bench.report.records import CellTotals
from bench.sim.scenario import MODEL, Scenario
from router.core.fleet.window import NoWindow
from router.core.model.commands import Command, Dispatch, Reject, WakeAt
from router.core.model.events import (
    Arrived,
    Cancelled,
    Event,
    Failed,
    Finished,
    Progressed,
    Started,
    Ticked,
    WorkerJoined,
    WorkerLeft,
    WorkerReported,
)
from router.core.model.request import RequestId, Worker, WorkerId
from router.core.policies.context import Parameters
from router.core.policies.dlpm.dlpm_parameters import D2lpmParameters
from router.core.policies.registry import POLICIES
from router.core.scheduler import Scheduler

PLACEMENT: Final = "d2lpm"
ABOVE: Final = -1
"""The number of the placement among the schedulers; cells are numbered from 0."""


class Cells:
    """All schedulers of a fleet in cells. Workers join the cells in turn."""

    def __init__(self, scenario: Scenario) -> None:
        each = -(-len(scenario.workers) // scenario.cells)
        parameters = Parameters(*scenario.parameters)
        placement = parameters.of(D2lpmParameters)
        wide = replace(
            placement, quantum=placement.quantum * each, load_slack=placement.load_slack * each, by_service_rate=False
        )
        self.placement = Scheduler(
            POLICIES[PLACEMENT],
            replace(scenario.settings, window=NoWindow()),
            Parameters(wide),
            Random(scenario.seed),
        )
        """Places requests on cells. Its ledger has the service of all clients in the whole fleet."""
        self.schedulers: Sequence[Scheduler] = [
            Scheduler(POLICIES[scenario.policy], scenario.settings, parameters, Random(scenario.seed))
            for _ in range(scenario.cells)
        ]
        self._names = [WorkerId(f"cell{number}") for number in range(1, scenario.cells + 1)]
        self._cell_of: dict[WorkerId, int] = {}
        self._kv_tokens: list[dict[WorkerId, int]] = [{} for _ in self._names]
        self._requests: dict[RequestId, int] = {}
        """The cell of each live request."""
        self._decisions: Counter[int] = Counter()
        """Requests that each cell has dispatched."""
        self._wake_ups: dict[int, float] = {}
        """When each scheduler has asked to be woken; `ABOVE` is the placement."""
        self._wake_at = inf

    def handle(self, event: Event, now: float) -> Sequence[Command]:
        """Apply an event, as `Scheduler.handle` does. Raises TypeError for one that a simulation in cells has not."""
        commands: list[Command] = []
        match event:
            case Arrived(request):
                commands += self._place(event, now)
                if (cell := self._requests.get(request.id)) is not None:
                    commands += self._ask(cell, event, now)
            case Started(name) | Finished(name) | Failed(name) | Cancelled(name):
                commands += self._end_or_start(event, name, now)
            case Progressed():
                commands += self._progress(event, now)
            case Ticked():
                commands += self._tick(now)
            case WorkerJoined() | WorkerReported() | WorkerLeft():
                commands += self._change_fleet(event, now)
            case _:
                raise TypeError(f"no simulation in cells has a {type(event).__name__}")
        return [*commands, *self._wake_up()]

    def cell_of(self, worker: WorkerId) -> Scheduler:
        """Return the scheduler of a worker's cell."""
        return self.schedulers[self._cell_of[worker]]

    def totals(self) -> Sequence[CellTotals]:
        """Return each cell's totals since the beginning."""
        return [
            CellTotals(
                len(self._kv_tokens[number]),
                self._decisions[number],
                cell.fairness.gap(None),
                cell.fairness.bound(None, cell.policy.properties.gap_quantum),
            )
            for number, cell in enumerate(self.schedulers)
        ]

    def _place(self, event: Arrived, now: float) -> Sequence[Command]:
        """Place a request on a cell. Returns its rejection if there is none."""
        rejected: list[Command] = []
        for command in self._asked(ABOVE, self.placement, event, now):
            if isinstance(command, Dispatch):
                self._requests[command.request] = self._names.index(command.worker)
            else:
                rejected.append(command)
        return rejected

    def _end_or_start(
        self, event: Started | Finished | Failed | Cancelled, request: RequestId, now: float
    ) -> Sequence[Command]:
        cell = self._requests.get(request)
        if cell is None:
            return ()
        if not isinstance(event, Started):
            del self._requests[request]
        self._asked(ABOVE, self.placement, event, now)
        return self._ask(cell, event, now)

    def _progress(self, event: Progressed, now: float) -> Sequence[Command]:
        parts: dict[int, dict[RequestId, int]] = {}
        for request, tokens in event.output_tokens.items():
            parts.setdefault(self._requests[request], {})[request] = tokens
        self._asked(ABOVE, self.placement, event, now)
        return [command for cell, part in parts.items() for command in self._ask(cell, Progressed(part), now)]

    def _tick(self, now: float) -> Sequence[Command]:
        self._wake_at = inf
        commands: list[Command] = []
        for number in [number for number, time in self._wake_ups.items() if time <= now]:
            del self._wake_ups[number]
            if number == ABOVE:
                self._asked(ABOVE, self.placement, Ticked(), now)
            else:
                commands += self._ask(number, Ticked(), now)
        return commands

    def _change_fleet(self, event: WorkerJoined | WorkerReported | WorkerLeft, now: float) -> Sequence[Command]:
        match event:
            case WorkerJoined(worker):
                cell = self._cell_of.setdefault(worker.id, len(self._cell_of) % len(self._names))
                self._kv_tokens[cell].setdefault(worker.id, 0)
                self._describe(cell, now)
            case WorkerReported(name, kv_tokens=kv_tokens):
                cell = self._cell_of[name]
                if kv_tokens is not None and self._kv_tokens[cell][name] != kv_tokens:
                    self._kv_tokens[cell][name] = kv_tokens
                    self._describe(cell, now)
            case WorkerLeft(name):
                cell = self._cell_of[name]
        return self._ask(cell, event, now)

    def _describe(self, cell: int, now: float) -> None:
        """Say to the placement how large the caches of a cell are together."""
        sizes = self._kv_tokens[cell].values()
        assumed = self.schedulers[cell].settings.kv_tokens
        known = sum(size or assumed for size in sizes)
        worker = Worker(self._names[cell], frozenset({MODEL}), kv_tokens=known)
        self._asked(ABOVE, self.placement, WorkerJoined(worker), now)

    def _ask(self, cell: int, event: Event, now: float) -> Sequence[Command]:
        """Have a cell apply an event. Ends in the placement what the cell rejects."""
        commands = self._asked(cell, self.schedulers[cell], event, now)
        for command in commands:
            if isinstance(command, Dispatch):
                self._decisions[cell] += 1
            elif isinstance(command, Reject):
                del self._requests[command.request]
                self._asked(ABOVE, self.placement, Failed(command.request, accepted=False), now)
        return commands

    def _asked(self, number: int, scheduler: Scheduler, event: Event, now: float) -> Sequence[Command]:
        """Have a scheduler apply an event, and return its commands but for its wake-up, which is noted."""
        commands = scheduler.handle(event, now)
        for command in commands:
            if isinstance(command, WakeAt):
                self._wake_ups[number] = command.time
        return [command for command in commands if not isinstance(command, WakeAt)]

    def _wake_up(self) -> Sequence[Command]:
        """Ask to be woken when the first of the schedulers wants to."""
        earliest = min(self._wake_ups.values(), default=inf)
        if earliest >= self._wake_at:
            return ()
        self._wake_at = earliest
        return (WakeAt(earliest),)

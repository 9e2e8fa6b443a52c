"""Workers in cells: each cell schedules its own requests, and D²LPM's placement shares requests out to them."""

from dataclasses import replace

import pytest

from bench.report.records import Record
from bench.sim.command import simulate
from bench.sim.scenario import Scenario, WorkerSpec
from bench.sim.simulation import Simulation
from bench.workloads.parts.lengths import Lengths
from bench.workloads.parts.traffic import Outcome
from bench.workloads.shared_prefix import SharedPrefix
from router.core.clients.queue_limits import WaitingLimits
from router.core.fleet.window import FixedWindow
from router.core.scheduler_settings import SchedulerSettings

CELLS = 3
SPEC = WorkerSpec(max_running=4, kv_tokens=20_000)
SETTINGS = SchedulerSettings(window=FixedWindow(5, 8192))
SCENARIO = Scenario(
    "dlpm_home",
    SharedPrefix(
        client_count=4,
        concurrency=8,
        sessions=10,
        groups=2,
        own=True,
        prefix=Lengths(1000),
        question=Lengths(50),
        output=Lengths(30),
    ),
    (SPEC,) * 2 * CELLS,
    6.0,
    1.0,
    settings=SETTINGS,
    drain=True,
    cells=CELLS,
)


def cell(record: Record) -> int:
    """Workers join the cells in turn."""
    assert record.worker is not None
    return (int(record.worker[1:]) - 1) % CELLS


def test_one_cell_decides_as_one_scheduler() -> None:
    """The placement before it changes neither what is decided nor when."""
    with_it, without = simulate(replace(SCENARIO, cells=1)), simulate(replace(SCENARIO, cells=0))
    assert with_it.records == without.records
    assert [totals.service_gap_bound for totals in with_it.cells] == [without.workers["w1"].service_gap_bound]


def test_the_placement_and_the_cells_keep_the_same_books() -> None:
    """After a drain no scheduler holds a request, and both have served each client the same."""
    simulation = Simulation(SCENARIO)
    records = simulation.run().records
    assert {record.outcome for record in records} == {Outcome.DONE}
    assert simulation.cells is not None
    for scheduler in (simulation.scheduler, *simulation.cells.schedulers):
        assert scheduler.live == 0
        scheduler.ledger.check_conservation()
    for client, account in simulation.scheduler.ledger.accounts.items():
        own = [each.ledger.accounts[client].served for each in simulation.cells.schedulers]
        assert sum(tokens.output for tokens in own) == account.served.output
        assert sum(tokens.extend for tokens in own) == account.served.extend


def test_a_prefix_stays_in_the_cell_that_holds_it() -> None:
    """Its client's deficit there lasts and the cells' loads are alike, so each prefix is computed in few cells."""
    records = simulate(replace(SCENARIO, warmup=0.0)).records
    later = [record for record in records if record.arrived > 0]
    assert {cell(record) for record in records} == set(range(CELLS))
    assert sum((record.cached_tokens or 0) > 900 for record in later) > 0.9 * len(later)


def test_what_a_cell_rejects_is_live_nowhere() -> None:
    """The placement learns of it, and refunds what it has booked."""
    crowded = replace(SETTINGS, waiting=WaitingLimits(requests=1))
    simulation = Simulation(replace(SCENARIO, settings=crowded))
    assert Outcome.REJECTED in {record.outcome for record in simulation.run().records}
    assert simulation.scheduler.live == 0
    simulation.scheduler.ledger.check_conservation()


def test_decisions_are_counted_by_cell() -> None:
    """Each call that a worker got was one decision of its cell."""
    result = simulate(replace(SCENARIO, warmup=0.0))
    sent = [cell(record) for record in result.records if record.dispatched is not None and record.dispatched < 6.0]
    assert [totals.decisions for totals in result.cells] == [sent.count(number) for number in range(CELLS)]
    assert [totals.workers for totals in result.cells] == [2] * CELLS


@pytest.mark.parametrize("changes", [{"cells": 7}, {"cells": -1}, {"oracle": True}, {"kv_events": True}])
def test_cells_that_cannot_be_are_refused(changes: dict[str, int]) -> None:
    """A cell without a worker, and what would need to know more than the schedulers do."""
    with pytest.raises(ValueError, match="cell"):
        replace(SCENARIO, **changes)  # type: ignore[arg-type]

"""The full grid: its loads, programs that run to their end, and the default policy compared with the best."""

from collections.abc import Mapping
from dataclasses import replace
from math import inf

import pytest

from bench.lab.experiments import EXPERIMENTS
from bench.lab.frame.conditions import ALL
from bench.lab.frame.experiment import Row
from bench.lab.frame.felt_loads import FELT_LOADS
from bench.lab.frame.loads import loaded
from bench.lab.frame.measures import LIGHT_TIMES
from bench.lab.sweeps.full import DEFAULT, FINALISTS, FullGrid, at_load, compared
from bench.lab.sweeps.policies import PolicyTable, Relative
from bench.report.programs import summarise_programs
from bench.report.summary import summarise
from bench.sim.scenario import Scenario, WorkerSpec
from bench.sim.simulation import Simulation
from bench.workloads.combined import Combined
from bench.workloads.judge import Judge
from bench.workloads.papers.preble import EMBODIED
from bench.workloads.papers.vtc import Suite
from bench.workloads.parts.traffic import Outcome, Workload
from bench.workloads.recorded.sessions import Recorded, Sessions, Turn
from bench.workloads.recorded.traces import Trace, Traced
from tests.bench.lab.experiment_rows import rows_of


def row(
    policy: str, service: float, p95: float | None, longest: float | None, workload: str = "qa", load: str = "1"
) -> Row:
    waits: dict[str, float | None] = {
        **dict.fromkeys(LIGHT_TIMES, 0.0),
        "light TTFT p95": p95,
        "light TTFT longest": longest,
    }
    figures = {"service/s": service, "hit rate": 0.5, "Jain": 1.0, "Jain of shares": 1.0, **waits, "unended": 0}
    labels = {"workload": workload, "load": load, "policy": policy}
    return Row(labels, {name: [value] for name, value in figures.items()})


def test_programs_that_began_are_run_to_their_end() -> None:
    """With `drain` all calls of these programs come, also after the end, and no other program begins then."""
    workload = Judge(client_count=2, rate=3.0)
    cut, drained = (
        Simulation(Scenario("dlpm_home", workload, (WorkerSpec(),), 6.0, drain=drain)).run() for drain in (False, True)
    )
    assert summarise_programs(cut.records, 0.0, 6.0)["unfinished"] > 0
    ended = summarise_programs(drained.records, 0.0, 6.0)
    assert (ended["unfinished"], ended["broken"]) == (0, 0)
    assert any(record.arrived >= 6.0 for record in drained.records)
    begun = {(record.client, record.program) for record in cut.records}
    assert {(record.client, record.program) for record in drained.records} == begun


def test_the_drain_waits_for_a_program_that_pauses() -> None:
    """The drain goes on while nothing runs, because embodied tasks pause between their calls."""
    workload = replace(EMBODIED, client_count=1, rate=0.0, concurrency=1, sessions=1)
    run = Simulation(Scenario("dlpm_home", workload, (WorkerSpec(),), 2.0, drain=True)).run()
    assert summarise_programs(run.records, 0.0, 2.0)["done"] == 1


def test_nothing_is_censored() -> None:
    """Every program that began in the measured time ended, even under overload."""
    for each in rows_of("full"):
        assert list(each.values["unended"]) == [0], each.labels


def test_percentiles_are_exact_with_the_drain_alone() -> None:
    """The same cells without the drain have unfinished calls, so that percentiles are only bounds."""
    cells = FullGrid().cells(quick=True)
    for cell in cells:
        run = Simulation(cell.with_seed(0)).run()
        spans = [r.finished - r.arrived for r in run.records if r.finished is not None]
        assert len(spans) == len(run.records)
        assert FullGrid().measure(run, summarise(run))["unended"] == 0
    cut = Simulation(replace(cells[0].scenario, drain=False)).run()
    assert any(record.outcome is Outcome.UNFINISHED for record in cut.records)
    assert FullGrid().measure(cut, summarise(cut))["unended"] != 0


@pytest.mark.parametrize("factor", [0.8, 1.5])
def test_a_load_is_a_multiple_of_the_sustained_rate(factor: float) -> None:
    """The factor scales a rate, a trace's speed, a crowd's size or the concurrency, but never the light clients."""
    assert at_load("judge", factor, {}).workload == loaded("judge", 2, factor)
    crowd, usual = at_load("crowd of 60", factor, {}).workload, FELT_LOADS["crowd of 60"].workload
    assert isinstance(crowd, Combined)
    assert isinstance(usual, Combined)
    assert crowd.parts["crowd"] == replace(usual.parts["crowd"], client_count=round(60 * factor))
    assert crowd.parts["light"] == usual.parts["light"]
    flood = at_load("32 cold prompts, 4x32 chats", factor, {}).workload
    assert isinstance(flood, Combined)
    assert {name: part.concurrency for name, part in flood.parts.items()} == {
        "heavy": round(32 * factor),
        "honest": round(32 * factor),
        "light": 1,
    }
    mix, once = (at_load("ServeGen", each, {}).workload for each in (factor, 1.0))
    assert isinstance(mix, Suite)
    assert isinstance(once, Suite)
    assert mix.speed == pytest.approx(once.speed * factor)
    sessions = Sessions((Recorded(1, 1, (Turn(5, 5, 0, 0.0),)),))
    traces: dict[str, Workload] = {"servegen": Trace((Traced(0.0, 5, 5, 1),)), "sessions": sessions}
    trace, once_more = (at_load("ServeGen", each, traces).workload for each in (factor, 1.0))
    assert isinstance(trace, Trace)
    assert isinstance(once_more, Trace)
    assert trace.play.speed == pytest.approx(once_more.play.speed * factor)
    agents = at_load("coding agents", factor, traces).workload
    assert isinstance(agents, Sessions)
    assert agents.play.concurrency == round(sessions.play.concurrency * factor)


def test_the_default_is_compared_with_the_best_that_serves_enough() -> None:
    """Throughput is compared with the best's, waits with those of policies that serve nine tenths of it; under 0.1 s
    all are equal.
    """
    rows = [row(DEFAULT, 95.0, 2.0, 8.0), row("best", 100.0, 4.0, 10.0), row("idle", 50.0, 0.1, 0.1)]
    rows += [row(DEFAULT, 100.0, 0.02, 0.1, load="1.5"), row("best", 90.0, 0.001, 0.05, load="1.5")]
    first, second = compared(rows)
    assert (first.workload, first.load, first.service, first.waits) == ("qa", "1", 0.95, (1.0, 1.0))
    assert (second.load, second.service, second.waits) == ("1.5", 1.0, (1.0, 1.0))


def test_clients_that_begin_no_call_wait_longest() -> None:
    """A policy whose light clients begin no call in the time measured, as an earlier one waits, is never the best."""
    rows = [row(DEFAULT, 95.0, 3.0, 9.0), row("starves", 100.0, None, None), row("best", 100.0, 2.0, 9.0)]
    rows += [row(DEFAULT, 95.0, None, None, load="2"), row("best", 100.0, 2.0, 9.0, load="2")]
    rows += [row(DEFAULT, 95.0, None, None, load="3"), row("starves", 100.0, None, None, load="3")]
    assert [verdict.waits for verdict in compared(rows)] == [(1.5, 1.0), (inf, inf), (1.0, 1.0)]
    assert Relative(rows[:3]).best(3) == ["best", DEFAULT, "starves"]
    assert Relative(rows[:3]).wait("qa", DEFAULT) == 1.5


def test_the_digest_marks_missed_targets() -> None:
    """Missed targets are bold, and their number is in the first line."""
    rows = [row(DEFAULT, 90.0, 3.0, 8.0), row("best", 100.0, 2.0, 8.0), row(DEFAULT, 1.0, 1.0, 1.0, load="2")]
    head, _, *_, first, second = FullGrid().digest(rows)
    assert "1 of 2" in head
    assert first == "| qa | 1 | **0.90** | **1.50** | 1.00 |"
    assert second == "| qa | 2 | 1.00 | 1.00 | 1.00 |"


def test_the_best_are_near_the_best_in_throughput_and_waits() -> None:
    """Policies are ordered by the mean of both relative figures over the workloads."""
    rows = [row("fast", 100.0, 10.0, 0.0), row("prompt", 60.0, 1.0, 0.0), row("both", 90.0, 1.25, 0.0)]
    assert Relative(rows).best(2) == ["both", "prompt"]
    assert PolicyTable().digest(rows)[0] == "Nearest to the best: both, prompt, fast."


def test_the_full_grid_compares_the_default_with_five_policies() -> None:
    """All of them are among the policies of the other experiments."""
    assert "full" in EXPERIMENTS
    assert set(FINALISTS) < ALL.keys()
    assert len(set(FINALISTS) - {DEFAULT}) == 5


def labels(cell: Mapping[str, str]) -> tuple[str, str]:
    return cell["workload"], cell["load"]


def test_every_workload_has_four_loads_and_six_policies() -> None:
    """Each cell runs under five seeds."""
    cells = FullGrid().cells(quick=False)
    places = {labels(dict(cell.labels)) for cell in cells}
    assert len(places) == 4 * len({workload for workload, _ in places})
    assert len(cells) == 6 * len(places)
    assert len(FullGrid.seeds) == 5

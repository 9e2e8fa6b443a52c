"""The results that the VTC and the Preble paper report, and some of our own, on quick runs."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from bench.__main__ import main
from bench.lab.frame.experiment import Experiment, Value
from bench.lab.frame.runner import Task, figures_of
from bench.lab.micro.decision_cost import Setting
from bench.lab.papers import fig4
from bench.lab.papers.preble import PrebleLatency, tools_and_videos
from bench.lab.papers.vtc import VtcSuites
from bench.lab.sweeps.window import WindowSize
from bench.workloads.recorded.traces import Trace, Traced

VTC: Final = VtcSuites()
PREBLE: Final = PrebleLatency()
WINDOW: Final = WindowSize()
SHOWN: Final = ("difference avg", "light TTFT mean", "tokens/s")


@cache
def quick(experiment: Experiment, *labels: str) -> Mapping[str, Value]:
    """Return the figures of the one cell of a quick run that has these labels."""
    (cell,) = [c for c in experiment.cells(quick=True) if {*labels} <= {value for _, value in c.labels}]
    return figures_of(Task(experiment, cell, 0))


def measured(figure: str, experiment: Experiment, *labels: str) -> float:
    """Return one figure of that cell."""
    value = quick(experiment, *labels)[figure]
    assert value is not None
    assert not isinstance(value, Sequence)
    return value


def test_a_client_over_its_share_leads_under_fcfs_and_not_under_vtc() -> None:
    """In figure 3, FCFS lets the faster client's lead grow, and VTC keeps it below its bound."""
    bound = 2 * 2 * 10_000
    assert measured("accumulated", VTC, "vtc-overload", "vtc") <= bound
    assert measured("accumulated", VTC, "vtc-overload", "fcfs") > 3 * bound
    difference = measured("difference avg", VTC, "vtc-overload", "vtc")
    assert difference < measured("difference avg", VTC, "vtc-overload", "fcfs") / 4


@pytest.mark.parametrize("policy", ["vtc", "lcf"])
def test_counters_serve_27_clients_more_evenly_at_equal_throughput(policy: str) -> None:
    """In figures 11 to 13, the difference is smaller than under FCFS, light clients wait less, and the output is the
    same.
    """
    ours, fcfs = ({name: measured(name, VTC, "vtc-27", each) for name in SHOWN} for each in (policy, "fcfs"))
    assert ours["difference avg"] < fcfs["difference avg"]
    assert ours["light TTFT mean"] < fcfs["light TTFT mean"] / 2
    assert ours["tokens/s"] > 0.95 * fcfs["tokens/s"]


def test_limits_of_requests_a_minute_lose_throughput() -> None:
    """In figure 13, a limit of 5 requests a minute loses nearly half of VTC's output."""
    assert measured("output tokens/s", VTC, "vtc-27", "rpm 5") < 0.7 * measured("output tokens/s", VTC, "vtc-27", "vtc")


def test_preble_answers_sooner_than_round_robin() -> None:
    """In figure 3 of the Preble paper, at the highest rate of long documents, round robin's average latency is 1.5
    times as long.
    """
    average = measured("latency avg", PREBLE, "loogle", "preble")
    assert 1.5 * average < measured("latency avg", PREBLE, "loogle", "rr+lpm")


def test_a_larger_window_has_a_larger_gap_and_no_more_throughput() -> None:
    """The gap rises from a third of the engine's slots over the learned window to no window, and stays under its
    bound.
    """
    for size in ("16", "256", "learned"):
        assert measured("gap", WINDOW, "fcfs", size) <= measured("bound", WINDOW, "fcfs", size)
    gaps = [measured("gap", WINDOW, "fcfs", size) for size in ("16", "learned", "off")]
    assert gaps == sorted(gaps)
    assert 3 * gaps[1] < gaps[2]
    assert measured("service/s", WINDOW, "fcfs", "learned") > 0.95 * measured("service/s", WINDOW, "fcfs", "256")


def test_a_trace_adds_cells_and_changes_no_other() -> None:
    """With the paper's own trace, its 27 clients are added under every policy that their stand-in has."""
    trace = Trace((Traced(0.0, 10, 10, 1), Traced(1.0, 10, 10, 2)))
    alone, traced = VTC.cells(quick=True), VtcSuites(traces={"arena": trace}).cells(quick=True)
    assert traced[: len(alone)] == alone
    added = [dict(cell.labels) for cell in traced[len(alone) :]]
    assert {labels["suite"] for labels in added} == {"arena"}
    stand_in = [labels["policy"] for labels in (dict(cell.labels) for cell in alone) if labels["suite"] == "vtc-27"]
    assert [labels["policy"] for labels in added] == stand_in


def test_every_arrival_of_a_trace_belongs_to_one_part_of_the_mix() -> None:
    """Each of Azure's times goes to one part of Preble's mix, one in five to the videos."""
    mixed = tools_and_videos([float(second) for second in range(20)])
    parts = {client.name.split("-")[0]: 0 for client in mixed.clients(0)}
    calls = [(call.at, client.name.split("-")[0]) for client in mixed.clients(0) for call in client.calls]
    for _, part in calls:
        parts[part] += 1
    assert sorted(at for at, _ in calls) == list(range(20))
    assert parts == {"tools": 16, "videos": 4}


def test_a_trace_that_no_experiment_plays_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing runs if a given trace would be ignored."""
    file = tmp_path / "trace.csv"
    file.write_text("arrival_s,client,prompt_tokens,output_tokens\n0,1,10,10\n")
    with pytest.raises(SystemExit):
        main(["experiment", "window", "--trace", f"arena:{file}", "--out", str(tmp_path)])
    assert "window plays no arena trace" in capsys.readouterr().err


def test_decision_costs_are_written_to_their_own_files(tmp_path: Path) -> None:
    """Each setting has its time, in microseconds and as a share of a decode step, in JSON, table and plot."""
    small = [Setting(policy, 20, 2, chunks=2_000, in_flight=4) for policy in ("d2lpm", "dlpm_home")]
    costs = fig4.measure(small, rounds=1, turns=5)
    assert all(cost.microseconds > 0 for cost in costs)
    assert costs[0].decode_step == costs[0].microseconds / 1e6 / fig4.decode_step_seconds()
    fig4.write(costs, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"fig4-times.{kind}" for kind in ("json", "md", "png")]
    written = json.loads((tmp_path / "fig4-times.json").read_text())["costs"]
    assert [cost["policy"] for cost in written] == ["d2lpm", "dlpm_home"]
    assert (tmp_path / "fig4-times.md").read_text().count("| 20 |") == 2

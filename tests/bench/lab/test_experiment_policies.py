"""Every policy on every workload: the loads, and the short form of the table."""

from pathlib import Path

import pytest

from bench.lab.frame.conditions import FIG7_SESSIONS, ON_A100, OVERLOAD, PLAIN_SESSIONS, SATURATING
from bench.lab.frame.experiment import Row
from bench.lab.frame.loads import loaded
from bench.lab.frame.measures import LIGHT_TIMES
from bench.lab.frame.report import as_markdown, write
from bench.lab.sweeps.policies import PolicyTable
from bench.lab.sweeps.saturation import Saturation
from bench.workloads.combined import Combined
from bench.workloads.parts.pace import RatedWorkload


def row(workload: str, policy: str, service: float | None, jain: float = 1.0, wait: float = 0.0) -> Row:
    waits = dict.fromkeys(LIGHT_TIMES, wait)
    figures = {"service/s": service, "hit rate": 0.5, "Jain": jain, "Jain of shares": jain, **waits}
    return Row({"workload": workload, "policy": policy}, {name: [value] for name, value in figures.items()})


ROWS = [
    row("qa", "fair", 50.0, jain=0.99, wait=0.12),
    row("qa", "local", 200.0, jain=0.5, wait=30.0),
    row("tot", "fair", 100.0),
    row("tot", "local", 80.0),
]


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("workload", PLAIN_SESSIONS)
def test_equal_clients_ask_half_as_much_again_as_the_workers_can_do(workload: str, workers: int) -> None:
    """Sessions a second times the seconds that each takes, over the workers."""
    load = loaded(workload, workers)
    assert isinstance(load, RatedWorkload)
    assert load.rate * ON_A100[PLAIN_SESSIONS[workload]] == pytest.approx(OVERLOAD * workers)


@pytest.mark.parametrize("workload", FIG7_SESSIONS)
def test_clients_of_two_kinds_ask_as_much_together(workload: str) -> None:
    """Each part's share of the sessions is the workload's own."""
    load = loaded(workload, 2)
    assert isinstance(load, Combined)
    rates = [load.parts[part].rate for part in ("heavy", "light")]
    seconds = [ON_A100[session] for session in FIG7_SESSIONS[workload]]
    of_one = sum(rate * each for rate, each in zip(rates, seconds, strict=True)) / sum(rates)
    assert load.rate * of_one == pytest.approx(OVERLOAD * 2)


def test_a_workload_without_a_known_session_has_no_load() -> None:
    """Rather than any."""
    with pytest.raises(KeyError):
        loaded("vtc-27", 1)


def test_the_digest_sets_each_policy_beside_the_best_on_every_workload() -> None:
    """Throughput over the best's, Jain's index, light p99; and before them what each has at least, and on the mean."""
    lines = PolicyTable().digest(ROWS)
    assert lines[-2:] == [
        "| fair | 0.25 / 0.99 / 0.1 | 1.00 / 1.00 / 0.0 |",
        "| local | 1.00 / 0.50 / 30.0 | 0.80 / 1.00 / 0.0 |",
    ]
    assert {line for line in lines if line.startswith(("| fair |", "| local |"))} >= {
        "| fair | 0.25 | qa | 0.62 | 1 | 2 |",
        "| local | 0.80 | tot | 0.90 | 1 | 2 |",
    }


def test_a_workload_without_service_divides_by_no_zero() -> None:
    """A figure that is missing in every policy divides by no zero."""
    assert "| fair | 0.00 | qa | 0.00 | 0 | 1 |" in PolicyTable().digest([row("qa", "fair", None)])


def test_a_digest_stands_before_its_table(tmp_path: Path) -> None:
    """In the Markdown that is written, and the plot can be drawn of the same rows."""
    write("policies", PolicyTable(), ROWS, [0], tmp_path)
    text = (tmp_path / "policies.md").read_text("utf-8")
    assert text == as_markdown(PolicyTable(), ROWS, [0])
    assert text.index("| local | 0.80 |") < text.index("| qa | fair | 50 |")
    assert (tmp_path / "policies.png").stat().st_size > 1000


def test_every_figure_that_sets_a_load_has_a_simulation_that_measures_it() -> None:
    """And each of these runs a session that is known, at a hardware that is."""
    measured = {dict(cell.labels)["session"] for cell in Saturation().cells(quick=False)}
    assert measured <= SATURATING.keys()
    assert {*PLAIN_SESSIONS.values(), *(name for pair in FIG7_SESSIONS.values() for name in pair)} <= measured

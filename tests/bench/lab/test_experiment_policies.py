"""The experiment of every policy on every workload sets equal loads, and its digest is that of its table."""

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
def test_equal_clients_ask_for_the_overload_of_the_workers(workload: str, workers: int) -> None:
    """Sessions per second times the seconds per session is the overload factor times the number of workers."""
    load = loaded(workload, workers)
    assert isinstance(load, RatedWorkload)
    assert load.rate * ON_A100[PLAIN_SESSIONS[workload]] == pytest.approx(OVERLOAD * workers)


@pytest.mark.parametrize("workload", FIG7_SESSIONS)
def test_clients_of_two_kinds_ask_for_the_same_overload_together(workload: str) -> None:
    """Each part keeps the workload's share of the sessions."""
    load = loaded(workload, 2)
    assert isinstance(load, Combined)
    rates = [load.parts[part].rate for part in ("heavy", "light")]
    seconds = [ON_A100[session] for session in FIG7_SESSIONS[workload]]
    of_one = sum(rate * each for rate, each in zip(rates, seconds, strict=True)) / sum(rates)
    assert load.rate * of_one == pytest.approx(OVERLOAD * 2)


def test_a_workload_without_a_known_session_has_no_load() -> None:
    """Such a workload raises KeyError instead of getting an arbitrary load."""
    with pytest.raises(KeyError):
        loaded("vtc-27", 1)


def test_the_digest_compares_each_policy_with_the_best_of_each_workload() -> None:
    """A cell has throughput relative to the best, Jain's index and light p99; each policy's minimum and mean come
    first.
    """
    lines = PolicyTable().digest(ROWS)
    assert lines[-2:] == [
        "| fair | 0.25 / 0.99 / 0.1 | 1.00 / 1.00 / 0.0 |",
        "| local | 1.00 / 0.50 / 30.0 | 0.80 / 1.00 / 0.0 |",
    ]
    assert {line for line in lines if line.startswith(("| fair |", "| local |"))} >= {
        "| fair | 0.25 | qa | 0.62 | 1 | 2 |",
        "| local | 0.80 | tot | 0.90 | 1 | 2 |",
    }


def test_a_workload_without_service_is_no_division_by_zero() -> None:
    """A figure that is missing under every policy counts as 0."""
    assert "| fair | 0.00 | qa | 0.00 | 0 | 1 |" in PolicyTable().digest([row("qa", "fair", None)])


def test_a_digest_precedes_its_table(tmp_path: Path) -> None:
    """The written Markdown has the digest first, and the plot is drawn from the same rows."""
    write("policies", PolicyTable(), ROWS, [0], tmp_path)
    text = (tmp_path / "policies.md").read_text("utf-8")
    assert text == as_markdown(PolicyTable(), ROWS, [0])
    assert text.index("| local | 0.80 |") < text.index("| qa | fair | 50 |")
    assert (tmp_path / "policies.png").stat().st_size > 1000


def test_every_figure_that_sets_a_load_has_a_simulation_that_measures_it() -> None:
    """Every measured session is a known one."""
    measured = {dict(cell.labels)["session"] for cell in Saturation().cells(quick=False)}
    assert measured <= SATURATING.keys()
    assert {*PLAIN_SESSIONS.values(), *(name for pair in FIG7_SESSIONS.values() for name in pair)} <= measured

"""Experiments: their rows, their files, and the command."""

import asyncio
import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.lab.experiments import EXPERIMENTS
from bench.lab.frame.experiment import Cell, Row
from bench.lab.frame.measures import first_token_line, first_token_spans, longest_alone, worst_spread
from bench.lab.frame.report import write
from bench.lab.frame.runner import Task, figures_of, run
from bench.report.records import Record, Result, ServiceSample
from bench.workloads.parts.traffic import Outcome
from tests.bench.lab import tiny_experiment
from tests.bench.lab.tiny_experiment import HELD, LENGTHS, SEEDS, Held, Tiny, Unsent
from tests.support.running import TIMEOUT_S, until

PNG = b"\x89PNG\r\n\x1a\n"

TINY = "tests.bench.lab.tiny_experiment"


@pytest.fixture(scope="module")
def rows() -> Sequence[Row]:
    return tiny_experiment.rows(jobs=2)


def test_rows_come_in_the_order_of_the_cells(tmp_path: Path) -> None:
    """A row is at its cell's place, even if the first simulation ends last."""
    os.mkfifo(tmp_path / "pipe")
    over: list[int] = []
    held = run(Held(tmp_path / "pipe"), quick=True, seeds=[0], jobs=2, done=lambda done, _of: over.append(done))
    assert [(row.labels["seconds"], row.values["seconds"]) for row in held] == [(f"{s}", [s]) for s in HELD]
    assert over == [1, 2, 3, 4]


def test_a_part_of_an_experiment_is_run_by_its_labels() -> None:
    """With `only`, no other cells are run than those whose labels contain it."""
    part = run(Tiny(), quick=True, seeds=[0], jobs=1, done=lambda _done, _of: None, only="1 dlpm")
    assert [dict(row.labels) for row in part] == [{"seconds": "1", "policy": "dlpm_home"}]
    assert not run(Tiny(), quick=True, seeds=[0], jobs=1, done=lambda _done, _of: None, only="no such label")


def test_no_scenario_is_sent_to_another_process() -> None:
    """A simulation runs whose scenario cannot be pickled, as none can with compiled code."""
    both = [run(each, quick=True, seeds=[0], jobs=1, done=lambda _done, _of: None) for each in (Tiny(), Unsent())]
    assert both[0] == both[1]


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("quick", [True, False])
def test_each_cell_has_labels_of_its_own(name: str, quick: bool) -> None:
    """No two cells of an experiment have the same labels, by which a process finds the one that it runs."""
    labels = [cell.labels for cell in EXPERIMENTS[name].cells(quick=quick)]
    assert len(set(labels)) == len(labels)


async def test_simulations_end_with_their_parent_process(tmp_path: Path) -> None:
    """A killed run leaves no process behind, not even in the middle of a simulation."""
    os.mkfifo(tmp_path / "pipe")
    program = (sys.executable, "-m", TINY, "held", str(tmp_path / "pipe"))
    runner = await asyncio.create_subprocess_exec(*program)
    ends: list[int] = []

    def simulating() -> bool:
        with suppress(OSError):  # the pipe has no reader
            ends.append(os.open(tmp_path / "pipe", os.O_WRONLY | os.O_NONBLOCK))
        return bool(ends)

    try:
        await until(simulating)
    finally:
        runner.kill()
        await runner.wait()
    reader_gone = select.poll()
    reader_gone.register(ends[0], select.POLLERR)
    assert reader_gone.poll(TIMEOUT_S * 1000)
    os.close(ends[0])


def test_a_row_holds_the_values_of_all_seeds(rows: Sequence[Row]) -> None:
    """Each value is at its seed's place and equals that of a separate simulation."""
    for cell, row in zip(Tiny().cells(quick=False), rows, strict=True):
        assert dict(row.labels) == dict(cell.labels)
        alone = [figures_of(Task(Tiny(), cell, seed)) for seed in SEEDS]
        assert {name: list(values) for name, values in row.values.items()} == {
            name: [figures[name] for figures in alone] for name in alone[0]
        }


def test_equal_seeds_give_equal_bytes(tmp_path: Path) -> None:
    """Neither JSON nor plot nor table depends on the hash seed of the interpreters."""
    for seed in ("1", "2"):
        (tmp_path / seed).mkdir()
        subprocess.run(
            [sys.executable, "-m", TINY, str(tmp_path / seed)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            timeout=120,
        )
    for file in ("tiny.json", "tiny.md", "tiny.png"):
        assert (tmp_path / "1" / file).read_bytes() == (tmp_path / "2" / file).read_bytes()


def test_all_that_was_measured_is_written(rows: Sequence[Row], tmp_path: Path) -> None:
    """The JSON has every seed's values, the Markdown a line per row with the medians, and the plot is a PNG."""
    write("tiny", Tiny(), rows, SEEDS, tmp_path)
    document = json.loads((tmp_path / "tiny.json").read_text())
    assert document["seeds"] == list(SEEDS)
    assert [row["values"]["calls"] for row in document["rows"]] == [row.values["calls"] for row in rows]
    lines = (tmp_path / "tiny.md").read_text().splitlines()
    assert "| seconds | policy | calls | Jain | none |" in lines
    first = f"| {rows[0].labels['seconds']} | d2lpm | {rows[0].median('calls')} | {rows[0].median('Jain'):.3f} | - |"
    assert first in lines
    assert len([line for line in lines if " | d2lpm | " in line]) == len(LENGTHS)
    assert (tmp_path / "tiny.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("values", "median"),
    [([3.0, 1.0, 2.0], 2.0), ([4.0, 1.0, 3.0, 2.0], 2.0), ([1.0, None, 2.0], None), ([7], 7)],
)
def test_a_median_is_one_of_the_values(values: Sequence[float | None], median: float | None) -> None:
    """The median is the middle value or the lower of two, and missing if a seed has none."""
    assert Row({}, {"figure": values}).median("figure") == median


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["fig0"], "unknown experiment 'fig0'"),
        (["flet"], "unknown experiment 'flet'; did you mean felt? (known: fig1"),
        (["felt", "--quik"], "unrecognized arguments: --quik; did you mean --quick?"),
        (["fig7", "--jobs", "0"], "must be at least 1"),
        (["fig7", "--seeds", "0"], "must be at least 1"),
        (["fig7", "--out", __file__], "cannot write to"),
        (["fig7", "--redraw", "--out", "/nowhere"], "cannot draw from /nowhere/fig7.md"),
        (["fig99", "--redraw"], "unknown experiment 'fig99'"),
    ],
)
def test_an_impossible_command_is_refused(
    arguments: Sequence[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line names the reason, the status is 2, and nothing has run."""
    with pytest.raises(SystemExit) as ended:
        main(["experiment", *arguments])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert complaint in line


@cache
def cells_of(name: str, *, quick: bool) -> Sequence[Cell]:
    return EXPERIMENTS[name].cells(quick=quick)


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("quick", [False, True])
def test_cells_have_distinct_labels(name: str, quick: bool) -> None:
    """All cells of an experiment have the same columns, and no two have equal values in them."""
    cells = cells_of(name, quick=quick)
    assert len({tuple(column for column, _ in cell.labels) for cell in cells}) == 1
    assert len({cell.labels for cell in cells}) == len(cells) > 1


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_quick_runs_are_of_the_same_shape(name: str) -> None:
    """Every cell of the quick run is also in the full run, where its simulation is no shorter."""
    whole = {cell.labels: cell.scenario for cell in cells_of(name, quick=False)}
    for cell in cells_of(name, quick=True):
        assert cell.scenario.seconds <= whole[cell.labels].seconds
        assert cell.scenario.policy == whole[cell.labels].policy


def record(client: str, arrived: float, started: float | None, finished: float | None) -> Record:
    outcome = Outcome.UNFINISHED if finished is None else Outcome.DONE
    return Record("r", client, outcome, arrived, arrived, started, finished, "w1", None, 10, 0, 0, 5)


def test_what_has_not_begun_counts_until_the_end() -> None:
    """A call without a first token counts as having waited until the end, in spans and in lines."""
    calls = [record("a", 0.0, 1.0, 2.0), record("a", 1.0, None, None), record("a", 5.0, 6.0, 7.0)]
    assert list(first_token_spans(calls[:2], 4.5)) == [(1.0, True), (3.5, False)]
    assert first_token_line(calls, 2.0, 10.0) == [(1.0, 5.0), (5.0, 1.0)]


def result(*services: tuple[float, float]) -> Result:
    """Return a result with the service of two clients, second by second; both wait all the time."""
    timeline = tuple(ServiceSample(float(t), {"a": a, "b": b}, {}) for t, (a, b) in enumerate(services))
    end = float(len(services))
    calls = (record("a", 0.0, 1.0, end), record("b", 0.0, 1.0, end))
    return Result(end, 0.0, calls, {}, {"a": 1.0, "b": 1.0}, timeline)


def test_the_spread_is_the_largest_at_any_time() -> None:
    """The largest spread since all clients were active counts, even if they are equal at the end."""
    assert worst_spread(result((5, 0), (10, 2), (20, 10), (20, 15))) == 5.0


def test_a_client_with_nearly_all_service_counts_as_alone() -> None:
    """The longest consecutive time of any client counts, and without service no client is alone."""
    services = [(0, 0), (10, 0), (20, 1), (20, 11), (20, 21), (20, 31), (20, 31), (30, 41)]
    assert longest_alone(result(*services), 0.9, 1.0) == 3.0
    assert longest_alone(result(*services), 0.95, 1.0) == 3.0
    assert longest_alone(result((0, 0), (5, 5), (9, 10)), 0.9, 1.0) == 0.0

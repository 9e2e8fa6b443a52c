"""A resumed experiment runs the simulations that are missing or that were run under other conditions."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench.lab.frame.experiment import Row
from bench.lab.frame.kept import Kept
from bench.lab.frame.runner import Task, figures_of, run
from tests.bench.lab.tiny_experiment import SEEDS, Tiny

TASK = Task(Tiny(), Tiny().cells(quick=True)[0], 0)


def resumed(kept: Kept) -> tuple[Sequence[Row], int]:
    """Return the rows, and how many simulations were run for them."""
    over: list[int] = []
    rows = run(Tiny(), quick=True, seeds=SEEDS, jobs=1, done=lambda done, _of: over.append(done), kept=kept)
    return rows, len(over)


def test_what_is_kept_is_not_run_again(tmp_path: Path) -> None:
    """Each simulation has its own file, and rows are the same whether all, some or none were kept."""
    kept = Kept(tmp_path / "cells")
    first, all_of_them = resumed(kept)
    files = sorted((tmp_path / "cells").iterdir())
    assert len(files) == all_of_them == 4
    assert {file.suffix for file in files} == {".json"}
    again, none = resumed(kept)
    files[1].unlink()
    third, one = resumed(kept)
    assert (none, one) == (0, 1)
    assert [row.values["Jain"] for row in first] == [row.values["Jain"] for row in again]
    assert [row.values["Jain"] for row in first] == [row.values["Jain"] for row in third]


def test_other_conditions_are_other_simulations(tmp_path: Path) -> None:
    """Another scenario, seed or source code is not found, and any label makes a valid file name."""
    kept = Kept(tmp_path)
    figures = figures_of(TASK)
    kept.keep(TASK, figures)
    assert kept.find(TASK) == {**figures, "TTFT": [list(point) for point in figures["TTFT"]]}  # type: ignore[union-attr]
    longer = replace(TASK.cell, scenario=replace(TASK.cell.scenario, seconds=2.0))
    assert kept.find(replace(TASK, cell=longer)) is None
    assert kept.find(replace(TASK, seed=1)) is None
    assert Kept(tmp_path, sources=("bench/workloads/spec.py",)).find(TASK) is None
    odd = replace(TASK, cell=replace(TASK.cell, labels=(("load", "4x4 / ü, 1:2"),)))
    kept.keep(odd, {"calls": 1})
    assert kept.find(odd) == {"calls": 1}


@pytest.mark.parametrize("text", ["", '{"conditions": {', "{}", "[]"])
def test_an_incomplete_file_is_ignored(tmp_path: Path, text: str) -> None:
    """The simulation of an incomplete file, such as an interrupted run may leave, is not found."""
    kept = Kept(tmp_path)
    kept.keep(TASK, {"calls": 1})
    (file,) = tmp_path.iterdir()
    file.write_text(text)
    assert kept.find(TASK) is None

"""Rows of experiments for tests, computed in the test's own process."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache

from bench.lab.experiments import EXPERIMENTS
from bench.lab.frame.conditions import QUICK_SEEDS
from bench.lab.frame.experiment import Row
from bench.lab.frame.runner import Task, figures_of

Wanted = Callable[[Mapping[str, str]], bool]
"""Returns whether the row with these labels is wanted."""


@cache
def rows_of(
    name: str, wanted: Wanted = lambda _labels: True, *, quick: bool = True, seeds: Sequence[int] = QUICK_SEEDS
) -> Sequence[Row]:
    """Return the wanted rows; each is simulated once for all callers."""
    experiment = EXPERIMENTS[name]
    cells = [cell for cell in experiment.cells(quick=quick) if wanted(dict(cell.labels))]
    rows = []
    for cell in cells:
        figures = [figures_of(Task(experiment, cell, seed)) for seed in seeds]
        rows.append(Row(dict(cell.labels), {name: [each[name] for each in figures] for name in figures[0]}))
    return rows


def figure(rows: Sequence[Row], measured: str, **labels: str) -> float:
    """Return a figure of the row with these labels."""
    (row,) = [r for r in rows if all(r.labels[name] == value for name, value in labels.items())]
    median = row.median(measured)
    assert median is not None
    return median

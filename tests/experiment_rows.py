"""Rows of experiments for tests, of one seed and without the processes."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache

from bench.experiments import EXPERIMENTS
from bench.experiments.conditions import QUICK_SEEDS
from bench.experiments.experiment import Row
from bench.experiments.runner import Task, figures_of

Wanted = Callable[[Mapping[str, str]], bool]
"""Says of which labels a row is wanted."""


@cache
def rows_of(name: str, wanted: Wanted = lambda _labels: True, *, quick: bool = True) -> Sequence[Row]:
    """The rows that are wanted, each simulated once for all that ask for the same."""
    experiment = EXPERIMENTS[name]
    cells = [cell for cell in experiment.cells(quick=quick) if wanted(dict(cell.labels))]
    (seed,) = QUICK_SEEDS
    figures = [figures_of(Task(experiment, cell, seed)) for cell in cells]
    return [
        Row(dict(cell.labels), {name: [value] for name, value in each.items()})
        for cell, each in zip(cells, figures, strict=True)
    ]


def figure(rows: Sequence[Row], measured: str, **labels: str) -> float:
    """A figure of the row with these labels."""
    (row,) = [r for r in rows if all(r.labels[name] == value for name, value in labels.items())]
    median = row.median(measured)
    assert median is not None
    return median

"""Runs the simulations of an experiment, as many at a time as there are cores."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context

from bench.experiments.experiment import Cell, Experiment, Row, Value
from bench.simulation import Simulation
from bench.summary import summarise


@dataclass(frozen=True, slots=True)
class Task:
    """One cell under one seed."""

    experiment: Experiment
    cell: Cell
    seed: int


def figures_of(task: Task) -> Mapping[str, Value]:
    """Run a simulation and read its figures."""
    result = Simulation(task.cell.with_seed(task.seed)).run()
    return task.experiment.measure(result, summarise(result))


def run(
    experiment: Experiment, *, quick: bool, seeds: Sequence[int], jobs: int, done: Callable[[int, int], None]
) -> Sequence[Row]:
    """Run all cells under all seeds, in so many processes; `done` hears how many of how many are over.

    Rows come in the order of the cells, whichever ended first. Raises what a simulation raised.
    """
    cells = experiment.cells(quick=quick)
    tasks = [Task(experiment, cell, seed) for cell in cells for seed in seeds]
    figures = _figures(tasks, jobs, done)
    return [
        _row(cell, figures[position * len(seeds) : (position + 1) * len(seeds)]) for position, cell in enumerate(cells)
    ]


def _figures(tasks: Sequence[Task], jobs: int, done: Callable[[int, int], None]) -> Sequence[Mapping[str, Value]]:
    # Fresh interpreters, because forking a process that has threads is not safe everywhere.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures: list[Future[Mapping[str, Value]]] = [pool.submit(figures_of, task) for task in tasks]
        try:
            for over, future in enumerate(as_completed(futures), 1):
                future.result()
                done(over, len(futures))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in futures]


def _row(cell: Cell, seeds: Sequence[Mapping[str, Value]]) -> Row:
    return Row(dict(cell.labels), {name: [figures[name] for figures in seeds] for name in seeds[0]})

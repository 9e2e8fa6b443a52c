"""Run the simulations of an experiment in parallel processes.

A process is sent the labels of a cell, and has the experiment make the cell again: a scenario cannot be sent with
compiled code (`hatch_build.py`), since frozen objects of the core cannot be unpickled.
"""

import gc
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from threading import Thread

from bench.lab.frame.experiment import Cell, Experiment, Labels, Row, Value
from bench.lab.frame.kept import Kept
from bench.report.summary import summarise
from bench.sim.simulation import Simulation


@dataclass(frozen=True, slots=True)
class Task:
    """One cell with one seed."""

    experiment: Experiment
    cell: Cell
    seed: int

    @property
    def extent(self) -> float:
        """Worker-seconds: roughly proportional to its duration, within an experiment."""
        return len(self.cell.scenario.workers) * self.cell.scenario.seconds


def figures_of(task: Task) -> Mapping[str, Value]:
    """Run a simulation and return its figures."""
    result = Simulation(task.cell.with_seed(task.seed)).run()
    return task.experiment.measure(result, summarise(result))


def run(
    experiment: Experiment,
    *,
    quick: bool,
    seeds: Sequence[int],
    jobs: int,
    done: Callable[[int, int], None],
    kept: Kept | None = None,
    only: str = "",
) -> Sequence[Row]:
    """Run all cells with all seeds in `jobs` processes. `done` is called with the finished and the total number.

    Rows are in the order of the cells. With `kept`, simulations whose figures are kept are not run, and the others are
    kept as each ends. With `only`, no cells are run but those whose names contain it. Raises what a simulation raised.
    """
    cells = [cell for cell in experiment.cells(quick=quick) if only in cell.name]
    tasks = [Task(experiment, cell, seed) for cell in cells for seed in seeds]
    figures = _figures(tasks, quick, jobs, done) if kept is None else _resumed(tasks, quick, jobs, done, kept)
    return [
        _row(cell, figures[position * len(seeds) : (position + 1) * len(seeds)]) for position, cell in enumerate(cells)
    ]


def _figures(
    tasks: Sequence[Task],
    quick: bool,
    jobs: int,
    done: Callable[[int, int], None],
    ended: Callable[[Task, Mapping[str, Value]], None] = lambda _task, _figures: None,
) -> Sequence[Mapping[str, Value]]:
    # Spawned, because forking a process with threads is not safe everywhere.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_begin_process) as pool:
        # The longest first, so that none of them runs alone at the end.
        order = sorted(range(len(tasks)), key=lambda number: tasks[number].extent, reverse=True)
        numbers: dict[Future[Mapping[str, Value]], int] = {
            pool.submit(_figures_and_clean, task.experiment, quick, task.cell.labels, task.seed): number
            for number, task in ((number, tasks[number]) for number in order)
        }
        try:
            for over, future in enumerate(as_completed(numbers), 1):
                ended(tasks[numbers[future]], future.result())
                done(over, len(tasks))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    figures = {number: future.result() for future, number in numbers.items()}
    return [figures[number] for number in range(len(tasks))]


def _resumed(
    tasks: Sequence[Task], quick: bool, jobs: int, done: Callable[[int, int], None], kept: Kept
) -> Sequence[Mapping[str, Value]]:
    found = [kept.find(task) for task in tasks]
    missing = [task for task, figures in zip(tasks, found, strict=True) if figures is None]
    before = len(tasks) - len(missing)
    run_now = iter(_figures(missing, quick, jobs, lambda over, _of: done(before + over, len(tasks)), kept.keep))
    return [next(run_now) if figures is None else figures for figures in found]


def _figures_and_clean(experiment: Experiment, quick: bool, labels: Labels, seed: int) -> Mapping[str, Value]:
    (cell,) = (cell for cell in experiment.cells(quick=quick) if cell.labels == labels)
    figures = figures_of(Task(experiment, cell, seed))
    gc.collect()
    return figures


def _begin_process() -> None:
    # A simulation makes hardly any garbage cycles, and looking for them takes a tenth of the time.
    gc.disable()
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _row(cell: Cell, seeds: Sequence[Mapping[str, Value]]) -> Row:
    return Row(dict(cell.labels), {name: [figures[name] for figures in seeds] for name in seeds[0]})

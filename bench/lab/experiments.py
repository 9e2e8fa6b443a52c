"""Run an experiment in virtual time, and write its figures, a table and a plot.

The conditions, that is hardware, loads and seeds, are in `conditions.py` and `vtc_conditions.py`. `all` runs the
experiments of the papers one after the other. It leaves out the sweeps, which take as long as all others together,
`full`, which takes hours (use `--resume`), `cells`, and `neighbour`, which is not from a paper, runs in real time and
needs an otherwise idle machine.
"""

import argparse
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from bench.lab.agents.sessions import AgentSessions
from bench.lab.balance.fair import Fair
from bench.lab.balance.pool import Pool
from bench.lab.balance.scaling import Scaling
from bench.lab.balance.sensitivity import Sensitivity
from bench.lab.balance.table1 import Table1
from bench.lab.frame.conditions import QUICK_SEEDS, SEEDS
from bench.lab.frame.experiment import Experiment, Row
from bench.lab.frame.kept import Kept
from bench.lab.frame.runner import run as run_cells
from bench.lab.frame.traced import TracedExperiment
from bench.lab.neighbour import experiment as neighbour
from bench.lab.neighbour.servers import SGLANG_FLAGS, Contestant, ServerError, contestant
from bench.lab.papers import fig4
from bench.lab.papers.fig1 import Figure1
from bench.lab.papers.fig7 import Figure7
from bench.lab.papers.fig8 import Figure8
from bench.lab.papers.fig9 import Figure9
from bench.lab.papers.fig10 import Figure10
from bench.lab.papers.fig11 import Figure11
from bench.lab.papers.fig12 import Figure12
from bench.lab.papers.preble import PrebleLatency
from bench.lab.papers.preble_ablation import PrebleAblation
from bench.lab.papers.vtc import VtcSuites
from bench.lab.sweeps.cache import CacheTruth
from bench.lab.sweeps.cells import CellsOfWorkers
from bench.lab.sweeps.defaults import Defaults
from bench.lab.sweeps.felt import Felt
from bench.lab.sweeps.full import FullGrid
from bench.lab.sweeps.policies import PolicyTable
from bench.lab.sweeps.saturation import Saturation
from bench.lab.sweeps.unmodified import Unmodified
from bench.lab.sweeps.window import WindowSize
from bench.report.exits import INTERRUPTED, refuse
from bench.report.progress import ProgressBar
from bench.workloads.recorded.sessions import Sessions, parse_recorded
from bench.workloads.recorded.traces import Trace
from router.runtime.mistakes import unknown

EXPERIMENTS: Final[Mapping[str, Experiment]] = {
    "fig1": Figure1(),
    "fig7": Figure7(),
    "fig8": Figure8(),
    "fig9": Figure9(),
    "fig10": Figure10(),
    "fig11": Figure11(),
    "fig12": Figure12(),
    "vtc": VtcSuites(),
    "preble": PrebleLatency(),
    "preble-ablation": PrebleAblation(),
    "window": WindowSize(),
    "unmodified": Unmodified(),
    "policies": PolicyTable(),
    "defaults": Defaults(),
    "saturation": Saturation(),
    "cache": CacheTruth(),
    "felt": Felt(),
    "full": FullGrid(),
    "br-table1": Table1(),
    "br-scaling": Scaling(),
    "br-sensitivity": Sensitivity(),
    "br-pool": Pool(),
    "br-fair": Fair(),
    "sessions": AgentSessions(),
    "cells": CellsOfWorkers(),
}
"""The experiments by name; a new one is a file and a line here. `fig4` is apart because it measures instead of
simulating.
"""
NAMES: Final = (*EXPERIMENTS, "fig4")
SWEEPS: Final = ("saturation", "policies", "defaults", "cache")
"""Many cells under one seed, for choices of our own; all others repeat what a paper measured, or check a claim of
ours.
"""
BALANCE: Final = tuple(name for name in EXPERIMENTS if name.startswith("br-"))
"""Decode ranks in step: half of their loads are public traces, and they run only if named."""
NAMED: Final = ("full", "sessions", "cells")
"""Take long, or are of a router that is not built, and run only if named."""
LIVE: Final = "neighbour"
OUT: Final = Path("results")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        metavar="NAME",
        help=f"one of {', '.join(NAMES)}, {LIVE}; or all (except the sweeps, full and br-*), or sweeps",
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter simulations with the same shape")
    parser.add_argument(
        "--out", type=Path, default=OUT, metavar="DIR", help="folder to write to (default: %(default)s)"
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="parallel processes (default: %(default)s)"
    )
    parser.add_argument(
        "--seeds",
        type=int,
        metavar="N",
        help=f"number of seeds (default: usually {len(SEEDS)}; quick {len(QUICK_SEEDS)})",
    )
    parser.add_argument(
        "--redraw",
        action="store_true",
        help="run nothing: draw the picture anew from the figures in the folder of --out; all: every one there",
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="DIR",
        help="keep each simulation's figures here, and skip simulations kept with the same conditions and code",
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="run only the simulations whose labels, joined by spaces, contain this, such as 'mooncake dlpm'",
    )
    parser.add_argument(
        "--trace",
        action="append",
        default=[],
        metavar="KIND:FILE",
        help="replay a public trace: arena in vtc, azure in preble; servegen and sessions in felt, policies and full; "
        "sessions in sessions; "
        "mooncake and azure in br-*",
    )
    parser.add_argument(
        "--router",
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help=f"another router in {LIVE}; {{port}} is its port, an argument with {{worker}} is repeated for each worker",
    )
    parser.add_argument(
        "--sglang-router",
        metavar="COMMAND",
        help=f"command line of SGLang's router in {LIVE} (default: sglang-router, if installed)",
    )


def run(options: argparse.Namespace) -> None:
    # Imported here because it needs matplotlib; the other commands, and the demo of an installed router, do not.
    from bench.lab.frame.report import table, write  # noqa: PLC0415

    if options.redraw:
        _redraw(options)
        return
    try:
        names = _names(options)
        _check_counts(options)
        traces = _traces(options, names)
        options.out.mkdir(parents=True, exist_ok=True)
    except ValueError as error:
        refuse("experiment", str(error))
    except OSError as error:
        refuse("experiment", f"cannot write to {options.out}: {error.strerror}")
    for name in names:
        if name == LIVE:
            _run_live(options, _seeds(options, SEEDS))
            continue
        if name == "fig4":
            fig4.run(options.out, quick=options.quick)
            continue
        experiment = _playing(EXPERIMENTS[name], traces)
        seeds = _seeds(options, experiment.seeds)
        bar = ProgressBar(sys.stderr, "simulations")
        rows = run_cells(
            experiment,
            quick=options.quick,
            seeds=seeds,
            jobs=options.jobs,
            done=bar.show,
            kept=None if options.resume is None else Kept(options.resume),
            only=options.only,
        )
        bar.close()
        if not rows:
            refuse("experiment", f"no simulation of {name} has {options.only!r} in its labels")
        write(name, experiment, rows, seeds, options.out)
        print(f"{name}: {experiment.title}", *table(experiment, rows), "", sep="\n", flush=True)


def _redraw(options: argparse.Namespace) -> None:
    """Draw from what was written; `all` leaves out what needs lines over time of which there is only a table."""
    from bench.lab.frame.report import draw, holds  # noqa: PLC0415 - as above

    experiments = {**EXPERIMENTS, LIVE: neighbour.NoisyNeighbour()}
    try:
        names = [options.name]
        if options.name == "all":
            names = [name for name, each in experiments.items() if holds(name, each, options.out)]
            names += ["fig4"] if (options.out / f"{fig4.FILE}.md").exists() else []
        for name in names:
            if name == "fig4":
                fig4.redraw(options.out)
            elif name in experiments:
                draw(name, experiments[name], options.out)
            else:
                raise ValueError(unknown("experiment", name, (*experiments, "fig4", "all")))
            print(f"{name}: {options.out}")
    except ValueError as error:
        refuse("experiment", str(error))
    except OSError as error:
        refuse("experiment", f"cannot draw from {error.filename}: {error.strerror}")


def _run_live(options: argparse.Namespace, seeds: Sequence[int]) -> None:
    from bench.lab.frame.report import table, write  # noqa: PLC0415 - as above
    from bench.live.clients import LoadError  # noqa: PLC0415 - it needs aiohttp

    for number in (signal.SIGTERM, signal.SIGHUP):  # so that no router outlives this process
        signal.signal(number, signal.default_int_handler)
    experiment, bar = neighbour.NoisyNeighbour(), ProgressBar(sys.stderr, "runs")
    rows: Sequence[Row] = []
    try:
        sglang_router = options.sglang_router or shutil.which("sglang-router")
        planned = neighbour.plan(contestants(options.router, sglang_router), quick=options.quick)
        for rounds, rows in enumerate(neighbour.run(planned, seeds, bar.show), 1):
            write(LIVE, experiment, rows, seeds[:rounds], options.out)
    except (ServerError, LoadError, ValueError) as error:
        refuse("experiment", str(error))
    except KeyboardInterrupt:
        print(f"{LIVE}: interrupted; the router and its workers have ended", file=sys.stderr)
        sys.exit(INTERRUPTED)
    finally:
        bar.close()
    print(f"{LIVE}: {experiment.title}", *table(experiment, rows), "", sep="\n", flush=True)
    for doubt in neighbour.doubts(rows):
        print(f"{LIVE}: {doubt}", file=sys.stderr)


def contestants(routers: Sequence[str], sglang_router: str | None) -> Sequence[Contestant]:
    """Return our router, SGLang's if installed, those that were named, and no router. Raises ValueError."""
    command = shlex.split(sglang_router or "")
    if not command:
        print(f"{LIVE}: no sglang-router here (--sglang-router COMMAND): its rows are left out", file=sys.stderr)
    sglang = [Contestant("sglang-router", (*command, *SGLANG_FLAGS))] if command else []
    return [*neighbour.ROUTERS, *sglang, *map(contestant, routers), neighbour.DIRECT]


def _names(options: argparse.Namespace) -> Sequence[str]:
    if options.name not in (known := (*NAMES, "all", "sweeps", LIVE)):
        raise ValueError(unknown("experiment", options.name, known))
    if options.name == "sweeps":
        return SWEEPS
    return (
        [name for name in NAMES if name not in (*SWEEPS, *NAMED, *BALANCE)] if options.name == "all" else [options.name]
    )


def _traces(options: argparse.Namespace, names: Sequence[str]) -> Mapping[str, Trace | Sessions]:
    """Read the traces that these experiments replay, by kind."""
    traces = {text.partition(":")[0].partition(",")[0]: parse_recorded(text) for text in options.trace}
    experiments = [EXPERIMENTS[name] for name in names if name in EXPERIMENTS]
    played = {kind for each in experiments if isinstance(each, TracedExperiment) for kind in each.kinds}
    for kind in traces:
        if kind not in played:
            raise ValueError(f"{options.name} plays no {kind} trace")
    return traces


def _playing(experiment: Experiment, traces: Mapping[str, Trace | Sessions]) -> Experiment:
    """Return the experiment with those of the traces that it replays."""
    if not isinstance(experiment, TracedExperiment):
        return experiment
    return replace(experiment, traces={kind: traces[kind] for kind in experiment.kinds if kind in traces})


def _check_counts(options: argparse.Namespace) -> None:
    if options.jobs < 1 or (options.seeds is not None and options.seeds < 1):
        raise ValueError("--jobs and --seeds must be at least 1")


def _seeds(options: argparse.Namespace, usual: Sequence[int]) -> Sequence[int]:
    if options.seeds is not None:
        return range(options.seeds)
    return QUICK_SEEDS if options.quick else usual

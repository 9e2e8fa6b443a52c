"""Simulate a fleet under a workload in virtual time.

Runs the router's own scheduler with emulated engines. Nothing sleeps, and equal seeds give equal figures. They are
written as JSON; `bench/report/summary.py` documents each of them. Parameters follow a colon, as in `--workload
documents:documents=40,tokens=6000` or `--window fixed:requests=64`. Several numbers are joined by slashes, as in
`weights=1/2/4`. Parameters of a part have its name before a dot, as in `--workload tot-s1:heavy.branches=3`. The
parameters of a trace follow its kind, as in `--trace arena,speed=2:FILE`; the file formats are documented in
`bench/workloads/recorded/traces.py` and `bench/workloads/recorded/sessions.py`.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, get_args

from bench.report.exits import refuse
from bench.report.progress import ProgressBar
from bench.report.records import Record, Result
from bench.report.summary import Summary, summarise
from bench.sim.scenario import FRONT_REPORT_SECONDS, Scenario, WorkerSpec
from bench.sim.simulation import Observer, Simulation
from bench.workloads.parts.spec import changed, parse_spec, split
from bench.workloads.parts.traffic import Rated, Workload
from bench.workloads.recorded.sessions import KIND, parse_recorded
from bench.workloads.recorded.traces import READERS
from bench.workloads.registry import WORKLOADS
from router.core.fleet.window import FixedWindow, LearnedWindow, NoWindow, Window
from router.core.model.commands import Command
from router.core.model.events import Event
from router.core.policies.registry import ORDERS, PARAMETERS, PLACEMENTS, POLICIES
from router.core.scheduler_settings import SchedulerSettings
from router.runtime.mistakes import unknown
from workers.engine.engine import DEFAULT_HARDWARE
from workers.engine.hardware import HARDWARE, RankSteps
from workers.engine.model import Dialect, Order

__all__ = ["Record", "Result", "Scenario", "Summary", "WorkerSpec", "configure", "run", "simulate", "summarise"]

WINDOWS: Final[Mapping[str, Window]] = {
    "learned": LearnedWindow(),
    "fixed": FixedWindow(),
    "off": NoWindow(),
}


def simulate(scenario: Scenario, observers: Sequence[Observer] = ()) -> Result:
    """Run a scenario; equal scenarios give equal results."""
    return Simulation(scenario, observers).run()


class ProgressObserver:
    """Shows the virtual time on a progress bar."""

    def __init__(self, seconds: float, bar: ProgressBar) -> None:
        self._seconds = seconds
        self._bar = bar

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:  # noqa: ARG002
        self._bar.show(now, self._seconds)


def configure(parser: argparse.ArgumentParser) -> None:
    _add_router_flags(parser)
    _add_traffic_flags(parser)
    _add_run_flags(parser)
    workers = parser.add_argument_group("workers")
    _add_fleet_flags(workers)
    _add_batch_flags(workers)


def _add_router_flags(parser: argparse.ArgumentParser) -> None:
    alone = [name for name in POLICIES if "+" not in name]
    parser.add_argument(
        "--policy",
        default="dlpm_home",
        metavar="P",
        help=f"{', '.join(alone)}; or PLACEMENT+ORDER, with placement {', '.join(PLACEMENTS)} and order "
        f"{', '.join(ORDERS)} (default: %(default)s)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FAMILY.PARAMETER=VALUE",
        dest="parameters",
        help="set a parameter of the policy; may be repeated",
    )
    parser.add_argument(
        "--window",
        default="learned",
        metavar="NAME",
        help=f"limit on the work in flight at a worker: {', '.join(WINDOWS)} (default: %(default)s)",
    )
    parser.add_argument(
        "--report-seconds",
        type=float,
        default=FRONT_REPORT_SECONDS,
        metavar="S",
        help="seconds between two reports of all streams' new output to the scheduler (default: %(default)s, as in a "
        "real front, which also reports a stream at 64 new tokens; most experiments use 0.1)",
    )


def _add_traffic_flags(parser: argparse.ArgumentParser) -> None:
    traffic = parser.add_mutually_exclusive_group()
    traffic.add_argument(
        "--workload", default="documents", metavar="W", help=f"one of {', '.join(WORKLOADS)} (default: %(default)s)"
    )
    traffic.add_argument(
        "--trace",
        metavar="KIND:FILE",
        help=f"replay a public trace instead; KIND is one of {', '.join(READERS)}, {KIND}",
    )
    parser.add_argument(
        "--rate", type=float, help="calls per second of all clients together (default: as the workload has it)"
    )


def _add_run_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="seconds of virtual time to simulate (default: %(default)s)"
    )
    parser.add_argument(
        "--warmup", type=float, default=0.0, help="seconds at the start that are not measured (default: %(default)s)"
    )
    parser.add_argument("--drain", action="store_true", help="continue until every call that arrived has ended")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write to this file instead of standard output")
    parser.add_argument("--records", action="store_true", help="also write one record per request")
    parser.add_argument(
        "--no-jumps", action="store_true", help="take every engine step by itself: slower, with equal results"
    )


def _add_fleet_flags(workers: argparse._ArgumentGroup) -> None:
    workers.add_argument("--workers", type=int, default=1, metavar="D", help="number of workers (default: %(default)s)")
    workers.add_argument(
        "--speeds", metavar="S,S,...", help="speed of each worker in turn, relative to the hardware (default: 1)"
    )
    workers.add_argument(
        "--hardware",
        default=DEFAULT_HARDWARE,
        metavar="H",
        help=f"step-time model: {', '.join(HARDWARE)} (default: %(default)s)",
    )
    workers.add_argument(
        "--rank-steps",
        metavar="fixed=MS,context=US[,prefill=MS]",
        help="emulate decode ranks: a step takes the fixed time, and a time per token of context of all running "
        "requests; prefill is free, or takes a time per prompt token (in place of the hardware's step times)",
    )
    workers.add_argument(
        "--barrier",
        action="store_true",
        help="make the workers ranks of one group: each step lasts as long as that of the slowest; the figures get "
        "their imbalance and the share of time in which they wait for each other",
    )
    workers.add_argument(
        "--dialect", choices=get_args(Dialect), default="vllm", help="engine to emulate (default: %(default)s)"
    )
    workers.add_argument(
        "--hide-capacity", action="store_true", help="do not report the size of the KV pool to the router"
    )


def _add_batch_flags(workers: argparse._ArgumentGroup) -> None:
    workers.add_argument(
        "--order",
        choices=get_args(Order),
        default="fcfs",
        help="order of the engine's own queue (default: %(default)s)",
    )
    workers.add_argument(
        "--kv-tokens", type=int, metavar="N", help="size of the KV pool in tokens (default: the hardware's)"
    )
    workers.add_argument("--slots", type=int, metavar="N", help="most requests in one batch (default: 256)")
    workers.add_argument(
        "--max-batched-tokens",
        type=int,
        metavar="N",
        help="most new tokens per step (default: vllm 2048, sglang 8192)",
    )


def run(options: argparse.Namespace) -> None:
    try:
        scenario = read_scenario(options)
    except ValueError as error:
        refuse("simulate", str(error))
    bar = ProgressBar(sys.stderr, "s")
    result = simulate(scenario, [ProgressObserver(scenario.seconds, bar)])
    bar.close()
    report: dict[str, object] = {"options": _shown(options), **summarise(result)}
    if options.records:
        report["records"] = [record._asdict() for record in result.records]
    text = json.dumps(report, indent=None if options.records else 2)
    if options.json is None:
        print(text)
    else:
        options.json.write_text(text + "\n", "utf-8")


def read_scenario(options: argparse.Namespace) -> Scenario:
    """Return the scenario of a command line. Raises ValueError if it is invalid."""
    return Scenario(
        policy=options.policy,
        workload=_workload(options),
        workers=tuple(_workers(options)),
        seconds=options.seconds,
        warmup=options.warmup,
        seed=options.seed,
        settings=SchedulerSettings(window=parse_spec(options.window, WINDOWS)),
        parameters=tuple(_parameters(options.parameters)),
        drain=options.drain,
        progress_seconds=options.report_seconds,
        jumps=not options.no_jumps,
    )


def _workload(options: argparse.Namespace) -> Workload:
    if options.trace is not None:
        if options.rate is not None:
            raise ValueError("a trace has times and no rate; its speed can be changed")
        return parse_recorded(options.trace)
    workload = parse_spec(options.workload, WORKLOADS)
    if options.rate is None:
        return workload
    if not isinstance(workload, Rated):
        raise ValueError(f"{options.workload} has no rate that could be changed")
    return workload.at_rate(options.rate)


def _workers(options: argparse.Namespace) -> Sequence[WorkerSpec]:
    if options.workers < 1:
        raise ValueError("--workers must be at least 1")
    spec = WorkerSpec(
        hardware=options.hardware,
        dialect=options.dialect,
        order=options.order,
        kv_tokens=options.kv_tokens,
        max_running=options.slots,
        max_batched_tokens=options.max_batched_tokens,
        reports_capacity=not options.hide_capacity,
        steps=None if options.rank_steps is None else _rank_steps(options.rank_steps),
        barrier="ranks" if options.barrier else None,
    )
    try:
        speeds = [float(speed) for speed in options.speeds.split(",")] if options.speeds else [1.0]
    except ValueError:
        raise ValueError(f"{options.speeds!r} is no list of speeds") from None
    return [replace(spec, speed=speeds[number % len(speeds)]) for number in range(options.workers)]


def _rank_steps(text: str) -> RankSteps:
    """Return the step times of a rank; both of what is fixed and of the context must be given."""
    given = dict(map(split, text.split(",")))
    if not {"fixed", "context"} <= given.keys():
        raise ValueError("--rank-steps needs fixed and context")
    return changed(RankSteps(1.0, 1.0), given)


def _parameters(assignments: Sequence[str]) -> Sequence[object]:
    """Return the policy's parameters, one object per family."""
    values: dict[str, dict[str, str]] = {}
    for name, value in map(split, assignments):
        family, _, parameter = name.partition(".")
        if family not in PARAMETERS:
            raise ValueError(unknown("family", family, PARAMETERS))
        values.setdefault(family, {})[parameter] = value
    return [changed(PARAMETERS[family](), each) for family, each in values.items()]


def _shown(options: argparse.Namespace) -> Mapping[str, object]:
    """Return the flags as given, to record which run the figures belong to."""
    shown = {name: value for name, value in vars(options).items() if isinstance(value, str | int | float | list | None)}
    return shown if options.trace is None else {**shown, "workload": None}

"""Show what the policies are for: one heavy client beside four light ones, on two emulated workers.

The same load under d2lpm, dlpm_home and vtc, and under rr+fcfs without a window: what a plain round-robin router does
before first-come-first-served engines. Router and workers are real processes on real sockets; the workers take a GPU's
time, only faster, and run no model. The light clients come first, alone, and then the heavy one beside them.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from textwrap import fill
from typing import Final

import uvloop

from bench.demo.figures import Figures, Timetable
from bench.demo.load import DemoError
from bench.demo.processes import fleet
from bench.demo.screen import Nowhere, Plain, Screen, Terminal
from bench.demo.table import findings, summary_lines
from bench.demo.trial import Trial
from bench.report.exits import INTERRUPTED
from bench.workloads.heavy_light import HeavyAndLight

POLICIES: Final[Mapping[str, Sequence[str]]] = {
    "d2lpm": (),
    "dlpm_home": (),
    "vtc": (),
    "rr+fcfs": ("--window", "off"),
}
"""The policies in turn, each with its router's flags."""
WORKERS: Final = 2
SLOTS: Final = 8
"""Requests that a worker computes at a time."""
LOAD: Final = HeavyAndLight()
WIDTH: Final = 100
"""Characters in a line of text."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=110, help="of the clock, for all of the load (%(default)s)")
    parser.add_argument("--speed", type=float, default=4, help="how much faster than a GPU's the time is (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts, the lengths and the pauses")
    parser.add_argument("--json", action="store_true", help="print nothing but the summary, as one JSON object")


def run(options: argparse.Namespace) -> None:
    if not (0 < options.seconds < 1e6 and 0 < options.speed < 1e6):
        sys.exit("demo: error: --seconds and --speed must be positive")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        results = demonstrate(options.seconds, options.speed, options.seed, _screen(options.json))
    except DemoError as error:
        sys.exit(f"demo: error: {error}")
    except KeyboardInterrupt:
        print("demo: interrupted; the router and its workers have ended", file=sys.stderr)
        sys.exit(INTERRUPTED)
    if options.json:
        print(json.dumps(_report(options, results), indent=2))
    else:
        print("", *summary_lines(results), "", *[fill(each, WIDTH) for each in findings(results)], sep="\n")


def demonstrate(seconds: float, speed: float, seed: int, screen: Screen) -> Mapping[str, Figures]:
    """Try each policy for its part of the seconds, under the same load. Raises DemoError."""
    times = Timetable.of(seconds / len(POLICIES) * speed)
    worker_flags = ("--max-running", str(SLOTS), "--speed", str(speed), "--seed", str(seed))
    results = {}
    for policy, flags in POLICIES.items():
        with fleet(WORKERS, worker_flags, ("--policy", policy, *flags)) as url:
            screen.begins(policy, url)
            results[policy] = uvloop.run(_trial(url, speed, seed, times, screen))
    return results


async def _trial(url: str, speed: float, seed: int, times: Timetable, screen: Screen) -> Figures:
    return await Trial(url, speed, LOAD.clients(seed), times, screen.show).run()


def _screen(quiet: bool) -> Screen:
    """Where to show how far it is; if quiet, not on standard output."""
    stream = sys.stderr if quiet else sys.stdout
    if stream.isatty():
        return Terminal(stream, tuple(POLICIES), lambda: os.get_terminal_size(stream.fileno()))
    return Nowhere() if quiet else Plain(stream)


def _report(options: argparse.Namespace, results: Mapping[str, Figures]) -> Mapping[str, object]:
    return {
        "seconds": options.seconds,
        "speed": options.speed,
        "seed": options.seed,
        "workers": WORKERS,
        "slots": SLOTS,
        "load": asdict(LOAD),
        "policies": {policy: {"flags": POLICIES[policy], **asdict(seen)} for policy, seen in results.items()},
        "findings": findings(results),
    }

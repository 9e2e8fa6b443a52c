"""Compare policies live: one heavy client beside four light ones, on two emulated workers.

Runs the same load under d2lpm, dlpm_home and vtc, and under rr+fcfs without a window, which is what a plain round-robin
router does in front of first-come-first-served engines. Router and workers are real processes on real sockets. The
workers run no model: they emulate the time that a GPU takes, only faster. The light clients are first alone, then the
heavy one joins them. Its prompts begin with one of 24 long prefixes, of which each worker's cache holds about half.
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
from bench.demo.screen import NoScreen, PlainScreen, Screen, TerminalScreen
from bench.demo.table import charts, explanation, findings, summary_lines
from bench.demo.trial import Trial
from bench.report.exits import INTERRUPTED
from bench.workloads.heavy_light import HeavyAndLight

POLICIES: Final[Mapping[str, Sequence[str]]] = {
    "d2lpm": (),
    "dlpm_home": (),
    "vtc": (),
    "rr+fcfs": ("--window", "off"),
}
"""The policies in order, each with the flags of its router."""
WORKERS: Final = 2
SLOTS: Final = 8
"""Most requests in one batch of a worker."""
KV_TOKENS: Final = 60_000
"""Tokens in the prefix cache of a worker: room for half of the heavy client's prefixes beside a full batch."""
LOAD: Final = HeavyAndLight(prefixes=24)
LIVE_TERMS: Final = (
    "While it runs: in flight are the open requests, heavy + light; cost/s is what the workers computed, input tokens"
    " and twice the output; hit rate is the part of the input that they had cached; p50 and p95 are the seconds"
    " within which half and 95 % of the requests had their first token; Jain is 1 if all clients got the same service."
)
"""The columns of the table that is shown while the demo runs, in plain words."""
WIDTH: Final = 100
"""Characters per line of text."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seconds", type=float, default=48, help="real seconds for all policies together (default: %(default)s)"
    )
    parser.add_argument(
        "--speed",
        type=float,
        default=5,
        help="how many times faster than a GPU the workers run (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts, lengths and pauses")
    parser.add_argument("--json", action="store_true", help="print only the summary, as one JSON object")


def run(options: argparse.Namespace) -> None:
    if not (0 < options.seconds < 1e6 and 0 < options.speed < 1e6):
        sys.exit("demo: error: --seconds and --speed must be positive")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    if not options.json:
        print(*[fill(each, WIDTH) for each in (_introduction(options.seconds), LIVE_TERMS)], "", sep="\n", flush=True)
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
        parts = [summary_lines(results), explanation(WIDTH), charts(results)]
        parts += [[fill(each, WIDTH)] for each in findings(results)]
        print(*("\n" + "\n".join(part) for part in parts), sep="\n")


def _introduction(seconds: float) -> str:
    return (
        f"One heavy client, with {LOAD.in_flight} requests open at a time, beside {LOAD.lights} light ones, with one"
        f" short request each, under {len(POLICIES)} policies in turn; {seconds / len(POLICIES):.0f} s each, and a few"
        f" to start. In each, the light clients are alone at first."
    )


def demonstrate(seconds: float, speed: float, seed: int, screen: Screen) -> Mapping[str, Figures]:
    """Run the same load under each policy, for an equal part of `seconds`. Raises DemoError."""
    times = Timetable.of(seconds / len(POLICIES) * speed)
    engine = ("--max-running", str(SLOTS), "--kv-tokens", str(KV_TOKENS))
    worker_flags = (*engine, "--speed", str(speed), "--seed", str(seed))
    results = {}
    for policy, flags in POLICIES.items():
        with fleet(WORKERS, worker_flags, ("--policy", policy, *flags)) as url:
            screen.start_policy(policy, url)
            results[policy] = uvloop.run(_trial(url, speed, seed, times, screen))
    return results


async def _trial(url: str, speed: float, seed: int, times: Timetable, screen: Screen) -> Figures:
    return await Trial(url, speed, LOAD.clients(seed), times, screen.show).run()


def _screen(quiet: bool) -> Screen:
    """Return where to show the progress; if `quiet`, never standard output."""
    stream = sys.stderr if quiet else sys.stdout
    if stream.isatty():
        return TerminalScreen(stream, tuple(POLICIES), lambda: os.get_terminal_size(stream.fileno()))
    return NoScreen() if quiet else PlainScreen(stream)


def _report(options: argparse.Namespace, results: Mapping[str, Figures]) -> Mapping[str, object]:
    return {
        "seconds": options.seconds,
        "speed": options.speed,
        "seed": options.seed,
        "workers": WORKERS,
        "slots": SLOTS,
        "kv_tokens": KV_TOKENS,
        "load": asdict(LOAD),
        "policies": {policy: {"flags": POLICIES[policy], **asdict(seen)} for policy, seen in results.items()},
        "findings": findings(results),
    }

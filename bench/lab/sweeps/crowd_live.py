"""Measure live what a crowd of polite clients and a light one see, under several policies in turn.

Two emulated workers with few places, and a router before them, over HTTP: 120 clients with one call open each and a
prefix of their own, and one that asks short questions now and then. Each policy meets new workers. `--virtual` runs the
same load in virtual time instead, where nothing depends on this machine. `--speed F` makes emulated time run F times
faster or, below 1, slower; everything that is not emulated, such as sockets and the router, then counts as F times
slower. "late" is how late calls were sent: if that is a good part of a call, a row describes this machine.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import uvloop

from bench.demo.load import DemoError
from bench.demo.processes import fleet
from bench.lab.frame.experiment import Value
from bench.lab.frame.felt_loads import WORKERS
from bench.lab.sweeps.felt import figures
from bench.live.clients import LiveLoad, LoadError, run_load
from bench.report.columns import aligned
from bench.report.exits import INTERRUPTED, refuse
from bench.report.summary import summarise
from bench.sim.command import simulate
from bench.sim.scenario import Scenario, WorkerSpec
from bench.workloads.crowds import LIGHT, POLITE, Crowd
from bench.workloads.parts.lengths import Lengths

POLICIES: Final = ("dlpm_home", "cache_aware")
PLACES: Final = 8
"""The most requests that a worker runs at a time."""


class Manner(NamedTuple):
    """How all policies are run."""

    clients: int = 120
    seconds: float = 60.0
    speed: float = 1.0
    """Speed of the workers' clock."""
    seed: int = 0
    stream_interval: int = 8
    """Tokens per event of an answer, after its first."""
    output: int = 100
    """Tokens of a polite client's answer."""
    prefix: int = 3000
    """Tokens that all prompts of a polite client begin with."""

    @property
    def workload(self) -> Crowd:
        """The clients."""
        crowd = replace(
            POLITE,
            client_count=self.clients,
            prefix=Lengths(self.prefix, most=self.prefix),
            output=Lengths(self.output),
        )
        return Crowd(crowd=crowd, light=replace(LIGHT, client_count=1))


class Row(NamedTuple):
    """What clients saw under one policy. Times are seconds of the workers' clock."""

    policy: str
    unserved: int
    """Clients that never got a token."""
    light_longest: float
    """The longest wait of the light client for a first token."""
    calls: int
    """Calls that were answered to their end."""
    hit_rate: float
    late: float | None
    """How late calls were sent (p99); None in virtual time."""


def configure(parser: argparse.ArgumentParser) -> None:
    default = Manner()
    parser.add_argument(
        "--policy", action="append", metavar="P", help=f"may be repeated (default: {', '.join(POLICIES)})"
    )
    parser.add_argument("--clients", type=int, default=default.clients, help="polite clients (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=default.seconds, help="length of the load (default: %(default)s)"
    )
    parser.add_argument(
        "--speed",
        type=float,
        default=default.speed,
        metavar="F",
        help="how many times faster than real time the workers run (default: %(default)s)",
    )
    parser.add_argument(
        "--stream-interval",
        type=int,
        default=default.stream_interval,
        metavar="N",
        help="tokens per event of an answer (default: %(default)s)",
    )
    parser.add_argument(
        "--output", type=int, default=default.output, help="tokens of a polite client's answer (default: %(default)s)"
    )
    parser.add_argument(
        "--prefix",
        type=int,
        default=default.prefix,
        help="tokens that all prompts of a polite client begin with (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=default.seed, help="seed of the load (default: %(default)s)")
    parser.add_argument("--virtual", action="store_true", help="run the load in virtual time, without processes")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the figures to this file")


def run(options: argparse.Namespace) -> None:
    manner = Manner(
        clients=options.clients,
        seconds=options.seconds,
        speed=options.speed,
        seed=options.seed,
        stream_interval=options.stream_interval,
        output=options.output,
        prefix=options.prefix,
    )
    measure = virtual if options.virtual else live
    try:
        rows = [measure(policy, manner) for policy in options.policy or POLICIES]
    except (ValueError, DemoError, LoadError) as error:
        refuse("crowd", str(error))
    except KeyboardInterrupt:
        print("crowd: interrupted; the router and its workers have ended", file=sys.stderr)
        sys.exit(INTERRUPTED)
    print(*table(rows), sep="\n")
    if options.json is not None:
        options.json.write_text(json.dumps([row._asdict() for row in rows], indent=2) + "\n", "utf-8")


def live(policy: str, manner: Manner) -> Row:
    """Run a policy over HTTP. Raises ValueError, DemoError or LoadError if that is impossible, or if a call failed."""
    worker = ["--max-running", str(PLACES), "--speed", str(manner.speed)]
    with fleet(WORKERS, worker, ["--policy", policy]) as url:
        load = LiveLoad(
            url,
            manner.workload,
            manner.seconds,
            seed=manner.seed,
            speed=manner.speed,
            stream_interval=manner.stream_interval,
        )
        ended = uvloop.run(run_load(load))
    if ended.failures:
        raise LoadError(f"calls failed: {dict(ended.failures)}")
    summary = ended.summary()
    seen = figures(ended.result, summary)
    return _row(policy, seen, manner.seconds, ended.late_p99_s)


def virtual(policy: str, manner: Manner) -> Row:
    """Run a policy in virtual time. Raises ValueError if there is no such policy."""
    workers = (WorkerSpec(max_running=PLACES),) * WORKERS
    result = simulate(Scenario(policy, manner.workload, workers, manner.seconds, seed=manner.seed))
    return _row(policy, figures(result, summarise(result)), manner.seconds, None)


def _row(policy: str, seen: Mapping[str, Value], seconds: float, late: float | None) -> Row:
    def figure(name: str) -> float:
        value = seen[name]
        return float(value) if isinstance(value, float | int) else 0.0

    calls = round(figure("calls/s") * seconds)
    return Row(policy, round(figure("unserved")), figure("light longest"), calls, figure("hit rate"), late)


def table(rows: Sequence[Row]) -> list[str]:
    """Format the rows with a header."""
    head = ("policy", "unserved", "light longest s", "calls", "hit rate", "late p99 s")
    return aligned([head, *map(_cells, rows)])


def _cells(row: Row) -> Sequence[str]:
    late = "-" if row.late is None else f"{row.late:.2f}"
    seen = (str(row.unserved), f"{row.light_longest:.1f}", f"{row.calls:,}", f"{row.hit_rate:.3f}")
    return [row.policy, *seen, late]

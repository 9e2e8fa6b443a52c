"""Measure what a streamed chat costs through this router and through others: CPU time, streams a second, waits.

All routers run before the same four workers, whose answers are made beforehand, and take turns under load, in one order
and then in the other. Each has one core, the first that this process may use; workers and clients have the others. In a
burst, a worker sends the chunks of an answer at once; paced, one every 10 ms. CPU time is that of all processes of a
router. A ratio is this router's CPU time over the other's, the median over the rounds.
"""

import argparse
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

from bench.lab.micro.canned_peers import MODEL, Driven, canned_workers, drive
from bench.lab.neighbour.servers import OURS, Ask, Contestant, Server, ServerError, contestant, started
from bench.report.columns import aligned
from bench.report.exits import refuse

COMMAND: Final = "router-cost"
OWN: Final = Contestant("d2lpm", OURS)
CHAT: Final = Ask(
    "/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "stream": True}
)
TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")


class Load(NamedTuple):
    """A load that is measured."""

    name: str
    gap_ms: int
    """Between two chunks; 0 for all at once."""
    chunks: int
    """Of each answer."""
    streams: int
    """Open at a time."""


LOADS: Final = (Load("burst", 0, 16, 32), Load("paced", 10, 64, 128))
Rounds = Mapping[str, Sequence[Driven]]
"""What was measured in each round, by the router's name."""


def measure(contestants: Sequence[Contestant], load: Load, rounds: int, seconds: float) -> Rounds:
    """Put each router under load once a round. Raises ServerError, and ValueError if no chat was answered."""
    found = defaultdict[str, list[Driven]](list)
    with ExitStack() as stack:
        with _on_core(the_first=False):
            ports = stack.enter_context(canned_workers(load.gap_ms, load.chunks))
        workers = [f"http://127.0.0.1:{port}" for port in ports]
        with _on_core(the_first=True):
            servers = [
                (who.name, stack.enter_context(started(who.name, who.command, workers, CHAT))) for who in contestants
            ]
        for number in range(rounds):
            for name, server in servers[:: -1 if number % 2 else 1]:
                with _on_core(the_first=False):
                    found[name].append(_measured(server, load, seconds))
    return found


def _measured(server: Server, load: Load, seconds: float) -> Driven:
    port = int(server.url.rpartition(":")[2])
    return drive(port, load.streams, seconds, partial(cpu_seconds, server.process.pid), load.chunks)


@contextmanager
def _on_core(*, the_first: bool) -> Iterator[None]:
    """Let what is started meanwhile run on the first core, or on all others. Changes nothing on a single core."""
    allowed = os.sched_getaffinity(0)
    first = {min(allowed)}
    os.sched_setaffinity(0, first if the_first else allowed - first or allowed)
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process and those that it has started have used. One that has ended counts 0."""
    return sum(map(_ticks, _family(pid))) / TICKS_PER_SECOND


def _family(pid: int) -> Iterator[int]:
    yield pid
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = file.read_text("ascii").split()
        except OSError:
            continue
        yield from chain.from_iterable(map(_family, map(int, children)))


def _ticks(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


def table(measured: Sequence[tuple[Load, Rounds]], seconds: float) -> Sequence[str]:
    """Return the lines of the report: for each load and router medians over the rounds."""
    head = ("load", "router", "streams/s", "CPU us per stream", "per chunk", f"{OWN.name} over it", "p50 ms")
    return aligned([head, *(_row(load, name, rounds, seconds) for load, rounds in measured for name in rounds)])


def _row(load: Load, name: str, rounds: Rounds, seconds: float) -> Sequence[str]:
    micros = median(map(_micros, rounds[name]))
    ratio = median(_micros(own) / _micros(other) for own, other in zip(rounds[OWN.name], rounds[name], strict=True))
    return (
        load.name,
        name,
        f"{median(each.calls for each in rounds[name]) / seconds:,.0f}",
        f"{micros:,.0f}",
        f"{micros / load.chunks:.1f}",
        f"{ratio:.2f}",
        f"{median(each.median_ms for each in rounds[name]):.1f}",
    )


def _micros(driven: Driven) -> float:
    """Return CPU microseconds per stream. At least a tick was used, though the system may have counted none."""
    return 1e6 * max(1 / TICKS_PER_SECOND, driven.cpu_seconds) / driven.calls


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    parser.add_argument(
        "--router",
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="another router; {port} is its port, {other_port} another free one, an argument with {worker} is repeated"
        " for each worker",
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="(5)")
    parser.add_argument("--seconds", type=float, default=4, metavar="S", help="length of each measurement (4)")


def run(options: argparse.Namespace) -> None:
    """Print a table."""
    if not sys.platform.startswith("linux"):
        refuse(COMMAND, "it reads /proc, which only Linux has")
    try:
        contestants = [OWN, *map(contestant, options.router)]
        measured = [(load, measure(contestants, load, options.rounds, options.seconds)) for load in LOADS]
    except (ServerError, ValueError) as error:
        refuse(COMMAND, str(error))
    print(*table(measured, options.seconds), sep="\n")

"""Measure live what the learned window costs, and how much it leaves in an engine's own queue.

Runs one emulated worker and the router (d2lpm), with `--window off` and `--window learned` in turn, and with the size
of the KV pool reported and hidden. Each load keeps more requests open than the worker can run. The loads are those of
virtual time (tests/bench/sim/test_window_throughput.py), scaled so that Python processes keep up: the short and the
slot-bound ones run on slower hardware with fewer open requests, and after its first event an answer has several tokens
per event. `--speed F` makes emulated time run F times faster; everything that is not emulated, such as sockets and the
router, then counts as F times slower. "time lost" is how much slower the worker's process was than its emulated
machine: a row with any describes this machine.

The queue is measured inside the engine after the warm-up: waiting requests and their uncached tokens, at the 95th
percentile over time. A row passes with 97 % of the throughput without a window, and with at most two step budgets of
uncached tokens, or two requests, in the queue.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, get_args

import uvloop

from bench.demo.load import DemoError
from bench.demo.processes import fleet
from bench.report.columns import aligned
from bench.report.exits import INTERRUPTED
from bench.workloads.unrelated import Unrelated
from workers.engine.model import Dialect

STEP_TOKENS: Final[Mapping[str, int]] = {"vllm": 2048, "sglang": 8192}
"""Each engine's default token budget per step."""
POLL_SECONDS: Final = 0.5
"""Interval between two readings of the worker's metrics, by its clock."""
BEFORE_END: Final = 0.1
"""Real seconds before the end at which the queue is read: at the end the calls are cancelled."""
LEAST_THROUGHPUT: Final = 0.97
MOST_BUDGETS: Final = 2.0
MOST_REQUESTS: Final = 2
SLOW: Final = ("--hardware", "a10g-llama-7b", "--kv-tokens", "430000")
"""A quarter of the default's speed, with its KV pool."""


class Load(NamedTuple):
    """A load that exceeds one worker; times in seconds of the worker's clock."""

    workload: Unrelated
    worker: Sequence[str]
    """Flags of the worker."""
    seconds: float
    warmup: float
    pace: float = 1.0
    """Speed of the worker relative to its hardware."""


# Of the short one a step starts dozens of requests at once, each of which takes Python processes two milliseconds: a
# step has to be much longer than that takes. Its lengths vary, since all requests of a batch would else end together.
LOADS: Final[Mapping[str, Load]] = {
    "short": Load(Unrelated(input=50, output=8, spread=0.5, concurrency=64), SLOW, 120.0, 30.0, pace=0.25),
    "slots": Load(Unrelated(input=100, output=300, concurrency=12), (*SLOW, "--max-running", "32"), 70.0, 20.0),
    "kv": Load(Unrelated(input=2000, output=600, concurrency=8), ("--kv-tokens", "40000"), 150.0, 40.0),
    "long prefill": Load(Unrelated(input=8000, output=16, concurrency=4), (), 40.0, 8.0),
}


class Manner(NamedTuple):
    """How all loads are run."""

    speed: float = 1.0
    """Speed of the worker's clock."""
    seed: int = 0
    stream_interval: int = 8
    """Tokens per event of an answer, after its first."""


class Seen(NamedTuple):
    """The figures of one run."""

    throughput: float
    """Tokens per second of the worker's clock."""
    requests_p95: float
    tokens_p95: float
    lost: float
    """Share of the time by which the worker's process was slower than its emulated machine."""


class Row(NamedTuple):
    """One load with the window on, compared with the window off."""

    load: str
    dialect: str
    reported: bool
    off: Seen
    learned: Seen

    @property
    def ratio(self) -> float:
        """Throughput with the window on, relative to that with it off."""
        return self.learned.throughput / self.off.throughput

    @property
    def budgets(self) -> float:
        """Waiting uncached tokens at p95, in step budgets."""
        return self.learned.tokens_p95 / STEP_TOKENS[self.dialect]

    @property
    def passes(self) -> bool:
        """True if the row meets the targets."""
        short = self.budgets <= MOST_BUDGETS or self.learned.requests_p95 <= MOST_REQUESTS
        return self.ratio >= LEAST_THROUGHPUT and short


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--speed",
        type=float,
        default=1.0,
        metavar="F",
        help="how many times faster than real time the worker runs (default: %(default)s)",
    )
    parser.add_argument(
        "--load", choices=LOADS, action="append", help="run only this load; may be repeated (default: all)"
    )
    parser.add_argument(
        "--dialect", choices=get_args(Dialect), action="append", help="run only this engine (default: both)"
    )
    parser.add_argument(
        "--stream-interval",
        type=int,
        default=8,
        metavar="N",
        help="tokens per event of an answer (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the figures to this file")


def run(options: argparse.Namespace) -> None:
    if not 0 < options.speed < 1e6:
        sys.exit("window: error: --speed must be positive")
    manner = Manner(options.speed, options.seed, options.stream_interval)
    rows: list[Row] = []
    try:
        for load in options.load or LOADS:
            for dialect in options.dialect or get_args(Dialect):
                for row in measure(load, dialect, manner):
                    rows.append(row)
                    print(*table(rows[-1:]), sep="\n", file=sys.stderr)
    except DemoError as error:
        sys.exit(f"window: error: {error}")
    except KeyboardInterrupt:
        print("window: interrupted; the router and its worker have ended", file=sys.stderr)
        sys.exit(INTERRUPTED)
    print(*table(rows), sep="\n")
    if options.json is not None:
        options.json.write_text(json.dumps([_fields(row) for row in rows], indent=2) + "\n", "utf-8")


def measure(load: str, dialect: str, manner: Manner) -> Iterator[Row]:
    """Run the load with the window off, and on with the capacity reported and hidden. Raises DemoError."""
    off = trial(LOADS[load], dialect, "off", manner, reported=True)
    for reported in (True, False):
        yield Row(load, dialect, reported, off, trial(LOADS[load], dialect, "learned", manner, reported=reported))


def trial(load: Load, dialect: str, window: str, manner: Manner, *, reported: bool) -> Seen:
    """Run a load once. Raises DemoError."""
    worker = ["--dialect", dialect, "--speed", str(manner.speed * load.pace), "--measure", *load.worker]
    router = ["--policy", "d2lpm", "--window", window, "--poll-interval", str(POLL_SECONDS / manner.speed)]
    with fleet(1, worker + ([] if reported else ["--hide-capacity"]), router) as url:
        return uvloop.run(_watched(url, load, manner))


async def _watched(url: str, load: Load, manner: Manner) -> Seen:
    """Make the calls, and measure the engine's queue from the warm-up to just before the end."""
    import aiohttp  # noqa: PLC0415 - as in bench.live.command

    from bench.live.clients import LiveLoad, run_load  # noqa: PLC0415

    speed, seed, interval = manner
    calls = LiveLoad(url, load.workload, load.seconds, load.warmup, seed, speed, stream_interval=interval)
    async with aiohttp.ClientSession() as http:
        async with http.get(f"{url}/workers") as response:
            queue = (await response.json())["workers"][0]["url"] + "/emulated/queue"
        playing = asyncio.create_task(run_load(calls))
        await asyncio.sleep(load.warmup / speed)
        async with http.post(queue):
            pass
        await asyncio.sleep((load.seconds - load.warmup) / speed - BEFORE_END)
        async with http.get(queue) as response:
            seen = await response.json()
        ended = await playing
    if ended.failures:
        raise DemoError(f"calls failed: {next(iter(ended.failures))}")
    throughput = ended.summary()["throughput_tokens_per_s"]
    return Seen(throughput, seen["requests_p95"], seen["tokens_p95"], seen["lost_seconds"] / seen["seconds"])


HEAD: Final = (
    *("load", "engine", "capacity", "throughput", "of off", "waiting p95", "step budgets", "off: step budgets"),
    *("time lost", "off: time lost", ""),
)


def table(rows: Sequence[Row]) -> list[str]:
    """Format the rows with a header."""
    return aligned([HEAD, *map(_cells, rows)])


def _cells(row: Row) -> Sequence[str]:
    return (
        row.load,
        row.dialect,
        "reported" if row.reported else "hidden",
        f"{row.learned.throughput:,.0f}",
        f"{row.ratio:.3f}",
        f"{row.learned.requests_p95:.0f}",
        f"{row.budgets:.2f}",
        f"{row.off.tokens_p95 / STEP_TOKENS[row.dialect]:.2f}",
        f"{row.learned.lost:.1%}",
        f"{row.off.lost:.1%}",
        "" if row.passes else "MISSED",
    )


def _fields(row: Row) -> dict[str, object]:
    seen = {"off": row.off._asdict(), "learned": row.learned._asdict()}
    return {**row._asdict(), **seen, "ratio": row.ratio, "step_budgets": row.budgets, "passes": row.passes}

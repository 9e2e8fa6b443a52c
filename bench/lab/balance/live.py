"""Compare policies live before ranks in step: a router and an engine with ranks as processes, over HTTP.

The same load runs in virtual time, so that both figures stand side by side: the imbalance of the ranks, the share of
their attention time in which they wait, and the output. Both are of the time after the warm-up in which calls arrive,
as nothing is run to its end. The engine counts the loads of its ranks itself, once for each step. `--speed F` makes its
time run F times faster; everything that is not emulated, such as sockets and the router, then counts as F times slower.

A machine that is too slow or too busy for the engine's steps makes them late, and places stay empty for longer before
the router hears of them: the figures then describe the machine. The table says what share of the time was lost so.
`--stream-interval 8` needs less of the machine, and a `--speed` below 1 gives it more time. `--jobs 4` runs four at a
time, with about three cores for each.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from time import monotonic
from typing import Final, NamedTuple

import aiohttp
import uvloop

from bench.demo.load import DemoError
from bench.demo.processes import fleet
from bench.lab.balance.contenders import REFERENCE
from bench.lab.balance.tiers import RANKS, TIERS, TRACES, Tier, balanced, saturated
from bench.lab.frame.conditions import Contender, Span
from bench.live.clients import LiveLoad, LoadError, run_load
from bench.report.columns import aligned
from bench.report.exits import INTERRUPTED, refuse
from bench.report.records import GroupTotals
from bench.report.summary import summarise
from bench.sim.command import simulate
from bench.sim.emulated_group import totals_since
from bench.workloads.parts.traffic import Workload
from bench.workloads.recorded.sessions import parse_recorded
from bench.workloads.recorded.traces import Trace
from workers.engine.barrier import StepTotals

POLICIES: Final = ("least_requests", "dlpm_home", "br0", "dlpm_balance")
MOST_POINTS: Final = 5.0
"""By how much, in points of the reference's figure, live and virtual time may differ."""
LONGEST: Final = 130_000
"""Tokens of a prompt and its answer together, at most."""
VOCABULARY: Final = 30_000
"""Token ids of prompts, kept short because every prompt is sent as text."""
UNLIMITED: Final = 10**9
LATENCIES: Final = (0.0005, 0.002, 0.004, 0.008)
"""Seconds between the router and the engine in virtual time, in one run each, whose figures are averaged: a few very
long calls, and when they go, decide much of a run's imbalance.
"""
BEFORE_END: Final = 0.2
"""Real seconds before the end at which the loads are read: at the end the calls are cancelled."""


class Seen(NamedTuple):
    """The figures of one run."""

    imbalance: float
    """Mean over the steps of max L - min L, in tokens."""
    idle: float
    """Share of the ranks' attention time in which they wait."""
    output: float
    """Tokens per second of the engine's steps."""


class Live(NamedTuple):
    """One run over HTTP."""

    seen: Seen
    late: float | None
    """How late calls were sent, in seconds by the engine's clock (p99)."""
    lost: float
    """Share of the time in which the engine made no step, as this machine was too slow for it."""


class Row(NamedTuple):
    """One policy, live and in virtual time."""

    policy: str
    live: Seen
    virtual: Seen
    """The mean of the runs with `LATENCIES`."""
    late: float | None
    """How late calls were sent, in seconds by the engine's clock (p99)."""
    lost: float
    """Share of the time in which the engine made no step."""
    virtual_runs: Sequence[Seen] = ()
    """The run with each of `LATENCIES`: how much they differ is chance."""


class Run(NamedTuple):
    """What all policies have in common."""

    tier: Tier
    workload: Workload
    span: Span
    ranks: int
    speed: float
    seed: int
    stream_interval: int | None
    dialect: str


def configure(parser: argparse.ArgumentParser) -> None:
    synthetic = [name for name in TIERS if name not in TRACES]
    parser.add_argument("--load", choices=synthetic, default="long", help="the load (default: %(default)s)")
    parser.add_argument(
        "--trace", metavar="KIND:FILE", help=f"replay a public trace instead; KIND is one of {', '.join(TRACES)}"
    )
    parser.add_argument(
        "--policy", action="append", metavar="P", help=f"may be repeated (default: {', '.join(POLICIES)})"
    )
    parser.add_argument("--seconds", type=float, default=150.0, help="length of the load (default: %(default)s)")
    parser.add_argument(
        "--warmup", type=float, default=30.0, help="seconds at the start that are not measured (default: %(default)s)"
    )
    parser.add_argument("--ranks", type=int, default=RANKS, help="ranks of the engine (default: %(default)s)")
    parser.add_argument(
        "--dialect", choices=("vllm", "sglang"), default="vllm", help="the engine (default: %(default)s)"
    )
    parser.add_argument(
        "--speed",
        type=float,
        default=1.0,
        metavar="F",
        help="how many times faster than real time the engine runs (default: %(default)s)",
    )
    parser.add_argument(
        "--stream-interval", type=int, metavar="N", help="tokens per event of an answer after its first (default: 1)"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="policies at a time, with about three cores each (default: 1)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the load (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the figures to this file")


def run(options: argparse.Namespace) -> None:
    try:
        given = read_run(options)
        rows = compare_all(options.policy or POLICIES, given, options.jobs)
    except (ValueError, DemoError, LoadError) as error:
        refuse("ranks", str(error))
    except KeyboardInterrupt:
        print("ranks: interrupted; the router and its engine have ended", file=sys.stderr)
        sys.exit(INTERRUPTED)
    print(*table(rows), sep="\n")
    if options.json is not None:
        options.json.write_text(json.dumps([_fields(row) for row in rows], indent=2) + "\n", "utf-8")


def read_run(options: argparse.Namespace) -> Run:
    """Return what a command line asks for. Raises ValueError if it is invalid."""
    name, traces = options.load, {}
    if options.trace is not None:
        name = options.trace.partition(":")[0].partition(",")[0]
        trace = parse_recorded(options.trace)
        if name not in TRACES or not isinstance(trace, Trace):
            raise ValueError(f"--trace needs one of {', '.join(TRACES)}")
        traces = {name: trace}
    if not 0 <= options.warmup < options.seconds:
        raise ValueError("the load must be longer than the warm-up")
    return Run(
        TIERS[name],
        saturated(name, traces, options.ranks),
        Span(options.seconds, options.warmup),
        options.ranks,
        options.speed,
        options.seed,
        options.stream_interval,
        options.dialect,
    )


def compare_all(policies: Sequence[str], given: Run, jobs: int) -> Sequence[Row]:
    """Compare each policy, `jobs` at a time, and return their rows in order. Raises ValueError, and as `compare`."""
    if jobs < 1:
        raise ValueError("--jobs must be at least 1")
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        rows = [pool.submit(compare, policy, given) for policy in policies]
        try:
            return [row.result() for row in rows]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def compare(policy: str, given: Run) -> Row:
    """Run a policy live and in virtual time. Raises DemoError or LoadError if it cannot be run live."""
    live = _live(policy, given)
    runs = [_virtual(policy, given, latency) for latency in LATENCIES]
    return Row(policy, live.seen, Seen(*map(fmean, zip(*runs, strict=True))), live.late, live.lost, runs)


def _virtual(policy: str, given: Run, latency: float) -> Seen:
    scenario = balanced(given.tier, Contender(policy), given.workload, given.span, given.ranks)
    summary = summarise(simulate(replace(scenario, drain=False, seed=given.seed, latency=latency)))
    (group,) = summary["groups"].values()
    return Seen(group["imbalance_tokens"] or 0.0, group["idle_share"] or 0.0, summary["output_tokens_per_s"])


def _live(policy: str, given: Run) -> Live:
    with _processes(policy, given) as url:
        return uvloop.run(_measure(url, given))


@contextmanager
def _processes(policy: str, given: Run) -> Iterator[str]:
    """Run the engine and the router, which refuses nothing. Yields the router's URL."""
    rank, steps = given.tier.rank, given.tier.steps
    engine = [
        *("--ranks", str(given.ranks), "--rank-steps", f"{steps.fixed},{steps.context}", "--measure"),
        *("--max-running", str(rank.max_running), "--kv-tokens", str(rank.kv_tokens)),
        *("--block-size", str(rank.block_size), "--max-batched-tokens", str(rank.max_batched_tokens)),
        *("--max-model-len", str(LONGEST), "--dialect", given.dialect, "--speed", str(given.speed)),
    ]
    router = [
        *("--policy", policy, "--window", "fixed", "--max-inflight", str(given.tier.slots)),
        *("--max-unstarted-tokens", str(UNLIMITED), "--max-queued", "100000", "--queue-ttl", "100000"),
        *("--max-queued-bytes", str(2**31), "--max-held-bytes", str(2**31), "--kv-events", "off"),
        *("--first-token-timeout", "0", "--token-timeout", "0", "--silence-timeout", "0"),
    ]
    with fleet(1, engine, router) as url:
        yield url


async def _measure(url: str, given: Run) -> Live:
    """Run the load, and read the engine's sums after the warm-up and shortly before the end."""
    load = LiveLoad(
        url,
        given.workload,
        given.span.seconds,
        given.span.warmup,
        given.seed,
        given.speed,
        stream_interval=given.stream_interval,
        vocabulary=VOCABULARY,
    )
    async with aiohttp.ClientSession() as http:
        engine = await _engine(http, url)
        playing = asyncio.create_task(run_load(load))
        await asyncio.sleep(given.span.warmup / given.speed)
        began, before = monotonic(), await _totals(http, engine)
        await asyncio.sleep(max(0.0, (given.span.seconds - given.span.warmup) / given.speed - BEFORE_END))
        seconds, after = (monotonic() - began) * given.speed, await _totals(http, engine)
        ended = await playing
    if ended.failures:
        raise LoadError(f"calls failed: {dict(ended.failures)}")
    group = totals_since(after, before, given.ranks)
    if not group.steps or not group.room_tokens:
        raise LoadError("the engine took no step after the warm-up")
    return figures(group, seconds, ended.summary()["output_tokens_per_s"], ended.late_p99_s)


def figures(group: GroupTotals, seconds: float, output: float, late: float | None) -> Live:
    """Return the figures of a group that worked all the time, for `seconds` by its clock, and gave `output` tokens in
    each of them.
    """
    stepped = min(1.0, group.step_seconds / seconds)
    seen = Seen(group.spread_tokens / group.steps, group.idle_tokens / group.room_tokens, output / stepped)
    return Live(seen, late, 1 - stepped)


async def _engine(http: aiohttp.ClientSession, url: str) -> str:
    """Return the URL of the router's only engine, once all its ranks are up."""
    while True:
        async with http.get(f"{url}/workers") as response:
            workers = (await response.json())["workers"]
        if any("ranks" in worker and worker["healthy"] for worker in workers):
            return str(workers[0]["url"])
        await asyncio.sleep(0.1)


async def _totals(http: aiohttp.ClientSession, engine: str) -> StepTotals:
    async with http.get(f"{engine}/emulated/group") as response:
        return StepTotals(**await response.json())


def points(row: Row, reference: Row) -> tuple[float, float]:
    """Return by how many points live and virtual time differ, in the imbalance and in the output over the reference."""

    def relative(own: Seen, base: Seen) -> tuple[float, float]:
        return 100 * own.imbalance / base.imbalance, 100 * own.output / base.output

    live, virtual = relative(row.live, reference.live), relative(row.virtual, reference.virtual)
    return abs(live[0] - virtual[0]), abs(live[1] - virtual[1])


HEAD: Final = (
    *("policy", "imbalance", "virtual", "idle", "virtual", "tok/s", "virtual"),
    *(f"imbalance / {REFERENCE}'s", "virtual", f"tok/s / {REFERENCE}'s", "virtual", "late p99 s", "lost", ""),
)


def table(rows: Sequence[Row]) -> list[str]:
    """Format the rows with a header. Relative figures need the reference among the policies."""
    reference = next((row for row in rows if row.policy == REFERENCE), None)
    return aligned([HEAD, *(_cells(row, reference) for row in rows)])


def _cells(row: Row, reference: Row | None) -> Sequence[str]:
    live, virtual = row.live, row.virtual
    cells = [row.policy, f"{live.imbalance:,.0f}", f"{virtual.imbalance:,.0f}"]
    cells += [f"{live.idle:.3f}", f"{virtual.idle:.3f}", f"{live.output:,.0f}", f"{virtual.output:,.0f}"]
    late = "-" if row.late is None else f"{row.late:.2f}"
    if reference is None:
        return [*cells, "-", "-", "-", "-", late, f"{row.lost:.2f}", ""]
    cells += [f"{seen.imbalance / base.imbalance:.3f}" for seen, base in zip(row[1:3], reference[1:3], strict=True)]
    cells += [f"{seen.output / base.output:.3f}" for seen, base in zip(row[1:3], reference[1:3], strict=True)]
    return [*cells, late, f"{row.lost:.2f}", "" if max(points(row, reference)) <= MOST_POINTS else "MISSED"]


def _fields(row: Row) -> Mapping[str, object]:
    runs = [seen._asdict() for seen in row.virtual_runs]
    return {**row._asdict(), "live": row.live._asdict(), "virtual": row.virtual._asdict(), "virtual_runs": runs}

"""Measures the fidelity of the emulated engines: `python -m tests.engine.fidelity [--engine vllm]`.

Exits with 1 if an emulation misses a bound. The same recorded load goes directly, `AT_ONCE` calls at a time, to a real
engine three times, and to its emulation with equal capacity, block size and batch limits. Each server is newly started.
The first run of the real engine is the reference. The other two show how much the engine differs from itself, and the
emulation may differ by that plus a margin. The duration of the real engine's steps on this machine is measured first
and given to the emulation, since it determines the order of events and so what is evicted. All runs are done with
memory for all running requests, and again with less, so that requests wait for memory and are preempted. Needs the
engine environments (`make test-engine`).

This is not part of the test suite: it takes several minutes for each engine, on an otherwise idle machine.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from ..environment import is_complete
from ..fleet import make_model
from .figures import Difference, Run, difference, verdicts
from .load import Call, prefix_tokens, recorded
from .pace import measured, typical
from .play import play
from .servers import BLOCK_TOKENS, CAPACITIES, DIALECTS, RUNNING, STEP_TOKENS, Dialect, Target, emulated, real

AT_ONCE = 16
CALLS = 640
REAL_RUNS = "real", "real again", "real a third time"


def main() -> int:
    options = _options()
    if not is_complete():
        print("there is no engine environment; `make test-engine` makes it", file=sys.stderr)
        return 2
    calls = recorded(options.calls)
    cancelled = sum(call.cancelled_after is not None for call in calls)
    say(f"{len(calls)} calls, {cancelled} of them cancelled, {AT_ONCE} at once")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(options.out or folder)
        out.mkdir(parents=True, exist_ok=True)
        kept = [
            compare(dialect, memory, calls, out)
            for dialect in options.engine or DIALECTS
            for memory in options.memory or CAPACITIES
        ]
    return 0 if all(kept) else 1


def say(line: str) -> None:
    print(line, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.engine.fidelity", description="Emulated beside real.")
    parser.add_argument("--engine", action="append", choices=DIALECTS, help="one engine alone (default: both)")
    parser.add_argument("--memory", action="append", choices=CAPACITIES, help="one size alone (default: both)")
    parser.add_argument("--calls", type=int, default=CALLS, help="how many of the recorded calls")
    parser.add_argument("--out", help="folder for the servers' logs and what became of each call")
    return parser.parse_args()


def compare(dialect: Dialect, memory: str, calls: list[Call], out: Path) -> bool:
    """Return whether the emulation of this engine keeps all bounds. Prints each run and each bound."""
    capacity, prefixes = CAPACITIES[memory], prefix_tokens(calls, BLOCK_TOKENS[dialect])
    times_that = f"{prefixes / capacity:.1f} times that"
    say(f"\n{dialect}, {memory} memory: {capacity} tokens, prefixes of {prefixes} ({times_that})")
    say(f"  {RUNNING} running requests and {STEP_TOKENS} new tokens in a step at most")
    runs = real_runs(dialect, memory, calls, out)
    with emulated(dialect, capacity, typical([each.times for each in runs]), out) as target:
        runs.append(run("emulated", memory, target, calls, out))
    *itself, emulation = [difference(runs[0], other) for other in runs[1:]]
    for other, each in zip(runs[1:], (*itself, emulation), strict=True):
        say(f"  {other.name} beside {runs[0].name}: {described(each)}")
    kept = True
    for verdict in verdicts(itself, emulation):
        kept = kept and verdict.kept
        say(f"  {verdict}")
    return kept


def real_runs(dialect: Dialect, memory: str, calls: list[Call], out: Path) -> list[Run]:
    """Run the load on several servers of the real engine, each newly started."""
    model, runs = make_model(), []
    for name in REAL_RUNS:
        with real(dialect, CAPACITIES[memory], model, out) as target:
            runs.append(run(name, memory, target, calls, out))
    return runs


def run(name: str, memory: str, target: Target, calls: list[Call], out: Path) -> Run:
    """Measure a server's step times, play the load to it, and print the results."""
    times = asyncio.run(measured(target.url, RUNNING))
    began = time.monotonic()
    outcomes = asyncio.run(play(target.url, calls, AT_ONCE))
    seconds = time.monotonic() - began
    done = Run(name, outcomes, target.evicted_tokens(), times)
    kept = out / f"{target.dialect}-{memory}-{name.replace(' ', '-')}.json"
    kept.write_text(json.dumps([asdict(outcome) for outcome in outcomes]))
    say(f"  {name}: hit rate {done.hit_rate:.4f}, {done.evicted_tokens} tokens evicted, {seconds:.0f} s;")
    say(f"    a step took {times} ms: each, more per prefilled token, more per decoded sequence")
    return done


def described(each: Difference) -> str:
    return (
        f"hit rate differs by {each.hit_rate:.4f}, equal cached tokens in {each.equal_calls:.4f} of calls, "
        f"tau {each.tau:.4f}, evictions differ by {each.evictions:.4f}"
    )


if __name__ == "__main__":
    sys.exit(main())

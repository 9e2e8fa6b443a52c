"""The command: runs each target in turn and prints its results."""

import argparse
import sys

from .engine import Failure, fuzz
from .targets import TARGETS

parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Feed readers random inputs.")
parser.add_argument("target", nargs="*", help=f"one or more of {', '.join(TARGETS)}; default: all")
parser.add_argument("--inputs", type=int, default=1_000_000, help="number of inputs per target")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--first", type=int, default=0, help="number of the first input, to reproduce a failure")
options = parser.parse_args()
failed = 0
for name in options.target or TARGETS:
    try:
        result = fuzz(TARGETS[name], options.inputs, options.seed, options.first, watch_every=50)
    except Failure as failure:
        print(failure, flush=True)
        failed += 1
        continue
    print(
        f"{name}: {result.inputs} inputs, {result.accepted} accepted, {result.cpu_seconds:.0f} s of CPU time, at most "
        f"{result.most_steps} steps, {result.left_bytes} bytes left, the process grew by {result.growth_bytes} bytes",
        flush=True,
    )
sys.exit(min(1, failed))

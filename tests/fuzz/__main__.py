"""The command: each target in turn, with what it showed."""

import argparse
import sys

from .engine import Failure, fuzz
from .targets import TARGETS

parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Feed readers random inputs.")
parser.add_argument("target", nargs="*", help=f"one or more of {', '.join(TARGETS)}; all, where none is named")
parser.add_argument("--inputs", type=int, default=1_000_000, help="for each target")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--first", type=int, default=0, help="the number of the first input, to see one again")
options = parser.parse_args()
failed = 0
for name in options.target or TARGETS:
    try:
        told = fuzz(TARGETS[name], options.inputs, options.seed, options.first, watch_every=50)
    except Failure as failure:
        print(failure, flush=True)
        failed += 1
        continue
    print(
        f"{name}: {told.inputs} inputs, {told.accepted} accepted, {told.cpu_seconds:.0f} s of CPU time, at most "
        f"{told.most_steps} steps, {told.left_bytes} bytes left, the process grew by {told.growth_bytes} bytes",
        flush=True,
    )
sys.exit(min(1, failed))

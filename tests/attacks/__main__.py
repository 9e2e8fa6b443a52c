"""`python -m tests.attacks`: five attacks from one address on a router with 1 GiB of memory, beside ten polite clients.

The exit code is 0 if the router stays below 600 MiB, no polite call fails, their p95 to the last token is at most twice
that beside the same attack on a plain sink on the same machine, and nothing is left behind.
"""

import argparse
import sys

import uvloop

from .attacker import ATTACKS
from .run import run, table


def main() -> int:
    """Run, print the results, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.attacks", description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="of each attack, and again of the sink (%(default)g)"
    )
    parser.add_argument("--attack", action="append", choices=[*ATTACKS], help="one of them; may be repeated (all)")
    options = parser.parse_args()
    seen = []
    for name in options.attack or ATTACKS:
        print(f"{name} ...", file=sys.stderr, flush=True)
        seen.append(uvloop.run(run(name, options.seconds)))
    print(table(seen))
    objections = [line for each in seen for line in (*each.harm, *each.delay)]
    for line in objections:
        print(f"violation: {line}")
    if not objections:
        print("No violation was found.")
    return 1 if objections else 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m tests.attacks`: five attacks of one address on a router with 1 GiB of memory, beside ten polite clients.

Ends with 0 if it stays below 600 MiB, no polite call fails, the p95 of their calls, to the last token, is at most twice
what it is while a plain sink is attacked likewise on the same machine, and nothing is left behind.
"""

import argparse
import sys

import uvloop

from .attacker import ATTACKS
from .run import run, table


def main() -> int:
    """Run, print what was seen, and say whether all is well."""
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
        print(f"NOT WELL: {line}")
    if not objections:
        print("All is well.")
    return 1 if objections else 0


if __name__ == "__main__":
    sys.exit(main())

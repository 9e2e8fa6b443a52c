"""`python -m tests.chaos`: ten minutes of faults, and a check that nothing is lost. The exit code is 0 if nothing
was.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path
from tempfile import mkdtemp

import uvloop

from .faults import Kind
from .judge import JAIN
from .reading import Ending
from .run import CALM, Plan, Result, run
from .service import recovered
from .violations import exit_code


def main() -> int:
    """Run, print the results, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the schedule and of all that clients do")
    parser.add_argument("--seconds", type=float, default=600.0, help="in all, the calm included")
    parser.add_argument("--schedule", action="store_true", help="print the faults and do nothing")
    options = parser.parse_args()
    plan = Plan(seed=options.seed, trouble=options.seconds - CALM)
    if options.schedule:
        for fault in plan.faults:
            print(f"{fault.at:7.2f} to {fault.until:7.2f}  worker {fault.worker}  {fault.kind}")
        return 0
    directory = Path(mkdtemp(prefix="chaos-"))
    result = uvloop.run(run(plan, directory))
    print(table(result))
    objections = [*result.objections, *result.fairness_objections]
    return exit_code(objections, directory, "The router's log and journal are")


def table(result: Result) -> str:
    """Return the results as a table."""
    judgement = result.judgement
    least = min((window.jain for window in result.windows), default=None)
    back = recovered(list(result.windows), JAIN)
    rows: list[tuple[str, object]] = [
        ("faults", _counts(Counter(fault.kind for fault in result.faults))),
        ("calls", f"{sum(judgement.endings.values())}: {_counts(judgement.endings)}"),
        ("errors", _counts(judgement.errors) or "none"),
        ("errors that no fault explains", len(judgement.unexplained)),
        ("lost their worker amid the stream", f"{judgement.amid} completed"),
        ("with as many workers lost as are tried", f"{judgement.exhausted} completed"),
        ("of both, it was killed or left", f"{judgement.killed} completed"),
        ("lost a worker before the first token", f"{judgement.before} completed"),
        ("Jain's index over 5 s again above 0.95", "never" if back is None else f"{back - result.over:.1f} s behind"),
        ("its least behind the last fault", "-" if least is None else f"{least:.4f}"),
        ("clients compared", max((window.clients for window in result.windows), default=0)),
        ("left over after the drain", len(result.left)),
    ]
    return "\n".join(f"{name:40} {value}" for name, value in rows)


def _counts(counter: Counter[Kind] | Counter[Ending] | Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counter.most_common())


if __name__ == "__main__":
    sys.exit(main())

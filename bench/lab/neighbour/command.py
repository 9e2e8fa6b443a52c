"""Light clients beside growing numbers of heavy ones, before any OpenAI-compatible server: who waits for whom.

Each heavy client keeps many calls open whose prompts share a long prefix of its own; the light ones ask something short
now and then, whatever became of what they asked before. Several URLs take the calls in turn, as a plain round-robin
router would send them. Each number of heavy clients is a run of its own, with new prompts, one after the other.
Prompts are text; every client has its own `user` and, without --api-key, its own key. `--speed F` is for emulated
workers whose clock runs F times faster; all times are told by that clock. Ctrl-C ends it with the runs that are over.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import uvloop

from bench.lab.neighbour.traffic import Neighbours
from bench.report.columns import aligned
from bench.report.exits import INTERRUPTED, refuse
from bench.report.progress import ProgressBar
from bench.workloads.parts.spec import changed, split

if TYPE_CHECKING:
    from bench.lab.frame.experiment import Value
    from bench.lab.neighbour.driver import Span, Target
    from bench.live.books import LiveResult

WARMUP: Final = 0.25
"""Of each run's time."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("urls", nargs="+", metavar="URL", help="of the server, as http://127.0.0.1:8000")
    parser.add_argument("--heavy", default="0,1,2,4", metavar="N,N", help="heavy clients in each run (%(default)s)")
    parser.add_argument("--light", type=int, default=Neighbours().light, metavar="N", help="light ones (%(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run, a quarter warm-up (%(default)s)")
    parser.add_argument("--traffic", default="", metavar="P=V,P=V", help=f"parameters of {Neighbours()}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--speed", type=float, default=1.0, metavar="F", help="of the servers' clock (%(default)s)")
    parser.add_argument("--model", help="its name (the first that the server has)")
    parser.add_argument("--api-key", metavar="KEY", help="one for all, where the server checks it")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures here too")


def run(options: argparse.Namespace) -> None:
    # Not at the top: these need aiohttp, which the other commands, and the demo of an installed router, do not.
    from bench.lab.neighbour.driver import Span, Target  # noqa: PLC0415
    from bench.live.clients import LoadError  # noqa: PLC0415

    runs: dict[int, LiveResult] = {}
    interrupted = False
    try:
        target = Target(options.urls, options.model, options.speed, options.api_key)
        span = Span(options.seconds, WARMUP * options.seconds)
        for each, ended in measured(target, _traffic(options), span, options.seed):
            runs[each.heavy] = ended
    except (ValueError, LoadError) as error:
        refuse("neighbour", str(error))
    except KeyboardInterrupt:
        interrupted = True
    _tell(options, runs)
    if interrupted:
        sys.exit(INTERRUPTED)


def measured(
    target: "Target", traffic: Sequence[Neighbours], span: "Span", seed: int
) -> Iterator[tuple[Neighbours, "LiveResult"]]:
    """One run after the other, with a progress bar. Raises LoadError."""
    from bench.lab.neighbour.driver import drive  # noqa: PLC0415 - as above

    bar = ProgressBar(sys.stderr, "s")
    try:
        for number, each in enumerate(traffic):
            show = partial(_show, bar, number * span.seconds, len(traffic) * span.seconds)
            yield each, uvloop.run(drive(target, each, span, seed, show))
    finally:
        bar.close()


def _show(bar: ProgressBar, before: float, total: float, now: float) -> None:
    bar.show(before + now, total)


def _traffic(options: argparse.Namespace) -> Sequence[Neighbours]:
    """One for each number of heavy clients. Raises ValueError."""
    values = dict(split(each) for each in options.traffic.split(",") if each)
    given = {"light": str(options.light)} | values
    return [changed(Neighbours(), given | {"heavy": str(heavy)}) for heavy in _levels(options.heavy)]


def _levels(text: str) -> Sequence[int]:
    try:
        levels = [int(each) for each in text.split(",")]
    except ValueError:
        raise ValueError(f"--heavy is no list of numbers: {text!r}") from None
    if len(set(levels)) < len(levels):
        raise ValueError("--heavy names a number twice")
    return levels


def _tell(options: argparse.Namespace, runs: Mapping[int, "LiveResult"]) -> None:
    from bench.lab.neighbour.experiment import FIGURES, NoisyNeighbour  # noqa: PLC0415 - it knows all the experiments
    from bench.live.command import load_warnings  # noqa: PLC0415

    seen = {heavy: NoisyNeighbour().measure(ended.result, ended.summary()) for heavy, ended in runs.items()}
    rows = [[str(heavy), *(_cell(row[name], FIGURES[name]) for name in FIGURES)] for heavy, row in seen.items()]
    print(*aligned([["heavy", *FIGURES], *rows]), sep="\n")
    for heavy, ended in runs.items():
        for doubt in load_warnings(ended):
            print(f"neighbour: beside {heavy} heavy clients {doubt}", file=sys.stderr)
    if options.json is not None:
        shown = {name: value for name, value in vars(options).items() if isinstance(value, str | int | float | list)}
        report = {"options": shown, "rows": [{"heavy": heavy, **row} for heavy, row in seen.items()]}
        options.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")


def _cell(value: "Value", decimals: int) -> str:
    return f"{value:,.{decimals}f}" if isinstance(value, float | int) else "-"

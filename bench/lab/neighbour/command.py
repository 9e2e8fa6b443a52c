"""Measure noisy neighbours: light clients beside growing numbers of heavy ones, on any OpenAI-compatible server.

Each heavy client keeps many calls open, whose prompts share a long prefix of its own. The light clients send short
prompts at random times, whether or not earlier ones were answered. Several URLs take the calls in turn, as behind a
plain round-robin router. Each number of heavy clients is a separate run with new prompts. Prompts are text; every
client has its own `user` and, without --api-key, its own key. `--speed F` is for emulated workers whose clock runs F
times faster; all reported times are by that clock. Ctrl-C ends the command and prints the finished runs.
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
    from bench.live.recorder import LiveResult

WARMUP: Final = 0.25
"""Share of each run's time."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("urls", nargs="+", metavar="URL", help="address of a server, for example http://127.0.0.1:8000")
    parser.add_argument(
        "--heavy", default="0,1,2,4", metavar="N,N", help="number of heavy clients in each run (default: %(default)s)"
    )
    parser.add_argument(
        "--light",
        type=int,
        default=Neighbours().light,
        metavar="N",
        help="number of light clients (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="seconds of each run; the first quarter is warm-up (default: %(default)s)",
    )
    parser.add_argument("--traffic", default="", metavar="P=V,P=V", help=f"change parameters of {Neighbours()}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--speed",
        type=float,
        default=1.0,
        metavar="F",
        help="how many times faster than real time the servers' clock runs (default: %(default)s)",
    )
    parser.add_argument("--model", help="name of the model (default: the first that the server lists)")
    parser.add_argument("--api-key", metavar="KEY", help="one key for all clients, if the server checks keys")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the figures to this file")


def run(options: argparse.Namespace) -> None:
    # Imported here because they need aiohttp; the other commands, and the demo of an installed router, do not.
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
    """Run one after the other, with a progress bar. Raises LoadError."""
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
    """Return the traffic for each number of heavy clients. Raises ValueError."""
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

"""Drive an OpenAI-compatible server over HTTP with the simulator's workloads, and report as the simulator does.

Every client has its own API key and `user`, so that a router tells them apart. Prompts are token ids; an answer that
comes back in a later prompt stands there as other ids, as many, so that no cache has that part. `--speed F` is for
emulated workers whose clock runs F times faster: calls come so much faster, and all times are told by that clock.
What only engines and router know is left out: the report has no workers. Ctrl-C ends it with the report so far.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import uvloop

from bench.report.exits import INTERRUPTED, refuse
from bench.report.progress import ProgressBar
from bench.workloads.parts.spec import parse_spec
from bench.workloads.registry import WORKLOADS

if TYPE_CHECKING:
    from bench.live.books import LiveResult
    from bench.live.clients import LiveLoad

LATE: Final = 0.05
"""Of the mean time that a call took: if calls were sent later than that, this machine is told to be too slow."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="of the server, as http://127.0.0.1:8000")
    parser.add_argument("--workload", default="chat", metavar="W", help=f"{', '.join(WORKLOADS)} (%(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long, by the servers' clock (%(default)s)")
    parser.add_argument("--warmup", type=float, default=0.0, help="of these, not measured (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--speed", type=float, default=1.0, metavar="F", help="of the servers' clock (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write here instead of to standard output")
    parser.add_argument("--records", action="store_true", help="one record for each request too")
    parser.add_argument("--model", help="its name (the first that the server has)")
    parser.add_argument("--api-key-prefix", default="bench-", metavar="P", help="of the clients' keys (%(default)s)")
    parser.add_argument("--api-key", metavar="KEY", help="one for all, where the server checks it: `user` differs then")
    parser.add_argument(
        "--stream-interval", type=int, metavar="N", help="tokens in an event, where the server heeds it"
    )
    parser.add_argument(
        "--vocabulary", type=int, metavar="N", help="token ids below this, as a real model needs (2^31)"
    )


def run(options: argparse.Namespace) -> None:
    # Not at the top: it needs aiohttp, which the other commands, and the demo of an installed router, do not.
    from bench.live.clients import LoadError, run_load  # noqa: PLC0415

    bar = ProgressBar(sys.stderr, "s")
    try:
        ended = uvloop.run(run_load(read_load(options), lambda now: bar.show(now, options.seconds)))
    except (ValueError, LoadError) as error:
        refuse("load", str(error))
    finally:
        bar.close()
    _write(options, ended)
    for doubt in doubts(ended):
        print(f"load: {doubt}", file=sys.stderr)
    if ended.interrupted:
        sys.exit(INTERRUPTED)


def read_load(options: argparse.Namespace) -> "LiveLoad":
    """What the command line asks for. Raises ValueError where it makes no sense."""
    from bench.live.clients import LiveLoad  # noqa: PLC0415

    return LiveLoad(
        url=options.url,
        workload=parse_spec(options.workload, WORKLOADS),
        seconds=options.seconds,
        warmup=options.warmup,
        seed=options.seed,
        speed=options.speed,
        model=options.model,
        key_prefix=options.api_key_prefix,
        api_key=options.api_key,
        stream_interval=options.stream_interval,
        vocabulary=options.vocabulary,
    )


def doubts(ended: "LiveResult") -> list[str]:
    """What there is to say beside the figures: calls that failed and why, and a machine that was too slow."""
    said = [f"{times} calls ended with {reason}" for reason, times in ended.failures.items()]
    spans = [r.finished - r.arrived for r in ended.result.records if r.finished is not None]
    if spans and ended.late_p99_s is not None and ended.late_p99_s > LATE * sum(spans) / len(spans):
        said.append(
            f"calls were sent up to {ended.late_p99_s:.3g} s late (p99), of {sum(spans) / len(spans):.3g} s that one"
            " took: this machine is too slow for the load, and the figures are its own"
        )
    return said


def _write(options: argparse.Namespace, ended: "LiveResult") -> None:
    shown = {name: value for name, value in vars(options).items() if isinstance(value, str | int | float | None)}
    report: dict[str, object] = {"options": shown, **ended.report()}
    if options.records:
        report["records"] = [record._asdict() for record in ended.result.records]
    text = json.dumps(report, indent=None if options.records else 2)
    if options.json is None:
        print(text)
    else:
        options.json.write_text(text + "\n", "utf-8")

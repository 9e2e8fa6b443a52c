"""Drive an OpenAI-compatible server over HTTP with the simulator's workloads, and report as the simulator does.

Every client has its own API key and `user`, so that a router can tell clients apart. Prompts are token ids. An answer
that is repeated in a later prompt is replaced there by the same number of other ids, so no cache holds that part. Calls
of an agent session name it in `X-Session-Id`. `--speed F` is for emulated workers whose clock runs F times faster:
calls are sent F times faster, and all reported times are by that clock. The report leaves out what only engines and the
router know; it has no workers. Ctrl-C ends the load and prints the report so far.
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
from bench.workloads.recorded.sessions import KIND, parse_recorded
from bench.workloads.recorded.traces import READERS, TraceError
from bench.workloads.registry import WORKLOADS

if TYPE_CHECKING:
    from bench.live.clients import LiveLoad
    from bench.live.recorder import LiveResult

LATE: Final = 0.05
"""If calls were sent later than this share of their mean duration, this machine is reported as too slow."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="address of the server, for example http://127.0.0.1:8000")
    parser.add_argument(
        "--workload", default="chat", metavar="W", help=f"one of {', '.join(WORKLOADS)} (default: %(default)s)"
    )
    parser.add_argument(
        "--trace",
        metavar="KIND:FILE",
        help=f"replay a public trace instead, as `simulate` does; KIND is one of {', '.join(READERS)}, {KIND}",
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="length of the load, by the servers' clock (default: %(default)s)"
    )
    parser.add_argument(
        "--warmup", type=float, default=0.0, help="seconds at the start that are not measured (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the workload (default: %(default)s)")
    parser.add_argument(
        "--speed",
        type=float,
        default=1.0,
        metavar="F",
        help="how many times faster than real time the servers' clock runs (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write to this file instead of standard output")
    parser.add_argument("--records", action="store_true", help="also write one record per request")
    parser.add_argument("--model", help="name of the model (default: the first that the server lists)")
    parser.add_argument(
        "--api-key-prefix", default="bench-", metavar="P", help="prefix of the clients' keys (default: %(default)s)"
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help="one key for all clients, if the server checks keys; only `user` differs then"
    )
    parser.add_argument(
        "--stream-interval", type=int, metavar="N", help="tokens per event of an answer, if the server supports it"
    )
    parser.add_argument(
        "--vocabulary",
        type=int,
        metavar="N",
        help="send only token ids below N, the model's vocabulary size (default: 2^31)",
    )


def run(options: argparse.Namespace) -> None:
    # Imported here because it needs aiohttp; the other commands, and the demo of an installed router, do not.
    from bench.live.clients import LoadError, run_load  # noqa: PLC0415

    bar = ProgressBar(sys.stderr, "s")
    try:
        ended = uvloop.run(run_load(read_load(options), lambda now: bar.show(now, options.seconds)))
    except (ValueError, TraceError, LoadError) as error:
        refuse("load", str(error))
    finally:
        bar.close()
    _write(options, ended)
    for warning in load_warnings(ended):
        print(f"load: {warning}", file=sys.stderr)
    if ended.interrupted:
        sys.exit(INTERRUPTED)


def read_load(options: argparse.Namespace) -> "LiveLoad":
    """Return the load of a command line. Raises ValueError if it is invalid."""
    from bench.live.clients import LiveLoad  # noqa: PLC0415

    return LiveLoad(
        url=options.url,
        workload=parse_spec(options.workload, WORKLOADS) if options.trace is None else parse_recorded(options.trace),
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


def load_warnings(ended: "LiveResult") -> list[str]:
    """Return warnings about the figures: calls that failed, with their reasons, and a machine that was too slow."""
    found = [f"{times} calls ended with {reason}" for reason, times in ended.failures.items()]
    spans = [r.finished - r.arrived for r in ended.result.records if r.finished is not None]
    if spans and ended.late_p99_s is not None and ended.late_p99_s > LATE * sum(spans) / len(spans):
        found.append(
            f"calls were sent up to {ended.late_p99_s:.3g} s late (p99), and took {sum(spans) / len(spans):.3g} s on"
            " average: this machine is too slow for the load, so the figures describe this machine"
        )
    return found


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

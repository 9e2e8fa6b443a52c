"""Compare policies live before engines that run already, real or emulated, in rounds that take turns.

Each round starts a router of its own with one policy, empties the engines' prefix caches (vLLM must allow it:
VLLM_SERVER_DEV_MODE=1), and runs the load for some seconds; the policies take turns, round after round, and in each
round all get the same calls. The hit rate is that of the answers in the measured time, as engines report it with each;
beside it stands what the engines' own counters say of the whole round, which began with empty caches. The engines must
have no other calls. Ctrl-C ends the command and prints the finished rounds.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final

import aiohttp
import uvloop

from bench.demo.load import DemoError
from bench.demo.processes import router
from bench.lab.engines.servers import ASK_SECONDS, all_known, common_model, counted, emptied
from bench.lab.frame.measures import AWAITED, first_token_spans, light_times, modest
from bench.live.clients import LiveLoad, LoadError, run_load
from bench.live.command import load_warnings
from bench.live.recorder import LiveResult
from bench.report.columns import aligned
from bench.report.exits import INTERRUPTED, refuse
from bench.report.meters import censored_percentile
from bench.report.progress import ProgressBar
from bench.report.records import Result
from bench.workloads.parts.spec import parse_spec
from bench.workloads.registry import WORKLOADS
from router.core.policies.registry import POLICIES
from router.runtime.mistakes import unknown

COMPARED: Final = ("dlpm_home", "cache_aware", "round_robin", "vtc", "d2lpm")
VOCABULARY: Final = 30_000
"""Token ids that any model knows."""


@dataclass(frozen=True, slots=True)
class Row:
    """One round of one policy. Times are seconds, of calls that arrived in the measured time."""

    policy: str
    round: int
    tokens_per_s: float
    """Tokens of answers and of prompts answered by a first token, cached ones included."""
    output_tokens_per_s: float
    hit_rate: float | None
    """Cached tokens per prompt token of the answers in the measured time."""
    counted_hit_rate: float | None
    """The same by the engines' counters, warm-up included."""
    light_ttft_p50_s: float | None
    light_ttft_p95_s: float | None
    heavy_ttft_p50_s: float | None
    """Of all clients but the light ones."""
    light_calls: int
    """Calls of the light clients in the measured time: how much the figures above rest on."""
    jain: float | None
    """Jain's index of actual service. It says something only if all clients lack service."""
    late_p99_s: float | None
    """How late calls were sent; if high, the figures describe this machine."""


Figures = tuple[float | None, ...]
HEAD: Final = (
    *("policy", "round", "tokens/s", "output/s", "hit rate", "counted", "light TTFT p50", "p95", "heavy TTFT p50"),
    *("light calls", "Jain", "late p99"),
)
DECIMALS: Final = (0, 0, 3, 3, 3, 3, 3, 0, 3, 3)
"""Of the columns after the round."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("urls", nargs="+", metavar="URL", help="address of an engine, for example http://10.0.0.7:8000")
    parser.add_argument(
        "--policies", default=",".join(COMPARED), metavar="P,P", help="the policies (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=2, help="rounds of each policy (default: %(default)s)")
    parser.add_argument(
        "--workload",
        default="own-documents",
        metavar="W",
        help="the load, as for `load`: NAME or NAME:parameter=value,... (default: %(default)s)",
    )
    parser.add_argument("--seconds", type=float, default=18.0, help="length of a round (default: %(default)s)")
    parser.add_argument(
        "--warmup", type=float, default=6.0, help="seconds at its start that are not measured (default: %(default)s)"
    )
    parser.add_argument(
        "--vocabulary",
        type=int,
        default=VOCABULARY,
        metavar="N",
        help="send only token ids below N, at most the model's vocabulary size (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the first round's load (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the figures to this file, as JSON")


def run(options: argparse.Namespace) -> None:
    rows: list[Row] = []
    interrupted, fault = False, ""
    try:
        for row, interrupted in measured(options):
            if interrupted:
                break
            rows.append(row)
    except (ValueError, DemoError, LoadError) as error:
        fault = str(error)
    except KeyboardInterrupt:
        interrupted = True
    if fault and not rows:
        refuse("engines", fault)
    print(*table(rows), sep="\n")
    if options.out is not None:
        shown = {name: value for name, value in vars(options).items() if isinstance(value, str | int | float | list)}
        report = {"options": shown, "rows": [asdict(row) for row in rows]}
        options.out.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    if fault:
        refuse("engines", fault)
    if interrupted:
        sys.exit(INTERRUPTED)


def measured(options: argparse.Namespace) -> Iterable[tuple[Row, bool]]:
    """Run the rounds; yield each with whether Ctrl-C cut it short. Raises ValueError, DemoError or LoadError."""
    urls = [url.rstrip("/").removesuffix("/v1") for url in options.urls]
    policies = _policies(options.policies)
    if options.rounds < 1:
        raise ValueError("there must be a round")
    load = partial(
        LiveLoad,
        workload=parse_spec(options.workload, WORKLOADS),
        seconds=options.seconds,
        warmup=options.warmup,
        vocabulary=options.vocabulary,
    )
    load("http://nowhere")  # raises ValueError before anything is started
    bar, total = ProgressBar(sys.stderr, "s"), options.rounds * len(policies) * options.seconds
    for number in range(options.rounds):
        for place, policy in enumerate(policies):
            before = (number * len(policies) + place) * options.seconds
            tell(f"{policy}, round {number + 1} of {options.rounds}")
            try:
                model = uvloop.run(_prepared(urls))
                with router(["--policy", policy, *(flag for url in urls for flag in ("--worker", url))]) as address:
                    each = load(address, seed=options.seed + number, model=model)
                    show = partial(_show, bar, before, total)
                    ended, hit_rate = uvloop.run(_loaded(each, urls, show))
            finally:
                bar.close()
            for warning in load_warnings(ended):
                tell(warning)
            yield _row(policy, number, ended, hit_rate), ended.interrupted


def tell(line: str) -> None:
    """Tell on standard error how it goes."""
    print(f"engines: {line}", file=sys.stderr)


def _show(bar: ProgressBar, before: float, total: float, now: float) -> None:
    bar.show(before + now, total)


def _policies(text: str) -> Sequence[str]:
    """Return the policies. Raises ValueError if one is unknown."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in POLICIES:
            raise ValueError(unknown("policy", name, POLICIES))
    return names


async def _prepared(urls: Sequence[str]) -> str:
    """Empty the engines' caches, say which ones refuse, and return their model. Raises LoadError."""
    async with _session() as http:
        model = await common_model(http, urls)
        for url in urls:
            if not await emptied(http, url):
                tell(f"{url} does not empty its prefix cache, so this round begins with what is in it")
    return model


async def _loaded(
    load: LiveLoad, urls: Sequence[str], show: Callable[[float], None]
) -> tuple[LiveResult, float | None]:
    """Run the load once the router knows all engines; return it with the hit rate that the engines counted."""
    async with _session() as http:
        await all_known(http, load.base, len(set(urls)))
        before = await counted(http, urls)
        ended = await run_load(load, show)
        return ended, (await counted(http, urls)).hit_rate_since(before)


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ASK_SECONDS))


def _row(policy: str, number: int, ended: LiveResult, hit_rate: float | None) -> Row:
    result, summary = ended.result, ended.summary()
    light, own = light_times(result), set(modest(result))
    return Row(
        policy,
        number + 1,
        summary["throughput_tokens_per_s"],
        summary["output_tokens_per_s"],
        summary["hit_rate"],
        hit_rate,
        light["light TTFT p50"],
        light["light TTFT p95"],
        _others_ttft_p50(result, own),
        sum(client["requests"] for name, client in summary["clients"].items() if name in own),
        summary["jain"],
        ended.late_p99_s,
    )


def _others_ttft_p50(result: Result, modest_clients: set[str]) -> float | None:
    others = [record for record in result.records if record.client not in modest_clients]
    began = [r for r in others if result.warmup <= r.arrived < result.seconds and r.outcome in AWAITED]
    return censored_percentile(first_token_spans(began, result.seconds), 0.50)


def table(rows: Sequence[Row]) -> list[str]:
    """Format the rounds with a header, those of a policy together, with their medians if there are several."""
    lines: list[tuple[str, ...]] = [HEAD]
    for policy in dict.fromkeys(row.policy for row in rows):
        own = [row for row in rows if row.policy == policy]
        lines += [_cells(policy, str(row.round), _figures(row)) for row in own]
        if len(own) > 1:
            lines.append(_cells(policy, "median", tuple(map(_median, zip(*map(_figures, own), strict=True)))))
    return aligned(lines)


def _figures(row: Row) -> Figures:
    _, _, *figures = asdict(row).values()
    return tuple(figures)


def _median(values: Figures) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _cells(policy: str, number: str, figures: Figures) -> tuple[str, ...]:
    return (policy, number, *map(_cell, figures, DECIMALS))


def _cell(value: float | None, decimals: int) -> str:
    return "-" if value is None else f"{value:,.{decimals}f}"

"""Noisy neighbours over HTTP: light clients beside growing numbers of heavy ones, behind one router after another.

The only live experiment: emulated workers and routers are processes, calls use sockets, and time is real, only faster.
Each run has fresh workers. A round is all runs once, router after router for each number of heavy clients, so that
other load on this machine affects them all. The round's number is its seed, so every router gets the same calls in a
round.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import TYPE_CHECKING, ClassVar, Final

import uvloop

from bench.lab.drawing.axes import counts, from_zero, legend, outer, scale
from bench.lab.drawing.looks import policy_look
from bench.lab.frame.experiment import Cell, Experiment, Row, Value
from bench.lab.frame.measures import first_token_spans, max_min
from bench.lab.frame.plots import LABELS, draw_points
from bench.lab.neighbour.servers import MODEL, OURS, Contestant, engine_queue, fleet, started
from bench.lab.neighbour.traffic import HEAVY, LIGHT, Neighbours
from bench.report.meters import censored_percentile
from bench.report.records import Result
from bench.report.summary import Summary
from bench.workloads.parts.traffic import Outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from bench.lab.neighbour.driver import Span
    from bench.live.recorder import LiveResult

FLEET: Final = 2
SPEED: Final = 2.5
"""At this speed all the processes together use about half of two cores."""
WORKER: Final = ("--dialect", "vllm", "--max-running", "16", "--kv-tokens", "40000")
"""Sixteen calls at a time, and room for the prefixes of five heavy clients, not for eight on each worker."""
LEVELS: Final = (0, 1, 2, 4, 8)
QUICK_LEVELS: Final = (0, 2, 8)
"""Numbers of heavy clients: two fill the batches; with more, calls wait."""
SECONDS, QUICK_SECONDS = 48.0, 24.0
WARMUP: Final = 0.25
"""Share of the seconds."""
CHUNK_TOKENS: Final = 20
"""Tokens per event of an answer after its first; with one per event, parsing would cost more than all else."""
MOST_LOST: Final = 0.05
"""If a worker's process was too slow by more than this share of its time, a warning is printed."""
TRIES: Final = 3
"""How often a run is repeated until the machine was fast enough; the last try counts in any case."""

_PACE: Final = ("--poll-interval", str(0.5 / SPEED))
ROUTERS: Final = (
    Contestant("d2lpm", (*OURS, "--policy", "d2lpm", *_PACE)),
    Contestant("dlpm_home", (*OURS, "--policy", "dlpm_home", *_PACE)),
)
DIRECT: Final = Contestant("workers in turn", ())
FIGURES: Final[Mapping[str, int]] = {
    "light TTFT p50": 2,
    "light TTFT p95": 2,
    "light share": 3,
    "fair share": 3,
    "heavy tokens/s": 0,
    "tokens/s": 0,
    "hit rate": 3,
    "failed": 0,
}
"""The figures of a run, with their decimals in a table."""


@dataclass(frozen=True)
class NoisyNeighbour(Experiment):
    title: ClassVar[str] = "Light clients beside heavy ones, over HTTP"
    published: ClassVar[str] = (
        f"No paper has this. {FLEET} emulated vLLM workers (Mistral 7B on an A100, 16 calls at a time, KV of 40,000"
        f" tokens, FCFS), their clock {SPEED:g} times as fast as that on the wall; all times are by it. Each heavy"
        " client keeps 16 calls open, of 6,000 tokens that are its own prefix and 200 more, for 150 in answer; 4 light"
        " clients ask 300 tokens each for 50, every 2 s on average. TTFT in seconds from sending to the first token; of"
        " a call that has none at the end it is at least the time until then. Shares are of service, extend + 2 ·"
        " output tokens; the fair share of the light clients is max-min: what they ask, but of each no more than an"
        " equal part. tokens/s: prompts and answers of calls that were done, cached or not. time lost: by how much of"
        " its time a worker's process was too slow for the machine that it emulates; where there is much, the row is"
        f" of this one: a run with more than {MOST_LOST:.0%} is made again, {TRIES} times at most."
    )
    decimals: ClassVar[Mapping[str, int]] = {**FIGURES, "time lost": 3}

    def cells(self, *, quick: bool) -> Sequence[Cell]:  # noqa: ARG002
        """Return none: nothing here runs in virtual time."""
        return ()

    def measure(self, result: Result, summary: Summary) -> Mapping[str, Value]:
        """Return the figures of one run: most cover the measured time, but `calls` and `failed` cover all of it."""
        light = [r for r in result.records if r.client.startswith(LIGHT) and r.arrived >= result.warmup]
        waits = list(first_token_spans([r for r in light if r.outcome in ANSWERED], result.seconds))
        service = {client: figures["service"] for client, figures in summary["clients"].items()}
        whole = sum(service.values())
        outcomes = [record.outcome for record in result.records]
        return {
            "light TTFT p50": censored_percentile(waits, 0.50),
            "light TTFT p95": censored_percentile(waits, 0.95),
            "light share": _of(service, LIGHT) / whole if whole else None,
            "heavy share": _of(service, HEAVY) / whole if whole else None,
            "fair share": _fair_share(result, whole),
            "heavy tokens/s": _tokens_per_second(result, HEAVY),
            "tokens/s": _tokens_per_second(result),
            "hit rate": summary["hit_rate"],
            "calls": len(outcomes),
            "light calls": len(light),
            "done": outcomes.count(Outcome.DONE),
            "unfinished": outcomes.count(Outcome.UNFINISHED),
            "failed": outcomes.count(Outcome.FAILED) + outcomes.count(Outcome.REJECTED),
        }

    def draw(self, rows: Sequence[Row], figure: "Figure") -> None:
        """Draw a line for each router over the number of heavy clients."""
        figure.set_figheight(5.5)
        levels = sorted({int(row.labels["heavy"]) for row in rows})
        shown = ("light TTFT p50", "light TTFT p95", "light share", "tokens/s")
        for axes, measured in zip(figure.subplots(2, 2, sharex=True).flat, shown, strict=True):
            for place, router in enumerate(dict.fromkeys(row.labels["router"] for row in rows)):
                own = [row for row in rows if row.labels["router"] == router]
                draw_points(axes, own, partial(_heavy, 0.06 * place), measured, router, policy_look(router))
            from_zero(axes, "y")
            scale(axes, "y", LABELS[measured])
            counts(axes, levels, "heavy clients (count)")
        outer(figure, columns_alike=False)
        legend(figure)


def _heavy(aside: float, row: Row) -> float:
    """Return the number of heavy clients, a little to the right, so that no mark hides another."""
    return int(row.labels["heavy"]) + aside


ANSWERED: Final = (Outcome.DONE, Outcome.UNFINISHED)


def _fair_share(result: Result, whole: float) -> float | None:
    """Return the share of the light clients together; None if none of their calls was done: their cost is unknown."""
    light = [record for record in result.records if record.client.startswith(LIGHT)]
    costs = [r.input_tokens - (r.cached_tokens or 0) + 2 * r.output_tokens for r in light if r.outcome is Outcome.DONE]
    if not costs or not whole:
        return None
    arrived = Counter(record.client for record in light if record.arrived >= result.warmup)
    asked = {client: arrived[client] * sum(costs) / len(costs) for client in result.weights}
    asked |= {client: inf for client in result.weights if client.startswith(HEAVY)}
    return _of(max_min(asked, whole), LIGHT) / whole


def _of(parts: Mapping[str, float], kind: str) -> float:
    return sum(part for client, part in parts.items() if client.startswith(kind))


def _tokens_per_second(result: Result, kind: str = "") -> float:
    done = [r for r in result.records if r.outcome is Outcome.DONE and r.client.startswith(kind)]
    measured = [r for r in done if r.finished is not None and result.warmup <= r.finished < result.seconds]
    return sum(r.input_tokens + r.output_tokens for r in measured) / (result.seconds - result.warmup)


@dataclass(frozen=True, slots=True)
class Plan:
    """The runs of a round."""

    contestants: Sequence[Contestant]
    traffic: Sequence[Neighbours]
    """The traffic for each number of heavy clients."""
    span: "Span"
    speed: float = SPEED
    worker: Sequence[str] = WORKER
    """Flags of the workers."""


def plan(contestants: Sequence[Contestant], *, quick: bool) -> Plan:
    """Return the whole plan, or if `quick` a part of the same shape."""
    from bench.lab.neighbour.driver import Span  # noqa: PLC0415 - it needs aiohttp, which an installed router does not have

    seconds = QUICK_SECONDS if quick else SECONDS
    levels = QUICK_LEVELS if quick else LEVELS
    return Plan(contestants, [Neighbours(heavy) for heavy in levels], Span(seconds, WARMUP * seconds))


def run(planned: Plan, seeds: Sequence[int], done: Callable[[int, int], None]) -> Iterator[Sequence[Row]]:
    """Run round after round, yielding the rows of all rounds so far. Raises ServerError and LoadError.

    `done` is called with the finished and the total number of runs.
    """
    runs = [(level, who) for level in planned.traffic for who in planned.contestants]
    seen: dict[tuple[str, int], list[Mapping[str, Value]]] = {}
    for over, seed in enumerate(seeds):
        for number, (level, who) in enumerate(runs, 1):
            seen.setdefault((who.name, level.heavy), []).append(
                undisturbed(partial(_measured, planned, who, level, seed))
            )
            done(over * len(runs) + number, len(seeds) * len(runs))
        yield [
            _row(who.name, level.heavy, seen[who.name, level.heavy])
            for who in planned.contestants
            for level in planned.traffic
        ]


def _row(router: str, heavy: int, rounds: Sequence[Mapping[str, Value]]) -> Row:
    return Row({"router": router, "heavy": str(heavy)}, {name: [each[name] for each in rounds] for name in rounds[0]})


def undisturbed(measure: Callable[[], Mapping[str, Value]]) -> Mapping[str, Value]:
    """Return the figures of the first run for which this machine was fast enough, else of the last try."""
    figures = measure()
    for _ in range(TRIES - 1):
        if not _disturbed(figures["time lost"]):
            break
        figures = measure()
    return figures


def _disturbed(lost: Value) -> bool:
    return isinstance(lost, float) and lost > MOST_LOST


def _measured(planned: Plan, who: Contestant, level: Neighbours, seed: int) -> Mapping[str, Value]:
    """Run once with fresh workers."""
    with fleet(FLEET, (*planned.worker, "--measure", "--speed", str(planned.speed))) as workers:
        if who.command:
            with started(who.name, who.command, workers) as router:
                ended = _drive(planned, [router.url], level, seed)
        else:
            ended = _drive(planned, workers, level, seed)
        engines = [engine_queue(worker) for worker in workers]
    for reason, times in ended.failures.items():
        print(f"neighbour: {who.name}: {times} calls ended with {reason}", file=sys.stderr)
    figures = NoisyNeighbour().measure(ended.result, ended.summary())
    return {
        **figures,
        "waiting in engine p95": max(engine.requests_p95 for engine in engines),
        "late p99": ended.late_p99_s,
        "time lost": max(engine.lost for engine in engines),
    }


def _drive(planned: Plan, urls: Sequence[str], level: Neighbours, seed: int) -> "LiveResult":
    from bench.lab.neighbour.driver import Target, drive  # noqa: PLC0415 - as above

    target = Target(urls, MODEL, planned.speed, stream_interval=CHUNK_TOKENS)
    return uvloop.run(drive(target, level, planned.span, seed))


def doubts(rows: Iterable[Row]) -> Iterator[str]:
    """Yield warnings about rows for which this machine was too slow, even if only in one round."""
    for row in rows:
        times = sum(map(_disturbed, row.values["time lost"]))
        if times:
            name = ", ".join(row.labels.values())
            yield f"{name}: in {times} of {len(row.values['time lost'])} rounds the workers were too slow"

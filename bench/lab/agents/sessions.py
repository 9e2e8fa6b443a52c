"""Sessions of coding agents on a fleet whose KV cache holds more or fewer contexts than are open."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from random import Random
from statistics import mean
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

from bench.lab.agents.thunder_gate import thunder
from bench.lab.drawing.axes import at, legend
from bench.lab.drawing.looks import POLICIES
from bench.lab.frame.conditions import PATIENT, Span
from bench.lab.frame.experiment import Cell, Row, Value
from bench.lab.frame.plots import draw_policies
from bench.lab.frame.traced import TracedExperiment
from bench.report.records import Record, Result
from bench.report.summary import Summary
from bench.sim.scenario import Scenario, WorkerSpec
from bench.workloads.parts.traffic import Outcome
from bench.workloads.recorded.sessions import KIND, LIGHT, ONE_SHOT, Recorded, SessionPlay, Sessions, Turn
from bench.workloads.recorded.traces import Trace
from router.core.clients.fairness import jain_index, percentile
from router.core.policies.base import PolicyFactory
from router.core.policies.sessions.session_gate import gated
from router.core.policies.sessions.session_parameters import SessionParameters

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORKERS: Final = 4
KV_TOKENS: Final = 400_000
"""Of each worker."""
LOADS: Final = (0.5, 1.0, 2.0, 4.0)
"""Tokens of the contexts of all open sessions, over all KV cache."""
PLAY: Final = SessionPlay(client_count=5, longest=120_000, light=3, one_shots=0.2, part="aside")
"""Of every third session; nothing was tuned on these."""
HEAVY_SESSIONS: Final = (4, 40)
SPAN: Final = Span(600.0, 120.0)
QUICK_SPAN: Final = Span(120.0, 20.0)
LONG_SPAN: Final = Span(3600.0, 1200.0)
"""In SPAN most sessions are young, and none that waits need be served; here contexts are as long as the load says."""
UNCONTENDED: Final = "uncontended"
ROOMY_WORKERS, ROOMY_KV = 2, 8
"""Times the workers, and times the KV cache of each, of the uncontended fleet."""
OUTPUT_WEIGHT: Final = 2.0
TURN_ENDS, PERSON_SECONDS, TOOL_SECONDS = 0.06, 60.0, 8.0
"""Of the stand-in: the share of answers that end a turn, and the mean seconds until the next call after these and
after others."""


def stand_in(count: int = 60) -> Sessions:
    """Return seeded sessions in place of recorded ones, roughly as long and as fast."""
    random = Random("stand-in sessions")
    recorded = []
    for _ in range(count):
        size, pause, turns = random.randint(15_000, 50_000), 0.0, []
        for _ in range(random.randint(20, 80)):
            output, ends = random.randint(80, 800), random.random() < TURN_ENDS
            turns.append(Turn(size, output, size, pause, ends))
            size += output + random.randint(100, 3000)
            pause = random.expovariate(1 / (PERSON_SECONDS if ends else TOOL_SECONDS))
        recorded.append(Recorded(random.randint(5, 12) * 1000, 4000, tuple(turns)))
    return Sessions(tuple(recorded))


def _our_gate(policy: PolicyFactory) -> PolicyFactory:
    return gated(policy, SessionParameters())


STAND_IN: Final = stand_in()


class Contestant(NamedTuple):
    """A policy with or without a gate."""

    policy: str
    gate: "partial[PolicyFactory] | None" = None
    roomy: bool = False


CONTESTANTS: Final[Mapping[str, Contestant]] = {
    UNCONTENDED: Contestant("dlpm_home", roomy=True),
    "cache_aware": Contestant("cache_aware"),
    "dlpm_home": Contestant("dlpm_home"),
    "ThunderAgent": Contestant("dlpm_home", partial(thunder, idle=PLAY.patience + 1.0)),
    "gate": Contestant("dlpm_home", partial(_our_gate)),
}


@dataclass(frozen=True)
class AgentSessions(TracedExperiment):
    title: ClassVar[str] = "Agent sessions before too small a KV cache"
    published: ClassVar[str] = (
        "Of no paper. Load: tokens of the contexts of all open sessions over the KV cache of all workers. A light"
        " client has one session at a time, five others share the rest; a further client makes short calls that share"
        " nothing. Useful service is input that no perfect cache saves and twice the output; Jain's index and the least"
        " share are of each client's useful service, warm-up included, over its max-min share of what was served in the"
        " same run, where nobody wants more than in the uncontended run. Again: input that is computed though a perfect"
        " cache would hold it. A pause is from arrival to dispatch."
    )
    kinds: ClassVar[Sequence[str]] = (KIND,)
    seeds: ClassVar[Sequence[int]] = (0, 1, 2)
    decimals: ClassVar[Mapping[str, int]] = {
        "calls/s": 3,
        "hit rate": 2,
        "TTFT": 1,
        "light TTFT": 1,
        "one-shot p95": 1,
        "longest pause": 0,
        "useful/s": 0,
        "again/s": 0,
    }

    def cells(self, *, quick: bool) -> Sequence[Cell]:
        trace: Trace | Sessions = self.traces.get(KIND, STAND_IN)
        assert isinstance(trace, Sessions), "the trace is of this kind"
        span, loads = (QUICK_SPAN, LOADS[2:3]) if quick else (SPAN, LOADS)
        kv_tokens = WORKERS * KV_TOKENS
        plays = {f"{load:g}": replace(PLAY, working_set=round(load * kv_tokens)) for load in loads}
        cells = [
            _cell(load, name, Sessions(trace.sessions, play), span)
            for load, play in plays.items()
            for name in CONTESTANTS
        ]
        if not quick:
            for labels in (True, False):
                play = replace(plays["2"], alike=True, labels=labels)
                name = "2, alike" if labels else "2, alike, no labels"
                cells.append(_cell(name, "gate", Sessions(trace.sessions, play), span))
            for heavy in HEAVY_SESSIONS:
                play = replace(PLAY, client_count=8, concurrency=3, heavy=heavy, light=0)
                cells += [
                    _cell(_crowd(heavy), name, Sessions(trace.sessions, play), span)
                    for name in (UNCONTENDED, "dlpm_home", "gate")
                ]
            cells += [
                _cell("2, an hour", name, Sessions(trace.sessions, plays["2"]), LONG_SPAN)
                for name in ("dlpm_home", "ThunderAgent", "gate")
            ]
        return cells

    def measure(self, result: Result, summary: Summary) -> Mapping[str, Value]:  # noqa: ARG002
        done = [record for record in result.records if record.outcome is Outcome.DONE]
        records = [record for record in done if (record.finished or 0.0) >= result.warmup]
        calls = [record for record in records if record.client != ONE_SHOT]
        one_shots = [record for record in records if record.client == ONE_SHOT]
        light = [record for record in calls if record.client.startswith(LIGHT)]
        seconds = result.seconds - result.warmup
        hits = sum(worker.prefix_hits for worker in result.workers.values())
        queries = sum(worker.prefix_queries for worker in result.workers.values())
        # Warm-up included: there a fast run makes long first prompts that a slow one makes later.
        since_start = _useful(done, result.weights)
        return {
            "calls/s": len(calls) / seconds,
            "hit rate": hits / queries if queries else None,
            "TTFT": _mean_ttft(calls),
            "light TTFT": _mean_ttft(light),
            "one-shot p95": percentile(map(_ttft, one_shots), 0.95),
            "longest pause": max(_pauses(result), default=None),
            "useful/s": sum(_useful(records, result.weights).values()) / seconds,
            "again/s": sum(map(_computed_again, calls)) / seconds,
            "clients": [(float(number), each / result.seconds) for number, each in enumerate(since_start.values())],
        }

    def digest(self, rows: Sequence[Row]) -> Sequence[str]:
        """Return how evenly clients were served, by policy and load."""
        wanted = {row.labels["load"]: row for row in rows if row.labels["policy"] == UNCONTENDED}
        lines = ["| load | policy | Jain | least share | heavy over mean |", "| --- | --- | ---: | ---: | ---: |"]
        for row in rows:
            load = row.labels["load"]
            if row.labels["policy"] == UNCONTENDED:
                continue
            jain = least = "-"
            heavy = _median([_first_over_mean(points) for points in row.values["clients"]])
            if load in wanted:
                shares = [
                    over_max_min(_ys(own), _ys(most))
                    for own, most in zip(row.values["clients"], wanted[load].values["clients"], strict=True)
                ]
                jain = f"{_median([jain_index(share) or 0.0 for share in shares]):.2f}"
                least = f"{_median([min(share) for share in shares]):.2f}"
            lines.append(f"| {load} | {row.labels['policy']} | {jain} | {least} | {heavy:.2f} |")
        return lines + _growths(rows)

    def draw(self, rows: Sequence[Row], figure: "Figure") -> None:
        """Draw calls per second by load for each policy."""
        figure.set_figheight(3.6)
        axes = figure.subplots()
        own = [row for row in rows if row.labels["load"].replace(".", "").isdigit()]
        draw_policies(axes, own, lambda row: float(row.labels["load"]), "calls/s")
        at(axes, LOADS, [f"{load:g}" for load in LOADS], "contexts / KV cache (ratio)", logarithmic=True)
        legend(figure, list(POLICIES))


def _growths(rows: Sequence[Row]) -> list[str]:
    """Return what more sessions of the first client bring it, what its max-min share grows by, and what the others with
    sessions are left with, by policy.
    """
    few, many = [
        {row.labels["policy"]: row.values["clients"] for row in rows if row.labels["load"] == _crowd(heavy)}
        for heavy in HEAVY_SESSIONS
    ]
    heads = ("policy", "service with the most sessions over that with the fewest", "max-min share", "of the others")
    lines = ["", f"| {' | '.join(heads)} |", "| --- | --- | --- | --- |"]
    for policy in (policy for policy in many if policy in few):
        pairs = list(zip(few[policy], many[policy], strict=True))
        own = [_over(_ys(more)[0], _ys(fewer)[0]) for fewer, more in pairs]
        others = [_over(sum(_ys(more)[1:-1]), sum(_ys(fewer)[1:-1])) for fewer, more in pairs]
        shares = ["-"]
        if UNCONTENDED in few and UNCONTENDED in many:
            fewer_shares = _first_shares(few[policy], few[UNCONTENDED])
            shares = list(map(_over, _first_shares(many[policy], many[UNCONTENDED]), fewer_shares))
        lines.append(f"| {policy} | {', '.join(own)} | {', '.join(shares)} | {', '.join(others)} |")
    return lines if len(lines) > 3 else []


def _first_shares(served: Sequence[Value], wanted: Sequence[Value]) -> Sequence[float]:
    """Return the first client's max-min share with each seed."""
    return [max_min(sum(_ys(own)), _ys(most))[0] for own, most in zip(served, wanted, strict=True)]


def _over(more: float, fewer: float) -> str:
    return f"{more / fewer if fewer else inf:.2f}"


def _crowd(heavy: int) -> str:
    """Return the load with this many sessions of the first client."""
    return f"{heavy} beside 3 each"


def _cell(load: str, name: str, workload: Sessions, span: Span) -> Cell:
    policy, gate, roomy = CONTESTANTS[name]
    kv_tokens, count = (KV_TOKENS * ROOMY_KV, WORKERS * ROOMY_WORKERS) if roomy else (KV_TOKENS, WORKERS)
    workers = (WorkerSpec(kv_tokens=kv_tokens),) * count
    scenario = Scenario(policy, workload, workers, span.seconds, span.warmup, settings=PATIENT, gate=gate)
    return Cell((("load", load), ("policy", name)), scenario)


def _ttft(record: Record) -> float:
    assert record.started is not None, "a call that is done has been answered"
    return record.started - record.arrived


def _mean_ttft(records: Sequence[Record]) -> float | None:
    return mean(map(_ttft, records)) if records else None


def _pauses(result: Result) -> Sequence[float]:
    """Return how long each call waited in the router, also those that still wait."""
    ends = [result.seconds if record.dispatched is None else record.dispatched for record in result.records]
    return [end - record.arrived for record, end in zip(result.records, ends, strict=True)]


def _useful(records: Sequence[Record], clients: Mapping[str, float]) -> Mapping[str, float]:
    """Return each client's useful service, in tokens of input."""
    useful = dict.fromkeys(clients, 0.0)
    for record in records:
        useful[record.client] += (record.fresh_tokens or 0) + OUTPUT_WEIGHT * record.output_tokens
    return useful


def _computed_again(record: Record) -> int:
    """Return the tokens of input that were computed though an earlier call of the session had them."""
    return max(0, record.input_tokens - (record.cached_tokens or 0) - (record.fresh_tokens or 0))


def max_min(total: float, wanted: Sequence[float]) -> Sequence[float]:
    """Divide a total: nobody gets more than it wants, and those that want more than they get all get the same."""
    left, shares = total, [0.0] * len(wanted)
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    for position, number in enumerate(order):
        shares[number] = min(wanted[number], left / (len(order) - position))
        left -= shares[number]
    return shares


def over_max_min(served: Sequence[float], wanted: Sequence[float]) -> Sequence[float]:
    """Return what each client was served over its max-min share of all that was served."""
    shares = max_min(sum(served), wanted)
    return [own / share if share else 1.0 for own, share in zip(served, shares, strict=True)]


def _ys(points: Value) -> Sequence[float]:
    assert isinstance(points, Sequence)
    return [y for _, y in points]


def _first_over_mean(points: Value) -> float:
    """Return the first client's useful service over the mean of all with sessions."""
    served = _ys(points)[:-1]
    return served[0] / mean(served) if any(served) else 0.0


def _median(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]

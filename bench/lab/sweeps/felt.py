"""The experience of clients: who is not served, how long light ones wait, and what honest ones get beside a flood."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Final

from bench.lab.drawing.axes import legend
from bench.lab.drawing.looks import POLICIES
from bench.lab.frame.conditions import Contender, fleet
from bench.lab.frame.experiment import Cell, Row, Value
from bench.lab.frame.felt_loads import FELT_LOADS, TRACED, WORKERS, felt_load
from bench.lab.frame.measures import asked, max_min, modest, service_seen
from bench.lab.frame.plots import draw_marks
from bench.lab.frame.traced import TracedExperiment
from bench.report.meters import censored_percentile
from bench.report.records import Record, Result
from bench.report.summary import Summary
from bench.report.unserved import longest_unserved, never_served
from bench.sim.scenario import Scenario
from bench.workloads.parts.traffic import Outcome, Workload
from router.core.clients.fairness import jain_index
from router.core.policies.dlpm.dlpm_parameters import DlpmHomeParameters

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLAIN: Final = DlpmHomeParameters(round_seconds=0.0, overdue_after=0.0, isolation=0.0, head_start=2_000.0)
"""Algorithm 1 alone, which was the default once: rounds without a limit, nobody overdue, no refill delayed."""
CONTENDERS: Final[Mapping[str, Contender]] = {
    "dlpm_home": Contender("dlpm_home"),
    "dlpm_home plain": Contender("dlpm_home", PLAIN),
    "d2lpm": Contender("d2lpm"),
    "vtc": Contender("vtc"),
    "cache_aware": Contender("cache_aware"),
    "pooled_fcfs": Contender("pooled_fcfs"),
}
"""By the name in the table; another set of parameters is another line."""

HONEST: Final = "honest"
"""How the names of the clients begin that would use their share beside others."""
QUICK_LOADS: Final = ("crowd of 200", "documents", "32 cold prompts, 4x32 chats", "200 chats, 4x24")


@dataclass(frozen=True)
class Felt(TracedExperiment):
    kinds: ClassVar[Sequence[str]] = tuple(TRACED.values())
    marks: ClassVar[str] = ""
    title: ClassVar[str] = "What clients feel: crowds, floods and documents, two A100"
    published: ClassVar[str] = (
        "Of no paper. A fair round is the time in which every client with calls could be served a call of mean cost."
        " A wait goes on until the first token; one that has not ended counts with what it has lasted so far."
    )
    decimals: ClassVar[Mapping[str, int]] = {
        "unserved": 0,
        "unserved rounds": 1,
        "fair round": 1,
        "light longest": 1,
        "light p95": 1,
        "others longest": 1,
        "calls/s": 1,
        "hit rate": 3,
        "Jain": 2,
        "actual/s": 0,
        "service/s": 0,
        "honest/s": 0,
        "least/fair": 2,
        "TPOT": 0,
    }

    def cells(self, *, quick: bool) -> Sequence[Cell]:
        return [
            cell(name, contender, load, self.traces)
            for load in (QUICK_LOADS if quick else FELT_LOADS)
            for name, contender in CONTENDERS.items()
        ]

    def measure(self, result: Result, summary: Summary) -> Mapping[str, Value]:
        return figures(result, summary)

    def draw(self, rows: Sequence[Row], figure: "Figure") -> None:
        """Draw how long light clients wait at most, and the service, by load and policy."""
        figure.set_figheight(1.6 + 0.3 * len({row.labels["load"] for row in rows}))
        for axes, shown in zip(figure.subplots(1, 2, sharey=True), ("light longest", "service/s"), strict=True):
            draw_marks(axes, rows, "load", shown)
        legend(figure, list(POLICIES))


def cell(name: str, contender: Contender, load: str, traces: Mapping[str, Workload] = MappingProxyType({})) -> Cell:
    """Return the simulation of a contender under a load, with the trace that it stands in for if that is given."""
    chosen = felt_load(load, traces)
    return Cell(
        (("load", load), ("policy", name)),
        Scenario(
            contender.policy,
            chosen.workload,
            fleet(chosen.spec, WORKERS),
            chosen.span.seconds,
            chosen.span.warmup,
            parameters=contender.parameters,
        ),
    )


def figures(result: Result, summary: Summary) -> Mapping[str, Value]:
    """Return the figures of one simulation. Times are seconds, TPOT milliseconds, service cost units.

    `unserved` and the longest time that any client was not served (in fair rounds) cover the whole run. All else covers
    the measured time; waits include calls that arrived before it and were still waiting. Jain: of the service of all
    but the light clients. actual/s: service, extend + 2 · output; service/s: as clients see it, input + 2 · output.
    honest/s and least/fair: what the honest clients got each, and the least of them over its max-min share.
    """
    seconds = result.seconds - result.warmup
    service = {client: each["service"] / seconds for client, each in summary["clients"].items()}
    light = modest(result)
    others = [client for client in service if client not in light] or list(service)
    honest = [client for client in service if client.startswith(HONEST)]
    light_waits, other_waits = _waits(result, light), _waits(result, others)
    whole, calls = sum(service.values()), summary["requests_per_s"]
    fair_round = len(service) / calls if calls else None
    fair = max_min({client: demand / seconds for client, demand in asked(result).items()}, whole)
    unserved = max(longest_unserved(result.records, result.seconds).values(), default=0.0)
    return {
        "unserved": float(never_served(result.records)),
        "unserved rounds": unserved / fair_round if fair_round else None,
        "fair round": fair_round,
        "light longest": max(light_waits, default=None),
        "light p95": censored_percentile([(wait, True) for wait in light_waits], 0.95),
        "others longest": max(other_waits, default=None),
        "calls/s": calls,
        "hit rate": summary["hit_rate"],
        "Jain": jain_index([service[client] for client in others]),
        "actual/s": whole,
        "service/s": service_seen(summary) / seconds,
        "honest/s": sum(service[client] for client in honest) / len(honest) if honest else None,
        "least/fair": min((service[client] / fair[client] for client in honest if fair[client]), default=None),
        "TPOT": _token_time(result, honest or others),
    }


def _waits(result: Result, clients: Iterable[str]) -> Sequence[float]:
    """Return the waits to the first token of these clients' calls that waited at any time measured."""
    own = set(clients)
    spans = [(r, _first(r, result.seconds)) for r in result.records if r.client in own]
    return [first - record.arrived for record, first in spans if first >= result.warmup]


def _first(record: Record, end: float) -> float:
    """Return when the call stopped waiting."""
    ends = [time for time in (record.started, record.finished) if time is not None]
    return min([end, *ends])


def _token_time(result: Result, clients: Iterable[str]) -> float | None:
    """Return the mean time between these clients' tokens, of answers that ended in the measured time."""
    own = set(clients)
    spans = [
        (r.finished - r.started, r.output_tokens - 1)
        for r in result.records
        if r.client in own and r.outcome is Outcome.DONE and r.started is not None and r.finished is not None
        if result.warmup <= r.finished < result.seconds
    ]
    tokens = sum(more for _, more in spans)
    return 1000 * sum(span for span, _ in spans) / tokens if tokens else None

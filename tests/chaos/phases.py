"""Measures a phase of the load, and checks that the flood harmed only its senders. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from router.core.clients.fairness import percentile

from .load import Called

THROUGHPUT: Final = 0.95
REFUSAL_SECONDS: Final = 0.05
TTFT: Final = 2.0
LATE_SECONDS: Final = 0.02
"""Seconds by which the load may be late; beyond that the figures are this machine's."""
AT_ONCE: Final = frozenset({"rejected-saturated", "rejected-client-saturated"})
"""Reasons of refusals without a wait. A call dropped for another client's has waited."""


@dataclass(frozen=True, slots=True)
class Phase:
    """The measurements of one phase; None where there was nothing to measure."""

    name: str
    offered: float
    """Calls per second, as are the next two."""
    answered: float
    refused: float
    refusal_p50: float | None
    refusal_p99: float | None
    """Seconds."""
    gave_way: float
    """Calls per second that had waited and were then refused in favour of others."""
    gave_way_p99: float | None
    ttft_p50: float | None
    ttft_p95: float | None
    """Waits of light clients in seconds."""
    light: int
    light_refused: int
    cores: float
    """Share of a core that the router used."""
    late_p99: float
    odd: Counter[str]
    """Calls that ended with neither an answer nor a refusal."""


def measured(name: str, called: Iterable[Called], begin: float, end: float, cpu_seconds: float) -> Phase:
    """Measure the calls that were sent, and the answers that ended, between two times."""
    called, span = list(called), end - begin
    sent = [each for each in called if begin <= each.reply.sent < end]
    refused = [each for each in sent if each.reply.status == 429]
    at_once = [each.reply.ended - each.reply.sent for each in refused if each.reply.reason in AT_ONCE]
    gave_way = [each.reply.ended - each.reply.sent for each in refused if each.reply.reason not in AT_ONCE]
    light = [each for each in sent if each.light]
    ttft = [each.reply.first - each.reply.sent for each in light if each.reply.whole and each.reply.first]
    odd = Counter(
        f"status {each.reply.status}" for each in sent if not (each.reply.whole or each.cut or each.reply.status == 429)
    )
    return Phase(
        name=name,
        offered=len(sent) / span,
        answered=sum(each.reply.whole and begin <= each.reply.ended < end for each in called) / span,
        refused=len(refused) / span,
        refusal_p50=percentile(at_once, 0.5),
        refusal_p99=percentile(at_once, 0.99),
        gave_way=len(gave_way) / span,
        gave_way_p99=percentile(gave_way, 0.99),
        ttft_p50=percentile(ttft, 0.5),
        ttft_p95=percentile(ttft, 0.95),
        light=len(light),
        light_refused=sum(each.light for each in refused),
        cores=cpu_seconds / span,
        late_p99=percentile([each.late for each in sent], 0.99) or 0.0,
        odd=odd,
    )


def objections(capacity: Phase, plateau: Phase, overload: Phase) -> list[str]:
    """Describe every violation under overload; empty if there is none."""
    found = []
    best = max(capacity.answered, plateau.answered)
    if overload.answered < THROUGHPUT * best:
        found.append(f"{overload.answered:.1f} answers a second instead of {best:.1f}")
    if overload.refusal_p99 is None or overload.refusal_p99 >= REFUSAL_SECONDS:
        found.append(f"p99 of refusals is {_ms(overload.refusal_p99)} ms")
    for name, before, after in (
        ("p50", plateau.ttft_p50, overload.ttft_p50),
        ("p95", plateau.ttft_p95, overload.ttft_p95),
    ):
        if before is None or after is None or after > TTFT * before:
            found.append(f"{name} of light clients' TTFT is {_ms(after)} ms, and was {_ms(before)} ms")
    if overload.light_refused:
        found.append(f"{overload.light_refused} calls of light clients were refused")
    for phase in (capacity, plateau, overload):
        found += [f"{phase.name}: {count} calls ended with {how}" for how, count in phase.odd.items()]
    if overload.late_p99 > LATE_SECONDS:
        found.append(f"the load was {_ms(overload.late_p99)} ms late (p99): the figures are this machine's")
    return found


def table(phases: Sequence[Phase]) -> str:
    """Return a table with one column for each phase."""
    rows: list[tuple[str, Sequence[object]]] = [
        ("", [phase.name for phase in phases]),
        ("offered, calls/s", [f"{phase.offered:.1f}" for phase in phases]),
        ("answered, calls/s", [f"{phase.answered:.1f}" for phase in phases]),
        ("refused, calls/s", [f"{phase.refused:.1f}" for phase in phases]),
        ("refused at once after, p50 ms", [_ms(phase.refusal_p50) for phase in phases]),
        ("refused at once after, p99 ms", [_ms(phase.refusal_p99) for phase in phases]),
        ("gave way to others, calls/s", [f"{phase.gave_way:.1f}" for phase in phases]),
        ("gave way after, p99 ms", [_ms(phase.gave_way_p99) for phase in phases]),
        ("light clients' calls", [phase.light for phase in phases]),
        ("of these refused", [phase.light_refused for phase in phases]),
        ("their TTFT, p50 ms", [_ms(phase.ttft_p50) for phase in phases]),
        ("their TTFT, p95 ms", [_ms(phase.ttft_p95) for phase in phases]),
        ("router, cores", [f"{phase.cores:.2f}" for phase in phases]),
        ("load late, p99 ms", [_ms(phase.late_p99) for phase in phases]),
    ]
    return "\n".join(f"{name:32}" + "".join(f"{value!s:>12}" for value in values) for name, values in rows)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f}"

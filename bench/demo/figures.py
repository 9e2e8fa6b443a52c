"""What the clients of the demo saw, as figures. Times are in emulated seconds, costs in cost units."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Self

from bench.report.meters import censored_percentile
from router.core.clients.fairness import jain_index
from router.core.model.cost import NOTHING, LinearCost, Tokens

HEAVY: Final = "heavy"
"""The heavy client's name in `HeavyAndLight`; whoever has another is a light one."""
COST: Final = LinearCost()


class Phase(StrEnum):
    """What goes on under a policy."""

    ALONE = "light alone"
    WARMUP = "warming up"
    MEASURED = "measuring"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Timetable:
    """When each part of one policy's run begins, in emulated seconds since its beginning."""

    alone: float
    """From then on the light clients are measured, alone; before, connections are made."""
    heavy: float
    """The heavy client comes."""
    measured: float
    end: float

    @classmethod
    def of(cls, seconds: float) -> Self:
        """Divide up so many emulated seconds."""
        return cls(0.03 * seconds, 0.15 * seconds, 0.35 * seconds, seconds)

    def phase(self, now: float) -> Phase:
        """What goes on at this time."""
        if now < self.heavy:
            return Phase.ALONE
        if now < self.measured:
            return Phase.WARMUP
        return Phase.MEASURED if now < self.end else Phase.DONE

    def begin(self, now: float) -> float:
        """Since when there are figures at this time: before the time measured they are of what went before."""
        if now < self.heavy:
            return self.alone
        return self.heavy if now < self.measured else self.measured


@dataclass(slots=True)
class LiveCall:
    """One call as its client sees it; filled in while it goes on."""

    client: str
    arrived: float
    started: float | None = None
    """When the first token came."""
    finished: float | None = None
    tokens: Tokens = NOTHING
    """By the engine's usage, which comes with the end."""


@dataclass(frozen=True, slots=True)
class Group:
    """One client, or several together."""

    requests: int
    """Finished in the time measured."""
    cost: float
    """What those came to."""
    ttft_p50_s: float | None
    """Of requests that came in the time measured; one that has no token at its end counts as having waited at least
    so long (`bench.report.meters.censored_percentile`)."""
    ttft_p95_s: float | None


@dataclass(frozen=True, slots=True)
class Reading:
    """What the router says of itself, the largest over its workers; None where it does not say."""

    service_gap: float | None = None
    """See `router.core.clients.service_gap`; nothing waits in a router whose window is off, and so it sees none."""
    service_gap_bound: float | None = None

    def joined(self, other: "Reading") -> "Reading":
        """The larger of each."""
        return Reading(
            _largest(self.service_gap, other.service_gap), _largest(self.service_gap_bound, other.service_gap_bound)
        )


@dataclass(frozen=True, slots=True)
class Figures:
    """One policy's run."""

    seconds: float
    """The time measured."""
    cost_per_s: float
    hit_rate: float | None
    """Cached tokens per token of the prompts of finished requests, by the engines' usage."""
    jain: float | None
    """Jain's index of what the clients were served; the light ones, who pause, cannot take an equal part."""
    heavy: Group
    light: Group
    """The light clients beside the heavy one."""
    light_alone: Group
    """The light clients before the heavy one came."""
    token_s: float | None
    """Mean time between two tokens of an answer. The workers' batches are full under every policy, so that it differs
    where this machine is too busy to emulate them at the same pace."""
    service_gap: float | None
    """The largest seen."""
    service_gap_bound: float | None


def figures(calls: Sequence[LiveCall], names: Iterable[str], times: Timetable, now: float, seen: Reading) -> Figures:
    """Figures of one run until now (see `Timetable.begin`). `names`: of all clients."""
    begin = times.begin(now)
    end = max(begin, min(now, times.end))
    ended = finished(calls, begin, end)
    served = [call.tokens for call in ended]
    cached, prompts = sum(each.cached for each in served), sum(each.cached + each.extend for each in served)
    light = [call for call in calls if call.client != HEAVY]
    each = [group([call for call in calls if call.client == name], begin, end).cost for name in names]
    return Figures(
        seconds=end - begin,
        cost_per_s=sum(map(COST, served)) / (end - begin) if end > begin else 0.0,
        hit_rate=cached / prompts if prompts else None,
        jain=jain_index(each),
        heavy=group([call for call in calls if call.client == HEAVY], begin, end),
        light=group(light, begin, end),
        light_alone=group(light, times.alone, min(now, times.heavy)),
        token_s=_token_seconds(ended),
        service_gap=seen.service_gap,
        service_gap_bound=seen.service_gap_bound,
    )


def group(calls: Sequence[LiveCall], begin: float, end: float) -> Group:
    """Figures of these calls between two times."""
    ended = finished(calls, begin, end)
    waits = [_wait(call, end) for call in calls if begin <= call.arrived < end]
    return Group(
        requests=len(ended),
        cost=sum(COST(call.tokens) for call in ended),
        ttft_p50_s=censored_percentile(waits, 0.50),
        ttft_p95_s=censored_percentile(waits, 0.95),
    )


def finished(calls: Iterable[LiveCall], begin: float, end: float) -> list[LiveCall]:
    """Those that ended between two times."""
    return [call for call in calls if call.finished is not None and begin <= call.finished < end]


def _token_seconds(ended: Iterable[LiveCall]) -> float | None:
    spans = [(call.finished - call.started, call.tokens.output - 1) for call in ended if call.started and call.finished]
    tokens = sum(tokens for _, tokens in spans)
    return sum(seconds for seconds, _ in spans) / tokens if tokens else None


def _wait(call: LiveCall, end: float) -> tuple[float, bool]:
    """How long its first token took, and whether it had come by the end."""
    if call.started is None or call.started >= end:
        return end - call.arrived, False
    return call.started - call.arrived, True


def _largest(one: float | None, other: float | None) -> float | None:
    return max((value for value in (one, other) if value is not None), default=None)

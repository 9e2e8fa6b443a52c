"""The figures of the demo, from what its clients saw. Times are emulated seconds, costs are cost units."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Self

from bench.report.meters import censored_percentile
from router.core.clients.fairness import jain_index
from router.core.model.cost import NOTHING, LinearCost, Tokens

HEAVY: Final = "heavy"
"""The heavy client's name in `HeavyAndLight`; all other clients are light."""
COST: Final = LinearCost()


class Phase(StrEnum):
    """The phases of a policy's run."""

    ALONE = "light alone"
    WARMUP = "warming up"
    MEASURED = "measuring"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Timetable:
    """When each phase of one policy's run begins, in emulated seconds since the run began."""

    alone: float
    """The light clients are measured alone from here on; before, connections are made."""
    heavy: float
    """The heavy client starts."""
    measured: float
    end: float

    @classmethod
    def of(cls, seconds: float) -> Self:
        """Divide `seconds` emulated seconds into phases."""
        return cls(0.03 * seconds, 0.15 * seconds, 0.35 * seconds, seconds)

    def phase(self, now: float) -> Phase:
        """Return the phase at `now`."""
        if now < self.heavy:
            return Phase.ALONE
        if now < self.measured:
            return Phase.WARMUP
        return Phase.MEASURED if now < self.end else Phase.DONE

    def measured_from(self, now: float) -> float:
        """Return when the time covered by figures at `now` began: with the current phase."""
        if now < self.heavy:
            return self.alone
        return self.heavy if now < self.measured else self.measured


@dataclass(slots=True)
class ObservedCall:
    """One call as its client sees it; filled in while it goes on."""

    client: str
    arrived: float
    started: float | None = None
    """When the first token arrived."""
    finished: float | None = None
    tokens: Tokens = NOTHING
    """From the engine's usage, which arrives at the end."""


@dataclass(frozen=True, slots=True)
class Group:
    """The figures of one client, or of several together."""

    requests: int
    """Requests finished in the measured time."""
    cost: float
    """The cost of these requests."""
    ttft_p50_s: float | None
    """Time to first token of the requests that arrived in the measured time.

    A request without a token at the end counts as having waited at least until then
    (`bench.report.meters.censored_percentile`).
    """
    ttft_p95_s: float | None


@dataclass(frozen=True, slots=True)
class Reading:
    """The service gap that the router reports, the largest over its workers; None if it reports none."""

    service_gap: float | None = None
    """As in `router.core.clients.fairness`; with the window off, nothing waits in the router: no gap."""
    service_gap_bound: float | None = None

    def joined(self, other: "Reading") -> "Reading":
        """Return the larger value of each field."""
        return Reading(
            _largest(self.service_gap, other.service_gap), _largest(self.service_gap_bound, other.service_gap_bound)
        )


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one policy's run."""

    seconds: float
    """Length of the measured time."""
    cost_per_s: float
    hit_rate: float | None
    """Cached tokens per prompt token of the finished requests, from the engines' usage."""
    jain: float | None
    """Jain's index of the clients' service. The light clients pause, so they cannot use an equal share."""
    heavy: Group
    light: Group
    """The light clients beside the heavy one."""
    light_alone: Group
    """The light clients before the heavy one starts."""
    token_s: float | None
    """Mean time between two tokens of an answer to a light client before the heavy one starts.

    The load is then the same under every policy, so this differs only if this machine is too busy to emulate the
    workers at the same pace.
    """
    service_gap: float | None
    """The largest value seen."""
    service_gap_bound: float | None


def figures(
    calls: Sequence[ObservedCall], names: Iterable[str], times: Timetable, now: float, seen: Reading
) -> Figures:
    """Compute the figures of one run at `now`, since `Timetable.measured_from`. `names`: of all clients."""
    begin = times.measured_from(now)
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
        token_s=_token_seconds(finished(light, times.alone, min(now, times.heavy))),
        service_gap=seen.service_gap,
        service_gap_bound=seen.service_gap_bound,
    )


def group(calls: Sequence[ObservedCall], begin: float, end: float) -> Group:
    """Compute the figures of these calls between two times."""
    ended = finished(calls, begin, end)
    waits = [_wait(call, end) for call in calls if begin <= call.arrived < end]
    return Group(
        requests=len(ended),
        cost=sum(COST(call.tokens) for call in ended),
        ttft_p50_s=censored_percentile(waits, 0.50),
        ttft_p95_s=censored_percentile(waits, 0.95),
    )


def finished(calls: Iterable[ObservedCall], begin: float, end: float) -> list[ObservedCall]:
    """Return the calls that ended between two times."""
    return [call for call in calls if call.finished is not None and begin <= call.finished < end]


def _token_seconds(ended: Iterable[ObservedCall]) -> float | None:
    spans = [(call.finished - call.started, call.tokens.output - 1) for call in ended if call.started and call.finished]
    tokens = sum(tokens for _, tokens in spans)
    return sum(seconds for seconds, _ in spans) / tokens if tokens else None


def _wait(call: ObservedCall, end: float) -> tuple[float, bool]:
    """Return how long a call waited for its first token, and whether that arrived before `end`."""
    if call.started is None or call.started >= end:
        return end - call.arrived, False
    return call.started - call.arrived, True


def _largest(one: float | None, other: float | None) -> float | None:
    return max((value for value in (one, other) if value is not None), default=None)

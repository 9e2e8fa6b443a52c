"""How unevenly clients are served: the VTC paper's measures, and the gap between two clients that both wait."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean, pvariance
from typing import Final, NamedTuple

from bench.report.records import CLIENT_VIEW, Record, Result
from router.core.model.cost import Tokens

WINDOW_SECONDS: Final = 60.0
STEP_SECONDS: Final = 30.0
"""Distance between the middles of two windows; the first begins at 0, the last ends with the observed time."""


class Spread(NamedTuple):
    """Statistics of the windows' service differences, in service units per second; the variance in their square."""

    largest: float
    mean: float
    variance: float


def service_difference(records: Sequence[Record], seconds: float) -> Spread:
    """Measure how far clients are behind a fair share ("Fairness in Serving Large Language Models", table 2).

    Each window's difference is the sum over clients of min(most - served, |asked - served|): `most` is the service of
    the client served most, `asked` the service of the calls that arrived in the window. Service is input + 2 · output
    tokens, spread evenly from the first token to the last. All calls must have ended: run with `drain`. Windows are
    counted as in the code published with the paper: ten minutes have 19. Raises ValueError for less than a window.
    """
    count = int((seconds - WINDOW_SECONDS) // STEP_SECONDS) + 1
    differences = [_difference(records, STEP_SECONDS * number) for number in range(count)]
    if not differences:
        raise ValueError(f"{seconds} s are less than a window")
    return Spread(max(differences), fmean(differences), pvariance(differences))


def difference_line(result: Result, ahead: str, behind: str) -> Sequence[tuple[float, float]]:
    """Return how much actual service (cost units) one client is ahead of another, at every poll of the measured time.

    It is 0 when measuring begins.
    """
    measured = [sample for sample in result.timeline if result.warmup <= sample.time <= result.seconds]
    line = [(sample.time, sample.service.get(ahead, 0.0) - sample.service.get(behind, 0.0)) for sample in measured]
    return [(time, difference - line[0][1]) for time, difference in line]


def widest(line: Iterable[tuple[float, float]]) -> float:
    """Return the most by which a line rises or falls over any interval, which is what theorems about service bound."""
    values = [value for _, value in line]
    return max(values) - min(values)


def _difference(records: Iterable[Record], begin: float) -> float:
    end = begin + WINDOW_SECONDS
    asked: defaultdict[str, float] = defaultdict(float)
    served: defaultdict[str, float] = defaultdict(float)
    for record in records:
        service = CLIENT_VIEW(Tokens(record.input_tokens, 0, record.output_tokens))
        asked[record.client] += service * (begin <= record.arrived < end) / WINDOW_SECONDS
        served[record.client] += service * _share(record, begin, end) / WINDOW_SECONDS
    most = max(served.values(), default=0.0)
    return sum(min(most - had, abs(asked[client] - had)) for client, had in served.items())


def _share(record: Record, begin: float, end: float) -> float:
    """Return the share of a call's service within this time."""
    if record.started is None or record.finished is None:
        return 0.0
    if record.finished == record.started:
        return float(begin <= record.started < end)
    within = min(end, record.finished) - max(begin, record.started)
    return max(0.0, within) / (record.finished - record.started)

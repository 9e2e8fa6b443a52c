"""Latency of whole programs: from the arrival of a program's first call to the end of its last.

A tree of thoughts, or a judge's calls for one article, is a program; a call outside any program counts as one.
"""

from collections.abc import Iterable, Sequence
from typing import TypedDict

from bench.report.meters import censored_mean, censored_percentile
from bench.report.records import Record
from bench.workloads.parts.traffic import Outcome


class ProgramSummary(TypedDict):
    """Programs whose first call arrived in the measured time; latencies in seconds.

    A program is done when as many of its calls are done as it has: `Record.program_calls`. One not done when measuring
    ends counts as having taken at least until then, whether its calls are running or have not arrived yet
    (`bench.report.meters.censored_percentile` and `censored_mean`). If one of its calls was rejected, failed or was
    cancelled, a program never ends: it counts as broken and in no latency.
    """

    done: int
    unfinished: int
    broken: int
    latency_p50_s: float | None
    latency_p99_s: float | None
    latency_mean_s: float | None


def summarise_programs(records: Iterable[Record], begin: float, end: float) -> ProgramSummary:
    """Summarise these clients' programs in the measured time, from `begin` to `end`."""
    measured = _measured(records, begin, end)
    spans = _spans(measured, end)
    done = sum(ended for _, ended in spans)
    return ProgramSummary(
        done=done,
        unfinished=len(spans) - done,
        broken=len(measured) - len(spans),
        latency_p50_s=censored_percentile(spans, 0.50),
        latency_p99_s=censored_percentile(spans, 0.99),
        latency_mean_s=censored_mean(spans),
    )


def program_spans(records: Iterable[Record], begin: float, end: float) -> Sequence[tuple[float, bool]]:
    """Return the duration of each program and whether it has ended; broken ones are left out."""
    return _spans(_measured(records, begin, end), end)


def _measured(records: Iterable[Record], begin: float, end: float) -> Sequence[Sequence[Record]]:
    """Return the calls of each program that began in that time."""
    programs: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        own = f"call {record.id}" if record.program is None else f"program {record.program}"
        programs.setdefault((record.client, own), []).append(record)
    return [calls for calls in programs.values() if begin <= calls[0].arrived < end]


def _spans(programs: Iterable[Sequence[Record]], end: float) -> Sequence[tuple[float, bool]]:
    whole = [calls for calls in programs if all(r.outcome in (Outcome.DONE, Outcome.UNFINISHED) for r in calls)]
    return [_span(calls, end) for calls in whole]


def _span(calls: Sequence[Record], end: float) -> tuple[float, bool]:
    """Return the duration of a program and whether it has ended; its calls are in order of arrival."""
    begin = calls[0].arrived
    ends = [call.finished for call in calls if call.finished is not None]
    if len(ends) < calls[0].program_calls:
        return end - begin, False
    return max(ends) - begin, True

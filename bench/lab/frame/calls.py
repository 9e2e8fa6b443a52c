"""Times of single calls, whichever program they belong to."""

from collections.abc import Iterable

from bench.report.programs import ProgramSummary, summarise_programs
from bench.report.records import Record, Result


def latencies(result: Result) -> ProgramSummary:
    """Summarise the calls that arrived in the measured time, from arrival to end."""
    return _each(result.records, result)


def response_times(result: Result, clients: Iterable[str]) -> ProgramSummary:
    """Summarise these clients' calls that arrived in the measured time, from arrival to the first token."""
    asked = set(clients)
    return _each([r._replace(finished=r.started) for r in result.records if r.client in asked], result)


def _each(records: Iterable[Record], result: Result) -> ProgramSummary:
    alone = [record._replace(program=None, program_calls=1) for record in records]
    return summarise_programs(alone, result.warmup, result.seconds)

"""How long clients had a call that waited, and nothing of theirs was served."""

from collections.abc import Iterable, Mapping
from math import inf

from bench.report.records import Record
from bench.workloads.parts.traffic import Outcome


def longest_unserved(records: Iterable[Record], end: float) -> Mapping[str, float]:
    """Of each client, the longest time up to `end` in which calls of it waited and none was answered, in seconds.

    A call waits from its arrival to its first token, whether in the router or in an engine, and is being answered from
    then on; one without a first token waits until it is over.
    """
    changes: dict[str, list[tuple[float, int, int]]] = {}
    for record in records:
        finished = min(end, inf if record.finished is None else record.finished)
        started = min(finished, inf if record.started is None else record.started)
        own = changes.setdefault(record.client, [])
        own += [(record.arrived, 1, 0), (started, -1, 1), (finished, 0, -1)]
    return {client: _longest(sorted(own)) for client, own in changes.items()}


def never_served(records: Iterable[Record]) -> int:
    """How many clients called and never got a first token or an answer."""
    called, served = set(), set()
    for record in records:
        called.add(record.client)
        if record.started is not None or record.outcome is Outcome.DONE:
            served.add(record.client)
    return len(called - served)


def _longest(changes: Iterable[tuple[float, int, int]]) -> float:
    """`changes`: time, by how much more calls wait from then on, and by how much more are answered; in order."""
    longest, waiting, answered = 0.0, 0, 0
    since = inf
    for time, more_waiting, more_answered in changes:
        waiting += more_waiting
        answered += more_answered
        if not waiting or answered:
            longest, since = max(longest, time - since), inf
        elif since == inf:
            since = time
    return longest

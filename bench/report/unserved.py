"""How long clients waited while none of their calls was being served."""

from collections.abc import Iterable, Mapping
from math import inf

from bench.report.records import Record
from bench.workloads.parts.traffic import Outcome


def longest_unserved(records: Iterable[Record], end: float) -> Mapping[str, float]:
    """Return the longest time (s) up to `end` in which a client had waiting calls and none being answered, per client.

    A call waits, in the router or in an engine, from its arrival to its first token, and is being answered from then
    on; without a first token it waits until its end.
    """
    changes: dict[str, list[tuple[float, int, int]]] = {}
    for record in records:
        finished = min(end, inf if record.finished is None else record.finished)
        started = min(finished, inf if record.started is None else record.started)
        own = changes.setdefault(record.client, [])
        own += [(record.arrived, 1, 0), (started, -1, 1), (finished, 0, -1)]
    return {client: _longest(sorted(own)) for client, own in changes.items()}


def never_served(records: Iterable[Record]) -> int:
    """Count the clients that made calls and never got a first token or an answer."""
    called, served = set(), set()
    for record in records:
        called.add(record.client)
        if record.started is not None or record.outcome is Outcome.DONE:
            served.add(record.client)
    return len(called - served)


def _longest(changes: Iterable[tuple[float, int, int]]) -> float:
    """`changes`: a time, and the changes in the calls that wait and in those being answered from then on; in order."""
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

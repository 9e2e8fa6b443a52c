"""What several experiments read from a simulation."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

from bench.experiments.experiment import Points
from bench.records import Record, Result, ServiceSample
from bench.summary import Summary

LIGHT = "light"
"""How the names of the well-behaved clients begin."""


def service_seen(summary: Summary) -> float:
    """Service of all clients as they see it, input + 2 · output tokens."""
    return sum(client["client_service"] for client in summary["clients"].values())


def modest(result: Result) -> Sequence[str]:
    """The clients called light; where none is, those that asked for no more than twice the mean.

    What a client asked for is the input of its calls and twice the output that they had.
    """
    named = [client for client in result.weights if client.startswith(LIGHT)]
    if named:
        return named
    asked = dict.fromkeys(result.weights, 0.0)
    for record in result.records:
        asked[record.client] += record.input_tokens + 2 * record.output_tokens
    return [client for client in asked if asked[client] <= 2 * sum(asked.values()) / len(asked)]


def light_records(result: Result) -> Sequence[Record]:
    """The calls of the well-behaved clients."""
    return [record for record in result.records if record.client.startswith(LIGHT)]


def first_token_spans(records: Iterable[Record], end: float) -> Iterator[tuple[float, bool]]:
    """How long each call took to its first token, and whether that had come by the end; see `bench.meters`."""
    for record in records:
        if record.started is None or record.started > end:
            yield end - record.arrived, False
        else:
            yield record.started - record.arrived, True


def first_token_line(records: Iterable[Record], width: float, end: float) -> Points:
    """Mean seconds to the first token of the calls that arrived in each `width` seconds.

    What has not come by the end counts as having taken until then.
    """
    spans: dict[int, list[float]] = {}
    for record in records:
        ((span, _),) = first_token_spans([record], end)
        spans.setdefault(int(record.arrived / width), []).append(span)
    return [((slot + 0.5) * width, sum(each) / len(each)) for slot, each in sorted(spans.items())]


Service = Callable[[ServiceSample], float]
"""What is read from a sample, in cost units served since the beginning."""


def actual(client: str) -> Service:
    """Extend + 2 · output tokens of this client."""
    return lambda sample: sample.service.get(client, 0.0)


def seen(client: str) -> Service:
    """Input + 2 · output tokens of this client."""
    return lambda sample: sample.client_service.get(client, 0.0)


def service_line(timeline: Sequence[ServiceSample], service: Service, width: float, end: float) -> Points:
    """Cost units a second in each `width` seconds up to the end."""
    ticks = _every(timeline, width, end)
    return [
        ((before.time + after.time) / 2, (service(after) - service(before)) / (after.time - before.time))
        for before, after in pairwise(ticks)
    ]


def all_active(result: Result) -> Sequence[ServiceSample]:
    """Samples from the first call of the last client to come until the last end of the first to stop."""
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    for record in result.records:
        first.setdefault(record.client, record.arrived)
        ended = result.seconds if record.finished is None else record.finished
        last[record.client] = max(last.get(record.client, 0.0), ended)
    return [s for s in result.timeline if max(first.values()) <= s.time <= min(last.values())]


def worst_spread(result: Result) -> float:
    """The largest difference between any two clients' actual service since all were active, in cost units."""
    samples = all_active(result)
    grown = [[actual(client)(s) - actual(client)(samples[0]) for client in result.weights] for s in samples]
    return max((max(each) - min(each) for each in grown), default=0.0)


def longest_alone(result: Result, share: float, width: float) -> float:
    """The longest time in which one client got this share of the actual service or more, while all were active.

    Looked at in steps of `width` seconds.
    """
    samples = _every(all_active(result), width, result.seconds)
    longest = 0.0
    for client in result.weights:
        since = None
        for before, after in pairwise(samples):
            own = actual(client)(after) - actual(client)(before)
            total = sum(actual(each)(after) - actual(each)(before) for each in result.weights)
            alone = total > 0 and own >= share * total
            since = (before.time if since is None else since) if alone else None
            longest = max(longest, after.time - since if since is not None else 0.0)
    return longest


def _every(timeline: Sequence[ServiceSample], width: float, end: float) -> Sequence[ServiceSample]:
    """The first sample in each `width` seconds up to the end."""
    ticks: dict[int, ServiceSample] = {}
    for sample in timeline:
        if sample.time <= end:
            ticks.setdefault(int(sample.time / width), sample)
    return list(ticks.values())

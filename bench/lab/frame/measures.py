"""Measures shared by several experiments."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import inf
from typing import Final

from bench.lab.frame.experiment import Points
from bench.report.meters import censored_mean, censored_percentile
from bench.report.programs import program_spans
from bench.report.records import Record, Result, ServiceSample
from bench.report.summary import Summary
from bench.workloads.parts.traffic import Outcome
from router.core.clients.fairness import jain_index

LIGHT: Final = "light"
"""How the names of the well-behaved clients begin."""
AWAITED: Final = (Outcome.DONE, Outcome.UNFINISHED)
"""The outcomes of calls that the client waited for."""


def service_seen(summary: Summary) -> float:
    """Return the service of all clients as they see it: input + 2 · output tokens."""
    return sum(client["client_service"] for client in summary["clients"].values())


def modest(result: Result) -> Sequence[str]:
    """Return the clients called light or, if there are none, those that asked for no more than twice the mean.

    What a client asked for is the input of its calls plus twice their output.
    """
    named = [client for client in result.weights if client.startswith(LIGHT)]
    if named:
        return named
    asked = dict.fromkeys(result.weights, 0.0)
    for record in result.records:
        asked[record.client] += record.input_tokens + 2 * record.output_tokens
    return [client for client in asked if asked[client] <= 2 * sum(asked.values()) / len(asked)]


LIGHT_TIMES: Final = tuple(
    f"light {kind} {figure}" for kind in ("TTFT", "latency") for figure in ("mean", "p50", "p95", "p99", "longest")
)


def light_times(result: Result) -> Mapping[str, float | None]:
    """Return seconds to the first token and to the end of the modest clients' calls, the latter of whole programs.

    Counts what began in the measured time. What had not happened at the end of the simulation counts as in
    `bench.report.meters`; for the longest, with its duration so far.
    """
    own = set(modest(result))
    records = [record for record in result.records if record.client in own]
    began = [r for r in records if result.warmup <= r.arrived < result.seconds and r.outcome in AWAITED]
    spans = {
        "TTFT": [_to_first_token(record, result.seconds) for record in began],
        "latency": program_spans(records, result.warmup, result.seconds),
    }
    return {
        f"light {kind} {figure}": value for kind, each in spans.items() for figure, value in _statistics(each).items()
    }


def _to_first_token(record: Record, end: float) -> tuple[float, bool]:
    ended = record.started if record.started is not None else record.finished
    return (end - record.arrived, False) if ended is None else (ended - record.arrived, True)


def _statistics(spans: Sequence[tuple[float, bool]]) -> Mapping[str, float | None]:
    return {
        "mean": censored_mean(spans),
        "p50": censored_percentile(spans, 0.50),
        "p95": censored_percentile(spans, 0.95),
        "p99": censored_percentile(spans, 0.99),
        "longest": max((span for span, _ in spans), default=None),
    }


def light_records(result: Result) -> Sequence[Record]:
    """Return the calls of the well-behaved clients."""
    return [record for record in result.records if record.client.startswith(LIGHT)]


def asked(result: Result) -> Mapping[str, float]:
    """Return what each client would use in the measured time, in cost units of actual service.

    A client that always calls again when a call ends would use everything: infinite. For the others it is the cost of
    the calls that arrived, at the mean cost of those that were done, their own or else everybody's.
    """
    calls: dict[str, list[Record]] = {client: [] for client in result.weights}
    for record in result.records:
        calls[record.client].append(record)
    usual = _mean_cost(result.records)
    return {client: inf if _always_calls(own) else _demand(result, own, usual) for client, own in calls.items()}


def _demand(result: Result, own: Sequence[Record], usual: float) -> float:
    came = sum(result.warmup <= record.arrived < result.seconds for record in own)
    return came * (_mean_cost(own) or usual)


def _mean_cost(records: Iterable[Record]) -> float:
    """Return the mean extend + 2 · output tokens of the calls that were done; 0 if none was."""
    done = [record for record in records if record.outcome is Outcome.DONE]
    total = sum(record.input_tokens - (record.cached_tokens or 0) + 2 * record.output_tokens for record in done)
    return total / len(done) if done else 0.0


def _always_calls(own: Sequence[Record]) -> bool:
    """True if half of a client's calls (a program's first ones) arrive just when another ends, or if none ever ends."""
    ends = {record.finished for record in own if record.finished is not None}
    firsts = {record.program or record.id: record for record in reversed(own)}.values()
    later = [record for record in firsts if record.arrived > own[0].arrived]
    following = sum(record.arrived in ends for record in later)
    return bool(own) and 2 * following >= len(later) and (bool(later) or not ends)


def max_min(demands: Mapping[str, float], whole: float) -> Mapping[str, float]:
    """Return each client's max-min share: what it asked for, but at most an equal part of what the
    smaller ones left.
    """
    parts: dict[str, float] = {}
    for place, client in enumerate(sorted(demands, key=demands.__getitem__)):
        parts[client] = min(demands[client], (whole - sum(parts.values())) / (len(demands) - place))
    return parts


def jain_of_shares(result: Result, summary: Summary) -> float | None:
    """Return Jain's index of each client's service over its max-min share of all service; None if there was none."""
    service = {client: each["service"] for client, each in summary["clients"].items()}
    fair = max_min(asked(result), sum(service.values()))
    return jain_index([service[client] / share for client, share in fair.items() if share > 0])


def first_token_spans(records: Iterable[Record], end: float) -> Iterator[tuple[float, bool]]:
    """Yield how long each call waited for its first token, and whether it arrived before `end`
    (`bench.report.meters`).
    """
    for record in records:
        if record.started is None or record.started > end:
            yield end - record.arrived, False
        else:
            yield record.started - record.arrived, True


def first_token_line(records: Iterable[Record], width: float, end: float) -> Points:
    """Return the mean seconds to the first token of the calls that arrived in each `width` seconds.

    A call without a token at the end counts as having waited until then.
    """
    spans: dict[int, list[float]] = {}
    for record in records:
        ((span, _),) = first_token_spans([record], end)
        spans.setdefault(int(record.arrived / width), []).append(span)
    return [((slot + 0.5) * width, sum(each) / len(each)) for slot, each in sorted(spans.items())]


Service = Callable[[ServiceSample], float]
"""Reads a service from a sample, in cost units since the beginning."""


def actual(client: str) -> Service:
    """Return the extend + 2 · output tokens of this client."""
    return lambda sample: sample.service.get(client, 0.0)


def seen(client: str) -> Service:
    """Return the input + 2 · output tokens of this client."""
    return lambda sample: sample.client_service.get(client, 0.0)


def service_line(timeline: Sequence[ServiceSample], service: Service, width: float, end: float) -> Points:
    """Return cost units per second in each `width` seconds up to the end."""
    ticks = _every(timeline, width, end)
    return [
        ((before.time + after.time) / 2, (service(after) - service(before)) / (after.time - before.time))
        for before, after in pairwise(ticks)
    ]


def all_active(result: Result) -> Sequence[ServiceSample]:
    """Return the samples from the first call of the last client to the first client's last end."""
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    for record in result.records:
        first.setdefault(record.client, record.arrived)
        ended = result.seconds if record.finished is None else record.finished
        last[record.client] = max(last.get(record.client, 0.0), ended)
    return [s for s in result.timeline if max(first.values()) <= s.time <= min(last.values())]


def worst_spread(result: Result) -> float:
    """Return the largest difference between two clients' actual service since all were active, in cost units."""
    samples = all_active(result)
    grown = [[actual(client)(s) - actual(client)(samples[0]) for client in result.weights] for s in samples]
    return max((max(each) - min(each) for each in grown), default=0.0)


def longest_alone(result: Result, share: float, width: float) -> float:
    """Return the longest time in which one client got at least this share of the service while all were active.

    Sampled in steps of `width` seconds.
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
    """Return the first sample in each `width` seconds up to the end."""
    ticks: dict[int, ServiceSample] = {}
    for sample in timeline:
        if sample.time <= end:
            ticks.setdefault(int(sample.time / width), sample)
    return list(ticks.values())

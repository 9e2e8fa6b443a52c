"""Figures of a simulation, in the shape of the JSON that `python -m bench simulate` writes."""

from collections.abc import Sequence
from typing import TypedDict

from bench.meters import censored_percentile
from bench.records import Record, Result, ServiceSample, WorkerTotals
from bench.traffic import Outcome
from router.core.fairness import jain_index


class ClientSummary(TypedDict):
    """One client. Times in seconds, of calls that arrived in the time measured.

    A call that has not come so far when measuring ends counts as having taken at least that long
    (`bench.meters.censored_percentile`).
    """

    weight: float
    service: float
    """Cost units served in the time measured."""
    requests: int
    """Calls that were done in the time measured."""
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    ttft_p99_s: float | None
    latency_p50_s: float | None
    latency_p99_s: float | None


class WorkerSummary(TypedDict):
    """One worker; see `WorkerTotals`."""

    utilisation: float
    """Share of the time measured in which a step ran."""
    steps: int
    prompt_tokens: int
    output_tokens: int
    hit_rate: float | None
    evicted_tokens: int
    preempted_requests: int
    waiting_requests_p95: float
    waiting_tokens_p95: float
    service_gap: float
    service_gap_bound: float | None


class Summary(TypedDict):
    """The whole simulation; all of it about the time measured."""

    throughput_tokens_per_s: float
    """Tokens of prompts answered by a first token, cached ones included, and of answers."""
    output_tokens_per_s: float
    requests_per_s: float
    hit_rate: float | None
    """Cached tokens per token of the prompts whose computation began, by the engines' count."""
    jain: float | None
    """Jain's index over service per weight while all clients were active: from the first arrival of the last to
    come until the last end of the first to stop. None if that is no time at all."""
    requests: dict[str, int]
    """By outcome; those unfinished arrived at any time."""
    clients: dict[str, ClientSummary]
    workers: dict[str, WorkerSummary]


def summarise(result: Result) -> Summary:
    """Make figures of it."""
    seconds = result.seconds - result.warmup
    workers = result.workers.values()
    output = sum(worker.output_tokens for worker in workers)
    ended = [r for r in result.records if r.finished is not None and result.warmup <= r.finished < result.seconds]
    done = sum(record.outcome is Outcome.DONE for record in ended)
    outcomes = {str(outcome): sum(r.outcome is outcome for r in ended) for outcome in Outcome}
    outcomes[Outcome.UNFINISHED] = sum(r.finished is None or r.finished >= result.seconds for r in result.records)
    return Summary(
        throughput_tokens_per_s=(sum(worker.prompt_tokens for worker in workers) + output) / seconds,
        output_tokens_per_s=output / seconds,
        requests_per_s=done / seconds,
        hit_rate=_ratio(sum(w.prefix_hits for w in workers), sum(w.prefix_queries for w in workers)),
        jain=jain(result),
        requests=outcomes,
        clients=_clients(result),
        workers={name: _worker(totals, seconds) for name, totals in result.workers.items()},
    )


def jain(result: Result) -> float | None:
    """See `Summary`."""
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    for record in result.records:
        first.setdefault(record.client, record.arrived)
        ended = result.seconds if record.finished is None else record.finished
        last[record.client] = max(last.get(record.client, 0.0), ended)
    if len(first) < len(result.weights):
        return None
    begin, end = max(result.warmup, *first.values()), min(result.seconds, *last.values())
    within = [sample for sample in result.timeline if begin <= sample.time <= end]
    if len(within) < 2:
        return None
    return jain_index([_grown(within, client) / weight for client, weight in result.weights.items()])


def _clients(result: Result) -> dict[str, ClientSummary]:
    measured = [sample for sample in result.timeline if result.warmup <= sample.time <= result.seconds]
    records: dict[str, list[Record]] = {client: [] for client in result.weights}
    for record in result.records:
        records[record.client].append(record)
    return {
        client: _client(result, weight, _grown(measured, client), records[client])
        for client, weight in result.weights.items()
    }


def _client(result: Result, weight: float, service: float, records: Sequence[Record]) -> ClientSummary:
    end = result.seconds
    arrived = [
        r for r in records if result.warmup <= r.arrived < end and r.outcome in (Outcome.DONE, Outcome.UNFINISHED)
    ]
    firsts = [_span(r, r.started if r.started is not None else r.finished, end) for r in arrived]
    lasts = [_span(r, r.finished, end) for r in arrived]
    return ClientSummary(
        weight=weight,
        service=service,
        requests=sum(
            r.outcome is Outcome.DONE and r.finished is not None and result.warmup <= r.finished < end for r in records
        ),
        ttft_p50_s=censored_percentile(firsts, 0.50),
        ttft_p95_s=censored_percentile(firsts, 0.95),
        ttft_p99_s=censored_percentile(firsts, 0.99),
        latency_p50_s=censored_percentile(lasts, 0.50),
        latency_p99_s=censored_percentile(lasts, 0.99),
    )


def _span(record: Record, until: float | None, end: float) -> tuple[float, bool]:
    """How long it took from the arrival, and whether that had come by the end."""
    if until is None:
        return end - record.arrived, False
    return until - record.arrived, True


def _worker(totals: WorkerTotals, seconds: float) -> WorkerSummary:
    return WorkerSummary(
        utilisation=totals.busy_seconds / seconds,
        steps=totals.steps,
        prompt_tokens=totals.prompt_tokens,
        output_tokens=totals.output_tokens,
        hit_rate=_ratio(totals.prefix_hits, totals.prefix_queries),
        evicted_tokens=totals.evicted_tokens,
        preempted_requests=totals.preempted_requests,
        waiting_requests_p95=totals.waiting_requests_p95,
        waiting_tokens_p95=totals.waiting_tokens_p95,
        service_gap=totals.service_gap,
        service_gap_bound=totals.service_gap_bound,
    )


def _grown(samples: Sequence[ServiceSample], client: str) -> float:
    return samples[-1].service.get(client, 0.0) - samples[0].service.get(client, 0.0)


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None

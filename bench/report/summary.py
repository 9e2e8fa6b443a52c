"""Figures of a run, in the form of the JSON that `python -m bench simulate` writes."""

from collections.abc import Mapping, Sequence
from typing import TypedDict

from bench.report.meters import censored_mean, censored_percentile
from bench.report.programs import ProgramSummary, summarise_programs
from bench.report.records import GroupTotals, Record, Result, ServiceSample, WorkerTotals
from bench.workloads.parts.traffic import Outcome
from router.core.clients.fairness import jain_index


class ClientSummary(TypedDict):
    """One client. Times are seconds, of calls that arrived in the measured time.

    A call that has not got a token, or not ended, when measuring ends counts as having taken at least until then
    (`bench.report.meters.censored_percentile`).
    """

    weight: float
    service: float
    """Actual service in the measured time, in cost units: the router's own cost, extend + 2 · output tokens."""
    client_service: float
    """Service as the client sees it in the measured time: input + 2 · output tokens, whatever was cached."""
    requests: int
    """Calls done in the measured time."""
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    ttft_p99_s: float | None
    ttft_mean_s: float | None
    """The response time of the VTC paper. Means are those of `bench.report.meters.censored_mean`."""
    latency_p50_s: float | None
    latency_p99_s: float | None
    latency_mean_s: float | None
    programs: ProgramSummary


class WorkerSummary(TypedDict):
    """One worker; the fields of `WorkerTotals` have the same meaning there."""

    utilisation: float
    """Share of the measured time in which a step was running."""
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


class GroupSummary(TypedDict):
    """Ranks in step, by the steps that began in the measured time.

    L of a rank is its load: the tokens of context of its running sequences.
    """

    ranks: int
    steps: int
    step_ms: float | None
    """Mean duration."""
    imbalance_tokens: float | None
    """Mean of max L - min L, as in BalanceRoute's tables (6.1)."""
    imbalance_sum_tokens: float | None
    """Mean of the sum over the ranks of max L - L, as in its theory (3.1)."""
    idle_share: float | None
    """Share of the ranks' attention time in which they wait for the fullest: sum of max L - L over sum of max L."""
    attention_share: float | None
    """Share of a step that depends on the contexts. No balancer can bring more than 1/(1 - idle · attention share)."""


class WholeRunSummary(TypedDict):
    """From the beginning to the end of the last call, warm-up and drain included: what was put off counts, too.

    Without a drain, to the end of the measured time.
    """

    output_tokens_per_s: float | None
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    ttft_max_s: float | None
    longest_wait_s: float | None
    """The longest that a call waited in the router before it was sent to a worker."""


class Summary(TypedDict):
    """The whole run, within the measured time."""

    throughput_tokens_per_s: float
    """Tokens of answers and of prompts answered by a first token, cached ones included."""
    output_tokens_per_s: float
    requests_per_s: float
    hit_rate: float | None
    """Cached tokens per token of the prompts whose prefill began, as counted by the engines."""
    jain: float | None
    """Jain's index of actual service per weight while all clients were active.

    That is from the last first arrival of a client to the first last end. None if this time is empty.
    """
    jain_client: float | None
    """The same index of service as the clients see it."""
    last_end_s: float | None
    """When the last call ended, in seconds since the beginning: the makespan if the workload has an end."""
    requests: dict[str, int]
    """Calls by outcome; unfinished ones arrived at any time."""
    programs: ProgramSummary
    """Programs of all clients."""
    clients: dict[str, ClientSummary]
    workers: dict[str, WorkerSummary]
    groups: dict[str, GroupSummary]
    """Ranks in step, by barrier."""
    whole_run: WholeRunSummary


def summarise(result: Result) -> Summary:
    """Compute the figures of a run."""
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
        jain_client=jain_client(result),
        last_end_s=max((r.finished for r in result.records if r.finished is not None), default=None),
        requests=outcomes,
        programs=summarise_programs(result.records, result.warmup, result.seconds),
        clients=_clients(result),
        workers={name: _worker(totals, seconds) for name, totals in result.workers.items()},
        groups={name: _group(totals) for name, totals in result.groups.items()},
        whole_run=_whole_run(result),
    )


def jain(result: Result) -> float | None:
    """Return `Summary.jain` of a run."""
    return _jain(result, [sample.service for sample in _all_active(result)])


def jain_client(result: Result) -> float | None:
    """Return `Summary.jain_client` of a run."""
    return _jain(result, [sample.client_service for sample in _all_active(result)])


def _jain(result: Result, services: Sequence[Mapping[str, float]]) -> float | None:
    if len(services) < 2:
        return None
    return jain_index([_grown(services, client) / weight for client, weight in result.weights.items()])


def _all_active(result: Result) -> Sequence[ServiceSample]:
    """Return the samples of the measured time while all clients were active; none if they never all were."""
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    for record in result.records:
        first.setdefault(record.client, record.arrived)
        ended = result.seconds if record.finished is None else record.finished
        last[record.client] = max(last.get(record.client, 0.0), ended)
    if len(first) < len(result.weights):
        return []
    begin, end = max(result.warmup, *first.values()), min(result.seconds, *last.values())
    return [sample for sample in result.timeline if begin <= sample.time <= end]


def _clients(result: Result) -> dict[str, ClientSummary]:
    measured = [sample for sample in result.timeline if result.warmup <= sample.time <= result.seconds]
    actual, seen = [sample.service for sample in measured], [sample.client_service for sample in measured]
    records: dict[str, list[Record]] = {client: [] for client in result.weights}
    for record in result.records:
        records[record.client].append(record)
    return {
        client: _client(result, weight, _grown(actual, client), _grown(seen, client), records[client])
        for client, weight in result.weights.items()
    }


def _client(
    result: Result, weight: float, service: float, client_service: float, records: Sequence[Record]
) -> ClientSummary:
    begin, end = result.warmup, result.seconds
    arrived = [r for r in records if begin <= r.arrived < end and r.outcome in (Outcome.DONE, Outcome.UNFINISHED)]
    firsts = [_span(r, r.started if r.started is not None else r.finished, end) for r in arrived]
    lasts = [_span(r, r.finished, end) for r in arrived]
    return ClientSummary(
        weight=weight,
        service=service,
        client_service=client_service,
        requests=sum(
            r.outcome is Outcome.DONE and r.finished is not None and begin <= r.finished < end for r in records
        ),
        ttft_p50_s=censored_percentile(firsts, 0.50),
        ttft_p95_s=censored_percentile(firsts, 0.95),
        ttft_p99_s=censored_percentile(firsts, 0.99),
        ttft_mean_s=censored_mean(firsts),
        latency_p50_s=censored_percentile(lasts, 0.50),
        latency_p99_s=censored_percentile(lasts, 0.99),
        latency_mean_s=censored_mean(lasts),
        programs=summarise_programs(records, begin, end),
    )


def _span(record: Record, until: float | None, end: float) -> tuple[float, bool]:
    """Return the time from the call's arrival to `until`, and whether it happened before `end`."""
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


def _group(totals: GroupTotals) -> GroupSummary:
    steps, seconds = totals.steps, totals.step_seconds
    return GroupSummary(
        ranks=totals.ranks,
        steps=steps,
        step_ms=_ratio(1000 * seconds, steps),
        imbalance_tokens=_ratio(totals.spread_tokens, steps),
        imbalance_sum_tokens=_ratio(totals.idle_tokens, steps),
        idle_share=_ratio(totals.idle_tokens, totals.room_tokens),
        attention_share=_ratio(totals.attention_seconds, seconds),
    )


def _whole_run(result: Result) -> WholeRunSummary:
    served = [record for record in result.records if record.outcome in (Outcome.DONE, Outcome.UNFINISHED)]
    ends = [record.finished for record in result.records if record.finished is not None]
    end = max(ends, default=0.0) if len(ends) == len(result.records) else result.seconds
    firsts = [_span(record, record.started or record.finished, end) for record in served]
    return WholeRunSummary(
        output_tokens_per_s=_ratio(sum(record.output_tokens for record in result.records), end),
        ttft_p50_s=censored_percentile(firsts, 0.50),
        ttft_p95_s=censored_percentile(firsts, 0.95),
        ttft_max_s=max((seconds for seconds, _ in firsts), default=None),
        longest_wait_s=max((_span(record, record.dispatched, end)[0] for record in served), default=None),
    )


def _grown(services: Sequence[Mapping[str, float]], client: str) -> float:
    return services[-1].get(client, 0.0) - services[0].get(client, 0.0)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None

"""The state of the scheduler at one moment: the content of /fairness, /v1/usage and the state gauges of /metrics."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any, Final, TypeVar

from pydantic import TypeAdapter

from router.auth.identity import Identity
from router.auth.prices import PricedUsage, PriceList, day_of
from router.core.clients.ledger import Account
from router.core.clients.turns import ClientTurns
from router.core.fleet.engine_work import EngineWork
from router.core.fleet.health import Condition
from router.core.model.commands import Deficit
from router.core.model.cost import NOTHING, Tokens
from router.core.model.load import Limits
from router.core.model.request import BarrierId, ClientId, GroupId, WorkerId
from router.core.scheduler import Scheduler
from router.telemetry.turn_report import NO_ROUND, NO_WAIT, RoundReport, WaitReport, round_report, wait_report
from router.upstream.directory import WorkerDirectory, WorkerEndpoint

T = TypeVar("T")

SILENT: Final = "silent"
BREAKER_STATES: Final = (*Condition, SILENT)
"""States of a circuit breaker, and `silent` for a worker that does not answer, whatever the state of its breaker."""
CLIENTS_PER_BATCH: Final = 50
"""Clients that are read or written between two turns of the event loop."""


@dataclass(frozen=True, slots=True)
class Service:
    """Service in tokens, and its cost."""

    extend: int
    """Input tokens computed."""
    cached: int
    """Input tokens found in a prefix cache."""
    output: int
    """Output tokens."""
    cost: float
    """Cost of the service in cost units."""


@dataclass(frozen=True, slots=True)
class ClientReport:
    """One client."""

    weight: float
    """Its share relative to other clients."""
    service: Service
    """What it was served so far."""
    queued: int
    """Requests that wait in the router."""
    running: int
    """Requests at workers."""
    wait_p50_s: float | None
    """Median wait in the router's queue of its last 256 requests, in seconds; None before the first."""
    wait_p95_s: float | None
    """The 95th percentile of the same."""
    deficit: dict[WorkerId, Deficit]
    """Its deficits by worker, in cost units."""
    share: float | None = None
    """Its share of the cost of all service in the last minute, 0 to 1; None if nothing was served."""
    service_lag: float = 0.0
    """How far it is behind an even share of service, in cost units per weight; 0 while it is not active."""
    unserved_s: float | None = None
    """Seconds for which it has had a waiting call and been served nothing; None while no call of it waits."""


@dataclass(frozen=True, slots=True)
class UsageReport:
    """What a client sees of itself at /v1/usage."""

    client: ClientId
    """Its name."""
    weight: float
    """Its share relative to other clients, or to other members of its group."""
    group: GroupId | None
    """The group whose weight it shares with the other members; None without a group."""
    service: Service
    """What it was served so far."""
    share: float
    """Its share of the fleet among the clients that are active now, 0 to 1."""
    queued: int
    """Requests that wait in the router."""
    running: int
    """Requests at workers."""
    wait_p95_s: float | None
    """95th percentile of the wait in the router's queue of its last 256 requests, in seconds; None before the first."""
    currency: str | None
    """The currency of amounts; None without prices."""
    usage: list[PricedUsage]
    """What it used by day (UTC) and model, oldest first; a call counts on the day on which it ended."""


@dataclass(frozen=True, slots=True)
class WorkerCacheReport:
    """The predicted content of one worker's prefix cache, and how right predictions were.

    All counts are in tokens and since the worker joined.
    """

    capacity: int
    """Tokens that the cache can hold."""
    believed: int
    """Tokens believed to be cached now."""
    answers: int
    """Answers that reported how much of their prompt was cached; the next five fields count these answers only."""
    prompt: int
    """Input tokens."""
    predicted: int
    """Input tokens predicted to be cached."""
    actual: int
    """Input tokens that were cached."""
    false_hit: int
    """Input tokens predicted to be cached that were not."""
    missed_hit: int
    """Input tokens that were cached and not predicted to be."""
    error: float | None
    """Mean absolute error of the last 200 predictions, as a share of the prompt; None before the first."""
    discount: float
    """Factor on predictions while they are wrong; 1 while they are right."""
    silent: bool
    """Whether the worker's answers never report how much was cached."""
    evicted: dict[str, int]
    """Tokens evicted, by the signal that revealed the eviction: replayed, corrected, counted, aged, told, restart."""


@dataclass(frozen=True, slots=True)
class WorkerWorkReport:
    """Tokens charged for a worker's work since it joined, beside those that its own counters report as computed.

    The counters start with the worker's first report, and include calls that did not come through this router.
    """

    charged_input: int
    """Computed input tokens charged to clients."""
    charged_output: int
    """Output tokens charged to clients."""
    computed_input: int | None
    """Input tokens that the engine counted as computed; None if it has no such counter."""
    computed_output: int | None
    """Output tokens that the engine counted; None if it has no such counter."""
    charged_of_computed: float | None = None
    """Tokens charged over tokens computed, of the kinds that the engine counts; None before it has computed any."""


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """One worker."""

    url: str
    """Its address."""
    healthy: bool
    """Whether it answers health polls."""
    queued: int
    """Requests that wait for it in the router."""
    running: int
    """Requests in flight at the worker."""
    unstarted_tokens: int
    """Uncached input tokens of its requests without a first token."""
    window: Limits | None
    """What its window allows in flight; None without a window."""
    kv_tokens: int | None
    """Capacity of its KV cache in tokens; None while unknown."""
    service_gap: float | None
    """Largest difference in service between two clients that wait in its queue, in cost units per weight; None where
    nothing bounds it (`router.core.clients.fairness`)."""
    service_gap_bound: float | None
    """What the service gap cannot exceed, in cost units per weight; None where nothing bounds it."""
    cache: WorkerCacheReport | None = None
    """Its prefix cache; None while it is away."""
    unread: int = 0
    """Answers to polls of its load and cache that could not be read."""
    breaker: str | None = None
    """State of its circuit breaker, or `silent`; None while it is away."""
    work: WorkerWorkReport | None = None
    """Its work, as charged and as counted by the engine; None while it is away."""
    context_tokens: int = 0
    """Tokens of its requests in flight, which a decode step reads: prompts, cached or not, and output so far."""
    rank: int | None = None
    """Its data-parallel rank; None if its URL has one engine, or it is the URL of several ranks as a whole."""
    barrier: BarrierId | None = None
    """The group with which it steps; None if it waits for no other worker."""


@dataclass(frozen=True, slots=True)
class BarrierReport:
    """Ranks that step together, by L, the context tokens of each."""

    ranks: int
    """How many there are."""
    most_tokens: int
    """The largest L, which each step waits for."""
    imbalance_tokens: int
    """The largest L less the smallest."""
    imbalance_sum_tokens: int
    """The sum over the ranks of what each lacks to the largest L."""
    idle_share: float | None
    """That sum over the number of ranks times the largest L: the share of the ranks' attention time that is idle. None
    while nothing is in flight."""


@dataclass(frozen=True, slots=True)
class FairnessReport:
    """Fairness in the whole fleet."""

    policy: str
    """The scheduling policy."""
    jain: float | None
    """Jain's index of service per weight in the last minute, of clients backlogged for half of it or longer; None
    without any."""
    clients: dict[ClientId, ClientReport]
    """The clients that the router remembers."""
    forgotten: Service
    """Service of clients that the router no longer remembers."""
    workers: dict[WorkerId, WorkerReport]
    """The workers by id."""
    service_lag: float = 0.0
    """The largest service lag of a client, in cost units per weight."""
    rounds: RoundReport = NO_ROUND
    """Rounds in which every active client is served."""
    waits: WaitReport = NO_WAIT
    """The longest waits."""
    barriers: dict[BarrierId, BarrierReport] | None = None
    """The groups of ranks that step together; None if there is none."""


_REPORT: Final = TypeAdapter(FairnessReport)
_CLIENTS: Final = TypeAdapter(dict[ClientId, ClientReport])
_OF_RANKS: Final[dict[str, Any]] = {
    "barriers": True,
    "workers": {"__all__": {"rank", "barrier", "context_tokens"}},
}
"""What is left out where there are no ranks."""


async def fairness_report(
    policy: str, scheduler: Scheduler, directory: WorkerDirectory, now: float, unread: Mapping[WorkerId, int]
) -> FairnessReport:
    """Build the report; changes nothing. `unread`: answers to polls that could not be read, by worker.

    Reads a batch of clients at a time and lets the event loop run other tasks in between. Service is as it was at the
    beginning, so that the figures add up; everything else is as it is when it is read.
    """
    accounts, running = scheduler.ledger, Counter(bill.client for bill in scheduler.ledger.bills)
    forgotten, jain = _service(accounts.forgotten, scheduler), scheduler.fairness.jain(now)
    turns = scheduler.fairness.turns
    rounds, longest = turns.rounds(scheduler.fleet.rate_of_all(), now), turns.longest_waits(now)
    rows = [
        (client, weight, accounts.accounts[client].served if client in accounts.accounts else NOTHING)
        for client, weight in scheduler.weights.items()
    ]
    clients, client_turns = {}, []
    for batch in _batches(rows):
        for client, weight, served in batch:
            client_turns.append(turns.client_turns(client, now))
            clients[client] = _client(
                client, weight, _service(served, scheduler), client_turns[-1], running[client], scheduler, now
            )
        await asyncio.sleep(0)
    workers = await worker_reports(scheduler, directory, unread)
    lag = max((each.lag for each in client_turns), default=0.0)
    waits = wait_report(client_turns, longest, rounds.fair_s)
    barriers = barrier_reports(workers.values()) or None
    return FairnessReport(policy, jain, clients, forgotten, workers, lag, round_report(rounds), waits, barriers)


def _client(
    client: ClientId,
    weight: float,
    service: Service,
    turns: ClientTurns,
    running: int,
    scheduler: Scheduler,
    now: float,
) -> ClientReport:
    return ClientReport(
        weight,
        service,
        scheduler.backlog.of_client(client),
        running,
        *scheduler.fairness.waits(client),
        _deficits(client, scheduler),
        scheduler.fairness.share(client, now),
        turns.lag,
        turns.unserved_s,
    )


def usage_report(scheduler: Scheduler, who: Identity, prices: PriceList, bases: Mapping[str, str]) -> UsageReport:
    """Build the report for a client; changes nothing. `bases`: as in `PriceList`."""
    client, weight, group = who.client, who.weight, who.shared_group
    account = scheduler.ledger.accounts.get(client, Account())
    return UsageReport(
        client,
        weight,
        group,
        _service(account.served, scheduler),
        scheduler.shares.fleet_share(client, weight, group, who.group_weight),
        scheduler.backlog.of_client(client),
        scheduler.ledger.in_flight(client),
        scheduler.fairness.waits(client)[1],
        prices.currency,
        list(prices.priced(scheduler.ledger.usage.rows_of(client), bases)),
    )


def usage_of_all(
    scheduler: Scheduler, first: date, last: date, prices: PriceList, bases: Mapping[str, str]
) -> Iterator[Sequence[PricedUsage]]:
    """Yield the usage of all clients from the first to the last day, both included, in batches, by day, client and
    model. Each day is as it is when its first batch is asked for. `bases`: as in `PriceList`.
    """
    for day, rows in scheduler.ledger.usage.days():
        if first <= day_of(day) <= last:
            for batch in _batches(sorted(rows)):
                yield list(prices.priced(batch, bases))


async def worker_reports(
    scheduler: Scheduler, directory: WorkerDirectory, unread: Mapping[WorkerId, int]
) -> dict[WorkerId, WorkerReport]:
    """Build the reports of all workers, one per turn of the event loop."""
    reports = {}
    for endpoint in directory.endpoints:
        healthy = directory.is_up(endpoint)
        reports[endpoint.id] = _worker(endpoint, scheduler, unread.get(endpoint.id, 0), healthy=healthy)
        await asyncio.sleep(0)
    return reports


def barrier_reports(workers: Iterable[WorkerReport]) -> dict[BarrierId, BarrierReport]:
    """Return the reports of all groups whose ranks step together."""
    loads: dict[BarrierId, list[int]] = {}
    for worker in workers:
        if worker.barrier is not None:
            loads.setdefault(worker.barrier, []).append(worker.context_tokens)
    return {barrier: _barrier(tokens) for barrier, tokens in loads.items()}


def _barrier(loads: Sequence[int]) -> BarrierReport:
    most = max(loads)
    lacking = len(loads) * most - sum(loads)
    return BarrierReport(
        len(loads), most, most - min(loads), lacking, lacking / (len(loads) * most) if most > 0 else None
    )


async def report_json(report: FairnessReport) -> bytes:
    """Encode the report as JSON, a batch of clients per turn of the event loop."""
    ranked = any(each.rank is not None or each.barrier is not None for each in report.workers.values())
    rest = _REPORT.dump_json(replace(report, clients={}), exclude=None if ranked else _OF_RANKS)
    clients = []
    for batch in _batches([*report.clients.items()]):
        clients.append(_CLIENTS.dump_json(dict(batch))[1:-1])
        await asyncio.sleep(0)
    return rest.replace(b'"clients":{}', b'"clients":{%b}' % b",".join(clients), 1)


def _batches(rows: Sequence[T]) -> Iterator[Sequence[T]]:
    return (rows[start : start + CLIENTS_PER_BATCH] for start in range(0, len(rows), CLIENTS_PER_BATCH))


def _deficits(client: ClientId, scheduler: Scheduler) -> dict[WorkerId, Deficit]:
    deficits = {state.worker.id: scheduler.policy.deficit(client, state.worker.id) for state in scheduler.fleet}
    return {worker: deficit for worker, deficit in deficits.items() if deficit != Deficit()}


def _service(served: Tokens, scheduler: Scheduler) -> Service:
    return Service(served.extend, served.cached, served.output, scheduler.settings.cost(served))


def _cache(worker: WorkerId, scheduler: Scheduler) -> WorkerCacheReport:
    mirror = scheduler.mirror
    cache = mirror.cache(worker)
    calibration = cache.calibration
    totals = calibration.totals
    return WorkerCacheReport(
        capacity=cache.capacity,
        believed=round(mirror.held_tokens(worker)),
        answers=totals.answers,
        prompt=totals.prompt,
        predicted=totals.predicted,
        actual=totals.actual,
        false_hit=totals.false_hit,
        missed_hit=totals.missed_hit,
        error=calibration.error,
        discount=calibration.discount,
        silent=calibration.silent,
        evicted=dict(cache.evictions),
    )


def _work(work: EngineWork, charged: Tokens) -> WorkerWorkReport:
    pairs = [(charged.extend, work.input_tokens), (charged.output, work.output_tokens)]
    counted = [(charge, tokens) for charge, tokens in pairs if tokens is not None]
    computed = sum(tokens for _, tokens in counted)
    return WorkerWorkReport(
        charged.extend,
        charged.output,
        _rounded(work.input_tokens),
        _rounded(work.output_tokens),
        sum(charge for charge, _ in counted) / computed if computed else None,
    )


def _rounded(tokens: float | None) -> int | None:
    return None if tokens is None else round(tokens)


def _worker(endpoint: WorkerEndpoint, scheduler: Scheduler, unread: int, *, healthy: bool) -> WorkerReport:
    if endpoint.id not in scheduler.fleet:
        return WorkerReport(endpoint.url, healthy, 0, 0, 0, None, None, None, None, unread=unread, rank=endpoint.rank)
    state = scheduler.fleet[endpoint.id]
    properties = scheduler.policy.properties
    queue = None if properties.pooled else endpoint.id
    return WorkerReport(
        url=endpoint.url,
        healthy=healthy,
        queued=scheduler.backlog.length(endpoint.id),
        running=state.load.requests,
        unstarted_tokens=state.load.unstarted_tokens,
        window=state.window.limits,
        kv_tokens=state.worker.kv_tokens,
        service_gap=scheduler.fairness.gap(queue),
        service_gap_bound=scheduler.fairness.bound(queue, properties.gap_quantum),
        cache=_cache(endpoint.id, scheduler),
        unread=unread,
        breaker=SILENT if state.silent else state.health.condition,
        work=_work(state.work, state.charged),
        context_tokens=state.context_tokens,
        rank=endpoint.rank,
        barrier=None if state.left else state.worker.barrier,
    )

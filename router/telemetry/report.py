"""What an operator sees of the scheduler at one moment: the content of /fairness and of the gauges in /metrics."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from pydantic import TypeAdapter

from router.core.clients.ledger import Account
from router.core.clients.turns import ClientTurns
from router.core.fleet.engine_work import EngineWork
from router.core.fleet.health import Condition
from router.core.model.commands import Deficit
from router.core.model.cost import NOTHING, Tokens
from router.core.model.load import Limits
from router.core.model.request import ClientId, GroupId, WorkerId
from router.core.scheduler import Scheduler
from router.telemetry.turn_report import NO_ROUND, NO_WAIT, RoundReport, WaitReport, round_report, wait_report
from router.upstream.directory import WorkerDirectory, WorkerEndpoint

T = TypeVar("T")

SILENT: Final = "silent"
BREAKER_STATES: Final = (*Condition, SILENT)
"""Of its breaker; or it says nothing, and is sent nothing, whatever its breaker is."""
CLIENTS_PER_BATCH: Final = 50
"""So many are read, or written, in one go."""


@dataclass(frozen=True, slots=True)
class Service:
    """What a client was served, in tokens, and what that cost, in cost units."""

    extend: int
    cached: int
    output: int
    cost: float


@dataclass(frozen=True, slots=True)
class ClientReport:
    """One client."""

    weight: float
    service: Service
    queued: int
    running: int
    wait_p50_s: float | None
    wait_p95_s: float | None
    deficit: dict[WorkerId, Deficit]
    share: float | None = None
    """Of the cost served in the last minute, 0 to 1; None if nothing was served."""
    service_lag: float = 0.0
    """How far it is behind an even share, see `router.core.clients.service_lag`; 0 while it is not active."""
    unserved_s: float | None = None
    """For how long a call of its has waited while it was served nothing; None while none of its waits."""


@dataclass(frozen=True, slots=True)
class UsageReport:
    """What a client is told of itself."""

    client: ClientId
    weight: float
    group: GroupId | None
    """Whose weight it shares with others."""
    service: Service
    share: float
    """What of the fleet is its own, while those are active that are now: 0 to 1."""
    queued: int
    running: int
    wait_p95_s: float | None


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What is believed of one worker's prefix cache, and how right that was; in tokens, counted since it joined."""

    capacity: int
    believed: int
    """Cached at this moment."""
    answers: int
    """That told what was cached of their prompts; the next five are of these."""
    prompt: int
    predicted: int
    actual: int
    false_hit: int
    missed_hit: int
    error: float | None
    """Mean absolute error of the last 200 predictions as a share of the prompt; None before the first."""
    discount: float
    """What predictions are multiplied with until they are right again; 1 where they are."""
    silent: bool
    """Whether its answers never tell what was cached."""
    evicted: dict[str, int]
    """By what told of it: replayed, corrected, counted, aged, told, restart."""


@dataclass(frozen=True, slots=True)
class WorkReport:
    """What was charged for a worker's work since it joined, beside what its own counters say that it computed since its
    first report; in tokens. Calls that do not come through this router are in the latter alone.
    """

    charged_input: int
    charged_output: int
    computed_input: int | None
    """None where it does not count."""
    computed_output: int | None
    charged_of_computed: float | None = None
    """All that was charged over all that was computed, of the kinds that it counts; None before it computed any."""


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """One worker; gap and bound as `service_gap` defines them, None where nothing bounds the gap."""

    url: str
    healthy: bool
    queued: int
    running: int
    unstarted_tokens: int
    window: Limits | None
    kv_tokens: int | None
    service_gap: float | None
    service_gap_bound: float | None
    cache: CacheReport | None = None
    unread: int = 0
    """Its answers about load and cache that were of no use."""
    breaker: str | None = None
    """One of `BREAKER_STATES`; None while it is away."""
    work: WorkReport | None = None
    """None while it is away."""


@dataclass(frozen=True, slots=True)
class FairnessReport:
    """The fleet."""

    policy: str
    jain: float | None
    clients: dict[ClientId, ClientReport]
    forgotten: Service
    """What clients were served that are not remembered any more."""
    workers: dict[WorkerId, WorkerReport]
    service_lag: float = 0.0
    """The largest of all clients."""
    rounds: RoundReport = NO_ROUND
    waits: WaitReport = NO_WAIT


_REPORT: Final = TypeAdapter(FairnessReport)
_CLIENTS: Final = TypeAdapter(dict[ClientId, ClientReport])


async def fairness_report(
    policy: str, scheduler: Scheduler, fleet: WorkerDirectory, now: float, unread: Mapping[WorkerId, int]
) -> FairnessReport:
    """Read it all off; changes nothing. `unread`: by worker, see `WorkerReport`.

    A few clients at a time, so that the event loop can do something else in between: what each was served is what it
    was at the beginning, and adds up; the rest is what it is when it is read.
    """
    accounts, running = scheduler.ledger, Counter(bill.client for bill in scheduler.ledger.bills.values())
    forgotten, jain = _service(accounts.forgotten, scheduler), scheduler.fairness.jain(now)
    turns = scheduler.fairness.turns
    rounds, longest = turns.rounds(scheduler.cluster.rate_of_all(), now), turns.longest_waits(now)
    met = [
        (client, weight, accounts.accounts[client].served if client in accounts.accounts else NOTHING)
        for client, weight in scheduler.weights.items()
    ]
    clients, felt = {}, []
    for some in _a_few(met):
        for client, weight, served in some:
            felt.append(turns.of(client, now))
            clients[client] = _client(
                client, weight, _service(served, scheduler), felt[-1], running[client], scheduler, now
            )
        await asyncio.sleep(0)
    workers = await worker_reports(scheduler, fleet, unread)
    lag = max((each.lag for each in felt), default=0.0)
    waits = wait_report(felt, longest, rounds.fair_s)
    return FairnessReport(policy, jain, clients, forgotten, workers, lag, round_report(rounds), waits)


def _client(
    client: ClientId,
    weight: float,
    service: Service,
    felt: ClientTurns,
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
        felt.lag,
        felt.unserved_s,
    )


def usage_report(
    scheduler: Scheduler, client: ClientId, weight: float, group: GroupId | None, group_weight: float
) -> UsageReport:
    """What a client with this weight, in this group, is told; changes nothing."""
    account = scheduler.ledger.accounts.get(client, Account())
    return UsageReport(
        client,
        weight,
        group,
        _service(account.served, scheduler),
        scheduler.shares.part(client, weight, group, group_weight),
        scheduler.backlog.of_client(client),
        scheduler.ledger.in_flight(client),
        scheduler.fairness.waits(client)[1],
    )


async def worker_reports(
    scheduler: Scheduler, fleet: WorkerDirectory, unread: Mapping[WorkerId, int]
) -> dict[WorkerId, WorkerReport]:
    """What of that is about the workers."""
    reports = {}
    for backend in fleet.backends:
        reports[backend.id] = _worker(backend, scheduler, unread.get(backend.id, 0))
        await asyncio.sleep(0)
    return reports


async def report_json(report: FairnessReport) -> bytes:
    """The report as JSON, a few clients at a time."""
    rest = _REPORT.dump_json(replace(report, clients={}))
    clients = []
    for some in _a_few([*report.clients.items()]):
        clients.append(_CLIENTS.dump_json(dict(some))[1:-1])
        await asyncio.sleep(0)
    return rest.replace(b'"clients":{}', b'"clients":{%b}' % b",".join(clients), 1)


def _a_few(rows: Sequence[T]) -> Iterator[Sequence[T]]:
    return (rows[at : at + CLIENTS_PER_BATCH] for at in range(0, len(rows), CLIENTS_PER_BATCH))


def _deficits(client: ClientId, scheduler: Scheduler) -> dict[WorkerId, Deficit]:
    credits = {state.worker.id: scheduler.policy.credit(client, state.worker.id) for state in scheduler.cluster}
    return {worker: credit for worker, credit in credits.items() if credit != Deficit()}


def _service(served: Tokens, scheduler: Scheduler) -> Service:
    return Service(served.extend, served.cached, served.output, scheduler.settings.cost(served))


def _cache(worker: WorkerId, scheduler: Scheduler) -> CacheReport:
    mirror = scheduler.mirror
    cache = mirror.cache(worker)
    calibration = cache.calibration
    totals = calibration.totals
    return CacheReport(
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


def _work(work: EngineWork) -> WorkReport:
    charged = work.charged
    pairs = [(charged.extend, work.input_tokens), (charged.output, work.output_tokens)]
    counted = [(paid, tokens) for paid, tokens in pairs if tokens is not None]
    computed = sum(tokens for _, tokens in counted)
    return WorkReport(
        charged.extend,
        charged.output,
        _rounded(work.input_tokens),
        _rounded(work.output_tokens),
        sum(paid for paid, _ in counted) / computed if computed else None,
    )


def _rounded(tokens: float | None) -> int | None:
    return None if tokens is None else round(tokens)


def _worker(backend: WorkerEndpoint, scheduler: Scheduler, unread: int) -> WorkerReport:
    if backend.id not in scheduler.cluster:
        return WorkerReport(backend.url, backend.healthy, 0, 0, 0, None, None, None, None, unread=unread)
    state = scheduler.cluster[backend.id]
    properties = scheduler.policy.properties
    queue = None if properties.pooled else backend.id
    return WorkerReport(
        url=backend.url,
        healthy=backend.healthy,
        queued=scheduler.backlog.length(backend.id),
        running=state.load.requests,
        unstarted_tokens=state.load.unstarted_tokens,
        window=state.window.limits,
        kv_tokens=state.worker.kv_tokens,
        service_gap=scheduler.fairness.gap(queue),
        service_gap_bound=scheduler.fairness.bound(queue, properties.gap_quantum),
        cache=_cache(backend.id, scheduler),
        unread=unread,
        breaker=SILENT if state.silent else state.health.condition,
        work=_work(state.work),
    )

"""What an operator sees of the scheduler at one moment: the content of /fairness and of the gauges in /metrics."""

from collections import Counter
from dataclasses import dataclass

from router.core.accounts import Account
from router.core.model import ClientId, Deficit, WorkerId
from router.core.scheduler import Scheduler
from router.core.window import Limits
from router.fleet import Backend, Fleet


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
    wait_p95_s: float | None
    deficit: dict[WorkerId, Deficit]


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


@dataclass(frozen=True, slots=True)
class FairnessReport:
    """The fleet."""

    policy: str
    jain: float | None
    clients: dict[ClientId, ClientReport]
    workers: dict[WorkerId, WorkerReport]


def fairness_report(policy: str, scheduler: Scheduler, fleet: Fleet, now: float) -> FairnessReport:
    """Read it all off; changes nothing."""
    running = Counter(bill.client for bill in scheduler.accounts.bills.values())
    clients = {
        client: ClientReport(
            weight,
            _service(scheduler.accounts.accounts.get(client, Account()), scheduler),
            scheduler.backlog.of_client(client),
            running[client],
            scheduler.fairness.wait_p95(client),
            _deficits(client, scheduler),
        )
        for client, weight in scheduler.weights.items()
    }
    workers = {backend.id: _worker(backend, scheduler) for backend in fleet.backends}
    return FairnessReport(policy, scheduler.fairness.jain(now), clients, workers)


def _deficits(client: ClientId, scheduler: Scheduler) -> dict[WorkerId, Deficit]:
    credits = {state.worker.id: scheduler.policy.credit(client, state.worker.id) for state in scheduler.cluster}
    return {worker: credit for worker, credit in credits.items() if credit != Deficit()}


def _service(account: Account, scheduler: Scheduler) -> Service:
    served = account.served
    return Service(served.extend, served.cached, served.output, scheduler.settings.cost(served))


def _worker(backend: Backend, scheduler: Scheduler) -> WorkerReport:
    if backend.id not in scheduler.cluster:
        return WorkerReport(backend.url, backend.healthy, 0, 0, 0, None, None, None, None)
    state = scheduler.cluster[backend.id]
    properties = scheduler.policy.properties
    queue = None if properties.pooled else backend.id
    quantum = properties.gap_quantum
    return WorkerReport(
        url=backend.url,
        healthy=backend.healthy,
        queued=scheduler.backlog.length(backend.id),
        running=state.load.requests,
        unstarted_tokens=state.load.unstarted_tokens,
        window=state.window.limits,
        kv_tokens=state.worker.kv_tokens,
        service_gap=scheduler.fairness.gap(queue),
        service_gap_bound=None if quantum is None else scheduler.fairness.bound(queue, quantum),
    )

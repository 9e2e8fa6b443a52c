"""The scheduler's side: the core and its host, the workers' polling and KV events, journal and state."""

import logging
import os
import random
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Final, NamedTuple

from router.auth.identity import is_allowed_name
from router.channel.earlier_run import CoveredFront
from router.channel.host import Observer, SchedulerHost
from router.config.addresses import WorkerAddress
from router.config.settings import Settings
from router.core.clients.queue_limits import WaitingLimits
from router.core.clients.rate_limits import RateLimits, RateWindow
from router.core.fleet.health import HealthRules, SilenceRules
from router.core.fleet.stored_responses import StoredResponse, StoredResponses
from router.core.fleet.window import FixedWindow, LearnedWindow, NoWindow, Window
from router.core.model.cost import LinearCost
from router.core.model.events import ChargedRequest
from router.core.model.request import Role, Takes, Worker, WorkerId
from router.core.model.saved import Fleet, LiveRequests, Piece, UsageRows
from router.core.policies.context import Parameters
from router.core.policies.registry import POLICIES
from router.core.policies.sessions.session_gate import gated
from router.core.policies.sessions.session_parameters import SessionParameters
from router.core.scheduler import Scheduler
from router.core.scheduler_settings import SchedulerSettings
from router.core.snapshot import restore, snapshot
from router.kv_events.setup import KvEvents, build_kv_events
from router.persistence.journal import Journal, open_journal
from router.persistence.state_file import SavedState, StateFile, StateLine, load, new_header, set_aside, usable_pieces
from router.process.services import SchedulerServices
from router.upstream.directory import WorkerDirectory, WorkerEndpoint, server_of
from router.upstream.discovery.kubernetes import KubernetesWatch, kubernetes_api
from router.upstream.discovery.sources import Discovery, DnsSource, FileSource, Resolve, WorkerSource, read_workers
from router.upstream.flag_check import FlagWarnings
from router.upstream.flag_rules import RouterNeeds
from router.upstream.polling.poller import Poller
from router.upstream.ranks.rank_rules import RankRules
from router.upstream.worker_registry import OperatorChanges, WorkerDrain, WorkerRegistry, endpoint_of

log = logging.getLogger(__name__)

DEBTORS_OF_A_CLIENT: Final = 20
"""For each client in `client_limit`, clients of which every queue remembers only their debt."""


class SchedulerSide(NamedTuple):
    """The parts on the scheduler's side of the channel."""

    secret: bytes
    """Keys the prompt hashes."""
    host: SchedulerHost
    directory: WorkerDirectory
    workers: "WorkerServices"
    kv_events: KvEvents
    stored: StoredResponses
    services: SchedulerServices
    journal: Journal | None
    state: StateFile | None
    saved: "SavedRun | None"
    """What another run left to this one, if it is not the router's first."""

    @property
    def files(self) -> list[AbstractAsyncContextManager[object]]:
        """The parts that write files while their context is entered; to be entered first, and left last."""
        return [file for file in (self.journal, self.state) if file is not None]

    @property
    def observing(self) -> list[AbstractAsyncContextManager[object]]:
        """The parts that must be entered before the scheduler is fed any event. Then all workers are known by name."""
        workers = self.workers
        return [*self.files, self.kv_events, workers.flag_warnings, workers.discovery, *workers.kubernetes]

    @property
    def running(self) -> list[AbstractAsyncContextManager[object]]:
        """The parts that run while their context is entered, in the order in which to enter them."""
        return [self.workers.poller]


def build_scheduler(
    settings: Settings,
    observers: Callable[[Scheduler], Sequence[Observer]],
    resolve: Resolve,
    left: SavedState | None = None,
    *,
    goes_on: bool = False,
) -> SchedulerSide:
    """Build the scheduler's side, with its saved state restored. Raises ConfigError for a file that cannot be used.

    `observers`: returns the observers of a scheduler's events; `resolve`: looks up the addresses of a host name;
    `left`: the state that another run has left to this one, if there was one; `goes_on`: as in `initial_state`.
    """
    now = time.monotonic()
    secret, scheduler, restored, responses, saved, windows = initial_state(settings, now, left, goes_on=goes_on)
    journal = _journal(settings, secret, now, restored)
    first = [] if journal is None else [journal]
    host = SchedulerHost(scheduler, [*first, *observers(scheduler)], time.monotonic, time.time, traced=settings.otel)
    directory = WorkerDirectory(aliases=settings.aliases(), announce=host.announce)
    kv_events = build_kv_events(settings, directory, host, secret)
    workers = _worker_services(settings, directory, host, resolve, saved)
    host.attach(workers.flag_warnings, workers.registry)
    stored = StoredResponses(settings.stored_responses)
    stored.restore(responses)
    services = SchedulerServices(host, directory, stored, workers.poller.mark_unreachable)
    services.limits.restore(*windows)
    host.set_services(services)
    return SchedulerSide(
        secret,
        host,
        directory,
        workers,
        kv_events,
        stored,
        services,
        journal,
        _state(settings, secret, host, stored, services.limits),
        saved,
    )


def _state(
    settings: Settings, secret: bytes, host: SchedulerHost, stored: StoredResponses, limits: RateLimits
) -> StateFile | None:
    if settings.state is None:
        return None

    def pieces() -> Iterator[StateLine]:
        yield from snapshot(host.scheduler, host.clock())
        yield from stored.saved()
        yield from limits.saved(host.clock())

    return StateFile(settings.state, pieces, partial(new_header, settings.policy, secret), settings.state_interval)


class SavedRun(NamedTuple):
    """What a run of the scheduler has left to the next one, besides the state that `restore` restores."""

    live: tuple[ChargedRequest, ...]
    """Its live requests."""
    fleet: Mapping[WorkerId, Worker]
    """The workers that were present."""
    fronts: Sequence[CoveredFront]
    """What the state covers of each front."""
    changes: OperatorChanges


def _journal(settings: Settings, secret: bytes, now: float, restored: list[Piece]) -> Journal | None:
    if settings.journal is None:
        return None
    decisive = [piece for piece in restored if not isinstance(piece, UsageRows)]  # on usage, no decision depends
    return open_journal(settings.journal, secret, now, settings.without_addresses(), decisive)


def new_scheduler(settings: Settings) -> Scheduler:
    """Build a scheduler in its initial state."""
    core = SchedulerSettings(
        cost=LinearCost(settings.extend_weight, settings.output_weight),
        waiting=WaitingLimits(
            settings.max_queued,
            settings.queue_ttl,
            settings.max_queued_bytes,
            settings.max_queued_per_client or None,
            settings.max_queued_bytes_per_client or None,
        ),
        window=_window(settings),
        health=_health(settings),
        prefix_limit=settings.prefix_limit,
        match_minimum=settings.min_match_tokens,
        client_limit=settings.client_limit,
        debtor_limit=DEBTORS_OF_A_CLIENT * settings.client_limit,
        kv_tokens=settings.kv_tokens_default,
        handoff_seconds=settings.handoff_seconds,
        decode_alone=settings.pd_fallback,
        named=is_allowed_name,
        usage_days=settings.usage_days,
    )
    parameters = Parameters(*settings.parameters().values())
    policy, sessions = POLICIES[settings.policy], _session_parameters(settings)
    if sessions is not None:
        policy = gated(policy, sessions)
    return Scheduler(policy, core, parameters, random.Random(settings.seed))


def _session_parameters(settings: Settings) -> SessionParameters | None:
    if settings.sessions == "off":
        return None
    return SessionParameters(
        by_label=settings.sessions != "prefix",
        by_prefix=settings.sessions != "labels",
        fill=settings.session_fill,
        idle=settings.session_idle,
        idle_after_turn=settings.session_idle_after_turn,
        turn=settings.session_turn,
        growth=settings.session_growth,
        grace=settings.session_grace,
        limit=settings.session_limit,
    )


def _health(settings: Settings) -> HealthRules:
    return HealthRules(
        settings.breaker_failures,
        settings.breaker_cooldown,
        settings.tries,
        settings.retry_budget,
        settings.retry_floor,
        settings.silence_timeout,
        SilenceRules(settings.first_token_timeout, settings.token_timeout),
    )


def _window(settings: Settings) -> Window:
    if settings.window == "off":
        return NoWindow()
    kind = LearnedWindow if settings.window == "learned" else FixedWindow
    return kind(settings.max_inflight, settings.max_unstarted_tokens)


class WorkerServices(NamedTuple):
    """The parts that manage which workers there are."""

    poller: Poller
    drain: WorkerDrain
    registry: WorkerRegistry
    discovery: Discovery
    kubernetes: list[KubernetesWatch]
    flag_warnings: FlagWarnings


def _worker_services(
    settings: Settings, directory: WorkerDirectory, host: SchedulerHost, resolve: Resolve, saved: SavedRun | None
) -> WorkerServices:
    drain = WorkerDrain(host.feed)
    fleet = host.scheduler.fleet
    rules = RankRules(settings.ranks, settings.barrier)
    poller = Poller(directory, drain.feed, settings.poll_interval, rules, fleet.last_sign)
    runs = fleet.__contains__
    known = {} if saved is None else saved.fleet
    worker_registry = WorkerRegistry(directory, poller, drain, runs, lambda worker: _endpoint(worker, settings, known))
    if saved is not None:
        worker_registry.repeat(saved.changes)
    needs = RouterNeeds(settings.min_match_tokens, settings.isolate != "none", handoff_seconds=settings.handoff_seconds)
    advice = FlagWarnings(directory, needs, balances=settings.policy != "dlpm_home")
    discovery = _discovery(settings, worker_registry, resolve, goes_on=saved is not None)
    kubernetes = _kubernetes(settings, worker_registry)
    return WorkerServices(poller, drain, worker_registry, discovery, kubernetes, advice)


def _endpoint(worker: WorkerAddress, settings: Settings, fleet: Mapping[WorkerId, Worker]) -> WorkerEndpoint:
    """Return the endpoint of a worker. If it is known from an earlier run, it is assumed to be healthy, with its ranks.

    `fleet`: the workers of that run.
    """
    endpoint = endpoint_of(worker, settings)
    if (known := fleet.get(endpoint.id)) is not None:
        endpoint.healthy = endpoint.assumed = True
        endpoint.models, endpoint.barrier = known.models, known.barrier
        endpoint.role, endpoint.connector = known.role, None if known.role is Role.BOTH else known.connector
        ranks = [each for each in fleet.values() if each.takes is Takes.PINNED and server_of(each.id) == endpoint.id]
        endpoint.ranks = tuple([endpoint.new_rank(each.rank) for each in ranks if each.rank is not None])
        for rank, each in zip(endpoint.ranks, ranks, strict=True):
            rank.barrier = each.barrier
    return endpoint


def _kubernetes(settings: Settings, worker_registry: WorkerRegistry) -> list[KubernetesWatch]:
    """Build what follows the API of Kubernetes. Raises ConfigError outside of a pod without an URL."""
    if not settings.worker_kubernetes:
        return []
    api = kubernetes_api(settings.kubernetes_api, settings.kubernetes_namespace, os.environ)
    report = worker_registry.set_source_workers
    return [KubernetesWatch(selector, api, report) for selector in settings.worker_kubernetes]


def _discovery(
    settings: Settings, worker_registry: WorkerRegistry, resolve: Resolve, *, goes_on: bool = False
) -> Discovery:
    """Register the workers of the settings, and build the discovery of others. Raises ConfigError for a wrong file.

    `goes_on`: whether another run was before this one, which a file that has become wrong since does not stop.
    """
    worker_registry.set_source_workers("the settings", settings.workers())
    sources: list[WorkerSource] = [DnsSource(url, resolve) for url in settings.worker_dns]
    if settings.workers_file is not None:
        if not goes_on:
            read_workers(settings.workers_file)  # an error stops the start here; later it would only be logged
        sources.append(FileSource(settings.workers_file))
    return Discovery(sources, worker_registry.set_source_workers, settings.discovery_interval)


class InitialState(NamedTuple):
    """The state with which a run of the router begins."""

    secret: bytes
    """The secret that keys the prompt hashes."""
    scheduler: Scheduler
    restored: list[Piece]
    """The saved state that was restored into the scheduler after a restart."""
    responses: Sequence[StoredResponse] = ()
    """The stored responses that were saved with it."""
    saved: SavedRun | None = None
    """What else another run has left."""
    windows: tuple[Sequence[RateWindow], float] = ((), 0.0)
    """What was left of clients' rate limits, and when, on the clock of `now`."""


def initial_state(
    settings: Settings, now: float, left: SavedState | None = None, *, goes_on: bool = False
) -> InitialState:
    """Build the scheduler and restore its saved state, if there is a usable one.

    `left`: the state of another run of the same router; `goes_on`: whether there was another run. If that has left
    nothing, the state directory is not read: what fronts report would be charged twice. Raises ConfigError if the
    state directory cannot be used.
    """
    given = settings.hash_secret
    secret = None if given is None else given.get_secret_value().encode()
    scheduler = new_scheduler(settings)
    folder = None if goes_on or left is not None else settings.state
    found = left if folder is None else load(folder, settings.state_fresh, time.time())
    if found is None:
        return InitialState(secret or secrets.token_bytes(32), scheduler, [])
    saved = bytes.fromhex(found.header.hash_secret)
    pieces = list(usable_pieces(found, settings.policy, saved if secret is None else secret))
    try:
        restore(scheduler, pieces, now)
    except ValueError as error:
        if folder is None:
            log.error("the state of the run before is not used: %s", error)
        else:
            set_aside(folder, error)
        return InitialState(secret or secrets.token_bytes(32), new_scheduler(settings), [])
    run = None if left is None else _saved_run(found)
    secret = secret or (secrets.token_bytes(32) if found.too_old else saved)
    age = max(0.0, time.time() - found.header.saved)
    return InitialState(secret, scheduler, pieces, found.responses, run, (found.windows, now - age))


def _saved_run(found: SavedState) -> SavedRun:
    live = [row for piece in found.pieces if isinstance(piece, LiveRequests) for row in piece.rows]
    fleet = {worker.id: worker for piece in found.pieces if isinstance(piece, Fleet) for worker in piece.workers}
    return SavedRun(tuple(live), fleet, found.fronts, found.changes)

"""The composition root: builds every part of the router from the settings and connects them, in one process."""

import random
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Final, NamedTuple

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from router.api.endpoints.azure import without_azure
from router.api.families import family_of
from router.auth.admission import Admission
from router.auth.identity import ClientDirectory, Identifier
from router.auth.key_watch import KeyWatch
from router.channel.host import Observer, SchedulerHost
from router.config.settings import Settings
from router.control.admin import Operations, is_open
from router.control.app import UsageLookup, control_plane
from router.core.clients.queue_limits import WaitingLimits
from router.core.fleet.health import HealthRules, SilenceRules
from router.core.fleet.window import FixedWindow, LearnedWindow, NoWindow, Window
from router.core.model.cost import LinearCost
from router.core.model.prompt_key import PromptHasher
from router.core.model.request import WorkerId
from router.core.model.saved import Piece
from router.core.policies.context import Parameters
from router.core.policies.registry import POLICIES
from router.core.scheduler import Scheduler
from router.core.scheduler_settings import SchedulerSettings
from router.core.snapshot import restore, snapshot
from router.front.byte_budget import ByteBudget
from router.front.drain import Drain, refuse
from router.front.gateway import Gateway, Isolation
from router.front.http.connection_limits import Connections, FrontLimits
from router.front.relay import RelaySettings
from router.front.stored.background import BackgroundResponses
from router.front.stored.calls import ResponseCalls
from router.front.stored.owners import StoredResponse, StoredResponses
from router.kv_events.setup import KvEvents, build_kv_events
from router.persistence.journal import Journal, open_journal
from router.persistence.state_file import StateFile, StateLine, load, new_header, set_aside, usable_pieces
from router.runtime.gc_tuning import FullCollections
from router.telemetry.cache_alarm import CacheAlarm
from router.telemetry.component_metrics import AdmissionMetrics, EventMetrics, FileMetrics, ResponseMetrics
from router.telemetry.explain import Explanation, Explanations
from router.telemetry.exposition import render_metrics
from router.telemetry.history import FairnessHistory
from router.telemetry.loop_lag import LoopLag
from router.telemetry.report import (
    FairnessReport,
    UsageReport,
    WorkerReport,
    fairness_report,
    usage_report,
    worker_reports,
)
from router.telemetry.request_metrics import ClientLabels, RequestMetrics
from router.telemetry.state_metrics import StateCollector
from router.upstream.directory import WorkerDirectory
from router.upstream.discovery import Discovery, DnsSource, FileSource, Resolve, WorkerSource, read_workers, resolve
from router.upstream.flag_check import FlagWarnings
from router.upstream.flag_rules import RouterNeeds
from router.upstream.poller import Poller
from router.upstream.worker_registry import WorkerDrain, WorkerRegistry, endpoint_of


def build(settings: Settings, resolve: Resolve = resolve) -> "Router":
    """Build the whole router as one ASGI application. Raises ConfigError for a file that cannot be read or written.

    `resolve` looks up the addresses of workers that are known by a host name.
    """
    now = time.monotonic()
    secret, scheduler, restored, responses = initial_state(settings, now)
    journal = _journal(settings, secret, now, restored)
    patience = SilenceRules(settings.first_token_timeout, settings.token_timeout)
    directory = WorkerDirectory((), settings.connect_timeout, patience, settings.aliases())
    registry, labels = CollectorRegistry(), ClientLabels()
    explanations = Explanations(settings.policy)
    observers: list[Observer] = [RequestMetrics(registry, labels), explanations, CacheAlarm(scheduler.mirror)]
    if journal is not None:
        observers.insert(0, journal)
    scheduler_host = SchedulerHost(scheduler, observers, time.monotonic)
    kv_events = build_kv_events(settings, directory, scheduler_host, secret)
    workers = _worker_services(settings, directory, scheduler_host, resolve)
    scheduler_host.attach(workers.flag_warnings, workers.registry)
    poller = workers.poller
    drain, lag = Drain(settings.drain_timeout), LoopLag()
    access = _access_control(settings, scheduler_host)

    async def report() -> FairnessReport:
        return await fairness_report(
            settings.policy, scheduler, directory, scheduler_host.clock(), poller.unusable_answers()
        )

    async def cards() -> Mapping[WorkerId, WorkerReport]:
        return await worker_reports(scheduler, directory, poller.unusable_answers())

    async def scrape() -> bytes:
        state_metrics.report = await report()
        return await render_metrics(registry)

    def explain(request: str) -> Explanation:
        return explanations.explain(request, scheduler_host.clock(), time.time())

    stored, background = StoredResponses(settings.stored_responses), BackgroundResponses(scheduler_host, directory)
    stored.restore(responses)
    state_metrics, budget = StateCollector(labels), ByteBudget(settings.max_held_bytes)
    connections = _connections(settings, budget)
    event_metrics = EventMetrics(kv_events.report, kv_events.outcomes)
    state = _state(settings, secret, scheduler_host, stored)
    files = FileMetrics({"state": state, "journal": journal})
    for collector in (
        state_metrics,
        event_metrics,
        lag,
        AdmissionMetrics(access.admission.refusals),
        connections,
        budget,
        files,
        ResponseMetrics(stored, background),
    ):
        registry.register(collector)
    operations = _operations(settings, directory, workers, scheduler_host, report)
    parts = [
        *(lag, FullCollections(lambda: drain.idle), journal, access.keys, state),
        *(
            directory,
            kv_events,
            workers.flag_warnings,
            workers.discovery,
            poller,
            background,
            operations and operations.history,
        ),
    ]
    control = control_plane(
        *(directory, scrape, report, cards, access.usage, explain, drain, workers.drain.drained, operations),
        partial(_running, [part for part in parts if part is not None], scheduler_host),
    )
    calls = ResponseCalls(scheduler_host, directory, stored, background, allow_background=settings.background_responses)
    gateway = _gateway(settings, scheduler_host, directory, access, budget, kv_events, calls, secret)
    return Router(gateway, control, drain, connections, settings.cors_origins)


@asynccontextmanager
async def _running(
    parts: Sequence[AbstractAsyncContextManager[object]],
    scheduler_host: SchedulerHost,
    app: FastAPI,  # noqa: ARG001 - FastAPI's signature
) -> AsyncIterator[None]:
    """Run all parts, entered in the order in which they depend on each other."""
    async with AsyncExitStack() as stack:
        for part in parts:
            await stack.enter_async_context(part)
        yield
    scheduler_host.close()


def _state(
    settings: Settings, secret: bytes, scheduler_host: SchedulerHost, stored: StoredResponses
) -> StateFile | None:
    if settings.state is None:
        return None

    def pieces() -> Iterator[StateLine]:
        yield from snapshot(scheduler_host.scheduler, scheduler_host.clock())
        yield from stored.saved()

    return StateFile(settings.state, pieces, partial(new_header, settings.policy, secret), settings.state_interval)


def _operations(
    settings: Settings,
    directory: WorkerDirectory,
    workers: "WorkerServices",
    scheduler_host: SchedulerHost,
    report: Callable[[], Awaitable[FairnessReport]],
) -> Operations | None:
    """Build the operators' actions; None if the settings allow none."""
    if not is_open(settings):
        return None
    return Operations(
        *(directory, workers.registry, workers.drain, workers.poller.flush, FairnessHistory(report), settings),
        *(scheduler_host.feed, scheduler_host.scheduler.weights),
    )


def _gateway(
    settings: Settings,
    scheduler_host: SchedulerHost,
    directory: WorkerDirectory,
    access: "AccessControl",
    budget: ByteBudget,
    kv_events: KvEvents,
    responses: ResponseCalls,
    secret: bytes,
) -> Gateway:
    return Gateway(
        scheduler_host,
        directory,
        access.admission,
        PromptHasher(secret),
        budget,
        settings.body_limit,
        RelaySettings(settings.policy, settings.heartbeat, settings.response_headers, settings.continuation),
        kv_events.keys,
        responses,
        None if settings.isolate == "none" else Isolation(settings.isolate == "group", secret),
    )


class Router:
    """Routes calls to models around FastAPI, whose middleware would slow down every chunk of a stream."""

    def __init__(
        self, data: ASGIApp, control: ASGIApp, drain: Drain, connections: Connections, origins: Sequence[str] = ()
    ) -> None:
        """`origins`: those of web pages that may read answers; `*` for all."""
        self._app: ASGIApp = self._route
        if origins:
            self._app = CORSMiddleware(
                self._route, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["*"]
            )
        self._data = data
        self._control = control
        self.drain = drain
        self.connections = connections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call, or the ASGI lifespan."""
        await self._app(scope, receive, send)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call by the part of the router that it is for."""
        path = without_azure(scope.get("path", "")).path
        if family_of(path) is None:
            await self._control(scope if path == scope.get("path", "") else {**scope, "path": path}, receive, send)
        elif self.drain.begun:
            await refuse(scope, receive, send)
        else:
            with self.drain.track_call():
                await self._data(scope, receive, send)


def _journal(settings: Settings, secret: bytes, now: float, restored: list[Piece]) -> Journal | None:
    if settings.journal is None:
        return None
    return open_journal(settings.journal, secret, now, settings.without_addresses(), restored)


DEBTORS_OF_A_CLIENT: Final = 20
"""For each client in `client_limit`, clients of which every queue remembers only their debt."""


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
    )
    parameters = Parameters(*settings.parameters().values())
    return Scheduler(POLICIES[settings.policy], core, parameters, random.Random(settings.seed))


def _connections(settings: Settings, budget: ByteBudget) -> Connections:
    limits = FrontLimits(
        head_bytes=settings.header_limit,
        url_bytes=settings.url_limit,
        head_seconds=settings.header_timeout,
        body_seconds=settings.body_timeout,
        write_seconds=settings.write_timeout,
        idle_seconds=settings.keep_alive,
        connections=settings.max_connections,
        connections_per_address=settings.max_connections_per_address or None,
        hosts=settings.host_names(),
    )
    return Connections(limits, budget)


def _health(settings: Settings) -> HealthRules:
    return HealthRules(
        settings.breaker_failures,
        settings.breaker_cooldown,
        settings.tries,
        settings.retry_budget,
        settings.retry_floor,
        settings.silence_timeout,
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
    flag_warnings: FlagWarnings


def _worker_services(
    settings: Settings, directory: WorkerDirectory, scheduler_host: SchedulerHost, resolve: Resolve
) -> WorkerServices:
    drain = WorkerDrain(scheduler_host.feed)
    poller = Poller(directory, drain.feed, settings.poll_interval)
    runs = scheduler_host.scheduler.cluster.__contains__
    worker_registry = WorkerRegistry(directory, poller, drain, runs, lambda worker: endpoint_of(worker, settings))
    advice = FlagWarnings(directory, RouterNeeds(settings.min_match_tokens, settings.isolate != "none"))
    return WorkerServices(poller, drain, worker_registry, _discovery(settings, worker_registry, resolve), advice)


def _discovery(settings: Settings, worker_registry: WorkerRegistry, resolve: Resolve) -> Discovery:
    """Register the workers of the settings, and build the discovery of others. Raises ConfigError for a wrong file."""
    worker_registry.set_source_workers("the settings", settings.worker)
    sources: list[WorkerSource] = [DnsSource(url, resolve) for url in settings.worker_dns]
    if settings.workers_file is not None:
        read_workers(settings.workers_file)  # an error stops the start here; later it would only be logged
        sources.append(FileSource(settings.workers_file))
    return Discovery(sources, worker_registry.set_source_workers, settings.discovery_interval)


class AccessControl(NamedTuple):
    """The parts that identify clients and enforce their limits."""

    admission: Admission
    keys: KeyWatch
    usage: UsageLookup


def _access_control(settings: Settings, scheduler_host: SchedulerHost) -> AccessControl:
    scheduler = scheduler_host.scheduler
    identifier = Identifier(settings.identity, settings.trusted_header, settings.trusted_proxy, clock=time.time)

    def use(clients: ClientDirectory) -> None:
        identifier.directory = clients

    def usage(headers: Mapping[bytes, bytes], address: str | None) -> UsageReport:
        who = identifier.identify(headers, None, address)
        return usage_report(scheduler, who.client, who.weight, who.shared_group, who.group_weight)

    admission = Admission(identifier, scheduler.weights.__contains__, scheduler_host.clock)
    return AccessControl(admission, KeyWatch(settings.clients, use), usage)


class InitialState(NamedTuple):
    """The state with which a run of the router begins."""

    secret: bytes
    """The secret that keys the prompt hashes."""
    scheduler: Scheduler
    restored: list[Piece]
    """The saved state that was restored into the scheduler after a restart."""
    responses: Sequence[StoredResponse] = ()
    """The stored responses that were saved with it."""


def initial_state(settings: Settings, now: float) -> InitialState:
    """Build the scheduler and restore its saved state, if there is a usable one.

    Raises ConfigError if the state directory cannot be used.
    """
    given = settings.hash_secret
    secret = None if given is None else given.get_secret_value().encode()
    scheduler = new_scheduler(settings)
    found = None if settings.state is None else load(settings.state, settings.state_fresh, time.time())
    if settings.state is None or found is None:
        return InitialState(secret or secrets.token_bytes(32), scheduler, [])
    saved = bytes.fromhex(found.header.hash_secret)
    pieces = list(usable_pieces(found, settings.policy, saved if secret is None else secret))
    try:
        restore(scheduler, pieces, now)
    except ValueError as error:
        set_aside(settings.state, error)
        return InitialState(secret or secrets.token_bytes(32), new_scheduler(settings), [])
    return InitialState(secret or saved, scheduler, pieces, found.responses)

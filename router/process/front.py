"""One front: accepts client connections, parses calls, sends them to workers and relays the answers."""

import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client.registry import Collector
from starlette.types import ASGIApp

from router.auth.admission import Admission
from router.auth.identity import ClientDirectory, Identifier
from router.auth.key_watch import KeyWatch
from router.channel.client import SchedulerClient
from router.config.settings import Settings
from router.core.model.prompt_key import PromptHasher
from router.front.byte_budget import ByteBudget
from router.front.drain import Drain
from router.front.gateway import Gateway
from router.front.handoff.upkeep import Handoffs
from router.front.http.connection_limits import Connections, FrontLimits
from router.front.parsing import Isolation
from router.front.relay import RelaySettings
from router.front.session_labels import SessionLabels
from router.front.stored.background import BackgroundResponses
from router.front.stored.calls import ResponseCalls
from router.kv_events.setup import build_prompt_tokenizer
from router.kv_events.tokenize import PromptTokenizer
from router.telemetry.calls.recorded_call import RecordedCall
from router.telemetry.calls.recorder import CallRecorder
from router.telemetry.logs.access_log import log_call
from router.telemetry.metrics.component_metrics import (
    AdmissionMetrics,
    BackgroundMetrics,
    LabelMetrics,
    LagMetrics,
    TokenMetrics,
)
from router.telemetry.otel.setup import build_open_telemetry
from router.upstream.connections import WorkerConnections

if TYPE_CHECKING:
    from router.telemetry.otel.export import OpenTelemetry


class Front(NamedTuple):
    """The parts of a front."""

    scheduler_client: SchedulerClient
    worker_connections: WorkerConnections
    identifier: Identifier
    keys: KeyWatch
    admission: Admission
    budget: ByteBudget
    client_connections: Connections
    background: BackgroundResponses
    handoffs: Handoffs
    tokenizer: PromptTokenizer
    session_labels: SessionLabels
    otel: "OpenTelemetry | None"
    """What traces calls; None if nothing does."""
    gateway: Gateway

    @property
    def running(self) -> list[AbstractAsyncContextManager[object]]:
        """The parts that run while their context is entered, in the order in which to enter them."""
        traced = [] if self.otel is None else [self.otel]
        return [*traced, self.keys, self.worker_connections, self.handoffs, self.tokenizer, self.background]

    @property
    def collectors(self) -> list[Collector]:
        """What the front counts: counters and gauges only, as those of several fronts are summed."""
        return [
            TokenMetrics(self.tokenizer.outcome_counts),
            AdmissionMetrics(self.admission.refusals),
            self.client_connections,
            self.budget,
            BackgroundMetrics(self.background),
            LagMetrics(lambda: self.scheduler_client.lag_refusals),
            LabelMetrics(lambda: self.session_labels.ignored),
            *([] if self.otel is None else [self.otel.spans]),
        ]

    def recorded(self, app: ASGIApp, *, access_log: bool) -> ASGIApp:
        """Return an application that serves calls as this one does, and records them if that is of any use.

        `access_log`: whether to log each call.
        """
        if self.otel is None and not access_log:
            return app
        clock = self.scheduler_client.clock
        begin = (lambda _: RecordedCall(clock)) if self.otel is None else self.otel.begin
        return CallRecorder(app, begin, log_call if access_log else None)


def build_front(settings: Settings, secret: bytes, drain: Drain, clock: Callable[[], float]) -> Front:
    """Build a front; its `scheduler_client` is to be connected. Raises ConfigError for a file that cannot be read.

    `secret`: keys the prompt hashes; `drain`: counts the calls in flight, and refuses new ones once it has begun;
    `clock`: returns seconds and never goes backwards.
    """
    scheduler_client = SchedulerClient(clock)
    worker_connections = WorkerConnections(settings.connect_timeout, settings.aliases())
    scheduler_client.follow_workers(worker_connections)
    identifier, keys = build_identifier(settings)
    admission = Admission(identifier, scheduler_client)
    budget = ByteBudget(settings.max_held_bytes)
    background = BackgroundResponses(scheduler_client, worker_connections)
    scheduler_client.follow_responses(background)
    tokenizer = build_prompt_tokenizer(settings, worker_connections, scheduler_client, secret)
    handoffs = Handoffs(worker_connections, settings.handoff_seconds)
    session_labels = SessionLabels(settings.session_labels)
    gateway = Gateway(
        scheduler_client,
        worker_connections,
        admission,
        PromptHasher(secret),
        budget,
        settings.body_limit,
        RelaySettings(
            settings.policy, settings.heartbeat, settings.response_headers, settings.continuation, settings.strict
        ),
        tokenizer.keys,
        drain,
        ResponseCalls(scheduler_client, worker_connections, background, allow_background=settings.background_responses),
        handoffs,
        None if settings.isolate == "none" else Isolation(settings.isolate == "group", secret),
        session_labels if settings.sessions in ("labels", "both") else None,
    )
    return Front(
        scheduler_client,
        worker_connections,
        identifier,
        keys,
        admission,
        budget,
        _client_connections(settings, budget),
        background,
        handoffs,
        tokenizer,
        session_labels,
        build_open_telemetry(settings, worker_connections),
        gateway,
    )


def build_identifier(settings: Settings, *, goes_on: bool = False) -> tuple[Identifier, KeyWatch]:
    """Build what identifies clients, and what reloads their keys. Raises ConfigError for a file that cannot be read.

    `goes_on`: see `KeyWatch`.
    """
    identifier = Identifier(settings.identity, settings.trusted_header, settings.trusted_proxy, clock=time.time)

    def use(clients: ClientDirectory) -> None:
        identifier.directory = clients

    return identifier, KeyWatch(settings.clients, use, goes_on=goes_on)


def _client_connections(settings: Settings, budget: ByteBudget) -> Connections:
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

"""The router in one process: one front and the scheduler, in one event loop, behind one ASGI application."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial

from fastapi import FastAPI
from starlette.types import ASGIApp

from router.channel.local import connect
from router.config.settings import Settings
from router.control.app import control_plane
from router.control.operator_access import OperatorAccess
from router.core.model.cost import LinearCost
from router.front.drain import Drain
from router.process.entry import Entry
from router.process.front import Front, build_front
from router.process.insight import Insight, RequestRecords, build_operations, build_page
from router.process.scheduling import SchedulerSide, build_scheduler
from router.runtime.gc_tuning import FullCollections
from router.telemetry.metrics.front_metrics import ProcessMetrics
from router.upstream.discovery.sources import Resolve, resolve


def build(settings: Settings, resolve: Resolve = resolve, *, encoded: bool = False) -> "Router":
    """Build the whole router as one ASGI application. Raises ConfigError for a file that cannot be read or written.

    `resolve` looks up the addresses of workers that are known by a host name. `encoded`: whether front and scheduler
    exchange encoded messages, as they would between processes; for tests.
    """
    records = RequestRecords(settings.policy, LinearCost(settings.extend_weight, settings.output_weight))
    side = build_scheduler(settings, records.observers, resolve)
    drain = Drain(settings.drain_timeout, delay=settings.drain_delay)
    front = build_front(settings, side.secret, drain, time.monotonic)
    connect(front.scheduler_client, side.host, encoded=encoded)
    insight = Insight(settings, side, front.identifier, records)
    processes = ProcessMetrics("router", lambda: insight.lag.worst, lambda: drain.calls, side.services.measurements)
    insight.register(*front.collectors, processes)
    operations = build_operations(settings, side, insight)
    parts: list[AbstractAsyncContextManager[object]] = [insight.lag, FullCollections(lambda: drain.idle)]
    parts += [*side.observing, *front.running, *side.running, insight.history]
    control = control_plane(
        side.directory,
        insight,
        drain,
        side.workers.drain.drained,
        operations,
        build_page(settings, insight, drain),
        partial(_running, parts, side, front),
    )
    return Router(front, side, control, drain, OperatorAccess(settings), settings.cors_origins)


@asynccontextmanager
async def _running(
    parts: Sequence[AbstractAsyncContextManager[object]],
    side: SchedulerSide,
    front: Front,
    app: FastAPI,  # noqa: ARG001 - FastAPI's signature
) -> AsyncIterator[None]:
    """Run all parts, entered in the order in which they depend on each other."""
    async with AsyncExitStack() as stack:
        for part in parts:
            await stack.enter_async_context(part)
        yield
    front.scheduler_client.close()
    side.host.close()


class Router(Entry):
    """One front and the scheduler as one ASGI application."""

    def __init__(
        self,
        front: Front,
        side: SchedulerSide,
        control: ASGIApp,
        drain: Drain,
        access: OperatorAccess,
        origins: Sequence[str],
    ) -> None:
        """`access`: as in `Entry`; `origins`: those of web pages that may read answers; `*` for all."""
        super().__init__(front.gateway, control, access, origins)
        self.drain = drain
        self.front = front
        self.side = side
        self.connections = front.client_connections

"""The router in one process: one front and the scheduler, in one event loop, behind one ASGI application."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from router.api.endpoints.azure import without_azure
from router.api.families import family_of
from router.channel.local import connect
from router.config.settings import Settings
from router.control.admin import Operations, is_open
from router.control.app import control_plane
from router.front.drain import Drain, refuse
from router.process.front import Front, build_front
from router.process.insight import Insight, RequestRecords
from router.process.scheduling import SchedulerSide, build_scheduler
from router.runtime.gc_tuning import FullCollections
from router.telemetry.history import FairnessHistory
from router.upstream.discovery import Resolve, resolve


def build(settings: Settings, resolve: Resolve = resolve, *, encoded: bool = False) -> "Router":
    """Build the whole router as one ASGI application. Raises ConfigError for a file that cannot be read or written.

    `resolve` looks up the addresses of workers that are known by a host name. `encoded`: whether front and scheduler
    exchange encoded messages, as they would between processes; for tests.
    """
    records = RequestRecords(settings.policy)
    side = build_scheduler(settings, records.observers, resolve)
    front = build_front(settings, side.secret, time.monotonic)
    connect(front.scheduler_client, side.host, encoded=encoded)
    drain = Drain(settings.drain_timeout)
    insight = Insight(settings, side, front, records)
    operations = _operations(settings, side, insight)
    parts: list[AbstractAsyncContextManager[object]] = [insight.lag, FullCollections(lambda: drain.idle)]
    parts += [*side.files, *front.running, *side.running]
    if operations is not None:
        parts.append(operations.history)
    control = control_plane(
        *(side.directory, insight.scrape, insight.report, insight.cards, insight.usage, insight.explain),
        *(drain, side.workers.drain.drained, operations, partial(_running, parts, side, front)),
    )
    return Router(front, side, control, drain, settings.cors_origins)


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


def _operations(settings: Settings, side: SchedulerSide, insight: Insight) -> Operations | None:
    """Build the operators' actions; None if the settings allow none."""
    if not is_open(settings):
        return None
    workers, host = side.workers, side.host
    return Operations(
        *(side.directory, workers.registry, workers.drain, workers.poller.flush, FairnessHistory(insight.report)),
        *(settings, host.feed, host.scheduler.weights),
    )


class Router:
    """Routes calls to models around FastAPI, whose middleware would slow down every chunk of a stream."""

    def __init__(
        self, front: Front, side: SchedulerSide, control: ASGIApp, drain: Drain, origins: Sequence[str] = ()
    ) -> None:
        """`origins`: those of web pages that may read answers; `*` for all."""
        self._app: ASGIApp = self._route
        if origins:
            self._app = CORSMiddleware(
                self._route, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["*"]
            )
        self.front = front
        self.side = side
        self._control = control
        self.drain = drain
        self.connections = front.client_connections

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
                await self.front.gateway(scope, receive, send)

"""The scheduler in a process of its own: it serves fronts over the channel, and the control plane over HTTP."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from importlib import import_module
from typing import Final

from fastapi import FastAPI

from router.auth.key_watch import KeyWatch
from router.channel.socket import ChannelServer
from router.control.app import control_plane
from router.core.model.cost import LinearCost
from router.front.drain import Drain
from router.persistence.state_file import StateFile
from router.process.control_proxy import FromFronts
from router.process.front import build_identifier
from router.process.insight import Insight, RequestRecords, build_operations, build_page
from router.process.plan import AliveReports, ProcessPlan, on_supervisor_end, report_ready
from router.process.scheduling import SchedulerSide, build_scheduler
from router.process.server import (
    GRACE_SECONDS,
    DrainingServer,
    control_server_config,
    defer_termination,
    set_up_process,
)
from router.process.takeover import begin_takeover, run_file
from router.runtime import open_files
from router.runtime.gc_tuning import FullCollections
from router.telemetry.front_metrics import ProcessMetrics
from router.upstream.discovery.sources import resolve

LATE_IMPORTS: Final = (
    *("uvloop", "uvicorn.lifespan.on", "anyio._backends._asyncio", "httpcore"),
    "router.kv_events.subscriber",
)
"""What the parts of this process import at their first use. The last one needs an optional extra."""


def import_all() -> None:
    """Import now what would be imported at its first use, so that a standby can serve soon after it gets its plan."""
    for module in LATE_IMPORTS:
        with suppress(ImportError):
            import_module(module)


class FrontsDrain(Drain):
    """Is over once no front is connected: the fronts drain, and then leave."""

    def __init__(self, seconds: float, channel: ChannelServer) -> None:
        """`seconds`: how long the fronts have to leave."""
        super().__init__(seconds)
        self._channel = channel

    @property
    def idle(self) -> bool:
        return not self._channel.fronts


def run_scheduler(plan: ProcessPlan) -> int:
    """Schedule for the fronts until the supervisor ends this process or is gone. Returns the exit code.

    Raises ConfigError for a file that cannot be read or written.
    """
    settings = plan.settings
    set_up_process(settings, plan.name)
    open_files.raise_limit()
    defer_termination()
    identifier, keys = build_identifier(settings, goes_on=plan.restart > 0)
    records = RequestRecords(settings.policy, LinearCost(settings.extend_weight, settings.output_weight))
    side = build_scheduler(settings, records.observers, resolve, plan.run_folder if plan.restart else None)
    channel = ChannelServer(side.host, side.secret, plan.channel)
    drain = FrontsDrain(settings.drain_timeout + 2 * GRACE_SECONDS, channel)
    state = run_file(side, plan.run_folder, settings.policy, settings.state_interval)
    insight = Insight(settings, side, identifier, records, state)
    fronts = side.services.measurements
    insight.register(
        fronts,
        ProcessMetrics(plan.name, lambda: insight.lag.worst, lambda: side.host.open_requests, fronts, plan.restart),
    )
    config = control_server_config(FromFronts(_control(plan, side, state, channel, keys, insight, drain)), plan.control)
    server = DrainingServer(config, drain, report_ready, drains_early=plan.restart > 0)
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(_serve(server, plan.folder))
    return 0


def _control(
    plan: ProcessPlan,
    side: SchedulerSide,
    state: StateFile,
    channel: ChannelServer,
    keys: KeyWatch,
    insight: Insight,
    drain: Drain,
) -> FastAPI:
    """Build the control plane, whose lifespan runs all parts of this process."""
    operations = build_operations(plan.settings, side, insight)
    return control_plane(
        side.directory,
        *(insight.scrape, insight.report, insight.cards, insight.usage, insight.explain, insight.sessions),
        *(drain, side.workers.drain.drained, operations, build_page(plan.settings, insight, drain)),
        partial(_running, plan, side, state, channel, [keys, insight.lag], [insight.history]),
    )


async def _serve(server: DrainingServer, folder: str) -> None:
    on_supervisor_end(folder, server.end_now)
    await server.serve()


@asynccontextmanager
async def _running(
    plan: ProcessPlan,
    side: SchedulerSide,
    state: StateFile,
    channel: ChannelServer,
    first: Sequence[AbstractAsyncContextManager[object]],
    last: Sequence[AbstractAsyncContextManager[object]],
    app: FastAPI,  # noqa: ARG001 - FastAPI's signature
) -> AsyncIterator[None]:
    """Run all parts. The fronts come last and go first; but a run that takes over hears them before all else.

    `state`: from which another run can take over; `first` and `last`: parts to enter before and after those of the
    scheduler's side.
    """
    parts: list[AbstractAsyncContextManager[object]] = [
        AliveReports(),
        *first,
        FullCollections(lambda: side.host.at_rest),
        *side.observing,
    ]
    async with AsyncExitStack() as stack:
        for part in parts:
            await stack.enter_async_context(part)
        takeover = begin_takeover(side, plan.connected)
        if takeover is not None:
            await takeover.find_workers()
            await stack.enter_async_context(channel)
            await takeover.finish()
        await state.save()
        parts = [state, *side.running, *last, *([channel] if takeover is None else [])]
        for part in parts:
            await stack.enter_async_context(part)
        yield
    side.host.close()

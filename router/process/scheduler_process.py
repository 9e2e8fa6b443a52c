"""The scheduler in a process of its own: it serves fronts over the channel, and the control plane over HTTP."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from importlib import import_module
from math import inf
from typing import Final, NamedTuple

from fastapi import FastAPI

from router.channel.socket import ChannelServer
from router.cluster.report import ClusterMetrics
from router.control.app import control_plane
from router.control.replicas import ClusterOperations
from router.core.model.cost import LinearCost
from router.front.drain import Drain
from router.persistence.state_file import SavedState, load
from router.process.control_proxy import FromFronts
from router.process.front import build_identifier
from router.process.insight import Insight, RequestRecords, build_operations, build_page
from router.process.plan import AliveReports, ProcessPlan, follow_supervisor, report_ready
from router.process.scheduling import SchedulerSide, build_scheduler
from router.process.server import (
    GRACE_SECONDS,
    DrainingServer,
    control_server_config,
    defer_termination,
    set_up_process,
)
from router.process.takeover import RunState, Takeover, new_takeover, run_file
from router.runtime import open_files
from router.runtime.gc_tuning import FullCollections
from router.telemetry.metrics.front_metrics import ProcessMetrics
from router.upstream.discovery.sources import resolve

LATE_IMPORTS: Final = (
    *("uvloop", "uvicorn.lifespan.on", "anyio._backends._asyncio", "httpcore"),
    "router.kv_events.subscriber",
)
"""What the parts of this process import at their first use. The last one needs an optional extra."""
CANDIDATE: Final = "router.process.replica.candidate"
"""What runs the scheduler in a cluster. Imported only there: it needs an optional extra."""


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


class SchedulerRun:
    """One run of the scheduler: all parts of its process, and the server of the control plane."""

    def __init__(self, plan: ProcessPlan, left: SavedState | None, *, goes_on: bool) -> None:
        """`left`: the state that another run has left to this one; `goes_on`: whether there was another run.

        Raises ConfigError for a file that cannot be read or written.
        """
        settings = plan.settings
        self.plan = plan
        self._goes_on = goes_on
        self._identifier, self._keys = build_identifier(settings, goes_on=goes_on)
        self._records = RequestRecords(settings.policy, LinearCost(settings.extend_weight, settings.output_weight))
        self.side = build_scheduler(settings, self._records.observers, resolve, left, goes_on=goes_on)

    def server(
        self,
        channel: ChannelServer,
        state: RunState,
        takeover: Takeover | None,
        drain: Drain,
        on_started: Callable[[], None],
        cluster: "ClusterParts | None" = None,
    ) -> DrainingServer:
        """Return the server, which runs all parts.

        `state`: from which another run can take over; `takeover`: what this one takes over from another.
        """
        settings, side = self.plan.settings, self.side
        insight = Insight(settings, side, self._identifier, self._records, state)
        fronts, restarts = side.services.measurements, self.plan.restart
        insight.register(
            fronts,
            ProcessMetrics(
                self.plan.name, lambda: insight.lag.worst, lambda: side.host.open_requests, fronts, restarts
            ),
        )
        entrances: list[AbstractAsyncContextManager[object]] = [channel]
        last: list[AbstractAsyncContextManager[object]] = [insight.history]
        seen = drain
        if cluster is not None:
            insight.register(ClusterMetrics(cluster.operations.report))
            entrances.append(cluster.entrance)
            last.insert(0, cluster.upkeep)
            seen = Drain(0.0)  # the fronts of other replicas serve on while this one ends
        control = control_plane(
            side.directory,
            insight,
            seen,
            side.workers.drain.drained,
            build_operations(settings, side, insight),
            build_page(settings, insight, drain),
            partial(_running, side, state, takeover, entrances, [self._keys, insight.lag], last),
            None if cluster is None else cluster.operations,
        )
        config = control_server_config(FromFronts(control), self.plan.control)
        return DrainingServer(config, drain, on_started, drains_early=self._goes_on, supervised=True)


class ClusterParts(NamedTuple):
    """What a run of the scheduler has in a cluster."""

    upkeep: AbstractAsyncContextManager[object]
    """Keeps the lease, from when the scheduler serves."""
    entrance: AbstractAsyncContextManager[object]
    """Where the fronts of all replicas connect."""
    operations: ClusterOperations


def run_scheduler(plan: ProcessPlan) -> int:
    """Schedule for the fronts until the supervisor ends this process or is gone. Returns the exit code.

    Raises ConfigError for a file that cannot be read or written.
    """
    settings = plan.settings
    set_up_process(settings, plan.name)
    open_files.raise_limit()
    defer_termination()
    if settings.cluster is not None:
        candidate: Callable[[ProcessPlan], int] = import_module(CANDIDATE).run_candidate
        return candidate(plan)
    left = load(plan.run_folder, inf, time.time()) if plan.restart else None
    run = SchedulerRun(plan, left, goes_on=plan.restart > 0)
    channel = ChannelServer(run.side.host, run.side.secret, plan.channel)
    drain = FrontsDrain(settings.drain_delay + settings.drain_timeout + 2 * GRACE_SECONDS, channel)
    state = run_file(run.side, plan.run_folder, settings.policy, settings.state_interval)
    server = run.server(channel, state, new_takeover(run.side, plan.connected), drain, report_ready)
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(serve(server, plan.folder))
    return 0


async def serve(server: DrainingServer, folder: str) -> None:
    """Run a server until a signal arrives or the supervisor, whose folder this is, is gone."""
    follow_supervisor(folder, server.end_now)
    await server.serve()


@asynccontextmanager
async def _running(
    side: SchedulerSide,
    state: RunState,
    takeover: Takeover | None,
    entrances: Sequence[AbstractAsyncContextManager[object]],
    first: Sequence[AbstractAsyncContextManager[object]],
    last: Sequence[AbstractAsyncContextManager[object]],
    app: FastAPI,  # noqa: ARG001 - FastAPI's signature
) -> AsyncIterator[None]:
    """Run all parts. Fronts come last and go first, but a run that takes over accepts their reports before all else.

    `entrances`: where the fronts come in; `first` and `last`: parts to enter before and after those of the scheduler's
    side.
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
        if takeover is not None:
            takeover.begin()
            await takeover.find_workers()
            for entrance in entrances:
                await stack.enter_async_context(entrance)
            await takeover.finish()
        await state.save()
        parts = [state, *side.running, *last, *(entrances if takeover is None else ())]
        for part in parts:
            await stack.enter_async_context(part)
        yield
    side.host.close()

"""A front in a process of its own: it accepts clients, and asks the scheduler's process over the channel."""

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from importlib import import_module
from math import ceil
from typing import Final, Self

import uvicorn

from router.channel.front_channel import FrontChannel
from router.channel.messages import FrontMeasured
from router.channel.socket import ChannelClosed, Route, UnixRoute
from router.config.settings import Settings
from router.control.operator_access import OperatorAccess
from router.front.drain import Drain
from router.front.http.connection import accept_sockets
from router.process.control_proxy import ControlProxy
from router.process.entry import Entry
from router.process.front import Front, build_front
from router.process.plan import AliveReports, ProcessPlan, follow_supervisor, report_drained, report_ready
from router.process.server import (
    DrainingServer,
    build_tls,
    check_files,
    client_server_config,
    defer_termination,
    set_up_process,
)
from router.runtime.gc_tuning import FullCollections
from router.runtime.periodic import PeriodicTask
from router.telemetry.loop_lag import LoopLag
from router.telemetry.metrics.front_metrics import measured_metrics, process_load

log = logging.getLogger(__name__)

FOLLOWER: Final = "router.process.replica.follower"
"""What follows the leader of a cluster. Imported only in one: it needs an optional extra."""
REPORT_SECONDS: Final = 1.0
"""Seconds between two reports of what a front has counted."""


def share_of(settings: Settings, fronts: int) -> Settings:
    """Return the settings of one of several fronts: each has an equal part of what is limited where sockets are.

    But each can hold at least one call of `body_limit`, for which `ByteBudget` wants as much room again.
    """
    per_address = settings.max_connections_per_address
    one_call = 2 * (settings.body_limit + settings.header_limit)
    share = {
        "max_held_bytes": max(ceil(settings.max_held_bytes / fronts), min(settings.max_held_bytes, one_call)),
        "max_connections": ceil(settings.max_connections / fronts),
        "max_connections_per_address": ceil(per_address / fronts),
    }
    return settings.model_copy(update=share)


def run_front(plan: ProcessPlan) -> int:
    """Serve clients until the supervisor ends this process or is gone. Returns the exit code.

    Raises ConfigError for a file that cannot be read.
    """
    set_up_process(plan.settings, plan.name)
    check_files(share_of(plan.settings, plan.fronts))
    with asyncio.Runner(loop_factory=uvicorn.Config("", log_config=None).get_loop_factory()) as runner:
        try:
            return runner.run(_serve(plan))
        except ChannelClosed as error:
            log.error("%s", error)
            return 1


class FrontReports(PeriodicTask):
    """Reports to the scheduler's process what the front has counted."""

    def __init__(self, front: Front, drain: Drain, lag: LoopLag, channel: FrontChannel, restarts: int) -> None:
        """`restarts`: how often this process was started again."""
        super().__init__(REPORT_SECONDS)
        self._restarts = restarts
        self._front = front
        self._drain = drain
        self._lag = lag
        self._channel = channel

    async def __aenter__(self) -> Self:
        """Report at once, so that the front is on the page of metrics from its start."""
        self.send()
        return await super().__aenter__()

    def send(self) -> None:
        """Report now."""
        load = process_load(self._lag.worst, self._drain.calls, self._channel.delay, self._restarts)
        self._front.scheduler_client.report(FrontMeasured(measured_metrics(self._front.collectors), load))

    async def _run_once(self) -> None:
        self.send()


async def _serve(plan: ProcessPlan) -> int:
    async with AsyncExitStack() as stack:
        route: Route = UnixRoute(plan.channel)
        control = plan.control
        if plan.settings.cluster is not None:
            follow: Callable[[ProcessPlan, AsyncExitStack], Awaitable[tuple[Route, str]]]
            follow = import_module(FOLLOWER).follow_leader
            route, control = await follow(plan, stack)
        return await _serve_over(plan, route, control)


async def _serve_over(plan: ProcessPlan, route: Route, control: str) -> int:
    """Serve clients. `route`: to the scheduler; `control`: path of the socket of the control plane."""
    settings = share_of(plan.settings, plan.fronts)
    channel = FrontChannel(route, plan.number, plan.replica)
    opening = asyncio.create_task(channel.open())

    def give_up() -> None:
        opening.cancel()

    follow_supervisor(plan.folder, give_up)
    await asyncio.wait([opening])
    if opening.cancelled():
        return 1
    secret = opening.result()
    defer_termination()  # until here, there is nothing to drain: the signal ends the process
    drain, lag = Drain(settings.drain_timeout, delay=settings.drain_delay), LoopLag()
    front = build_front(settings, secret, drain, time.monotonic)
    channel.attach(front.scheduler_client)
    proxy = ControlProxy(control, front.budget, drain, lambda: not channel.behind)
    reports = FrontReports(front, drain, lag, channel, plan.restart)
    entry = Entry(front.gateway, proxy, OperatorAccess(settings), settings.cors_origins)
    tls = build_tls(settings)
    app = front.recorded(entry, access_log=settings.access_log)
    config = client_server_config(app, front.client_connections, tls, lifespan=False)
    server = DrainingServer(config, drain, report_ready, tls, supervised=True, on_drained=report_drained)
    follow_supervisor(plan.folder, server.end_now, server.let_end)
    parts: list[AbstractAsyncContextManager[object]] = [lag, FullCollections(lambda: drain.idle), reports]
    async with channel:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(AliveReports())
            for part in (*parts, *front.running, proxy):
                await stack.enter_async_context(part)
            lost = asyncio.create_task(_end_when_lost(channel, server))
            listeners = [socket.socket(fileno=number) for number in plan.listeners]
            await server.serve([each for listener in listeners for each in accept_sockets(listener)])
            lost.cancel()
        return await _leave(front, channel, reports)


async def _end_when_lost(channel: FrontChannel, server: DrainingServer) -> None:
    """End the process when there is no scheduler for long: no call could go on."""
    try:
        await channel.lost()
    except ChannelClosed as error:
        log.error("this front ends: %s", error)
    except Exception:  # calls would hang without a channel
        log.exception("the channel failed inside the router; this front ends")
    server.end_now()


async def _leave(front: Front, channel: FrontChannel, reports: FrontReports) -> int:
    """Report the last counts and close the channel. Returns the exit code."""
    front.scheduler_client.close()
    reports.send()
    return 0 if await channel.close() else 1

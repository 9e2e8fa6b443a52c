"""The scheduler's process in a cluster: it waits for the lease, and then schedules for the fronts of all replicas.

It leads once. When another replica leads, the process ends, and the supervisor starts it again as one that waits.
"""

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from secrets import token_hex
from typing import Final, NamedTuple

import uvicorn
from pydantic import SecretStr

from router.channel.socket import ChannelServer
from router.cluster.entrance import Entrance, bind
from router.cluster.handshake import hash_secret, read_secret
from router.cluster.kubernetes_lease import KubernetesLease
from router.cluster.leadership import Leadership, StartOfTerm
from router.cluster.lease import LONGEST_POLL_SECONDS, Candidacy, LeaderRecord, LeaseStore
from router.cluster.state_in_store import StateInStore, is_newer, stored_state
from router.cluster.store import (
    STATE_SECONDS,
    WAITING_SECONDS,
    ClusterStore,
    StoreUnreachable,
    new_record,
    store_address,
)
from router.cluster.tls import cluster_tls
from router.config.settings import Settings
from router.control.replicas import ClusterOperations
from router.errors import ConfigError
from router.persistence.state_file import SavedState, new_header, not_too_old
from router.process.plan import AliveReports, ProcessPlan, follow_supervisor, report_ready
from router.process.scheduler_process import ClusterParts, FrontsDrain, SchedulerRun, serve
from router.process.scheduling import SavedRun
from router.process.server import GRACE_SECONDS, DrainingServer, defer_termination
from router.process.takeover import StateForNextRun, Takeover
from router.upstream.discovery.kubernetes import kubernetes_api
from router.upstream.worker_registry import OperatorChanges

log = logging.getLogger(__name__)

SAY_SECONDS: Final = WAITING_SECONDS / 5
"""Seconds between two words to the store that this replica waits."""
GONE_SECONDS: Final = 86_400.0
"""Seconds after which a front of an earlier leader that has not reported counts as dead: it may obey that leader on the
other side of a parted network for as long. One whose process is started again is not waited for."""


class Term(NamedTuple):
    """What a leader begins with."""

    record: LeaderRecord
    left: SavedState | None
    """The state in the store; None if there is none, or none that can be used."""
    leases: LeaseStore
    states: ClusterStore
    """The store, with time for the whole state."""
    start: StartOfTerm
    """Holds the lease until this leader serves."""


def run_candidate(plan: ProcessPlan) -> int:
    """Wait for the lease and lead, until another leads, or the supervisor ends this process or is gone.

    Returns the exit code. Raises ConfigError for a file or an address that cannot be used.
    """
    secret = cluster_secret(plan.settings)
    host, _, port = plan.settings.cluster_address.rpartition(":")
    listener = bind(host.strip("[]"), int(port))
    with asyncio.Runner(loop_factory=uvicorn.Config("", log_config=None).get_loop_factory()) as runner:
        runner.run(_run(plan, secret, listener, f"{host}:{listener.getsockname()[1]}"))
    return 0


async def _run(plan: ProcessPlan, secret: bytes, listener: socket.socket, address: str) -> None:
    async with AliveReports(), open_leases(plan.settings) as leases, open_store(plan.settings, STATE_SECONDS) as states:
        record = await _campaign(plan, leases, address)
        if record is None:
            return
        async with released_in_the_end(leases, record), StartOfTerm(leases, record) as start:
            left = await _state(plan.settings, states)
            term = Term(record, left, leases, states, start)
            # In a thread, so that the supervisor sees this process alive while a large state is restored.
            server = await asyncio.to_thread(_build, plan, term, secret, listener)
            await serve(server, plan.folder)


@asynccontextmanager
async def released_in_the_end(store: LeaseStore, record: LeaderRecord) -> AsyncIterator[None]:
    """Give the lease up when the context is left, if it was not before: a run that fails before it serves would
    otherwise fail again and again with the lease, as a replica's own next run gets it at once.
    """
    try:
        yield
    finally:
        with suppress(StoreUnreachable):
            await store.release(record)


def cluster_secret(settings: Settings) -> bytes:
    """Return what replicas know each other by; nothing without a file. Raises ConfigError."""
    return b"" if settings.cluster_secret_file is None else read_secret(settings.cluster_secret_file)


def open_store(settings: Settings, seconds: float | None = None) -> ClusterStore:
    """Return the store of a cluster. `seconds`: in which it must answer; None for as usual."""
    address = store_address(settings.store_url)
    return ClusterStore(address) if seconds is None else ClusterStore(address, seconds)


def open_leases(settings: Settings) -> LeaseStore:
    """Return where the lease of a cluster is. Raises ConfigError outside of a pod if that is Kubernetes."""
    store = open_store(settings)
    if not settings.leads_by_kubernetes:
        return store
    api = kubernetes_api(settings.kubernetes_api, None, os.environ, setting="cluster")
    return KubernetesLease(api, store_address(settings.store_url).name, store)


async def _campaign(plan: ProcessPlan, store: LeaseStore, address: str) -> LeaderRecord | None:
    """Wait for the lease. Returns None if a signal ends this process, or its supervisor is gone."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    follow_supervisor(plan.folder, ended.set)
    report_ready()
    winning, waiting = asyncio.create_task(_win(store, plan.replica, address)), asyncio.create_task(ended.wait())
    try:
        await asyncio.wait([winning, waiting], return_when=asyncio.FIRST_COMPLETED)
        return None if ended.is_set() else winning.result()
    finally:
        winning.cancel()
        waiting.cancel()
        await asyncio.gather(winning, waiting, return_exceptions=True)
        loop.remove_signal_handler(signal.SIGTERM)
        defer_termination()


async def _win(
    store: LeaseStore,
    replica: str,
    address: str,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> LeaderRecord:
    """Wait until this replica holds the lease. It never does while the stored state is one of a newer router, which it
    would lose.

    `clock`: seconds that never go backwards; `sleep`: waits for so many of them.
    """
    candidacy, run = Candidacy(replica, time.time()), token_hex(8)
    says_at, failing, outdated = 0.0, False, False
    while True:
        wait = LONGEST_POLL_SECONDS
        try:
            now = clock()  # before the store counts, so that a lease never seems to end early
            view = await store.view()
            free, says, wait = candidacy.may_take(view, now), now >= says_at, view.looks_again_after
            if free or says:
                was_outdated, outdated = outdated, is_newer(await store.manifest())
                if outdated and not was_outdated:
                    log.error(
                        "the state in the cluster's store was written by a newer router: this replica does not lead"
                    )
            if free and not outdated:
                record = await store.acquire(new_record(replica, run, address), candidacy.highest)
                if record is not None:
                    log.warning("this replica leads with epoch %d", record.epoch)
                    return record
            elif says and not outdated:
                await store.waiting(replica)
            says_at, failing = now + SAY_SECONDS if says else says_at, False
        except StoreUnreachable as error:
            if not failing:
                log.error("the cluster's store does not answer, so this replica cannot lead: %s", error)
            failing = True
        await sleep(wait)


async def _state(settings: Settings, store: ClusterStore) -> SavedState | None:
    """Read the state in the store, as it is once nobody else saves it. Returns None if none can be used."""
    try:
        left = stored_state(await store.load())
    except StoreUnreachable as error:
        raise ConfigError(f"the state in the cluster's store cannot be read: {error}") from None
    except ValueError as error:
        log.error("the state in the cluster's store is not used: %s", error)
        return None
    return None if left is None else not_too_old(left, settings.state_fresh, time.time(), "the cluster's store")


def _build(plan: ProcessPlan, term: Term, secret: bytes, listener: socket.socket) -> DrainingServer:
    """Build the run that leads. Returns its server."""
    settings = plan.settings
    if settings.hash_secret is None and secret:
        settings = settings.model_copy(update={"hash_secret": SecretStr(hash_secret(secret).hex())})
    plan = replace(plan, settings=settings)
    run = SchedulerRun(plan, term.left, goes_on=True)
    epoch = term.record.epoch
    channel = ChannelServer(run.side.host, run.side.secret, None, epoch)
    leadership = Leadership(term.leases, term.record, channel)
    channel.on_superseded = run.side.services.on_superseded = leadership.on_superseded
    next_run = StateForNextRun(run.side)
    state = StateInStore(
        term.states,
        epoch,
        next_run.accounts,
        next_run.caches,
        partial(new_header, settings.policy, run.side.secret),
        settings.state_interval,
        next_run.on_saved,
    )
    leadership.saves(state)
    parts = ClusterParts(
        leadership,
        Entrance(listener, secret, channel, plan.control, tls=cluster_tls(settings)),
        ClusterOperations(leadership.report, leadership.hand_over),
    )
    drain = ReplicaDrain(settings.drain_delay + settings.drain_timeout + 2 * GRACE_SECONDS, channel, leadership)
    server = run.server(channel, state, _takeover(run), drain, _nothing, parts)
    leadership.on_end, leadership.on_serving = server.end_now, term.start.end
    return server


def _takeover(run: SchedulerRun) -> Takeover:
    """Return what this run takes over: at least the time in which fronts of leaders before can report."""
    saved = run.side.saved
    if saved is None or not saved.fronts:
        return Takeover(run.side, saved or SavedRun((), {}, (), OperatorChanges()), (), unknown=True)
    return Takeover(run.side, saved, {front.session for front in saved.fronts}, gone_seconds=GONE_SECONDS)


def _nothing() -> None:
    """The supervisor knows already that this process serves."""


class ReplicaDrain(FrontsDrain):
    """Hands the lead over when it begins."""

    def __init__(self, seconds: float, channel: ChannelServer, leadership: Leadership) -> None:
        """`seconds` and `channel`: as in `FrontsDrain`."""
        super().__init__(seconds, channel)
        self._leadership = leadership

    def begin(self) -> None:
        super().begin()
        self._leadership.begin_hand_over()

"""How one run of the scheduler takes over from another: nothing is charged twice, and nothing that waits is lost.

A run that dies leaves a state file and fronts with requests. The next run restores the state, and sends nothing while
the fronts report what the state does not cover (`UnsavedHistory`). Then it goes on.
"""

import asyncio
import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from math import inf
from pathlib import Path
from typing import Final, Protocol

from router.channel.earlier_run import CoveredFront, EarlierRun
from router.channel.host import FrontLink
from router.core.model.events import Held, Released, WorkerJoined
from router.core.snapshot import saved_accounts, saved_caches
from router.persistence.state_file import CoveredFronts, StateFile, StateLine, new_header
from router.process.scheduling import SavedRun, SchedulerSide

log = logging.getLogger(__name__)

REPORT_SECONDS: Final = 1.0
"""Seconds within which the fronts must report. A later report still counts, but others are served meanwhile."""
FIRST_POLL_SECONDS: Final = 1.0
"""Seconds in which workers must answer that the state does not name."""


class RunState(AbstractAsyncContextManager[object], Protocol):
    """Saves the state from which the next run takes over, at regular intervals while its context is entered."""

    @property
    def failing(self) -> bool:
        """Whether the last save failed."""

    @property
    def failures(self) -> int:
        """How many saves have failed."""

    async def save(self) -> None:
        """Save the state now."""


class Takeover:
    """Holds the scheduler until the fronts of the run before have reported."""

    def __init__(
        self,
        side: SchedulerSide,
        saved: SavedRun,
        fronts: Collection[int | str],
        *,
        unknown: bool = False,
        gone_seconds: float = inf,
        report_seconds: float = REPORT_SECONDS,
    ) -> None:
        """`fronts`: those that had been connected and may still run, by their numbers, or in a cluster by their
        sessions; `unknown`: whether there may be others, so that the whole time is waited for them. `gone_seconds`:
        after which one that has not reported counts as dead. Those that had not reported to the run before either are
        heard when they come, and not waited for. `report_seconds`: as `REPORT_SECONDS`.
        """
        self._side = side
        self._saved = saved
        self._missing = set(fronts)
        self._late = {front.session for front in saved.fronts if front.late}
        self._unknown = unknown
        self._gone_seconds = gone_seconds
        self._report_seconds = report_seconds
        self._complete = asyncio.Event()
        self._awaits_late = False
        """Whether the scheduler goes on, and fronts are still missing."""

    def begin(self) -> None:
        """Hold the scheduler. To be called before fronts can connect."""
        host = self._side.host
        host.earlier = EarlierRun(self._saved.fronts, [row.request for row in self._saved.live])
        host.on_reported = self._on_reported
        host.feed(Held(self._saved.live))
        known = {endpoint.id for endpoint in self._side.directory.endpoints}
        for worker in self._saved.fleet.values():
            if worker.id in known:
                self._side.workers.drain.feed(WorkerJoined(worker))

    async def find_workers(self) -> None:
        """Look for the workers that the state does not name: they may have joined since, and requests wait that no
        other serves. To be called before fronts can connect.
        """
        unknown = {endpoint.id for endpoint in self._side.directory.endpoints} - self._saved.fleet.keys()
        await self._side.workers.poller.poll_once(unknown, FIRST_POLL_SECONDS)

    async def finish(self) -> None:
        """Wait for the fronts, and release the scheduler."""
        if self._missing - self._late or self._unknown:
            with suppress(TimeoutError):  # the last report may come in the very turn in which the time ends
                async with asyncio.timeout(self._report_seconds):
                    await self._complete.wait()
        self._unknown = False
        if late := self._missing - self._late:
            log.error("fronts %s have not reported; the scheduler goes on without them", sorted(late))
        scheduler = self._side.host.scheduler
        log.warning("took over %d requests, of which %d wait", scheduler.live, scheduler.waiting)
        self._release()

    def _release(self) -> None:
        """Let the scheduler go on. Once no front is missing, forget what none has reported."""
        self._awaits_late = bool(self._missing)
        if not self._missing:
            self._side.host.all_reported()
        elif self._gone_seconds < inf:
            asyncio.get_running_loop().call_later(self._gone_seconds, self._give_up)
        self._side.host.feed(Released(complete=not self._missing))

    def _give_up(self) -> None:
        """Wait no more for fronts that are missing: their machines are gone."""
        if self._missing:
            self._missing.clear()
            self._release()

    def _on_reported(self, front: FrontLink) -> None:
        """Note that a front has reported, or one that was started again in its place."""
        before = [each.session for each in self._saved.fronts if each.name == front.name and front.replica]
        self._missing -= {front.number, front.session, *before}
        if not (self._missing - self._late or self._unknown):
            self._complete.set()
        if not self._missing and self._awaits_late:
            self._release()


class StateForNextRun:
    """What a run leaves to the next one."""

    def __init__(self, side: SchedulerSide) -> None:
        self._side = side
        self._covered: list[CoveredFront] = []
        """What the state covers that is being saved."""

    def lines(self) -> Iterator[StateLine]:
        """Yield the state. All that must agree with each other is taken in one step, before the first line."""
        yield from self.accounts()
        yield from self.caches()

    def accounts(self) -> Sequence[StateLine]:
        """Return what must agree with each other, and what the operator changed."""
        side, host = self._side, self._side.host
        self._covered = host.covered()
        exact: list[StateLine] = [
            *saved_accounts(host.scheduler),
            *side.stored.saved(),
            CoveredFronts(tuple(self._covered)),
        ]
        windows = side.services.limits.saved(host.clock())
        return [*exact, *windows, side.workers.registry.operator_changes()]

    def caches(self) -> Iterator[StateLine]:
        """Yield what workers are believed to hold."""
        host = self._side.host
        yield from saved_caches(host.scheduler, host.clock())

    def on_saved(self) -> None:
        """Tell the fronts what they need to keep no longer."""
        self._side.host.announce_saved(self._covered)


def run_file(side: SchedulerSide, folder: Path, policy: str, interval: float) -> StateFile:
    """Return the file in this folder that the next run takes over from."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = StateForNextRun(side)
    return StateFile(folder, state.lines, partial(new_header, policy, side.secret), interval, state.on_saved)


def new_takeover(
    side: SchedulerSide, fronts: Collection[int | str], report_seconds: float = REPORT_SECONDS
) -> Takeover | None:
    """Return what this run takes over from another; None if none has left something.

    `fronts` and `report_seconds`: as in `Takeover`.
    """
    return None if side.saved is None else Takeover(side, side.saved, fronts, report_seconds=report_seconds)

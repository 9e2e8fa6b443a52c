"""A leader's upkeep of its lease, and its end once another leads."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Final, Self

from router.channel.socket import ChannelServer
from router.cluster.lease import (
    LEASE_SECONDS,
    LONGEST_START_SECONDS,
    RENEW_SECONDS,
    START_SECONDS,
    LeaderRecord,
    LeaseStore,
    Tenure,
)
from router.cluster.report import ClusterReport
from router.cluster.state_in_store import StateInStore
from router.cluster.store import StoreUnreachable
from router.errors import NoReplica
from router.runtime.periodic import PeriodicTask

log = logging.getLogger(__name__)

LEAVE_SECONDS: Final = 2.0
"""Seconds that fronts have to hear of another leader, before the one that they obey ends."""
LOOK_SECONDS: Final = 0.02
START_RENEW_SECONDS: Final = START_SECONDS / 4
"""Seconds between two renewals before a run serves."""
START_RENEWALS: Final = round(LONGEST_START_SECONDS / START_RENEW_SECONDS)
"""Renewals at most before a run serves."""


class Leadership(PeriodicTask):
    """Renews the lease while the context is entered, and ends this run of the scheduler when another leads."""

    def __init__(self, store: LeaseStore, record: LeaderRecord, channel: ChannelServer) -> None:
        """`channel`: to the fronts, which leave once they hear of another leader."""
        super().__init__(RENEW_SECONDS)
        self._store = store
        self._channel = channel
        self.on_end: Callable[[], None] = lambda: None
        """Ends this run."""
        self.on_serving: Callable[[], None] = lambda: None
        """Called once this run serves, and renews the lease by itself."""
        self._tenure = Tenure(record)
        self._state: StateInStore | None = None
        self._waiting: Sequence[str] = ()
        self._seconds = LEASE_SECONDS
        """What the last renewal held the lease for."""
        self._looking: asyncio.Task[None] | None = None
        """The last look at who waits; None before the first."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._retiring = False
        self._serving = asyncio.Event()
        """Set once this run has taken over all that runs before have left."""

    def saves(self, state: StateInStore) -> None:
        """Set what saves the state."""
        self._state = state

    async def __aenter__(self) -> Self:
        """Renew the lease at once."""
        self._serving.set()
        self.on_serving()
        await self._run_once()
        return await super().__aenter__()

    async def __aexit__(self, *leaving: object) -> None:
        """Give the lease up, unless another has it."""
        await super().__aexit__(*leaving)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._release()

    def on_superseded(self, epoch: int) -> None:
        """Note that a front has obeyed an epoch that is higher than this one.

        If the store has lost its data, and this leader began again below it, the next one is to begin above it.
        """
        if epoch <= self._tenure.record.epoch:
            return
        self._tenure.heard(epoch)
        self._start(self._raise(epoch))
        self._retire()

    async def hand_over(self) -> None:
        """Have another replica lead. Raises NoReplica if none waits."""
        await self._look_who_waits()
        if not self._waiting:
            raise NoReplica
        await self._release_saved()

    def begin_hand_over(self) -> None:
        """Have another replica lead, if one waits: this one is about to end."""
        self._start(self._release_saved())

    def report(self) -> ClusterReport:
        """Return the report of /cluster."""
        record, state = self._tenure.record, self._state
        saved = None if state is None or state.saved_at is None else time.monotonic() - state.saved_at
        unsaved = "unsaved" if state is not None and state.failing else "ok"
        return ClusterReport(
            record.replica,
            record.epoch,
            record.since,
            record.address,
            dict(sorted(self._channel.replicas.items())),
            tuple(self._waiting),
            "unreachable" if self._tenure.unreachable else unsaved,
            None if saved is None else round(saved, 3),
        )

    async def _release_saved(self) -> None:
        """End the lease right after a save, so that the next leader has little to hear from the fronts.

        What a run would save that has not taken over yet does not say what it covers: that would be charged twice.
        """
        await self._serving.wait()
        if self._state is not None:
            await self._state.save()
        self._tenure.hand_over(time.monotonic())
        await self._release()

    async def _release(self) -> None:
        try:
            await self._store.release(self._tenure.record)
        except StoreUnreachable as error:
            log.warning("the lease could not be released and will expire: %s", error)

    async def _raise(self, epoch: int) -> None:
        try:
            await self._store.raise_epoch(self._tenure.record, epoch)
        except StoreUnreachable as error:
            log.warning("epoch %d could not be stored: %s", epoch, error)

    async def _look_who_waits(self) -> None:
        try:
            self._waiting = sorted(await self._store.waiting())
        except StoreUnreachable as error:
            log.warning("the waiting replicas could not be read: %s", error)

    async def _run_once(self) -> None:
        was_unreachable = self._tenure.unreachable
        if self._tenure.renews(time.monotonic()):
            await self._renew(self._tenure.seconds_for(time.monotonic()))
        if self._tenure.unreachable and not was_unreachable:
            log.error("the cluster's store does not answer; this replica goes on serving its fronts")
        if was_unreachable and not self._tenure.unreachable:
            log.warning("the cluster's store answers again")
        if self._tenure.over:
            self._retire()
        elif not self._tenure.unreachable and (self._looking is None or self._looking.done()):
            self._looking = self._start(self._look_who_waits())  # the next renewal does not wait for its answer

    async def _renew(self, seconds: float) -> None:
        if seconds > self._seconds:
            log.warning(
                "the lease now lasts %.1f s: it was renewed too late, as this machine or the store is busy", seconds
            )
        self._seconds = seconds
        self._tenure.answered(await self._store.renew(self._tenure.record, seconds))

    def _retire(self) -> None:
        """Save no more, and end this run once no front obeys it."""
        if not self._retiring:
            self._retiring = True
            log.warning("another replica leads; epoch %d ends", self._tenure.record.epoch)
            if self._state is not None:
                self._state.retired = True
            self._start(self._end_when_left())

    async def _end_when_left(self) -> None:
        last = time.monotonic() + LEAVE_SECONDS
        while self._channel.fronts and time.monotonic() < last:  # noqa: ASYNC110 - the channel sets no event
            await asyncio.sleep(LOOK_SECONDS)
        self.on_end()

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class StartOfTerm(PeriodicTask):
    """Holds the lease of a run that restores the state, until it serves."""

    def __init__(
        self, store: LeaseStore, record: LeaderRecord, seconds: float = START_RENEW_SECONDS, most: int = START_RENEWALS
    ) -> None:
        """`seconds`: between two renewals; `most`: renewals, so that one that hangs is followed by another run."""
        super().__init__(seconds)
        self._store = store
        self._record = record
        self._left = most

    def end(self) -> None:
        """Renew no more: the run serves, or it is to end."""
        self._left = 0

    async def _run_once(self) -> None:
        if self._left:
            self._left -= 1
            await self._store.renew(self._record, START_SECONDS)

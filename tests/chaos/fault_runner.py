"""Carries out the schedule: kills, stops and restarts workers, and sets the faults of the links."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from .faults import Fault, Kind
from .link import Link
from .processes import Server

ENDS: Final = {Kind.KILL: signal.SIGKILL, Kind.LEAVE: signal.SIGTERM}
AT_ONCE: Final = frozenset({Kind.KILL, Kind.LEAVE, Kind.HANG, Kind.RESET})
"""Faults that concern the calls in flight; the others concern calls that begin during the fault."""


class FaultRunner:
    """The workers with their links, and the operator's key to drain them."""

    def __init__(
        self,
        workers: Sequence[Server],
        links: Sequence[Link],
        operator: Callable[[Link, str], Awaitable[None]],
    ) -> None:
        """`operator`: asks the router to `drain` or `resume` the worker behind a link."""
        self._workers = workers
        self._links = links
        self._operator = operator
        self._turns = [asyncio.Lock() for _ in workers]
        """One lock per worker: a restarted process may need longer than the schedule leaves it."""
        self.over = 0.0
        """When the last fault was over, in seconds since the clients began, including the restart of a process."""

    async def make(self, faults: Sequence[Fault], clock: Callable[[], float]) -> None:
        """Carry out all faults, each at its time; `clock`: seconds since the clients began."""
        await asyncio.gather(*(self._one(fault, clock) for fault in faults))
        self.over = clock()

    async def _one(self, fault: Fault, clock: Callable[[], float]) -> None:
        await asyncio.sleep(fault.at - clock())
        async with self._turns[fault.worker]:
            await self._begin(fault)
            await asyncio.sleep(fault.until - clock())
            await self._end(fault)

    async def _begin(self, fault: Fault) -> None:
        worker, link = self._workers[fault.worker], self._links[fault.worker]
        link.kind = fault.kind
        if fault.kind is Kind.HANG:
            worker.signal(signal.SIGSTOP)
        if fault.kind in AT_ONCE:
            link.harm(fault.kind)
        if fault.kind in ENDS:
            await worker.end(ENDS[fault.kind])
            link.refuse()
        if fault.kind is Kind.DRAIN:
            await self._operator(link, "drain")

    async def _end(self, fault: Fault) -> None:
        worker, link = self._workers[fault.worker], self._links[fault.worker]
        if fault.kind is Kind.HANG:
            worker.signal(signal.SIGCONT)
        if fault.kind in ENDS:
            await worker.start()
            link.listen(worker.port)
        if fault.kind is Kind.DRAIN:
            await self._operator(link, "resume")
        link.kind = None

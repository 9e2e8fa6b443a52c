"""Starts the processes of the router, starts those again that die or hang, and ends them all.

The supervisor holds the sockets at which clients connect: if a front dies, those connections that no front has accepted
yet stay in their queues for the others. It serves no call itself.
"""

import asyncio
import logging
import os
import platform
import signal
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from secrets import token_hex
from typing import Literal

from router.config.settings import Settings
from router.process.plan import ProcessPlan
from router.process.server import GRACE_SECONDS, EndSignals
from router.process.supervision.child_process import COMMAND, ChildProcess, start_process
from router.process.supervision.keeper import Keeper, LivenessRules, described
from router.process.supervision.socket_folder import socket_folder
from router.process.supervision.standby import Standby
from router.runtime.command_line import INTERRUPTED

log = logging.getLogger(__name__)


def process_count(settings: Settings) -> int:
    """Return how many processes serve: with `auto`, one for each core that this process may use.

    In a cluster a scheduler serves the fronts of other replicas too, so it always has a process of its own.
    """
    return max(_wanted(settings.processes), 1 if settings.cluster is None else 2)


def _wanted(setting: int | Literal["auto"]) -> int:
    if setting != "auto":
        return setting
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # not on macOS


def supervise(settings: Settings, listeners: Sequence[socket.socket], fronts: int, on_ready: Callable[[], None]) -> int:
    """Run the scheduler and this many fronts until a signal arrives, and their calls have ended. Returns the exit code.

    `listeners`: where clients and operators connect; `on_ready`: called once all processes serve. Raises ConfigError if
    there is no place for the sockets between the processes.
    """
    with socket_folder() as folder:
        return asyncio.run(Supervisor(settings, listeners, fronts, folder, on_ready).run())


class Supervisor:
    """Runs the scheduler's process with its standby, and the fronts."""

    def __init__(
        self,
        settings: Settings,
        listeners: Sequence[socket.socket],
        fronts: int,
        folder: str,
        on_ready: Callable[[], None],
    ) -> None:
        """`folder`: for the sockets between the processes, which only this user may enter."""
        self._settings = settings
        self._listeners = listeners
        self._folder = folder
        self._on_ready = on_ready
        self._rules = rules = LivenessRules()
        self._scheduler = Keeper(self._start_scheduler, rules)
        self._fronts = {n: Keeper(partial(self._start_front, n), rules) for n in range(1, fronts + 1)}
        self._standby = Standby(COMMAND)
        self._replica = "" if settings.cluster is None else new_replica_name()
        self._keeping: dict[Keeper, asyncio.Task[None]] = {}
        """What keeps each process running."""
        self._watching: asyncio.Task[None] | None = None
        """What looks for processes that hang; None before all serve."""
        self._signals = EndSignals()
        self._stopping = asyncio.Event()
        self._aborted = asyncio.Event()

    async def run(self) -> int:
        """Start all, keep them running, and end all after a signal. Returns the exit code.

        The code of a process that does not start is that of the router: it has logged why.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            starting = asyncio.create_task(self._start_all())
            await self._unless_stopping(starting)
            if self._stopping.is_set():
                return INTERRUPTED
            if (code := starting.result()) is not None:
                return code
            self._on_ready()
            self._watching = asyncio.create_task(self._watch())
            await self._stopping.wait()
            await self._drain()
            return INTERRUPTED if self._aborted.is_set() else 0
        finally:
            await self._end_all()

    async def _unless_stopping(self, task: asyncio.Task[int | None]) -> None:
        """Wait for the end of a task, or cancel it when a signal arrives."""
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait([task, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if self._stopping.is_set():
            await _cancelled([task])

    async def _start_all(self) -> int | None:
        """Start the scheduler, then one front, which shows a mistake in its files once, then the others.

        Returns the exit code of the first that fails, which is negative if a signal ended it; None if all serve.
        """
        keepers = list(self._fronts.values())
        for group in ([self._scheduler], keepers[:1], keepers[1:]):
            processes = [await keeper.start() for keeper in group]
            for process in processes:
                if not await process.ready():
                    code = await process.wait()
                    if code < 0:  # it could not say why
                        log.error("%s ended with %s before it served", process.name, described(code))
                    return code
            for keeper in group:
                self._keeping[keeper] = asyncio.create_task(keeper.keep())
        return None

    async def _start_scheduler(self, restarts: int) -> ChildProcess:
        """Have the standby take its place, or start another process if there is none."""
        connected = tuple(number for number, front in self._fronts.items() if front.serves)
        count = len(self._fronts)
        plan = ProcessPlan(
            self._settings,
            self._folder,
            fronts=count,
            restart=restarts,
            connected=connected,
            replica=self._replica,
        )
        return self._standby.take(plan) or await start_process(plan)

    async def _start_front(self, number: int, restarts: int) -> ChildProcess:
        count, listeners = len(self._fronts), tuple([listener.fileno() for listener in self._listeners])
        plan = ProcessPlan(self._settings, self._folder, number, count, listeners, restarts, replica=self._replica)
        return await start_process(plan)

    async def _watch(self) -> None:
        """End processes that hang, of those that are kept running, and keep a standby."""
        await self._standby.start()
        while True:
            await asyncio.sleep(self._rules.turn_seconds)
            keepers = list(self._keeping)
            for keeper in keepers:
                keeper.check()
            await self._standby.count_turn(calm=all(keeper.serves for keeper in keepers))

    async def _drain(self) -> None:
        """Let the calls in flight end: within the drain's time, or until a second signal.

        Calls that wait need a scheduler, so one that dies meanwhile is started again. In a cluster another leads.
        """
        await self._keep_no_more(self._fronts.values())
        for listener in self._listeners:  # once the fronts have ended, too, clients are refused instead of left waiting
            listener.close()
        for front in self._fronts.values():
            front.send(signal.SIGTERM)
        if self._settings.cluster is not None:
            await self._end_scheduler()
        ended, aborted = asyncio.create_task(self._end_together()), asyncio.create_task(self._aborted.wait())
        seconds = self._settings.drain_delay + self._settings.drain_timeout + 3 * GRACE_SECONDS
        await asyncio.wait([ended, aborted], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        await _cancelled([ended, aborted])

    async def _end_together(self) -> None:
        """Wait until no process runs. A front that has drained refuses calls until all have, for the kernel still gives
        it connections, which it would close unanswered when it ends. The scheduler goes last.
        """
        fronts = [keeper.process for keeper in self._fronts.values() if keeper.process is not None]
        for front in fronts:
            await front.drained()
        await self._keep_no_more([self._scheduler])  # without fronts, it ends by itself if it had a signal, too
        for front in fronts:
            front.let_end()
        for front in fronts:
            await front.wait()
        await self._end_scheduler()
        await self._all_ended()

    async def _end_scheduler(self) -> None:
        """Let the scheduler end once no front is connected, and the standby at once."""
        await self._keep_no_more([self._scheduler])
        if self._watching is not None:
            await _cancelled([self._watching])
        self._standby.end()
        self._scheduler.send(signal.SIGTERM)

    async def _keep_no_more(self, keepers: Iterable[Keeper]) -> None:
        """Start these processes no more."""
        await _cancelled([self._keeping.pop(keeper) for keeper in keepers if keeper in self._keeping])

    async def _end_all(self) -> None:
        """End what still runs: it cuts its calls, and is killed if that takes long."""
        await self._keep_no_more(list(self._keeping))
        await self._end_scheduler()
        for process in self._processes():
            process.abort()
        await self._end_within_grace()
        for process in self._processes():
            process.send(signal.SIGKILL)
        await self._end_within_grace()

    async def _end_within_grace(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._rules.grace_seconds):
                await self._all_ended()

    async def _all_ended(self) -> None:
        """Wait until no process runs."""
        for process in self._processes():
            await process.wait()

    def _on_signal(self, number: signal.Signals) -> None:
        """Drain all processes; at a second signal, end their calls at once."""
        if not self._signals.is_new(number):
            return
        if self._stopping.is_set():
            self._aborted.set()
        self._stopping.set()

    def _processes(self) -> list[ChildProcess]:
        started = [keeper.process for keeper in (*self._fronts.values(), self._scheduler)]
        return [process for process in (*started, self._standby.process) if process is not None]


def new_replica_name() -> str:
    """Return a name that no other replica has: that of the machine, and some random digits."""
    machine = "".join(each for each in platform.node().split(".")[0] if each.isalnum() or each in "-_")
    return f"{machine or 'replica'}-{token_hex(3)}"


async def _cancelled(tasks: Sequence[asyncio.Task[object]]) -> None:
    """Cancel tasks, and wait until they have ended. Raises nothing."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

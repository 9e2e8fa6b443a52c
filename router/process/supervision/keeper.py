"""Keeps one process running: it is started again when it dies, and ended when it is silent for too long."""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from router.process.server import GRACE_SECONDS
from router.process.supervision.child_process import CANNOT_START, ChildProcess, why

log = logging.getLogger(__name__)

FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 5.0
"""Bounds of the seconds before a process is started again; each quick death doubles them."""
STABLE_SECONDS: Final = 10.0
"""A process that has run for this long is started again at once."""


@dataclass(frozen=True, slots=True)
class LivenessRules:
    """When a process counts as wedged.

    That is counted in timer turns of the supervisor, so that a stall of the supervisor itself, or of all processes
    together, is not taken for one of the process.
    """

    turn_seconds: float = 1.0
    silent_turns: int = 5
    """Turns without output of a process that serves, which writes once a second, or of a standby that got its plan.
    Time in which it was ready to run and had no core does not count.
    """
    start_turns: int = 60
    """Turns without output of a process that starts."""
    grace_seconds: float = GRACE_SECONDS
    """How long a process has to end before it is killed."""


class RestartPauses:
    """How long to wait before a process is started again: not at all, then longer after each quick death."""

    def __init__(self) -> None:
        self._next = 0.0

    def after(self, seconds: float) -> float:
        """Return for how long to pause, in seconds, after the death of a process that ran for `seconds`."""
        if seconds >= STABLE_SECONDS:
            self._next = 0.0
        pause = self._next
        self._next = min(max(2 * pause, FIRST_PAUSE), LONGEST_PAUSE)
        return pause


class Keeper:
    """Keeps one process running."""

    def __init__(self, start: Callable[[int], Awaitable[ChildProcess]], rules: LivenessRules) -> None:
        """`start`: starts the process; it gets how often the process was started again."""
        self.process: ChildProcess | None = None
        """The process that runs or has run last; None before the first start."""
        self._start = start
        self._rules = rules
        self._restarts = 0
        self._ended: ChildProcess | None = None
        """The last process that was ended because it was silent."""

    @property
    def serves(self) -> bool:
        """Whether the process runs and has said that it serves."""
        return self.process is not None and self.process.serves

    def send(self, number: signal.Signals) -> None:
        """Send the process a signal, if it runs."""
        if self.process is not None:
            self.process.send(number)

    async def start(self) -> ChildProcess:
        """Start the process and return it."""
        self.process = await self._start(self._restarts)
        return self.process

    async def keep(self) -> None:
        """Start the process again whenever it dies, until this is cancelled. It was started once before."""
        loop, pauses = asyncio.get_running_loop(), RestartPauses()
        assert self.process is not None
        process = self.process
        while True:
            started = loop.time()
            code = await self._end_of(process)
            pause = pauses.after(loop.time() - started)
            log.error("%s ended with %s; it is started again in %.1f s", process.name, described(code), pause)
            await asyncio.sleep(pause)
            self._restarts += 1
            process = await self._start_again(process.name, pauses)

    async def _end_of(self, process: ChildProcess) -> int:
        """Wait for the end of a process, and return its exit code.

        A front that has drained although the router does not was sent a signal alone, and need not wait for the others.
        """
        await process.drained()
        process.let_end()
        return await process.wait()

    async def _start_again(self, name: str, pauses: RestartPauses) -> ChildProcess:
        """Start the process, as soon as the system lets it."""
        while True:
            try:
                return await self.start()
            except CANNOT_START as error:
                pause = pauses.after(0.0)
                log.error("%s cannot be started: %s; it is tried again in %.1f s", name, why(error), pause)
                await asyncio.sleep(pause)

    def check(self) -> None:
        """Count a turn of the supervisor, and end the process if it has been silent for too many."""
        if self.process is None or not self.process.runs:
            return
        prompt = self.process.serves or self.process.must_answer
        limit = self._rules.silent_turns if prompt else self._rules.start_turns
        if self.process.count_turn() >= limit and self._ended is not self.process:
            self._ended = self.process
            log.error("%s has been silent for %d turns of the supervisor; ending it", self.process.name, limit)
            self.process.send(signal.SIGKILL)


def described(code: int) -> str:
    """Return an exit code in words, with the name of the signal if it is that of one."""
    return f"code {code}" if code >= 0 else f"code {code} ({signal.Signals(-code).name})"

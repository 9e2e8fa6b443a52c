"""A process that has imported all that the scheduler needs, and waits to take the place of a scheduler that dies."""

import logging
import signal
from collections.abc import Sequence
from typing import Final

from router.process.plan import SCHEDULER, ProcessPlan
from router.process.supervision.child_process import CANNOT_START, ChildProcess, start_without_plan, why
from router.process.supervision.keeper import described

log = logging.getLogger(__name__)

CALM_TURNS: Final = 3
LONGEST_CALM_TURNS: Final = 60
"""Bounds of the turns of the supervisor for which all processes must serve before a standby is started, as its imports
take the CPU that they need. Each death of a standby doubles them.
"""


class Standby:
    """Keeps one process ready that has no plan yet. While it waits it uses no CPU."""

    def __init__(self, command: Sequence[str]) -> None:
        """`command`: starts a process."""
        self._command = command
        self._needed_calm = CALM_TURNS
        self._calm = 0
        self.process: ChildProcess | None = None
        """The process that waits; None after it was taken."""

    async def start(self) -> None:
        """Start the process. If the system does not let it, it is tried again after more calm turns."""
        self._calm = 0
        try:
            self.process = await start_without_plan(SCHEDULER, self._command)
        except CANNOT_START as error:
            self._needed_calm = min(2 * self._needed_calm, LONGEST_CALM_TURNS)
            log.error("the scheduler's standby cannot be started: %s", why(error))

    def take(self, plan: ProcessPlan) -> ChildProcess | None:
        """Give the process its plan and return it. None if none waits."""
        process, self.process = self.process, None
        self._calm, self._needed_calm = 0, CALM_TURNS
        if process is None or not process.runs:
            return None
        process.give(plan)
        return process

    async def count_turn(self, *, calm: bool) -> None:
        """Count a turn of the supervisor; start a process if none waits. `calm`: whether all others serve."""
        if self.process is not None:
            if self.process.runs:
                return
            code = await self.process.wait()
            self.process, self._needed_calm = None, min(2 * self._needed_calm, LONGEST_CALM_TURNS)
            log.error("the scheduler's standby ended with %s; starting another", described(code))
        self._calm = self._calm + 1 if calm else 0
        if self._calm >= self._needed_calm:
            await self.start()

    def end(self) -> None:
        """End the process, which has nothing to lose."""
        if self.process is not None:
            self.process.send(signal.SIGKILL)

"""One process that the supervisor has started: it is given its plan, and says that it serves and is alive."""

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from router.process.plan import ABORT, DRAINED, END, READY, ProcessPlan
from router.runtime.own_python import python_command

COMMAND: Final = python_command("router", "process")
CANNOT_START: Final = (OSError, RuntimeError)
"""What the start of a process raises if no memory, process id or file descriptor is left; the second one if it is only
the thread in which asyncio waits for the end of the process that cannot start.
"""


class ProcessActivity(NamedTuple):
    """What the kernel says of a process."""

    runnable: bool
    """Whether it runs or waits for a core, rather than sleep."""
    cpu_seconds: float
    """CPU time that it has used."""


def activity(pid: int) -> ProcessActivity:
    """Return what a process does; where there is no /proc, it sleeps."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return ProcessActivity(False, 0.0)
    return ProcessActivity(fields[0] == b"R", (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))


class ChildProcess:
    """One started process."""

    def __init__(
        self, process: asyncio.subprocess.Process, name: str, look: Callable[[int], ProcessActivity] = activity
    ) -> None:
        """`look`: returns what a process does."""
        self.name = name
        self._process = process
        self._serving: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Whether it served before its output ended."""
        self._drained: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once it has said that it has drained, or its output has ended."""
        self._follower = asyncio.create_task(self._follow())
        self._silent_turns = 0.0
        self._look = look
        self._counted_at = asyncio.get_running_loop().time()
        self._cpu_seconds = look(process.pid).cpu_seconds
        """How much it had used when the last turn was counted."""
        self.waits = False
        """Whether it has written anything, as one does that waits for its plan with all imports done."""
        self.must_answer = False
        """Whether it waited for its plan, which it has to confirm at once."""

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self._process.returncode is None

    @property
    def serves(self) -> bool:
        """Whether it runs and has said that it serves."""
        return self.runs and self._serving.done() and self._serving.result()

    def give(self, plan: ProcessPlan) -> None:
        """Tell it what to do. Its input stays open: the end of that tells the process that the supervisor is gone."""
        assert self._process.stdin is not None
        self.must_answer, self._silent_turns = self.waits, 0
        self._process.stdin.write(plan.encoded())

    async def ready(self) -> bool:
        """Wait until it serves. Returns False if it ends instead."""
        return await asyncio.shield(self._serving)

    async def drained(self) -> None:
        """Wait until it has drained, or ended."""
        await asyncio.shield(self._drained)

    def let_end(self) -> None:
        """Tell a front that has drained to end."""
        assert self._process.stdin is not None
        self._process.stdin.write(END)

    def abort(self) -> None:
        """Have it cut its calls and end, if it still runs."""
        if self.runs:
            assert self._process.stdin is not None
            self._process.stdin.write(ABORT)
            self._process.send_signal(signal.SIGTERM)  # ends one that does not read yet

    async def wait(self) -> int:
        """Wait for its end, and return its exit code: that of a signal is negative."""
        return await self._process.wait()

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, if it still runs."""
        if self.runs:
            self._process.send_signal(number)

    def count_turn(self) -> float:
        """Count a turn of the supervisor. Returns the turns since the process last wrote something, or was started.

        A process that hangs sleeps or computes. One that waits for a core is alive, and a kill would only add to the
        load. So a turn at whose end it is ready to run counts for the share of it in which it had a core.
        """
        now, seen = asyncio.get_running_loop().time(), self._look(self.pid)
        share = (seen.cpu_seconds - self._cpu_seconds) / max(now - self._counted_at, 1e-9)
        self._silent_turns += min(share, 1.0) if seen.runnable else 1.0
        self._counted_at, self._cpu_seconds = now, seen.cpu_seconds
        return self._silent_turns

    async def _follow(self) -> None:
        """Read the output to its end."""
        output = self._process.stdout
        assert output is not None
        while line := await output.readline():
            self._note_output()
            if line == READY:
                self._serving.set_result(True)
            elif line == DRAINED:
                self._drained.set_result(None)
        if not self._serving.done():
            self._serving.set_result(False)
        if not self._drained.done():
            self._drained.set_result(None)

    def _note_output(self) -> None:
        self._silent_turns, self.waits, self.must_answer = 0.0, True, False


def why(error: OSError | RuntimeError) -> str:
    """Return why a process cannot be started."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


async def start_process(plan: ProcessPlan, command: Sequence[str] = COMMAND) -> ChildProcess:
    """Start a process and give it its plan."""
    child = await start_without_plan(plan.name, command, plan.listeners)
    child.give(plan)
    return child


async def start_without_plan(name: str, command: Sequence[str], inherited: Sequence[int] = ()) -> ChildProcess:
    """Start a process, which waits for its plan. `inherited`: the file descriptors that it shares."""
    process = await asyncio.create_subprocess_exec(
        *command,
        name,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        pass_fds=inherited,
        process_group=0,  # Ctrl-C reaches the supervisor only, which drains the others
    )
    return ChildProcess(process, name)

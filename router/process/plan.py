"""What the supervisor tells a process that it starts: one line of JSON on its standard input, which then stays open.

So every process has the same settings, whatever has become of their sources since, and no secret is on a command line.
The end of the input means that the supervisor is gone; later lines let a front that has drained end, or have a process
cut its calls. On its output, a process says that it serves, about once a second that its event loop turns, and that it
has drained.
"""

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final, Self

from router.config.settings import Settings, revealed
from router.errors import ConfigError
from router.runtime.periodic import PeriodicTask

INPUT: Final = 0
"""File descriptor of the plan."""
OUTPUT: Final = 1
"""File descriptor on which the process reports."""
READY: Final = b"ready\n"
"""What a process writes once it serves."""
ALIVE: Final = b"alive\n"
ALIVE_SECONDS: Final = 1.0
"""What a process writes while its event loop turns, and how often."""
DRAINED: Final = b"drained\n"
"""What a front writes once it has drained."""
END: Final = b"end\n"
"""What the supervisor writes to a front once all fronts have drained."""
ABORT: Final = b"abort\n"
"""What the supervisor writes to a process that is to cut its calls and end. No signal says so: whoever ends a group of
processes, as systemd does, sends a signal to each, beside that of the supervisor.
"""
SCHEDULER: Final = "scheduler"
"""The name of the scheduler's process."""


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """What one process is to do."""

    settings: Settings
    folder: str
    """Where the sockets between the processes are."""
    number: int = 0
    """Of this front; 0 for the scheduler."""
    fronts: int = 1
    """How many fronts there are."""
    listeners: tuple[int, ...] = ()
    """File descriptors of the sockets at which a front accepts clients and operators."""
    restart: int = 0
    """How often this process was started again after it had died."""
    connected: tuple[int, ...] = ()
    """For the scheduler: the numbers of the fronts that run already, and will connect to it."""
    replica: str = ""
    """The name of this replica in its cluster."""

    @property
    def name(self) -> str:
        """The name of the process in logs and metrics."""
        return f"front-{self.number}" if self.number else SCHEDULER

    @property
    def channel(self) -> str:
        """Path of the socket of the channel."""
        return str(Path(self.folder) / "channel")

    @property
    def run_folder(self) -> Path:
        """Where a run of the scheduler leaves its state to the next one."""
        return Path(self.folder) / "run"

    @property
    def control(self) -> str:
        """Path of the socket at which the scheduler's process serves the control plane."""
        return str(Path(self.folder) / "control")

    def encoded(self) -> bytes:
        """Return the plan as one line."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return json.dumps({**values, "settings": self.settings.model_dump()}, default=revealed).encode() + b"\n"


def decode_plan(line: bytes) -> ProcessPlan:
    """Return the plan. Raises ConfigError if the line is none."""
    try:
        values = json.loads(line)
        tuples = {name: tuple(values[name]) for name in ("listeners", "connected")}
        return ProcessPlan(**{**values, **tuples, "settings": Settings.model_validate(values["settings"])})
    except (ValueError, TypeError, KeyError):
        raise ConfigError("only `d2lpm serve --processes` starts this command") from None


def read_plan() -> ProcessPlan | None:
    """Wait for the plan of this process on its standard input. Returns None if the input ends before it.

    Raises ConfigError if what comes is no plan.
    """
    line = bytearray()
    while not line.endswith(b"\n") and (block := os.read(INPUT, 65536)):
        line += block
    return decode_plan(bytes(line)) if line else None


def report_ready() -> None:
    """Tell the supervisor that this process serves."""
    _report(READY)


def report_alive() -> None:
    """Tell the supervisor that this process is alive: it has imported what it needs, has got its plan, or serves."""
    _report(ALIVE)


def _report(word: bytes) -> None:
    """Tell the supervisor something, if it lives and reads: `read_plan` and `follow_supervisor` see that it is gone."""
    with suppress(BlockingIOError, BrokenPipeError):
        os.write(OUTPUT, word)


class AliveReports(PeriodicTask):
    """Tells the supervisor that the event loop of this process turns, while the context is entered."""

    def __init__(self) -> None:
        super().__init__(ALIVE_SECONDS)

    async def __aenter__(self) -> Self:
        """Begin. From now on, a supervisor that stands still and reads nothing cannot block this process."""
        os.set_blocking(OUTPUT, False)
        return await super().__aenter__()

    async def _run_once(self) -> None:
        report_alive()


def report_drained() -> None:
    """Tell the supervisor that this front has drained. It then waits for `END`."""
    _report(DRAINED)


def follow_supervisor(folder: str, on_gone: Callable[[], None], on_end: Callable[[], None] = lambda: None) -> None:
    """Call `on_end` when the supervisor lets this front end, and `on_gone` when it has this process cut its calls.

    Call that, too, when the supervisor has ended, however it died: the kernel closes its end of the input. If it could
    not do so itself, remove its folder.
    """
    loop = asyncio.get_running_loop()

    def readable() -> None:
        said = os.read(INPUT, 4096)
        if said.endswith(ABORT):
            on_gone()
        elif said:
            on_end()
        else:
            loop.remove_reader(INPUT)
            on_gone()
            shutil.rmtree(folder, ignore_errors=True)

    loop.add_reader(INPUT, readable)

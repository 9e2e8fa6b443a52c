"""Runs a scheduler and fronts as processes for a test, which takes the supervisor's place.

`d2lpm serve --processes` needs seconds of CPU time to import the router three times. Here the processes are forked from
one that has imported it, and are given their plans, ready and ended as the supervisor does it.
"""

import asyncio
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from router.config.settings import Settings
from router.process.plan import END, INPUT, OUTPUT, READY, ProcessPlan, read_plan
from router.process.scheduler_process import LATE_IMPORTS, run_scheduler

from .processes import note_start, process_count

START_SECONDS: Final = 60.0
END_SECONDS: Final = 20.0
LINE_BYTES: Final = 4096
FORKS: Final = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["router.process.front_process", __name__, *LATE_IMPORTS])


class RouterProcess:
    """One process of the router."""

    def __init__(self, plan: ProcessPlan, listener: socket.socket | None, log: Path) -> None:
        """Start it. `listener`: where a front accepts clients; `log`: the file for what it writes."""
        self.name = plan.name
        its_input, self._input = FORKS.Pipe(duplex=False)
        self._output, its_output = FORKS.Pipe(duplex=False)
        self._process = FORKS.Process(target=serve, args=(its_input, its_output, listener, str(log)), daemon=True)
        self._process.start()
        for end in (its_input, its_output):
            end.close()
        os.write(self._input.fileno(), plan.encoded())

    async def ready(self) -> None:
        """Wait until it serves. Raises RuntimeError if it ends instead."""
        said = b""
        async with asyncio.timeout(START_SECONDS):
            while READY not in said:  # it may say first that it is alive
                block = await asyncio.to_thread(os.read, self._output.fileno(), LINE_BYTES)
                if not block:
                    raise RuntimeError(f"{self.name} has ended before it served")
                said += block

    def drain(self) -> None:
        """Have it drain, and end without waiting for the other fronts."""
        self.signal(signal.SIGTERM)
        with suppress(BrokenPipeError):
            os.write(self._input.fileno(), END)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        if self._process.is_alive():
            assert self._process.pid is not None
            os.kill(self._process.pid, number)

    async def end(self) -> int | None:
        """Wait for its end, and return its exit code. One that does not end is killed."""
        await asyncio.to_thread(self._process.join, END_SECONDS)
        self.signal(signal.SIGKILL)
        await asyncio.to_thread(self._process.join)
        code = self._process.exitcode
        for end in (self._input, self._output):
            end.close()
        return code


def serve(plan: Connection, reports: Connection, listener: socket.socket | None, log: str) -> None:
    """Run one process, as `d2lpm process` does."""
    with open(log, "ab") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.dup2(plan.fileno(), INPUT)
    os.dup2(reports.fileno(), OUTPUT)
    from router.process.front_process import run_front  # noqa: PLC0415

    found = read_plan()
    assert found is not None
    if listener is None:
        sys.exit(run_scheduler(found))
    sys.exit(run_front(replace(found, listeners=(listener.detach(),))))


@asynccontextmanager
async def forked_router(settings: Settings, listener: socket.socket) -> AsyncIterator[None]:
    """Run a scheduler and fronts, which accept clients at this socket.

    Raises AssertionError if one of them ends with an error, or has logged an exception.
    """
    note_start()
    fronts = process_count() - 1
    with tempfile.TemporaryDirectory(prefix="d2lpm-") as folder:
        log = Path(folder) / "log"
        started = [RouterProcess(ProcessPlan(settings, folder, fronts=fronts), None, log)]
        try:
            await started[0].ready()
            for number in range(1, fronts + 1):
                plan = ProcessPlan(settings, folder, number, fronts, (listener.fileno(),))
                started.append(RouterProcess(plan, listener, log))
            for front in started[1:]:
                await front.ready()
            yield
        finally:
            for process in started:
                process.drain()
            codes = {process.name: await process.end() for process in reversed(started)}
            print(text := log.read_text("utf-8"))
        assert not any(codes.values()), codes
        assert "Traceback" not in text

"""How long a process counts as silent: not while it is ready to run and other processes have the cores."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from router.process.supervision.child_process import ChildProcess, ProcessActivity, activity

TURN = 0.02
TURNS = 10


@asynccontextmanager
async def silent_process(seen: Iterable[ProcessActivity]) -> AsyncIterator[ChildProcess]:
    """Run a process that writes nothing. `seen`: what it does at its start, and at the end of each turn."""
    process = await asyncio.create_subprocess_exec("cat", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
    looks = iter(seen)
    child = ChildProcess(process, "front-1", lambda pid: next(looks))  # noqa: ARG005 - there is one
    try:
        yield child
    finally:
        process.kill()
        await child.wait()
        assert not await child.ready()


async def silent_turns(child: ChildProcess) -> float:
    """Count `TURNS` turns, and return how many of them were silent."""
    silent = 0.0
    for _ in range(TURNS):
        await asyncio.sleep(TURN)
        silent = child.count_turn()
    return silent


@pytest.mark.parametrize("activity", [ProcessActivity(False, 0.0), ProcessActivity(False, 3.0)])
async def test_a_process_that_sleeps_is_silent_in_every_turn(activity: ProcessActivity) -> None:
    """It waits for a lock or an answer, or is stopped."""
    async with silent_process([activity] * (TURNS + 1)) as child:
        assert await silent_turns(child) == TURNS


async def test_a_process_that_computes_without_an_end_is_silent_in_every_turn() -> None:
    """It has a core all the time, and does not use it to report."""
    async with silent_process(ProcessActivity(True, hours * 3600.0) for hours in range(TURNS + 1)) as child:
        assert await silent_turns(child) == TURNS


async def test_a_process_without_a_core_is_not_silent() -> None:
    """However long it waits for one: the machine is too small for its load, and a kill would cut streams."""
    async with silent_process([ProcessActivity(True, 5.0)] * (TURNS + 1)) as child:
        assert await silent_turns(child) == 0.0


async def test_a_process_that_gets_a_core_at_times_is_silent_for_that_share() -> None:
    """So one that computes without an end on a busy machine is found, only later."""
    async with silent_process(ProcessActivity(True, TURN / 4 * turn) for turn in range(TURNS + 1)) as child:
        assert 0 < await silent_turns(child) < TURNS / 2


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="this system has no /proc")
def test_the_kernel_says_what_a_process_does() -> None:
    """The test itself runs, and uses a core; of a process that there is not, nothing is known."""
    before = activity(os.getpid())
    while time.process_time() < before.cpu_seconds + 0.05:
        pass
    assert before.runnable
    assert 0 < before.cpu_seconds < activity(os.getpid()).cpu_seconds
    assert activity(2**22 + 1) == ProcessActivity(False, 0.0)

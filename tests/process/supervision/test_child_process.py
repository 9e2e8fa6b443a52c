"""How long a process counts as silent: not while it is ready to run and other processes have the cores."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from router.process.supervision.child_process import ChildProcess, waited_for_core

TURN = 0.02


@asynccontextmanager
async def silent_process(waits: Iterator[float]) -> AsyncIterator[ChildProcess]:
    """Run a process that writes nothing. `waits`: for how long it had no core, whenever that is asked."""
    process = await asyncio.create_subprocess_exec("cat", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
    child = ChildProcess(process, "front-1", lambda pid: next(waits))  # noqa: ARG005 - whose does not matter
    try:
        yield child
    finally:
        process.kill()
        await child.wait()
        assert not await child.ready()


async def turns(child: ChildProcess, count: int) -> float:
    """Count so many turns, and return how many of them were silent."""
    silent = 0.0
    for _ in range(count):
        await asyncio.sleep(TURN)
        silent = child.count_turn()
    return silent


async def test_a_process_that_hangs_is_silent_in_every_turn() -> None:
    """It sleeps, is stopped, or computes without an end: it does not wait for a core."""
    async with silent_process(iter([0.0] * 11)) as child:
        assert await turns(child, 10) == pytest.approx(10)


async def test_a_process_without_a_core_is_not_silent() -> None:
    """However long it waits for one: the machine is too small for its load, and a kill would cut streams."""
    async with silent_process(float(hours) for hours in range(11)) as child:
        assert await turns(child, 10) == 0.0


async def test_a_process_that_gets_a_core_at_times_is_silent_for_that_share() -> None:
    """So one that computes without an end on a busy machine is found, only later."""
    waits = (TURN / 4 * turn for turn in range(11))
    async with silent_process(waits) as child:
        assert 5 < await turns(child, 10) < 10


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel does not count it")
def test_the_kernel_counts_the_time_without_a_core() -> None:
    """In seconds; it knows nothing of a process that there is not."""
    assert 0 < waited_for_core(os.getpid()) < 1e6
    assert waited_for_core(2**22 + 1) == 0.0

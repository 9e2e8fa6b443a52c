"""The meter of a coroutine: it counts the steps of this coroutine, and changes nothing about it."""

import asyncio
from itertools import count

import pytest

from router.runtime.metered import Metered


class Clock:
    """A clock that only work moves on."""

    def __init__(self) -> None:
        self.time = 0.0

    def read(self) -> float:
        return self.time

    async def work(self, steps: int) -> str:
        """Take a second in each step, and let others run in between."""
        for _ in range(steps):
            self.time += 1.0
            await asyncio.sleep(0)
        return "done"


async def test_only_the_coroutine_itself_counts() -> None:
    """What other tasks do while it waits is not measured, and it returns what it would."""
    clock = Clock()
    metered = Metered(clock.work(5), clock.read)
    other = asyncio.create_task(clock.work(50))
    assert await metered == "done"
    assert metered.seconds == 5.0
    await other


async def test_it_may_wait_for_anything_and_fail() -> None:
    """A future wakes it, an error passes through, and the time until then counts."""
    times = count()
    future = asyncio.get_running_loop().create_future()

    async def wait() -> None:
        await future
        raise ValueError("as it is")

    metered = Metered(wait(), lambda: float(next(times)))
    asyncio.get_running_loop().call_soon(future.set_result, None)
    with pytest.raises(ValueError, match="as it is"):
        await metered
    assert metered.seconds == 2.0


async def test_it_can_be_cancelled() -> None:
    """A cancellation reaches what it waits for."""
    future = asyncio.get_running_loop().create_future()

    async def wait() -> None:
        await future

    async def run() -> None:
        await Metered(wait())

    task = asyncio.create_task(run())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert future.cancelled()

"""The lag of the event loop as /metrics shows it."""

import asyncio
import re
import time

from router.telemetry.loop_lag import INTERVAL_SECONDS, LoopLag
from tests.support.running import running_router, until


async def test_a_callback_that_blocks_the_loop_is_measured() -> None:
    """The gauge shows at least the blocked time less one interval."""
    async with LoopLag() as lag:
        began = time.monotonic()
        asyncio.get_running_loop().call_soon(
            lambda: [None for _ in iter(lambda: time.monotonic() < began + 3 * INTERVAL_SECONDS, False)]
        )
        await until(lambda: lag.worst > 0)
        assert lag.worst >= 2 * INTERVAL_SECONDS - 0.001
    family, _ = lag.collect()
    assert [sample.value for sample in family.samples] == [lag.worst]


async def test_the_tasks_are_counted() -> None:
    """The gauge counts the tasks of the loop that have not ended."""
    async with LoopLag() as lag:
        before = tasks(lag)
        waiting = asyncio.ensure_future(asyncio.Event().wait())
        assert tasks(lag) == before + 1
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert tasks(lag) == before


def tasks(lag: LoopLag) -> float:
    _, family = lag.collect()
    return sum(sample.value for sample in family.samples)


async def test_the_lag_is_a_metric() -> None:
    """The gauge has one value without labels."""
    async with running_router("http://127.0.0.1:9") as router, router.http.get("/metrics") as response:
        assert re.search(r"^d2lpm_event_loop_lag_seconds \d", await response.text(), re.MULTILINE)

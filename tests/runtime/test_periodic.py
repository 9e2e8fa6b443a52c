"""Tasks that repeat at a fixed interval."""

import asyncio
import logging

import pytest

from router.runtime.periodic import PeriodicTask


class Counting(PeriodicTask):
    """Counts its turns; the first one fails."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.turns = 0
        self.third = asyncio.Event()

    async def _run_once(self) -> None:
        self.turns += 1
        if self.turns == 1:
            raise RuntimeError("the first")
        if self.turns == 3:
            self.third.set()


async def test_a_failed_run_is_logged_and_the_next_one_takes_place(caplog: pytest.LogCaptureFixture) -> None:
    """A failed run is logged once with its traceback, and the next runs follow."""
    with caplog.at_level(logging.ERROR):
        async with Counting() as counting, asyncio.timeout(60):
            await counting.third.wait()
    (record,) = caplog.records
    assert "a run of Counting failed" in record.getMessage()
    assert record.exc_info is not None


async def test_nothing_runs_after_the_context_is_left() -> None:
    """The task has ended when the context is left."""
    before = asyncio.all_tasks()
    async with Counting() as counting, asyncio.timeout(60):
        await counting.third.wait()
    assert asyncio.all_tasks() == before

"""What keeps a process running."""

import asyncio
import errno
import signal
import sys
from pathlib import Path

import pytest

from router.config.settings import Settings
from router.process.plan import ProcessPlan
from router.process.supervision.child_process import ChildProcess, start_without_plan
from router.process.supervision.keeper import Keeper, LivenessRules
from router.process.supervision.standby import LONGEST_CALM_TURNS, Standby
from tests.support.running import TIMEOUT_S, until

WAITS = (sys.executable, "-S", "-c", "print('alive', flush=True); input(); input()")
"""Has imported all that it needs, and then hangs."""
ENDS_AT_ONCE = (sys.executable, "-S", "-c", "")


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOMEM, "Cannot allocate memory"), RuntimeError("can't start new thread")]
)
async def test_a_process_that_the_system_does_not_let_start_is_tried_again(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """As when there is no memory left for it, or no id for the thread that waits for its end: that passes."""
    starts: list[int] = []
    enough = asyncio.Event()

    async def start(restarts: int) -> ChildProcess:
        starts.append(restarts)
        if len(starts) == 2:
            raise error
        if len(starts) == 3:
            enough.set()
        return await start_without_plan("front-1", ENDS_AT_ONCE)

    keeper = Keeper(start, LivenessRules())
    await keeper.start()
    keeping = asyncio.create_task(keeper.keep())
    third = asyncio.create_task(enough.wait())
    await asyncio.wait([keeping, third], timeout=TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
    assert starts == [0, 1, 1]
    assert f"front-1 cannot be started: {error.args[-1]}; it is tried again" in caplog.text
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    assert keeper.process is not None
    await keeper.process.wait()


async def test_a_standby_that_the_system_does_not_let_start_is_tried_again_later(tmp_path: Path) -> None:
    """The supervisor goes on without one until the system lets it start."""
    python = tmp_path / "python"
    standby = Standby((str(python), *WAITS[1:]))
    await standby.start()
    await standby.count_turn(calm=True)
    refused = standby.process
    python.symlink_to(sys.executable)
    for _ in range(LONGEST_CALM_TURNS):
        await standby.count_turn(calm=True)
    started = standby.process
    assert refused is None
    assert started is not None
    standby.end()
    await started.wait()


async def test_a_standby_that_hangs_does_not_hold_up_the_next_run_of_the_scheduler(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It has nothing to import any more, so it must confirm its plan as soon as a process that serves reports."""
    standby, rules = Standby(WAITS), LivenessRules()
    await standby.start()
    assert standby.process is not None
    await until(lambda: standby.process is not None and standby.process.waits)
    process = standby.take(ProcessPlan(Settings(), ""))
    assert process is not None

    async def start(_: int) -> ChildProcess:
        return process

    keeper = Keeper(start, rules)
    await keeper.start()

    def is_ended() -> bool:
        keeper.check()
        return not process.runs

    await until(is_ended)
    assert await process.wait() == -signal.SIGKILL
    assert f"silent for {rules.silent_turns} turns" in caplog.text
    assert rules.silent_turns < rules.start_turns

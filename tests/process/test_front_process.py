"""What each of several fronts is allowed, and its end."""

import asyncio
from pathlib import Path

import pytest

from router.config.settings import Settings
from router.front.byte_budget import ByteBudget
from router.process.front_process import share_of
from router.process.plan import ALIVE, ProcessPlan
from router.process.supervision.child_process import COMMAND


@pytest.mark.parametrize("fronts", [1, 2, 8, 99])
def test_each_front_can_hold_the_longest_body(fronts: int) -> None:
    """However many fronts share the memory; together they hold no more than all, or than one such body each."""
    settings = Settings()
    share = share_of(settings, fronts)
    assert ByteBudget(share.max_held_bytes).has_room("ann", settings.body_limit)
    assert fronts * share.max_held_bytes <= settings.max_held_bytes + fronts * 3 * settings.body_limit


async def test_a_front_that_waits_for_a_scheduler_ends_with_its_supervisor(tmp_path: Path) -> None:
    """Not only once it has waited for long enough, and it removes the folder of their sockets."""
    folder = tmp_path / "sockets"
    folder.mkdir()
    pipe = asyncio.subprocess.PIPE
    front = await asyncio.create_subprocess_exec(*COMMAND, "front-1", stdin=pipe, stdout=pipe)
    assert front.stdin is not None
    assert front.stdout is not None
    front.stdin.write(ProcessPlan(Settings(), str(folder), number=1).encoded())
    assert await front.stdout.readline() == ALIVE
    front.stdin.close()
    assert await front.wait() == 1
    assert not folder.exists()

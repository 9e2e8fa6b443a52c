"""A router or a worker is stopped for a while: the short form of `python -m tests.chaos.pause`."""

from pathlib import Path

import pytest

from tests.chaos.pause import Plan, objections, pause

SHORT = ("--token-timeout", "1.5", "--first-token-timeout", "1.5", "--write-timeout", "1.5", "--body-timeout", "1.5")
"""Timeouts shorter than the pause, and longer than a worker waits for a core on a busy machine."""


@pytest.mark.parametrize("stopped", ["router", "worker"])
async def test_no_stream_is_lost_to_a_pause(stopped: str, tmp_path: Path) -> None:
    """All 12 streams, and a call half sent before the pause, complete: at the same worker if the router was stopped,
    otherwise at the other worker.
    """
    limits = SHORT if stopped == "router" else ("--token-timeout", "1.5", "--silence-timeout", "0.3")
    plan = Plan(stopped, seconds=2.5, tokens=200, speed=1.0, flags=limits)  # type: ignore[arg-type]
    seen = await pause(plan, tmp_path)
    assert not objections(plan, seen)
    assert seen.back

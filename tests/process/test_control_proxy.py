"""What a front answers itself when it cannot pass a call on to the scheduler's process."""

from pathlib import Path

import httpx
import pytest

from router.front.byte_budget import ByteBudget
from router.front.drain import Drain
from router.process.control_proxy import LIMITS, ControlProxy
from router.process.server import control_server_config


@pytest.mark.parametrize(("path", "status"), [("/metrics", 503), ("/health", 200)])
async def test_while_no_scheduler_runs_its_paths_can_be_asked_again_later(
    path: str, status: int, tmp_path: Path
) -> None:
    """A monitor must not take a restart of the scheduler for an error of the router; /health is the front's own."""
    async with (
        ControlProxy(str(tmp_path / "nobody"), ByteBudget(1 << 20), Drain(1.0)) as proxy,
        httpx.AsyncClient(transport=httpx.ASGITransport(proxy), base_url="http://front") as http,
    ):
        answer = await http.get(path)
    assert answer.status_code == status
    if status == 503:
        assert answer.headers["retry-after"] == "1"


def test_a_front_gives_up_an_idle_connection_before_the_scheduler_does() -> None:
    """Otherwise a call could meet one that is being closed, and would fail although the scheduler runs."""
    config = control_server_config(ControlProxy("nobody", ByteBudget(0), Drain(1.0)), "control")
    assert LIMITS.keepalive_expiry is not None
    assert LIMITS.keepalive_expiry < config.timeout_keep_alive

"""Starts a real engine of each kind that publishes its KV events, and its emulation beside it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..fleet import ENGINE_START_SECONDS, ENGINES
from ..processes import Server
from .sides import Emulated, Sides, real_engine


@pytest.fixture(scope="package", params=ENGINES)
def dialect(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="package")
def sides(dialect: str, servers: list[Server], model: Path, logs: Path) -> Iterator[Sides]:
    """Start both sides for the tests of this dialect."""
    real = real_engine(dialect, model, logs / f"publishing-{dialect}")
    emulated = Emulated(dialect, logs / f"emulated-{dialect}")
    started: tuple[Server, ...] = (real, emulated)
    servers.extend(started)
    try:
        for server in started:
            server.start()
        emulated.wait_ready(emulated.ready_path, ENGINE_START_SECONDS)
        real.wait_ready(real.ready_path, ENGINE_START_SECONDS)
        yield Sides(dialect, real, emulated)
    finally:
        for server in started:
            server.stop()
            servers.remove(server)


@pytest.fixture(params=["real", "emulated"])
def server(request: pytest.FixtureRequest, sides: Sides) -> Server:
    """Return the real or the emulated engine: the claim holds for both."""
    return sides.real if request.param == "real" else sides.emulated

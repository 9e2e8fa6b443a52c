"""The scripted engine itself."""

import asyncio
import socket
from contextlib import suppress

import pytest

from .running import TIMEOUT_S
from .scripted_engine import scripted_engine


@pytest.mark.parametrize("turns", range(5))
async def test_an_engine_that_stops_closes_what_it_has_just_accepted(turns: int) -> None:
    """However many turns of the event loop ago; a socket that was lost would be an error of some later test."""
    loop = asyncio.get_running_loop()
    async with scripted_engine() as engine:
        with socket.create_connection(("127.0.0.1", engine.port)) as client:
            client.setblocking(False)
            for _ in range(turns):
                await asyncio.sleep(0)
            await engine.stop()
            with suppress(ConnectionResetError):
                async with asyncio.timeout(TIMEOUT_S):
                    assert await loop.sock_recv(client, 1) == b""

"""The leader's port: who proves nothing takes no room from those who can."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import cast

import pytest

from router.channel.socket import ChannelServer
from router.cluster.entrance import Entrance, bind
from router.cluster.handshake import NONCE_BYTES, Purpose, prove

SECRET = b"a secret of the tests"
MOST = 3


@pytest.fixture
async def address() -> AsyncIterator[tuple[str, int]]:
    """Where an entrance listens."""
    listener = bind("127.0.0.1", 0)
    name: tuple[str, int] = listener.getsockname()
    async with Entrance(listener, SECRET, cast("ChannelServer", None), "/nowhere", MOST):
        yield name


async def test_silent_connections_are_cut_oldest_first_and_keep_nobody_out(address: tuple[str, int]) -> None:
    """So many are open at most, and whoever knows the secret is admitted all the same."""
    loop = asyncio.get_running_loop()
    with ExitStack() as stack:
        silent = []
        for _ in range(MOST):
            silent.append(connection := stack.enter_context(socket.socket()))
            connection.setblocking(False)
            await loop.sock_connect(connection, address)
            assert len(await loop.sock_recv(connection, NONCE_BYTES)) == NONCE_BYTES
        front = stack.enter_context(socket.socket())
        front.setblocking(False)
        await loop.sock_connect(front, address)
        await prove(front, SECRET, Purpose.CONTROL)
        assert not await loop.sock_recv(silent[0], 1)
        with pytest.raises(BlockingIOError):
            silent[1].recv(1)

"""Replicas that know the same secret trust each other; all others part before anything is said."""

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from router.cluster.handshake import NONCE_BYTES, Purpose, Untrusted, admit, hash_secret, prove, read_secret
from router.errors import ConfigError

SECRET = b"a secret of the tests"


@pytest.fixture
def sides() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The two ends of a connection."""
    front, leader = socket.socketpair()
    front.setblocking(False)
    leader.setblocking(False)
    with front, leader:
        yield front, leader


@pytest.mark.parametrize("purpose", Purpose)
async def test_the_same_secret_opens_the_door(sides: tuple[socket.socket, socket.socket], purpose: Purpose) -> None:
    """The leader learns what the connection is for, and what follows is left on it."""
    front, leader = sides
    proving = asyncio.create_task(prove(front, SECRET, purpose))
    assert await admit(leader, SECRET) is purpose
    leader.send(b"next")
    await proving
    assert front.recv(100) == b"next"


async def test_a_client_with_another_secret_is_refused(sides: tuple[socket.socket, socket.socket]) -> None:
    """It gets no answer by which it could take the leader for one of its own."""
    front, leader = sides
    proving = asyncio.create_task(prove(front, b"another", Purpose.CHANNEL))
    with pytest.raises(Untrusted):
        await admit(leader, SECRET)
    leader.close()
    with pytest.raises(ConnectionError):
        await proving


async def test_a_leader_with_another_secret_is_refused(sides: tuple[socket.socket, socket.socket]) -> None:
    """A front tells nothing to a server that only repeats what it was sent."""
    front, leader = sides
    loop = asyncio.get_running_loop()
    proving = asyncio.create_task(prove(front, SECRET, Purpose.CHANNEL))
    await loop.sock_sendall(leader, bytes(NONCE_BYTES))
    said = await loop.sock_recv(leader, 1000)
    await loop.sock_sendall(leader, said[-32:])
    with pytest.raises(Untrusted):
        await proving


def test_a_secret_is_read_without_white_space_and_not_if_it_is_short(tmp_path: Path) -> None:
    """The end of a line is no part of it; the hash key that is derived from it is another one."""
    file = tmp_path / "secret"
    file.write_bytes(SECRET + b"\n")
    assert read_secret(file) == SECRET
    assert hash_secret(SECRET) != SECRET
    file.write_text("short")
    for path in (file, tmp_path / "none"):
        with pytest.raises(ConfigError, match="cluster_secret_file"):
            read_secret(path)

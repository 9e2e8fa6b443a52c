"""Joined connections: all of an answer arrives, however long it is."""

import asyncio
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import trustme
import uvloop

from router.cluster.leader_route import ControlTunnel
from router.cluster.pipe import Connection, join
from router.cluster.tls import ClusterTls
from tests.cluster.test_tls import leading, replica_of, route

BYTES = 2**20
"""Of an answer: more than the buffers between a leader and a client of another replica."""
LOOPS = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])


@LOOPS
@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "TLS"])
def test_a_long_answer_of_the_control_plane_arrives_whole(
    tmp_path: Path, loop: Callable[[], asyncio.AbstractEventLoop], *, encrypted: bool
) -> None:
    """Each process on its way passes all of it on, also what is written just before the connection ends."""
    tls: ClusterTls | None = replica_of(trustme.CA(), tmp_path, "replica") if encrypted else None
    line = bytes(BYTES - 1) + b"\n"

    async def ask() -> bytes:
        path = str(tmp_path / "tunnel")
        async with (
            leading(tmp_path, tls, limit=2 * BYTES) as (_, address),
            route(address, tls) as way,
            ControlTunnel(path, way),
        ):
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(line)
            found = await reader.read(-1)
            writer.close()
            await writer.wait_closed()
            return found

    with asyncio.Runner(loop_factory=loop) as runner:
        assert runner.run(ask()) == line


async def _pair() -> tuple[socket.socket, Connection]:
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        far = socket.create_connection(listener.getsockname())
        near, _ = listener.accept()
    near.setblocking(False)
    return far, await asyncio.open_connection(sock=near)


@LOOPS
def test_a_side_that_breaks_off_while_the_other_sends_is_no_error(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """The connection ends, whichever of the two is noticed first."""

    async def break_off() -> None:
        client, outer = await _pair()
        control, inner = await _pair()
        joined = asyncio.create_task(join(outer, inner))
        client.sendall(b"x")
        control.setblocking(False)
        await asyncio.get_running_loop().sock_recv(control, 1)  # by now the connections are joined
        control.setblocking(True)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # so that close sends a reset
        client.close()
        control.sendall(b"x" * 1000)
        await joined
        control.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        for _ in range(50):
            runner.run(break_off())

"""TLS between replicas: real handshakes with certificates of authorities that the test makes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import trustme

from router.channel.front_channel import FrontChannel
from router.channel.socket import ChannelClosed, ChannelServer, FrontEnd, Hello, connect_front
from router.cluster.entrance import Entrance, bind
from router.cluster.leader_route import LeaderRoute
from router.cluster.lease import LeaderRecord, StoreView
from router.cluster.store import ClusterStore
from router.cluster.tls import ClusterTls
from router.errors import ConfigError
from tests.channel.test_epochs import Leader
from tests.cluster.fixed_lease import FixedLease
from tests.support.running import until

SECRET = b"a secret of the tests"


def replica_of(authority: Any, folder: Path, name: str) -> ClusterTls:
    """Write the files of a replica."""
    files = ClusterTls(folder / f"{name}.pem", folder / f"{name}.key", folder / f"{name}.ca")
    made = authority.issue_cert("some.other.name")
    made.cert_chain_pems[0].write_to_path(files.cert)
    made.private_key_pem.write_to_path(files.key)
    authority.cert_pem.write_to_path(files.ca)
    return files


@asynccontextmanager
async def leading(folder: Path, tls: ClusterTls | None, limit: int = 2**16) -> AsyncIterator[tuple[ChannelServer, str]]:
    """A leader, and the address of its entrance. Its control plane repeats a line of at most `limit` bytes, and ends
    the connection.
    """

    async def repeat(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readline())
        await writer.drain()
        writer.close()

    leader, listener = Leader(folder, 1), bind("127.0.0.1", 0)
    control = str(folder / "control")
    async with (
        await asyncio.start_unix_server(repeat, control, limit=limit),
        leader.server,
        Entrance(listener, SECRET, leader.server, control, tls=tls),
    ):
        yield leader.server, f"127.0.0.1:{listener.getsockname()[1]}"


def route(address: str, tls: ClusterTls | None) -> LeaderRoute:
    lease = FixedLease(StoreView(LeaderRecord(1, "a", "run", address, 0.0), 1))
    return LeaderRoute(cast("ClusterStore", lease), SECRET, tls)


async def test_replicas_with_certificates_of_their_authority_are_one_cluster(tmp_path: Path) -> None:
    """The channel and the control plane work over TLS, whatever name a certificate has."""
    authority: Any = trustme.CA()
    async with (
        leading(tmp_path, replica_of(authority, tmp_path, "leader")) as (server, address),
        route(address, replica_of(authority, tmp_path, "front")) as way,
    ):
        channel = FrontChannel(way, 1, "replica")
        await channel.open()
        await until(lambda: server.replicas == {"replica": 1})
        reader, writer = await way.open_control()
        writer.write(b"hello\n")
        assert await reader.readline() == b"hello\n"
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("shown", ["nothing", "that of another authority"])
async def test_a_front_without_a_certificate_of_the_cluster_is_refused(tmp_path: Path, shown: str) -> None:
    """Even if it knows the secret."""
    authority, other = trustme.CA(), trustme.CA()
    files = None if shown == "nothing" else replica_of(other, tmp_path, "front")
    if files is not None:
        cast("Any", authority).cert_pem.write_to_path(files.ca)  # it trusts the leader
    async with (
        leading(tmp_path, replica_of(authority, tmp_path, "leader")) as (server, address),
        route(address, files) as way,
    ):
        with pytest.raises(ChannelClosed):
            await connect_front(way, Hello("version"), lambda _: None)
        assert not server.fronts


async def test_a_leader_without_a_certificate_of_the_cluster_is_refused(tmp_path: Path) -> None:
    """A front tells it nothing."""
    authority, other = trustme.CA(), trustme.CA()
    async with (
        leading(tmp_path, replica_of(other, tmp_path, "leader")) as (server, address),
        route(address, replica_of(authority, tmp_path, "front")) as way,
    ):
        with pytest.raises(OSError, match="certificate"):
            await way.connect(FrontEnd(Hello("version"), lambda _: None))
        assert not server.fronts


def test_files_that_cannot_be_used_are_found_at_the_start(tmp_path: Path) -> None:
    """One line says which."""
    files = replica_of(trustme.CA(), tmp_path, "replica")
    files.check()
    files.key.write_text("no key")
    with pytest.raises(ConfigError, match=r"cluster_tls_cert: .*replica\.key"):
        files.check()

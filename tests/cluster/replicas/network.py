"""A network for replicas, each in a namespace of its own, that can be parted."""

import asyncio
import os
import shutil
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final

REPLICAS: Final = 3
STRICT: Final = "echo 1 > /proc/sys/net/ipv4/conf/all/rp_filter"
"""Also drops what comes from an address to which nothing may be sent."""


class CannotBuildError(Exception):
    """The machine or the user may not make namespaces."""


class Network:
    """Namespaces for replicas, joined by a bridge, where the store and the workers are."""

    def __init__(self) -> None:
        self._name = f"d{os.getpid()}"
        self._subnet = f"10.77.{os.getpid() % 250}"
        self.workers: Final = f"{self._subnet}.1"
        """The address of the workers, which all replicas reach at any time."""
        self.store: Final = f"{self._subnet}.2"

    def address(self, replica: int) -> str:
        """Return the address of a replica; they are numbered from 1."""
        return f"{self._subnet}.{10 + replica}"

    def within(self, replica: int) -> Sequence[str]:
        """Return the words before a command that runs in the namespace of a replica."""
        return "ip", "netns", "exec", self._namespace(replica)

    async def build(self) -> None:
        """Make it. Raises CannotBuildError."""
        await _ip("link", "add", self._name, "type", "bridge")
        for address in (self.workers, self.store):
            await _ip("address", "add", f"{address}/24", "dev", self._name)
        await _ip("link", "set", self._name, "up")
        for replica in range(1, REPLICAS + 1):
            space, plug = self._namespace(replica), f"{self._name}v{replica}"
            await _ip("netns", "add", space)
            await _ip("link", "add", plug, "type", "veth", "peer", "name", "eth0", "netns", space)
            await _ip("link", "set", plug, "master", self._name, "up")
            await _ip("-n", space, "address", "add", f"{self.address(replica)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                await _ip("-n", space, "link", "set", device, "up")
            await _ip("netns", "exec", space, "sh", "-c", STRICT)

    async def part(self, replica: int) -> None:
        """Part a replica from the store and the other replicas. Clients and workers still reach it."""
        for address in self._others(replica):
            await _ip("-n", self._namespace(replica), "route", "add", "blackhole", f"{address}/32")

    async def heal(self, replica: int) -> None:
        """Join it again."""
        for address in self._others(replica):
            await _ip("-n", self._namespace(replica), "route", "delete", "blackhole", f"{address}/32")

    async def remove(self) -> None:
        """Remove what there is of it."""
        for replica in range(1, REPLICAS + 1):
            with suppress(CannotBuildError):
                await _ip("netns", "delete", self._namespace(replica))
        with suppress(CannotBuildError):
            await _ip("link", "delete", self._name)

    def _namespace(self, replica: int) -> str:
        return f"{self._name}n{replica}"

    def _others(self, replica: int) -> Sequence[str]:
        return [self.store, *[self.address(each) for each in range(1, REPLICAS + 1) if each != replica]]


async def _ip(*words: str) -> None:
    if (ip := shutil.which("ip")) is None:
        raise CannotBuildError("there is no command ip")
    process = await asyncio.create_subprocess_exec(ip, *words, stdout=DEVNULL, stderr=DEVNULL)
    if await process.wait():
        raise CannotBuildError(" ".join(words))


@asynccontextmanager
async def network() -> AsyncIterator[Network]:
    """Build a network, and remove it in the end. Raises CannotBuildError."""
    made = Network()
    try:
        await made.build()
        yield made
    finally:
        await made.remove()

"""Starts a router in front of emulated workers, and reads the memory, files and CPU time of its process."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from signal import SIGTERM
from typing import Final

import aiohttp

from .processes import Server, worker

READY_SECONDS: Final = 180.0
"""Seconds in which a router must find its workers."""
LOOK_SECONDS: Final = 0.25


@dataclass(frozen=True, slots=True)
class Process:
    """A router process that listens."""

    server: Server

    @property
    def address(self) -> tuple[str, int]:
        """Where the router listens."""
        return "127.0.0.1", self.server.port

    @property
    def rss(self) -> int:
        """Resident memory in bytes."""
        status = Path(f"/proc/{self.server.pid}/status").read_text()
        return 1024 * int(status.split("VmRSS:")[1].split()[0])

    @property
    def descriptors(self) -> int:
        """Number of open files and sockets."""
        return len([*Path(f"/proc/{self.server.pid}/fd").iterdir()])

    @property
    def cpu_seconds(self) -> float:
        """CPU time that the process has used so far."""
        fields = Path(f"/proc/{self.server.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def routed(
    workers: int, worker_flags: Sequence[str], router_flags: Sequence[str]
) -> AsyncIterator[tuple[Process, aiohttp.ClientSession]]:
    """Run a router that has found its workers, and an HTTP session with the router as its base."""
    fleet = [worker("vllm", *worker_flags) for _ in range(workers)]
    named: list[str] = []
    try:
        for each in fleet:
            await each.start()
            named += ["--worker", each.url]
        router = Server("router", "serve", "--log-level", "error", *named, *router_flags)
        fleet.append(router)
        await router.start()
        async with aiohttp.ClientSession(router.url) as http:
            await _ready(http)
            yield Process(router), http
    finally:
        for each in reversed(fleet):
            await each.end(SIGTERM)


async def _ready(http: aiohttp.ClientSession) -> None:
    async with asyncio.timeout(READY_SECONDS):
        while True:
            async with http.get("/ready") as response:
                if response.status == 200:
                    return
            await asyncio.sleep(LOOK_SECONDS)

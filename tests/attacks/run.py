"""Runs a router with little memory, its worker and a plain sink, and attacks both the router and the sink."""

import asyncio
import contextlib
import re
import resource
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .polite import Polite, p95, polite_clients

MEMORY: Final = 2**30
"""Bytes of memory that the router can allocate (RLIMIT_DATA)."""
RSS_MIB: Final = 600
SLOWER: Final = 2.0
"""Limit of the p95, as a multiple of the p95 beside the same attack on a sink."""
SOON: Final = 60.0
"""Seconds after an attack within which nothing of it may be left."""
START: Final = 180.0
PACKAGE: Final = "tests.attacks"
"""The package that holds the modules run here, from the root of the repository."""
SETTLE: Final = 1.0
"""Seconds of polite calls before an attack, and after it."""
LISTENS: Final = re.compile(rb"listening on http://([0-9.]+):(\d+)")
LEFT: Final = re.compile(
    r"^(d2lpm_(?:held_bytes|connections|client_unread_bytes|client_queued_requests|client_running_requests"
    r"|worker_queued_requests|worker_running_requests))(?:\{[^}]*\})? (\S+)$",
    re.MULTILINE,
)
FLAGS: Final = {
    # Few places, so that a call that holds one longer than its engine needs is noticed.
    "slow-readers": ("--window", "fixed", "--max-inflight", "16"),
    "unfinished-bodies": ("--max-connections", "500"),
}
"""Flags of the router, by attack."""

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Seen:
    """The result of one attack."""

    name: str
    rss_mib: float
    """The router's peak memory in MiB."""
    beside_router: Polite
    beside_sink: Polite
    left: Sequence[str]
    """Counts that were not zero after the attack."""

    @property
    def slower(self) -> float:
        """Return the p95 of a polite call as a multiple of the p95 beside the attack on the sink."""
        return p95(self.beside_router.wholes) / p95(self.beside_sink.wholes)

    @property
    def harm(self) -> list[str]:
        """Describe every violation that does not depend on the speed of the machine."""
        found = [f"{self.name}: {each} is left" for each in self.left]
        if self.rss_mib > RSS_MIB:
            found.append(f"{self.name}: {self.rss_mib:.0f} MiB of memory, and the limit is {RSS_MIB}")
        found += [f"{self.name}: a polite call failed: {each}" for each in self.beside_router.failures[:3]]
        if not self.beside_router.wholes:
            found.append(f"{self.name}: no polite call was served")
        return found

    @property
    def delay(self) -> list[str]:
        """Report polite calls that took too much longer; a delay of their first tokens alone is no violation."""
        if self.slower <= SLOWER:
            return []
        return [
            f"{self.name}: p95 of a call is {self.slower:.2f} times that beside the sink, and the limit is {SLOWER:g}"
        ]


@contextlib.asynccontextmanager
async def process(module: str, *flags: str) -> AsyncIterator[Process]:
    """Run a Python module while the context is entered."""
    started = await asyncio.create_subprocess_exec(sys.executable, "-m", module, *flags, stdin=PIPE, stdout=PIPE)
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            started.kill()
        await started.wait()


async def address(server: Process) -> Address:
    """Wait until a server listens; return its address. Raises RuntimeError if it never does."""
    assert server.stdout is not None
    async with asyncio.timeout(START):
        async for line in server.stdout:
            if found := LISTENS.search(line):
                return found[1].decode(), int(found[2])
    raise RuntimeError("the server has ended before it listened")


@contextlib.asynccontextmanager
async def routed(*flags: str) -> AsyncIterator[tuple[int, Address]]:
    """Run a router with little memory in front of a worker; yield its process id and its address."""
    async with process(f"{PACKAGE}.worker") as worker:
        host, port = await address(worker)
        named = ("--worker", f"http://{host}:{port}", "--port", "0", "--log-level", "error")
        async with process("router", "serve", *named, *flags) as router:
            resource.prlimit(router.pid, resource.RLIMIT_DATA, (MEMORY, MEMORY))
            where = await address(router)
            yield router.pid, where


async def attacked(name: str, seconds: float, target: Address, router: Address) -> Polite:
    """Attack this target while polite clients call the router; return what these experience."""
    async with polite_clients(*router) as polite:
        await asyncio.sleep(SETTLE)
        polite.firsts.clear()
        polite.wholes.clear()
        async with process(f"{PACKAGE}.attacker", name, target[0], str(target[1]), str(seconds)) as attacker:
            await attacker.wait()
    return polite


async def run(name: str, seconds: float, *, sink: bool = True) -> Seen:
    """Run one attack beside polite clients; without a sink there is no comparison of times."""
    async with routed(*FLAGS.get(name, ())) as (pid, router):
        beside_sink = Polite()
        if sink:
            async with process(f"{PACKAGE}.worker") as plain:
                beside_sink = await attacked(name, seconds, await address(plain), router)
        beside_router = await attacked(name, seconds, router, router)
        left = await left_over(router)
        return Seen(name, rss_peak(pid), beside_router, beside_sink, left)


def rss_peak(pid: int) -> float:
    """Return the peak resident memory of a process, in MiB."""
    status = Path(f"/proc/{pid}/status").read_text("utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


async def left_over(router: Address) -> list[str]:
    """Wait at most `SOON` after the last client; return what the router still holds or has open."""
    left = [""]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SOON):
            while left:
                await asyncio.sleep(0.2)
                found = LEFT.findall(await _metrics(*router))
                own = {"d2lpm_connections": 1.0}
                left = [f"{name} {value}" for name, value in found if float(value) != own.get(name, 0.0)]
                left += [] if found else ["no gauge is there"]
    return left


async def _metrics(host: str, port: int) -> str:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        return (await reader.read(-1)).decode()
    finally:
        writer.close()


def table(seen: Sequence[Seen]) -> str:
    """Return a table with a line for each attack."""
    head = f"{'attack':20}{'RSS MiB':>9}{'calls':>7}{'failed':>8}{'first p95':>11}{'beside sink':>13}"
    lines = [head + f"{'whole p95':>11}{'beside sink':>13}"]
    for each in seen:
        router, sink = each.beside_router, each.beside_sink
        times = (p95(router.firsts), p95(sink.firsts), p95(router.wholes), p95(sink.wholes))
        first, first_sink, whole, whole_sink = (f"{seconds:.3f} s" for seconds in times)
        lines.append(
            f"{each.name:20}{each.rss_mib:9.0f}{len(router.wholes):7}{len(router.failures):8}"
            f"{first:>11}{first_sink:>13}{whole:>11}{whole_sink:>13}"
        )
    return "\n".join(lines)

"""`python -m tests.cluster.replicas.cost`: what one, two and three replicas cost a call, beside one router alone.

All routers run at the same time, before the same workers, whose answers are made beforehand, and take turns under load,
in one order and then in the other. CPU time is that of all processes of a router or its replicas, the supervisors and
the waiting schedulers included, but not the store's. A ratio is the median of the ratios of each round.
"""

import argparse
import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from signal import SIGTERM
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

from tests.chaos.many_streams import TICK
from tests.chaos.processes import Server, cpu_ticks, router, router_processes
from tests.cluster.replicas.replicas import running_cluster

PEERS: Final = (sys.executable, "-m", "bench.lab.micro.canned_peers")
WORKERS: Final = 4
STREAMS: Final = 32
"""Chats open at a time, over all replicas."""
ONE_PROCESS: Final = "alone, one process"
TWO_PROCESSES: Final = "alone, two processes"


class Load(NamedTuple):
    """What a setup did in one round."""

    calls: int
    cpu_seconds: float
    median_ms: float
    """What the median call took; of several replicas, at the slowest."""

    @property
    def cpu_us(self) -> float:
        """CPU microseconds per call."""
        return 1e6 * self.cpu_seconds / max(1, self.calls)


Setups = Mapping[str, Sequence[Server]]
"""The supervisors of each setup, by its name."""
Rounds = Mapping[str, Sequence[Load]]


@asynccontextmanager
async def running_setups(folder: Path) -> AsyncIterator[Setups]:
    """Run all that is compared."""
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(_canned_worker()) for _ in range(WORKERS)]
        setups: dict[str, Sequence[Server]] = {}
        for name, processes in ((ONE_PROCESS, "1"), (TWO_PROCESSES, "2")):
            alone = router(folder / name, workers, "--processes", processes, "--log-level", "warning")
            stack.push_async_callback(alone.end, SIGTERM)
            await alone.start()
            setups[name] = [alone]
        for count in (1, 2, 3):
            own = folder / str(count)
            own.mkdir()
            cluster = await stack.enter_async_context(running_cluster(own, workers, count=count))
            setups[f"{count} replica{'s' * (count > 1)}"] = [replica.server for replica in cluster.replicas]
        yield setups


@asynccontextmanager
async def _canned_worker() -> AsyncIterator[str]:
    """Run a worker that sends each answer at once; yield its URL."""
    process = await asyncio.create_subprocess_exec(*PEERS, "worker", "0", stdin=PIPE, stdout=PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(await process.stdout.readline())}"
    finally:
        process.stdin.close()
        await process.wait()


async def load(servers: Sequence[Server], streams: int, seconds: float) -> Load:
    """Put the replicas of a setup under load: each has its part of the open chats, which follow one another."""
    clients = [
        await asyncio.create_subprocess_exec(*PEERS, "client", str(server.port), str(part), str(seconds), stdout=PIPE)
        for server, part in zip(servers, parts(streams, len(servers)), strict=True)
        if part
    ]
    await asyncio.gather(*map(_line, clients))
    before = cpu_seconds(servers)
    results = [(await _line(client)).split() for client in clients]
    used = cpu_seconds(servers) - before
    await asyncio.gather(*(client.wait() for client in clients))
    return Load(sum(int(calls) for calls, _ in results), used, max(float(ms) for _, ms in results))


async def _line(process: Process) -> str:
    assert process.stdout is not None
    return (await process.stdout.readline()).decode()


def parts(whole: int, count: int) -> Sequence[int]:
    """Divide chats evenly."""
    return [whole // count + (number < whole % count) for number in range(count)]


def cpu_seconds(servers: Iterable[Server]) -> float:
    """Return the CPU time that all processes of these routers have used."""
    ids = [pid for server in servers for pid in (server.pid, *router_processes(server.pid).values())]
    return sum(map(cpu_ticks, ids)) / TICK


async def measure(setups: Setups, rounds: int, streams: int, seconds: float) -> Rounds:
    """Put each setup under load once a round; the first round is not kept."""
    found: dict[str, list[Load]] = defaultdict(list)
    for number in range(rounds + 1):
        for name, servers in list(setups.items())[:: 1 if number % 2 else -1]:
            measured = await load(servers, streams, seconds)
            if number:
                found[name].append(measured)
    return found


def table(bursts: Rounds, singles: Rounds) -> Iterator[str]:
    """Yield the lines of the report."""
    yield f"{'':22}{'CPU us per call':>16}{'of one process':>16}{'of two':>8}{'p50, one at a time':>20}"
    for name, loads in bursts.items():
        ratios = [
            median(each.cpu_us / base.cpu_us for each, base in zip(loads, bursts[alone], strict=True))
            for alone in (ONE_PROCESS, TWO_PROCESSES)
        ]
        cost, single = median(each.cpu_us for each in loads), median(each.median_ms for each in singles[name])
        yield f"{name:22}{cost:16.0f}{ratios[0]:16.2f}{ratios[1]:8.2f}{single:17.2f} ms"


async def compare(rounds: int, seconds: float) -> None:
    """Measure and print."""
    with TemporaryDirectory() as folder:
        async with running_setups(Path(folder)) as setups:
            bursts = await measure(setups, rounds, STREAMS, seconds)
            singles = await measure(setups, rounds, 1, seconds)
    for line in table(bursts, singles):
        print(line)


def main() -> int:
    """Run, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.replicas.cost", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="that are kept (9)")
    parser.add_argument("--seconds", type=float, default=3.0, metavar="S", help="of each measurement (3)")
    options = parser.parse_args()
    asyncio.run(compare(options.rounds, options.seconds))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""`python -m tests.cluster.replicas.cost`: what processes and replicas cost a call, beside a router in one process.

All routers run at the same time, before the same workers, whose answers are made beforehand, and take turns under load,
in one order and then in the other. CPU time is that of all processes of a router or its replicas, the supervisors and
the waiting schedulers included, but not the store's. A ratio is the median of the ratios of each round.

`--alone 1 2 3 5 9 --replicas --streams 320` compares numbers of processes instead; flags after `--` are the routers'.
"""

import argparse
import asyncio
from asyncio.subprocess import PIPE, Process
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from signal import SIGTERM
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

from bench.lab.micro.canned_peers import CHUNKS, PEERS, canned_workers
from bench.report.columns import aligned
from tests.chaos.many_streams import TICK
from tests.chaos.processes import Server, cpu_ticks, router, router_processes
from tests.cluster.replicas.replicas import running_cluster

CLIENT_STREAMS: Final = 64
"""Chats that one process of the load keeps open, at most."""
FRONT: Final = "front"
SCHEDULER: Final = "scheduler"


class Plan(NamedTuple):
    """What is compared, and how."""

    alone: Sequence[int]
    """Processes of each router without a cluster."""
    replicas: Sequence[int]
    """How many replicas each cluster has."""
    streams: int
    """Chats open at a time, over all replicas."""
    gap_ms: int
    """Milliseconds between two of the 16 chunks of an answer; 0 for all at once."""
    rounds: int
    """That are kept."""
    seconds: float
    """Of each measurement."""
    flags: Sequence[str]
    """More flags of all routers."""


class Load(NamedTuple):
    """What a setup did in one round."""

    calls: int
    seconds: float
    cpu_seconds: Mapping[str, float]
    """By the name of the process, over all replicas; the supervisors, or the only processes, are named ""."""
    median_ms: float
    """What the median call took; of several clients, at the slowest."""

    @property
    def cpu_us(self) -> float:
        """CPU microseconds per call. At least a tick was used, though the system may have counted none."""
        return 1e6 * max(1 / TICK, sum(self.cpu_seconds.values())) / max(1, self.calls)

    @property
    def scheduler_share(self) -> float:
        """The scheduler's share of the CPU time."""
        return self.cpu_seconds.get(SCHEDULER, 0.0) / max(1e-9, sum(self.cpu_seconds.values()))

    @property
    def uneven(self) -> float:
        """The CPU time of the busiest front over that of the idlest; 1 without fronts."""
        fronts = [used for name, used in self.cpu_seconds.items() if name.startswith(FRONT)] or [1.0]
        return max(fronts) / max(1e-9, min(fronts))


Setups = Mapping[str, Sequence[Server]]
"""The supervisors of each setup, by its name."""
Rounds = Mapping[str, Sequence[Load]]


@asynccontextmanager
async def running_setups(folder: Path, plan: Plan) -> AsyncIterator[Setups]:
    """Run all that is compared."""
    async with AsyncExitStack() as stack:
        ports = stack.enter_context(canned_workers(plan.gap_ms))
        workers = [f"http://127.0.0.1:{port}" for port in ports]
        setups: dict[str, Sequence[Server]] = {}
        for processes in plan.alone:
            name = f"alone, {processes} process{'es' * (processes > 1)}"
            more = ("--processes", str(processes), "--log-level", "warning", *plan.flags)
            alone = router(folder / name, workers, *more)
            stack.push_async_callback(alone.end, SIGTERM)
            await alone.start()
            setups[name] = [alone]
        for count in plan.replicas:
            own = folder / str(count)
            own.mkdir()
            cluster = await stack.enter_async_context(running_cluster(own, workers, *plan.flags, count=count))
            setups[f"{count} replica{'s' * (count > 1)}"] = [replica.server for replica in cluster.replicas]
        yield setups


async def load(servers: Sequence[Server], streams: int, seconds: float) -> Load:
    """Put the replicas of a setup under load: each has its part of the open chats, which follow one another."""
    clients = [
        await asyncio.create_subprocess_exec(
            *PEERS, "client", str(server.port), str(some), str(seconds), str(CHUNKS), stdout=PIPE
        )
        for server, part in zip(servers, parts(streams, len(servers)), strict=True)
        for some in parts(part, -(-part // CLIENT_STREAMS))
    ]
    await asyncio.gather(*map(_line, clients))
    before = cpu_seconds(servers)
    results = [(await _line(client)).split() for client in clients]
    used = {name: after - before.get(name, 0.0) for name, after in cpu_seconds(servers).items()}
    await asyncio.gather(*(client.wait() for client in clients))
    return Load(sum(int(calls) for calls, _ in results), seconds, used, max(float(ms) for _, ms in results))


async def _line(process: Process) -> str:
    assert process.stdout is not None
    return (await process.stdout.readline()).decode()


def parts(whole: int, count: int) -> Sequence[int]:
    """Divide chats evenly."""
    return [whole // count + (number < whole % count) for number in range(count)]


def cpu_seconds(servers: Sequence[Server]) -> Mapping[str, float]:
    """Return the CPU time that the processes of these routers have used, by their names."""
    used = defaultdict[str, float](float)
    for number, server in enumerate(servers):
        for name, pid in {"": server.pid, **router_processes(server.pid)}.items():
            used[f"{name} of {number}" if name.startswith(FRONT) else name] += cpu_ticks(pid) / TICK
    return used


async def measure(setups: Setups, rounds: int, streams: int, seconds: float) -> Rounds:
    """Put each setup under load once a round; the first round is not kept."""
    found: dict[str, list[Load]] = defaultdict(list)
    for number in range(rounds + 1):
        for name, servers in list(setups.items())[:: 1 if number % 2 else -1]:
            measured = await load(servers, streams, seconds)
            if number:
                found[name].append(measured)
    return found


def table(bursts: Rounds, singles: Rounds) -> list[str]:
    """Return the lines of the report: medians over the rounds. The first two setups are what the others are compared
    with.
    """
    bases = [*bursts][:2]
    head = ("", "calls/s", "CPU us per call", *(f"of {base}" for base in bases), "scheduler's share")
    rows = [_row(name, bursts, singles, bases) for name in bursts]
    return aligned([(*head, "busiest front / idlest", "p50 ms", "p50, one at a time"), *rows])


def _row(name: str, bursts: Rounds, singles: Rounds, bases: Sequence[str]) -> Sequence[str]:
    loads = bursts[name]
    ratios = [
        median(each.cpu_us / beside.cpu_us for each, beside in zip(loads, bursts[base], strict=True)) for base in bases
    ]
    return (
        name,
        f"{median(each.calls / each.seconds for each in loads):,.0f}",
        f"{median(each.cpu_us for each in loads):,.0f}",
        *(f"{ratio:.2f}" for ratio in ratios),
        f"{median(each.scheduler_share for each in loads):.2f}",
        f"{median(each.uneven for each in loads):.2f}",
        f"{median(each.median_ms for each in loads):.2f}",
        f"{median(each.median_ms for each in singles[name]):.2f}",
    )


async def compare(plan: Plan) -> None:
    """Measure and print."""
    with TemporaryDirectory() as folder:
        async with running_setups(Path(folder), plan) as setups:
            bursts = await measure(setups, plan.rounds, plan.streams, plan.seconds)
            singles = await measure(setups, plan.rounds, 1, plan.seconds)
    print(*table(bursts, singles), sep="\n")


def main() -> int:
    """Run, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.replicas.cost", description=__doc__)
    parser.add_argument(
        "--alone", type=int, nargs="+", default=(1, 2), help="processes of routers without a cluster (1 2)"
    )
    parser.add_argument("--replicas", type=int, nargs="*", default=(1, 2, 3), help="replicas of clusters (1 2 3)")
    parser.add_argument("--streams", type=int, default=32, help="open at a time, over all replicas (32)")
    parser.add_argument(
        "--gap", type=int, default=0, metavar="MS", help="between two chunks of an answer (0: all at once)"
    )
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="that are kept (9)")
    parser.add_argument("--seconds", type=float, default=3.0, metavar="S", help="of each measurement (3)")
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="of all routers, after --, such as -- --window off")
    given = parser.parse_args()
    plan = Plan(given.alone, given.replicas, given.streams, given.gap, given.rounds, given.seconds, given.flags)
    asyncio.run(compare(plan))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""One run of chaos: starts the processes, the clients and the faults, and collects the result."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

import aiohttp

from .clients import Client, Crowd, Outcome, ask_all, make_clients
from .evidence import Evidence
from .fault_runner import FaultRunner
from .faults import Fault, schedule
from .judge import Judgement, fairness_objections, judge, objections
from .leftovers import left_in_core, left_over
from .link import Link
from .processes import Server, get_json, router, running_workers, sockets
from .service import Sample, Window, windows

KEY: Final = "the operator's key"
CALM: Final = 20.0
"""Seconds after the last fault in which the clients continue."""
SAMPLES: Final = 0.25
"""Seconds between two samples of the clients' service."""
ROUTER_FLAGS: Final = (
    *("--log-level", "warning", "--admin-key", KEY, "--poll-interval", "0.5"),
    *("--breaker-cooldown", "1"),
    # What a call costs, so that service is even within a few calls of each client, and so within seconds.
    *("--dlpm-home.quantum", "100"),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """The duration, the load, the faults and the seed of a run."""

    seed: int = 1
    trouble: float = 600.0 - CALM
    """Seconds in which there are faults."""
    calm: float = CALM
    """Seconds after them in which the clients continue."""
    every: float = 0.7
    """Seconds between two faults, on average."""
    workers: int = 8
    clients: int = 200
    greedy: int = 30
    """Number of clients that always have more waiting than is served."""
    calls: int = 3
    """Calls that a greedy client has open at once."""
    think: float = 15.0
    """Seconds between two calls of any other client, on average."""
    vanishing: float = 0.05
    """Share of the calls that their clients abandon."""
    speed: float = 0.25
    """Speed of the emulated hardware; each step is a token, and its duration is divided by this."""
    batch: int = 4
    """Requests that a worker runs at once."""

    patience: float = 3.0
    """Seconds for which the router waits for a token; twice as long for the first one, half as long for a sign of
    life.
    """

    @property
    def flags(self) -> tuple[str, ...]:
        """The router's command-line flags."""
        times = ("--token-timeout", str(self.patience), "--first-token-timeout", str(2 * self.patience))
        return (*ROUTER_FLAGS, *times, "--silence-timeout", str(self.patience / 2))

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The schedule of faults."""
        return schedule(self.seed, self.trouble, self.workers, self.every, 2 * self.patience)


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a run."""

    faults: Sequence[Fault]
    judgement: Judgement
    over: float
    """When the last fault was over, in seconds since the clients began."""
    windows: Sequence[Window]
    """Windows of service after that."""
    left: Sequence[str]
    """What was not at rest at the end."""

    @property
    def objections(self) -> list[str]:
        """Describe violations that no machine excuses; empty if there are none."""
        return [*objections(self.judgement), *(f"left over: {each}" for each in self.left)]

    @property
    def fairness_objections(self) -> list[str]:
        """Describe violations of fairness after the faults, which need a machine that keeps up."""
        return fairness_objections(self.windows, self.over)


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen during the load, and after it."""

    outcomes: Sequence[Outcome]
    samples: list[Sample]
    over: float
    left: list[str]


async def run(plan: Plan, directory: Path) -> Result:
    """Do the whole run. `directory`: for the router's log and journal."""
    evidence, journal = Evidence(), directory / "journal"
    async with (
        running_workers(plan.workers, plan.speed, plan.batch) as workers,
        linked(workers, plan.seed, evidence) as links,
    ):
        addresses = [link.url for link in links]
        proxy = router(directory / "log", addresses, *plan.flags, "--journal", str(journal))
        try:
            await proxy.start()
            async with aiohttp.ClientSession() as http:
                seen = await _under_load(plan, proxy, workers, links, http)
            code = await proxy.end(signal.SIGTERM)
        finally:
            await proxy.end()
    left = [*seen.left, *left_in_core(journal), *([f"exit code {code}"] if code else [])]
    found = windows(seen.samples, seen.over)
    return Result(plan.faults, judge(seen.outcomes, evidence, plan.faults), seen.over, found, left)


@asynccontextmanager
async def linked(workers: Sequence[Server], seed: int, evidence: Evidence) -> AsyncIterator[list[Link]]:
    """Put a link before each worker."""
    random = Random(seed)
    links = [Link(number, evidence, random) for number in range(len(workers))]
    try:
        for link, each in zip(links, workers, strict=True):
            link.listen(each.port)
        yield links
    finally:
        for link in links:
            link.close()


def operator_of(http: aiohttp.ClientSession, proxy: Server) -> Callable[[Link, str], Awaitable[None]]:
    """Return a function that asks a router to `drain` or `resume` the worker behind a link."""

    async def ask(link: Link, action: str) -> None:
        name = link.url.removeprefix("http://")
        headers = {"authorization": f"Bearer {KEY}"}
        async with http.post(f"{proxy.url}/workers/{name}/{action}", headers=headers) as response:
            response.raise_for_status()

    return ask


async def _under_load(
    plan: Plan, proxy: Server, workers: Sequence[Server], links: Sequence[Link], http: aiohttp.ClientSession
) -> Seen:
    began = time.monotonic()

    def clock() -> float:
        return time.monotonic() - began

    await get_json(http, f"{proxy.url}/fairness")
    before = sockets(proxy.pid)
    clients = make_clients(plan.seed, plan.clients, plan.greedy, plan.vanishing)
    crowd, trouble, samples = (
        Crowd(proxy.url, clock),
        FaultRunner(workers, links, operator_of(http, proxy)),
        list[Sample](),
    )
    asking = asyncio.gather(ask_all(crowd, clients, plan.calls, plan.think), _look(crowd, clients, samples, clock))
    try:
        await trouble.make(plan.faults, clock)
        await crowd.pause(plan.calm)
    finally:
        crowd.over.set()
        await asking
        await crowd.close()
    left = await left_over(http, proxy.url, proxy.pid, before, [each.url for each in workers])
    return Seen(crowd.outcomes, samples, trouble.over, left)


async def _look(crowd: Crowd, clients: Sequence[Client], samples: list[Sample], clock: Callable[[], float]) -> None:
    """Sample from time to time the service of the greedy clients."""
    greedy = [client for client in clients if client.greedy]
    while not crowd.over.is_set():
        service = {client.name: client.service for client in greedy}
        samples.append(Sample(clock(), service, {client.name: client.waiting for client in greedy}))
        await crowd.pause(SAMPLES)

"""A long run: `python -m tests.chaos.soak [--requests N]`. The exit code is 0 if the router holds no more at its end.

Many clients make a few calls and never return, while others stay; some disconnect amid their streams, some send invalid
calls, some close their connections. At each tenth of the run all of them pause, and once the router is at rest its
memory, files and sockets, event loop tasks and metric series are compared.
"""

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import aiohttp
import uvloop

from bench.report.progress import ProgressBar

from .asks import MODEL
from .fleet import LOOK_SECONDS, Process, routed
from .raw_connection import RawConnection, Reply, post

GROWTH: Final = 0.05
"""Ratio by which memory may grow from a fifth of the run to its end."""
FROM: Final = 0.2
"""Share of the run after which everything must be constant."""
REST_SECONDS: Final = 60.0
"""Seconds in which the router comes to rest: unused connections to workers close after 3 s."""
STARTS: Final = 8
"""Looks before the first request: polls come and go, and the most that they have open is no leak."""
CALLS_ON_A_LINE: Final = 100


@dataclass(frozen=True, slots=True)
class Plan:
    """The number of requests and clients of a run."""

    calls: int = 1_000_000
    lines: int = 48
    """Connections of clients at a time."""
    regulars: int = 400
    """Clients that return again and again, with every fourth call."""
    visits: int = 4
    """Calls that each of the other clients makes."""
    looks: int = 10
    """Pauses in which the router is examined, at equal distances."""
    workers: int = 2
    flags: Sequence[str] = ("--client-limit", "250", "--prefix-limit", "400000")
    """Flags of the router, with which its memory of clients and prompts is full after the first fifth."""


class Look(NamedTuple):
    """The router at rest, after a number of requests."""

    requests: int
    rss: int
    """Bytes."""
    descriptors: int
    tasks: int
    series: int


@dataclass(slots=True)
class Result:
    """The result of a run; the first look is before the first request."""

    looks: list[Look] = field(default_factory=list)
    endings: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def objections(self) -> list[str]:
        """Describe what grew, and which calls ended in a way that is not permitted."""
        start, end = self.looks[0], self.looks[-1]
        later = [look for look in self.looks if look.requests >= FROM * end.requests]
        found = [f"{count} calls ended with {ending}" for ending, count in self.endings.items() if ending not in FINE]
        for what, before in (("descriptors", start.descriptors), ("tasks", start.tasks)):
            most = max(getattr(look, what) for look in later)
            if most > before:
                found.append(f"{most} {what} instead of {before}")
        # As many clients are remembered, but not all of them have waited or owe anything, and have a series for that.
        series, before = max(look.series for look in later), later[0].series
        if series > before * (1 + GROWTH):
            found.append(f"{series} series instead of {before}")
        growth = end.rss / later[0].rss - 1
        if abs(growth) > GROWTH:
            found.append(f"memory differs by {growth:.1%}")
        return found


def call(plan: Plan, number: int) -> tuple[bytes, bool]:
    """Return a call by its number, and whether its client disconnects as soon as the answer begins."""
    leaves = number % 50 == 7
    if number % 4 == 1:
        client = number // 4 % plan.regulars
        name, prompt = f"regular{client}", f"The document of client {client}. " * 20 + f"Question {number}"
    else:
        client = number * 3 // 4 // plan.visits
        name, prompt = f"visitor{client}", f"Visitor {client} asks " * 4 + f"question {number}"
    tokens = -1 if number % 100 == 50 else 300 if leaves else 2 + number % 3
    streamed = leaves or number % 8 < 5
    return post({"model": MODEL, "prompt": prompt, "user": name, "max_tokens": tokens, "stream": streamed}), leaves


class Crowd:
    """All clients of one router."""

    def __init__(self, plan: Plan, router: Process, show: Callable[[int], None]) -> None:
        self.endings: Counter[str] = Counter()
        self._plan = plan
        self._router = router
        self._show = show
        self._begun = 0

    async def ask(self, until: int) -> None:
        """Make calls until this many were made; then close all connections."""
        await asyncio.gather(*(self._ask_on(until) for _ in range(self._plan.lines)))

    async def _ask_on(self, until: int) -> None:
        while self._begun < until:
            line = await RawConnection.open(self._router.address)
            for _ in range(CALLS_ON_A_LINE):
                if self._begun >= until or line.closed:
                    break
                data, leaves = call(self._plan, self._begun)
                self._begun += 1
                self.endings[_ending(await line.begin(data, leaves=leaves), leaves=leaves)] += 1
                self._show(self._begun)
            line.close()


def _ending(reply: Reply, *, leaves: bool) -> str:
    if leaves and reply.first is not None:
        return "left"
    if reply.whole:
        return "answered"
    return f"status {reply.status}" if reply.status != 200 else "a broken answer"


FINE: Final = ("answered", "left", "status 400")


async def look(router: Process, http: aiohttp.ClientSession, requests: int) -> Look:
    """Read the router's current figures."""
    async with http.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    tasks = next(int(float(line.split()[1])) for line in lines if line.startswith("d2lpm_event_loop_tasks "))
    series = sum(not line.startswith("#") for line in lines)
    return Look(requests, router.rss, router.descriptors, tasks, series)


async def at_rest(router: Process, http: aiohttp.ClientSession, requests: int, start: Look) -> Look:
    """Wait until the router has no more open than at the start, or for a limited time; return its figures."""
    deadline = asyncio.get_running_loop().time() + REST_SECONDS
    while True:
        seen = await look(router, http, requests)
        calm = seen.descriptors <= start.descriptors and seen.tasks <= start.tasks
        if calm or asyncio.get_running_loop().time() > deadline:
            return seen
        await asyncio.sleep(LOOK_SECONDS)


async def soak(
    plan: Plan, show: Callable[[int], None] = lambda _: None, on_look: Callable[[Look], None] = print
) -> Result:
    """Run everything; `show` is called after every request, `on_look` after every look."""
    result = Result()
    loop = asyncio.get_running_loop()
    began = loop.time()
    flags = ("--hardware", "instant", "--speed", "0")
    async with routed(plan.workers, flags, plan.flags) as (router, http):
        starts = []
        for _ in range(STARTS):
            await asyncio.sleep(LOOK_SECONDS)
            starts.append(await look(router, http, 0))
        start = Look(*map(max, zip(*starts, strict=True)))
        result.looks.append(start)
        crowd = Crowd(plan, router, show)
        for part in range(1, plan.looks + 1):
            requests = plan.calls * part // plan.looks
            await crowd.ask(requests)
            result.looks.append(await at_rest(router, http, requests, start))
            on_look(result.looks[-1])
    result.endings, result.seconds = crowd.endings, loop.time() - began
    return result


def main() -> int:
    """Run, print the results, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=Plan().calls)
    plan = Plan(calls=parser.parse_args().requests)
    bar = ProgressBar(sys.stderr, "thousand requests")
    print(f"{'requests':>9} {'MiB':>7} {'descriptors':>11} {'tasks':>6} {'series':>7}", flush=True)

    def on_look(seen: Look) -> None:
        bar.close()
        print(_row(seen), flush=True)

    result = uvloop.run(soak(plan, lambda done: bar.show(done / 1000, plan.calls / 1000), on_look))
    print(", ".join(f"{ending} {count}" for ending, count in result.endings.most_common()))
    print(f"{plan.calls / result.seconds:.0f} requests a second, {result.seconds:.0f} s")
    for objection in result.objections():
        print(f"violation: {objection}")
    return 1 if result.objections() else 0


def _row(seen: Look) -> str:
    return f"{seen.requests:9} {seen.rss / 2**20:7.1f} {seen.descriptors:11} {seen.tasks:6} {seen.series:7}"


if __name__ == "__main__":
    sys.exit(main())

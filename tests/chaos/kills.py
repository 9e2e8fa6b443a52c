"""`python -m tests.chaos.kills`: kill -9 of a front and of the scheduler in turn, under load (`serve --processes`).

Each is killed every 20 s for ten minutes. Only the calls of a killed front may be lost; calls that wait for the
scheduler wait on, streams go on without it, and the books are exact afterwards: each client was charged what it
received. The exit code is 0 if this holds.
"""

import argparse
import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, floor
from pathlib import Path
from signal import SIGKILL, SIGSTOP, SIGTERM
from tempfile import mkdtemp
from typing import Any, Final

import aiohttp
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from .clients import Crowd, Outcome, ask_all, make_clients
from .leftovers import at_rest
from .processes import (
    LOOK,
    Server,
    connections,
    get_json,
    holds,
    is_ready,
    router,
    router_processes,
    running_workers,
    runs,
    until,
)
from .reading import Ending
from .violations import exit_code

READY: Final = 2.0
"""Seconds after a kill in which the router must be ready again."""
CUT_SECONDS: Final = 1.0
"""Seconds after a kill in which the clients of a killed front notice it."""
STEP_TOKENS: Final = 18
"""Output tokens that a choice of a stream may be ahead of the last report: those of half a second, which is the time
between two reports, and of as much again for a busy machine.
"""
ESTIMATE_ERROR: Final = 0.4
"""Ratio by which the router errs in the input of a call whose engine has not reported its usage: it knows the bytes."""
SCHEDULER: Final = "scheduler"


@dataclass(frozen=True, slots=True)
class Plan:
    """The load, and how often processes are killed."""

    seconds: float = 600.0
    every: float = 20.0
    """Seconds between two kills of a front, and between two of the scheduler."""
    fronts: int = 2
    clients: int = 40
    workers: int = 4
    speed: float = 0.2
    """Speed of the emulated hardware."""

    @property
    def kills(self) -> list[tuple[float, str]]:
        """When to kill which process: fronts in turn, and the scheduler in between."""
        found = []
        for turn in range(int(2 * self.seconds / self.every) - 1):
            name = SCHEDULER if turn % 2 else f"front-{turn // 2 % self.fronts + 1}"
            found.append(((turn + 1) * self.every / 2, name))
        return found


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill; times are seconds since the clients began."""

    name: str
    at: float
    held: int
    """Connections of clients that the process had accepted."""
    ready: float
    """Seconds until the router was ready."""
    whole: float
    """Seconds until the process that was started in its place has reported."""


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls by how they ended."""

    endings: Counter[Ending]
    cut: Sequence[Outcome]
    """Those that a killed front took with it."""
    refused: Sequence[Outcome]
    """Those that began while the router was not ready, and got an error."""
    lost: Sequence[str]
    """What became of each other call that did not complete."""


@dataclass(frozen=True, slots=True)
class Account:
    """What a client was charged and what it received, in tokens. A range, if some of its calls were cut."""

    client: str
    charged: tuple[int, int]
    """Input and output."""
    least: tuple[int, int]
    most: tuple[int, int]

    @property
    def objections(self) -> list[str]:
        """Describe what the client was charged and did not receive, or the reverse."""
        sides = zip(self.least, self.charged, self.most, strict=True)
        if all(least <= charged <= most for least, charged, most in sides):
            return []
        return [f"{self.client} was charged {self.charged}, not {self.least} to {self.most} (input, output)"]


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a run."""

    kills: Sequence[Kill]
    outcomes: Sequence[Outcome]
    calls: Calls
    accounts: Sequence[Account]
    left: Sequence[str]
    """What was not at rest after the last call, or ran after the router's end."""
    code: int | None
    """The router's exit code."""

    @property
    def objections(self) -> list[str]:
        """Describe every violation that does not depend on the speed of the machine."""
        found = [*self.calls.lost, *(each for account in self.accounts for each in account.objections)]
        for kill in self.kills:
            cut = sum(is_cut_by(outcome, kill) for outcome in self.calls.cut)
            if cut > kill.held:
                found.append(f"{cut} calls were cut when {kill.name} with {kill.held} of them was killed")
        found += self.left
        if self.code != 0:
            found.append(f"the router ended with code {self.code}")
        return found

    @property
    def late(self) -> list[str]:
        """Describe what took too long."""
        return [f"ready {kill.ready:.2f} s after {kill.name} was killed" for kill in self.kills if kill.ready > READY]


async def run(plan: Plan, directory: Path) -> Result:
    """Run the load and the kills. `directory`: for the router's log."""
    flags = ("--log-level", "warning", "--processes", str(plan.fronts + 1))
    looks = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))
    async with running_workers(plan.workers, plan.speed, 4) as workers, looks as http:
        proxy = router(directory / "log", [each.url for each in workers], *flags)
        try:
            await proxy.start()
            await until(partial(holds, http, proxy, is_ready))
            began = time.monotonic()
            crowd = Crowd(proxy.url, lambda: time.monotonic() - began)
            kills = await _kill_under_load(plan, crowd, Killer(http, proxy, plan.fronts + 1))
            left = await at_rest(http, proxy.url, [each.url for each in workers])
            report = await get_json(http, f"{proxy.url}/fairness")
            processes = router_processes(proxy.pid)
        finally:
            code = await proxy.end(SIGTERM)
    left += [f"{name} runs after the router's end" for name, pid in processes.items() if runs(pid)]
    calls = judged(crowd.outcomes, kills)
    return Result(kills, crowd.outcomes, calls, accounts(report, crowd.outcomes, calls.cut), left, code)


async def _kill_under_load(plan: Plan, crowd: Crowd, killer: "Killer") -> list[Kill]:
    """Kill one process after the other while the clients call; end when all calls have ended."""
    asking = asyncio.gather(ask_all(crowd, make_clients(1, plan.clients, plan.clients // 2), 2, 1.0))
    try:
        kills = []
        for at, name in plan.kills:
            await crowd.pause(at - crowd.now())
            kills.append(await killer.kill(name, crowd.now))
            print(f"{kills[-1].at:6.1f} s  {name:10} ready after {kills[-1].ready:.2f} s", flush=True)
        await crowd.pause(plan.seconds - crowd.now())
    finally:
        crowd.over.set()
        await asking
        await crowd.close()
    return kills


class Killer:
    """Kills processes of a router and waits until it has recovered."""

    def __init__(self, http: aiohttp.ClientSession, proxy: Server, processes: int) -> None:
        """`processes`: how many there are, the standby aside."""
        self._http = http
        self._proxy = proxy
        self._processes = processes
        self._killed: Counter[str] = Counter()

    async def kill(self, name: str, clock: Callable[[], float]) -> Kill:
        """Kill a process. Returns once the one in its place has reported."""
        pid = router_processes(self._proxy.pid)[name]
        os.kill(pid, SIGSTOP)  # so that it accepts no more
        held = connections(pid, self._proxy.port)
        at = clock()
        os.kill(pid, SIGKILL)
        self._killed[name] += 1
        await until(partial(holds, self._http, self._proxy, is_ready))
        ready = clock() - at
        await until(partial(holds, self._http, self._proxy, self._is_whole))
        return Kill(name, at, held, ready, clock() - at)

    async def _is_whole(self, http: aiohttp.ClientSession, proxy: Server) -> bool:
        """Return whether all processes report, with as many restarts as there were kills at least."""
        restarts = await restarts_of(http, proxy)
        return len(restarts) == self._processes and all(
            restarts.get(name, 0) >= count for name, count in self._killed.items()
        )


async def restarts_of(http: aiohttp.ClientSession, proxy: Server) -> dict[str, float]:
    """Return how often each process that reports was started again."""
    async with http.get(f"{proxy.url}/metrics") as response:
        response.raise_for_status()  # an error while no scheduler answers
        families = text_string_to_metric_families(await response.text())
    samples = [sample for family in families for sample in family.samples]
    return {
        sample.labels["process"]: sample.value for sample in samples if sample.name == "d2lpm_process_restarts_total"
    }


def is_cut_by(outcome: Outcome, kill: Kill) -> bool:
    """Return whether a call was under way at this kill of a front and broke off just then."""
    noticed = kill.at <= outcome.ended <= kill.at + CUT_SECONDS
    return kill.name != SCHEDULER and noticed and outcome.sent <= kill.at + LOOK


def judged(outcomes: Iterable[Outcome], kills: Sequence[Kill]) -> Calls:
    """Say of each call that did not complete whether a kill explains it."""
    endings, cut, refused, lost = Counter[Ending](), list[Outcome](), list[Outcome](), list[str]()
    for outcome in outcomes:
        endings[outcome.verdict.ending] += 1
        if outcome.verdict.ending is Ending.COMPLETE:
            continue
        if outcome.verdict.ending is Ending.WRONG and any(is_cut_by(outcome, kill) for kill in kills):
            cut.append(outcome)
        elif outcome.verdict.ending is Ending.ERROR and any(
            0 <= outcome.sent - kill.at <= kill.ready for kill in kills
        ):
            refused.append(outcome)
        else:
            span = f"{outcome.sent:.2f} to {outcome.ended:.2f} s"
            lost.append(f"{outcome.request}, {span}, {outcome.received} tokens received: {outcome.verdict.why}")
    return Calls(endings, cut, refused, lost)


def accounts(report: dict[str, Any], outcomes: Iterable[Outcome], cut: Iterable[Outcome]) -> list[Account]:
    """Compare what clients were charged with the usage of their answers.

    `cut`: calls whose prompt may have been charged by estimate, and if they are not complete, their output too.
    """
    least, most = dict[str, list[int]](), dict[str, list[int]]()
    broken = {id(outcome) for outcome in cut}
    for outcome in outcomes:
        ask = outcome.ask
        low, high = least.setdefault(ask.client, [0, 0]), most.setdefault(ask.client, [0, 0])
        complete, estimated = outcome.verdict.ending is Ending.COMPLETE, id(outcome) in broken
        if not complete and not estimated:
            continue
        few = many = ask.output_tokens
        shortest = longest = ask.prompt_tokens
        if estimated:
            shortest = floor(ask.prompt_tokens * (1 - ESTIMATE_ERROR)) if complete or outcome.received else 0
            longest = ceil(ask.prompt_tokens * (1 + ESTIMATE_ERROR))
        if not complete:
            step = STEP_TOKENS * len(ask.texts)
            few = max(0, outcome.received - step)
            if ask.streamed and outcome.verdict.ending is not Ending.VANISHED:  # it may have left much unread
                many = min(many, outcome.received + step)
        low[0] += shortest
        low[1] += few
        high[0] += longest
        high[1] += many
    services = {name.removeprefix("user-"): entry["service"] for name, entry in report["clients"].items()}
    found = []
    for name in least:
        service = services.get(name, {"extend": 0, "cached": 0, "output": 0})
        charged = (service["extend"] + service["cached"], service["output"])
        found.append(Account(name, charged, (least[name][0], least[name][1]), (most[name][0], most[name][1])))
    return found


def table(result: Result) -> str:
    """Return the results as a table."""
    kills, calls = result.kills, result.calls
    rows: list[tuple[str, object]] = [
        ("calls", ", ".join(f"{ending} {count}" for ending, count in calls.endings.most_common())),
        ("cut by the kill of their front", f"{len(calls.cut)} of {sum(kill.held for kill in kills)} connections"),
        ("refused while the router was not ready", len(calls.refused)),
        ("lost", len(calls.lost)),
    ]
    for kind in (SCHEDULER, "front"):
        of_kind = [kill for kill in kills if kill.name.startswith(kind)]
        flying = sum(call.sent < kill.at < call.ended for kill in of_kind for call in result.outcomes)
        streaming = sum(
            call.ended > kill.at > call.sent and call.received > 0 for kill in of_kind for call in calls.cut
        )
        rows += [
            (f"kills of a {kind}", len(of_kind)),
            (f"calls under way at a kill of a {kind}", flying),
            ("ready after it, longest of all in s", f"{max((kill.ready for kill in of_kind), default=0.0):.2f}"),
            ("process in its place, longest in s", f"{max((kill.whole for kill in of_kind), default=0.0):.2f}"),
        ]
        if kind != SCHEDULER:
            rows.append(("streams that had begun and were cut", streaming))
    for side, name in enumerate(("input", "output")):
        charged = sum(account.charged[side] for account in result.accounts)
        least = sum(account.least[side] for account in result.accounts)
        most = sum(account.most[side] for account in result.accounts)
        rows.append((f"{name} tokens charged, and received", f"{charged}, {least} to {most}"))
    rows.append(("clients whose books differ", sum(bool(account.objections) for account in result.accounts)))
    rows.append(("left over", len(result.left)))
    return "\n".join(f"{name:45} {value}" for name, value in rows)


def main() -> int:
    """Run, print the results, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.kills", description=__doc__)
    parser.add_argument("--seconds", type=float, default=Plan().seconds, help="of load")
    parser.add_argument("--every", type=float, default=Plan().every, help="seconds between two kills of one kind")
    options = parser.parse_args()
    directory = Path(mkdtemp(prefix="chaos-kills-"))
    result = uvloop.run(run(Plan(seconds=options.seconds, every=options.every), directory))
    print(table(result))
    return exit_code([*result.objections, *result.late], directory, "The router's log is")


if __name__ == "__main__":
    sys.exit(main())

"""`python -m tests.chaos.handoffs`: faults before workers that compute prompts, and before ranks that compute answers.

Ten minutes, shared by the connectors. Then a minute without faults, in which what clients are charged is compared with
what the engines have computed. The exit code is 0 if no call was lost that could be served, and if nothing is left of
any call, in the router or in an engine.
"""

import argparse
import asyncio
import json
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Container, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from signal import SIGTERM
from tempfile import mkdtemp
from typing import Any, Final, NamedTuple

import aiohttp
import uvloop

from .asks import Ask, Asks
from .clients import Client, Crowd, Outcome, ask_all, make_clients
from .evidence import Evidence
from .fault_runner import FaultRunner
from .faults import HARMLESS, Fault, schedule
from .judge import CUTTING, RESTART, TRIES, Judgement, judge
from .kills import Account, accounts
from .leftovers import left_in_core, left_over
from .link import Link, kept_ports
from .processes import Server, get_json, holds, is_ready, router, sockets, until, worker
from .reading import Ending
from .run import CALM, KEY, linked, operator_of
from .violations import exit_code

POLL_SOCKETS: Final = 3
"""Connections to each worker that polls open and keep at times, besides the one that is there from the start."""
CONNECTORS: Final = ("nixl", "mooncake", "sglang")
"""What carries KV caches: two of vLLM's connectors, and SGLang's own."""
COMPUTED: Final = re.compile(
    r'^(?:vllm:prompt_tokens_by_source_total\{[^}]*source="local_compute"'
    r'|sglang:realtime_tokens_total\{[^}]*mode="prefill_compute")[^}]*\} (\S+)$',
    re.MULTILINE,
)
GENERATED: Final = re.compile(
    r'^(?:vllm:generation_tokens_total\{|sglang:realtime_tokens_total\{[^}]*mode="decode")[^}]*\} (\S+)$', re.MULTILINE
)
HANDED_OVER: Final = re.compile(r'^d2lpm_handoffs_total\{[^}]*outcome="([^"]+)"[^}]*\} (\S+)$', re.MULTILINE)
RETURNED: Final = re.compile(r'"Returned",\{"request":"([^"]+)"')
AGAIN: Final = re.compile(r"^d2lpm_prefills_again_total (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Plan:
    """The duration, the load, the faults and the seed of a run with one connector."""

    connector: str = "nixl"
    seed: int = 1
    trouble: float = 600.0 / len(CONNECTORS) - CALM
    """Seconds in which there are faults."""
    calm: float = CALM
    """Seconds after them in which the clients continue."""
    quiet: int = 200
    """Calls after that, by which charges are compared with what engines compute."""
    every: float = 3.0
    """Seconds between two faults of prefill workers, and between two of decode workers, on average."""
    prefill: int = 3
    decode: int = 4
    ranks: int = 2
    """Ranks of each decode worker, which step together."""
    clients: int = 40
    greedy: int = 10
    calls: int = 2
    """Calls that a greedy client has open at once."""
    think: float = 6.0
    """Seconds between two calls of any other client, on average."""
    vanishing: float = 0.1
    """Share of the calls that their clients abandon."""
    step: float = 60.0
    """Milliseconds of a decode step."""
    lease: float = 12.0
    """Seconds for which a prefill worker keeps a prompt."""
    oldest: float = 4.0
    """Greatest age in seconds of a prompt that is sent to a decode worker."""
    patience: float = 3.0
    """Seconds for which the router waits for a token; twice as long for the first one."""

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The schedule of faults: of prefill workers, and of decode workers, some of which are always there."""
        hang = 2 * self.patience + self.oldest
        first = schedule(self.seed, self.trouble, self.prefill, self.every, hang)
        second = schedule(self.seed + 1000, self.trouble, self.decode, self.every, hang)
        return (*first, *(replace(fault, worker=self.prefill + fault.worker) for fault in second))

    @property
    def flags(self) -> tuple[str, ...]:
        """The router's command-line flags."""
        return (
            *("--log-level", "warning", "--admin-key", KEY, "--poll-interval", "0.5", "--breaker-cooldown", "1"),
            *("--token-timeout", str(self.patience), "--first-token-timeout", str(2 * self.patience + self.oldest)),
            *("--silence-timeout", str(self.patience / 2), "--handoff-seconds", str(self.oldest)),
            # So that a call fails because of its workers alone.
            *("--retry-budget", "1", "--retry-floor", "1000"),
        )

    @property
    def roles(self) -> tuple[str, ...]:
        """The role of each worker."""
        return ("prefill",) * self.prefill + ("decode",) * self.decode

    def workers(self, side_ports: Sequence[int]) -> list[Server]:
        """Return the processes, not started yet. `side_ports`: where each is reached by the others."""
        dialect = "sglang" if self.connector == "sglang" else "vllm"
        flags = ["--speed", "1", "--kv-lease", str(self.lease), "--transfer-timeout", str(self.lease)]
        if dialect == "vllm":
            flags += ["--connector", self.connector]
        own = {
            "prefill": ("--step-times", "10,0.2,0", "--max-running", "8"),
            "decode": ("--rank-steps", f"{self.step},0.3", "--max-running", "4", "--ranks", str(self.ranks)),
        }
        return [
            worker(dialect, *flags, "--role", role, *own[role], "--side-port", str(port))
            for role, port in zip(self.roles, side_ports, strict=True)
        ]

    def described(self, links: Sequence[Link], side_ports: Sequence[int]) -> str:
        """Return the file of workers for the router."""
        rows: list[dict[str, Any]] = [
            {"url": link.url, "role": role} for link, role in zip(links, self.roles, strict=True)
        ]
        if self.connector == "mooncake":
            rows = [
                row | {"connector": "mooncake"} | ({"bootstrap_port": port} if row["role"] == "prefill" else {})
                for row, port in zip(rows, side_ports, strict=True)
            ]
        return json.dumps(rows)


class Work(NamedTuple):
    """Tokens that clients were charged, and that engines have computed."""

    extend: int
    output: int
    computed: int
    """Prompt tokens that engines found in no cache; a decode worker computes one of a prompt that it fetches."""
    generated: int
    """Output tokens of decode workers."""
    handed_over: int
    again: int
    """Prompts that were prefilled a second time."""

    def since(self, before: "Work") -> "Work":
        """Return the difference."""
        return Work(*(now - then for now, then in zip(self, before, strict=True)))

    @property
    def objections(self) -> list[str]:
        """Say where charges and computed tokens differ."""
        found = []
        if not self.again and not 0 <= self.computed - self.extend <= self.handed_over:
            found.append(f"engines computed {self.computed} tokens of prompts, and {self.extend} were charged")
        if self.generated != self.output:
            found.append(f"engines generated {self.generated} tokens, and {self.output} were charged")
        return found


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a run with one connector."""

    plan: Plan
    judgement: Judgement
    lost: Sequence[str]
    """Calls that ended in an error although workers could have served them."""
    accounts: Sequence[Account]
    work: Work
    """Of the calls without faults."""
    unanswered: int
    """Calls without faults that were not completed."""
    handoffs: Mapping[str, int]
    """Kept prompts of the whole run, by what became of them."""
    again: int
    left: Sequence[str]
    outcomes: Sequence[Outcome]
    """Of the calls under faults."""
    report: dict[str, Any]
    """/fairness after them."""

    @property
    def objections(self) -> list[str]:
        """Describe every violation."""
        found = [*self.lost, *(each for account in self.accounts for each in account.objections)]
        found += [*self.work.objections, *(f"left over: {each}" for each in self.left)]
        if self.unanswered:
            found.append(f"{self.unanswered} calls without any fault were not completed")
        return [f"{self.plan.connector}: {each}" for each in found]


async def run(plan: Plan, directory: Path) -> Result:
    """Do the whole run with one connector. `directory`: for the router's log and journal."""
    evidence, journal, file = Evidence(), directory / f"journal-{plan.connector}", directory / "workers.yaml"
    async with AsyncExitStack() as stack:
        ports = stack.enter_context(kept_ports(len(plan.roles)))
        workers = await stack.enter_async_context(running(plan.workers(ports)))
        links = await stack.enter_async_context(linked(workers, plan.seed, evidence))
        file.write_text(plan.described(links, ports))
        flags = ("--workers-file", str(file), *plan.flags, "--journal", str(journal))
        proxy = router(directory / f"log-{plan.connector}", [], *flags)
        try:
            await proxy.start()
            async with aiohttp.ClientSession() as http:
                fleet = Fleet(plan, proxy, workers, links, http)
                result = await fleet.suffer(evidence)
            code = await proxy.end(SIGTERM)
        finally:
            await proxy.end()
    left = [*result.left, *left_in_core(journal), *([f"exit code {code}"] if code else [])]
    return replace(result, left=left, accounts=books(result, returned(journal)))


@asynccontextmanager
async def running(made: list[Server]) -> AsyncIterator[list[Server]]:
    """Run these workers."""
    try:
        await asyncio.gather(*(each.start() for each in made))
        yield made
    finally:
        await asyncio.gather(*(each.end() for each in made))


class Fleet:
    """A router and its workers."""

    def __init__(
        self, plan: Plan, proxy: Server, workers: Sequence[Server], links: Sequence[Link], http: aiohttp.ClientSession
    ) -> None:
        self._plan = plan
        self._proxy = proxy
        self._workers = workers
        self._links = links
        self._http = http

    async def suffer(self, evidence: Evidence) -> Result:
        """Call under faults, then without any."""
        plan = self._plan
        await until(partial(holds, self._http, self._proxy, self._is_whole))
        before = sockets(self._proxy.pid) + POLL_SOCKETS * len(self._workers)
        began = time.monotonic()
        crowd = Crowd(self._proxy.url, lambda: time.monotonic() - began)
        try:
            await self._call_under_faults(crowd)
            left = await self._left(before)
            faulty = list(crowd.outcomes)
            report = await get_json(self._http, f"{self._proxy.url}/fairness")
            await until(partial(holds, self._http, self._proxy, self._is_whole))
            earlier = await self._work()
            await self._call_in_peace(crowd)
            left += await self._left(before)
            work = (await self._work()).since(earlier)
        finally:
            await crowd.close()
        quiet = crowd.outcomes[len(faulty) :]
        page = await self._page(self._proxy.url)
        return Result(
            plan,
            judge(faulty, evidence, plan.faults),
            lost(faulty, evidence, plan.faults),
            (),
            work,
            sum(outcome.verdict.ending is not Ending.COMPLETE for outcome in quiet),
            {outcome: int(float(count)) for outcome, count in HANDED_OVER.findall(page)},
            total(AGAIN, page),
            left,
            faulty,
            report,
        )

    async def _call_under_faults(self, crowd: Crowd) -> None:
        plan = self._plan
        clients = make_clients(plan.seed, plan.clients, plan.greedy, plan.vanishing)
        trouble = FaultRunner(self._workers, self._links, operator_of(self._http, self._proxy))
        asking = asyncio.gather(ask_all(crowd, clients, plan.calls, plan.think))
        try:
            await trouble.make(plan.faults, crowd.now)
            await crowd.pause(plan.calm)
        finally:
            crowd.over.set()
            await asking

    async def _call_in_peace(self, crowd: Crowd) -> None:
        """Make calls whose prompts are computed once: with one answer each, and some with a common prefix."""
        calls = [(Client(f"quiet-{each}", Random(each), greedy=False, vanishing=0.0), each) for each in range(8)]

        async def call(client: Client, number: int) -> None:
            asks = Asks(client.name, Random(f"quiet {self._plan.seed} {number}"), shared=number % 2 == 0)
            for turn in range(self._plan.quiet // len(calls)):
                await crowd.ask(client, _with_one_answer(asks), f"{client.name}.{turn}", None)

        await asyncio.gather(*(call(client, number) for client, number in calls))

    async def _is_whole(self, http: aiohttp.ClientSession, proxy: Server) -> bool:
        """Return whether the router is ready, and all workers and ranks are healthy."""
        report = await get_json(http, f"{proxy.url}/workers")
        healthy = [each for each in report["workers"] if each["healthy"]]
        expected = self._plan.prefill + self._plan.decode * self._plan.ranks
        return len(healthy) >= expected and await is_ready(http, proxy)

    async def _left(self, before: int) -> list[str]:
        urls = [each.url for each in self._workers]
        return await left_over(self._http, self._proxy.url, self._proxy.pid, before, urls)

    async def _page(self, url: str) -> str:
        async with self._http.get(f"{url}/metrics") as response:
            return await response.text()

    async def _work(self) -> Work:
        report = await get_json(self._http, f"{self._proxy.url}/fairness")
        services = [entry["service"] for entry in report["clients"].values()]
        pages = [await self._page(each.url) for each in self._workers]
        page = await self._page(self._proxy.url)
        return Work(
            sum(service["extend"] for service in services),
            sum(service["output"] for service in services),
            sum(total(COMPUTED, each) for each in pages),
            sum(total(GENERATED, each) for each in pages[self._plan.prefill :]),
            sum(int(float(count)) for _, count in HANDED_OVER.findall(page)),
            total(AGAIN, page),
        )


def total(counter: re.Pattern[str], page: str) -> int:
    """Return the sum of a counter's samples on a page of metrics."""
    return int(sum(float(value) for value in counter.findall(page)))


def _with_one_answer(asks: Asks) -> Ask:
    return next(ask for ask in iter(asks.next, None) if len(ask.texts) == 1)


def unseen_cuts(outcome: Outcome, evidence: Evidence, faults: Sequence[Fault]) -> int:
    """Return how many faults may have cut an attempt of a call before the link had read whose it was."""
    seen = {harm.worker for harm in evidence.of(outcome.request)}
    cut = [fault for fault in faults if fault.kind in CUTTING and fault.worker not in seen]
    return sum(fault.at <= outcome.ended and outcome.sent <= fault.until + RESTART for fault in cut)


def could_be_served(outcome: Outcome, evidence: Evidence, faults: Sequence[Fault]) -> bool:
    """Return whether a call had tries left, and no worker failed amid an answer that no other one can continue."""
    harms = [harm for harm in evidence.of(outcome.request) if harm.kind not in HARMLESS]
    amid = outcome.received > 0 or any(harm.begun for harm in harms)
    tried = len(harms) + (unseen_cuts(outcome, evidence, faults) if harms else 0)
    return tried < TRIES and (outcome.ask.continuable or not outcome.ask.streamed or not amid)


def lost(outcomes: Sequence[Outcome], evidence: Evidence, faults: Sequence[Fault]) -> list[str]:
    """Return the calls that ended in a wrong answer, or in an error although they could be served."""
    return [
        f"{outcome.request}, {outcome.sent:.2f} to {outcome.ended:.2f} s, {len(outcome.ask.texts)} answers,"
        f" {[f'{each.kind} at {each.worker}' for each in evidence.of(outcome.request)]}: {outcome.verdict.why}"
        for outcome in outcomes
        if outcome.verdict.ending is Ending.WRONG
        or (outcome.verdict.ending is Ending.ERROR and could_be_served(outcome, evidence, faults))
    ]


def returned(journal: Path) -> set[str]:
    """Return the requests that a worker gave back: what it, or the other one, has computed of them is estimated."""
    return set(RETURNED.findall(journal.read_text()))


def books(result: Result, estimated: Container[str]) -> list[Account]:
    """Compare charges with the usage of answers: exactly where no attempt broke off and the client stayed."""
    inexact = [
        outcome
        for outcome in result.outcomes
        if outcome.verdict.ending is not Ending.COMPLETE or outcome.request in estimated
    ]
    return accounts(result.report, result.outcomes, inexact)


def table(result: Result) -> str:
    """Return the results as a table."""
    judgement, work = result.judgement, result.work
    handed = ", ".join(f"{outcome} {count}" for outcome, count in result.handoffs.items())
    faults = Counter(fault.kind for fault in result.plan.faults)
    rows: list[tuple[str, object]] = [
        ("connector", result.plan.connector),
        ("faults", ", ".join(f"{kind} {count}" for kind, count in faults.most_common())),
        ("calls", ", ".join(f"{ending} {count}" for ending, count in judgement.endings.most_common())),
        ("errors", ", ".join(f"{why} {count}" for why, count in judgement.errors.items()) or "none"),
        ("lost", len(result.lost)),
        ("lost a worker amid the stream", f"{judgement.amid} completed"),
        ("lost a worker before the first token", f"{judgement.before} completed"),
        ("prompts handed over", handed),
        ("prefilled again", result.again),
        ("clients whose books differ", sum(bool(account.objections) for account in result.accounts)),
        ("without faults: prompt tokens", f"{work.extend} charged, {work.computed} computed"),
        ("without faults: output tokens", f"{work.output} charged, {work.generated} generated"),
        ("left over", len(result.left)),
    ]
    return "\n".join(f"{name:40} {value}" for name, value in rows)


def main() -> int:
    """Run, print the results, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.handoffs", description=__doc__)
    parser.add_argument("--seed", type=int, default=Plan().seed, help="of the schedule and of all that clients do")
    parser.add_argument("--seconds", type=float, default=600.0, help="of all connectors together")
    parser.add_argument("--connector", choices=CONNECTORS, help="only this one")
    options = parser.parse_args()
    connectors = CONNECTORS if options.connector is None else (options.connector,)
    directory = Path(mkdtemp(prefix="chaos-handoffs-"))
    objections = []
    for connector in connectors:
        trouble = options.seconds / len(connectors) - CALM
        result = uvloop.run(run(Plan(connector, options.seed, trouble), directory))
        print(table(result), flush=True)
        objections += result.objections
    return exit_code(objections, directory, "The router's logs and journals are")


if __name__ == "__main__":
    sys.exit(main())

"""Measure the cost of one decision, and how it grows with the queue and with the fleet.

A fleet has full windows and a queue: one request arrives, one ends, and the next is dispatched. The cost is the CPU
time of the scheduler for the arrival and the dispatch. A short and a long queue take turns in the same process, so that
their ratio is meaningful even on a noisy machine. So do a small fleet and larger ones, of which each worker's cache
holds as much. What a small fleet touches stays in the caches of the CPU, and most of what a large one touches does not.
So the small one is measured once more with those caches emptied before each event.

With agent sessions, the cost with the gate before the policy is compared with that without it (`session_cost`).

For policies that balance ranks which step together, the cost of the policy's choice alone is measured, too, each time
after all running requests have made progress, beside that of the whole arrival and dispatch.
"""

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from statistics import median
from time import process_time_ns
from typing import Final, cast

from bench.lab.micro.session_cost import SESSIONS, WAITING, compare_gate
from router.core.clients.queue_limits import WaitingLimits
from router.core.fleet.window import FixedWindow
from router.core.model.commands import Dispatch
from router.core.model.events import Arrived, Event, Evicted, Finished, Progressed, Started, Ticked, WorkerJoined
from router.core.model.prompt_key import CHUNK_BYTES, PromptHasher, PromptKey
from router.core.model.request import BarrierId, ClientId, Request, RequestId, Usage, Worker, WorkerId
from router.core.policies.base import Choice, Policy
from router.core.policies.context import Parameters, PolicyContext
from router.core.policies.dlpm.home_pool import CHANGES_AT_ONCE, CHANGES_SECONDS
from router.core.policies.registry import POLICIES
from router.core.scheduler import Scheduler
from router.core.scheduler_settings import SchedulerSettings
from router.runtime.gc_tuning import tune_collector

MODEL: Final = "m"
PROMPT_CHUNKS: Final = 4096 // CHUNK_BYTES
SHARED_CHUNKS: Final = PROMPT_CHUNKS // 2
"""Chunks of a prompt that are one of the shared prefixes."""
COMMON_CHUNKS: Final = SHARED_CHUNKS // 2
"""Chunks with which every prompt begins if all workers hold a common prefix."""
PREFIXES: Final = 1000
STREAMS: Final = 200
TOKENS_PER_SECOND: Final = 50
"""Tokens that each stream gains per second."""
PROGRESS_SECONDS: Final = 2.0
SECONDS_BETWEEN: Final = 0.02
"""Virtual time from one arrival to the next."""
WORKER_CHUNKS: Final = 4000
"""Chunks per worker in the prefix tree where fleets of several sizes are compared."""
RANKS: Final = 64
RANK_PLACES: Final = 16
"""Requests that a rank runs at once."""
POOLS: Final = (50, 5000)
"""Waiting requests before the ranks."""
CPU_CACHE_BYTES: Final = 64 * 2**20
"""More than the caches of a CPU hold; reading as much empties them of all else."""
COLD_TURNS: Final = 10
"""One turn in as many is measured with cold caches: to empty them takes much longer than the turn."""
ALIKE: Final = 5000
"""Waiting requests that share a prefix which a worker evicts."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The setting of a measurement."""

    policy: str
    waiting: int
    clients: int
    workers: int = 8
    chunks: int = 200_000
    in_flight: int = 32
    """Requests in flight at each worker."""
    prefixes: int = PREFIXES
    """Prefixes that prompts share."""
    common: bool = False
    """Whether all prompts begin alike, with a prefix that every worker holds."""
    barrier: BarrierId | None = None
    """The group of all workers, if they step together."""


class TimedPolicy:
    """A policy, and the CPU time of its choices."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.nanoseconds: list[int] = []
        """Of each choice of a request; calls that chose none are left out."""

    def next(self, now: float) -> Choice | None:
        """Choose as the policy does."""
        began = process_time_ns()
        choice = self._policy.next(now)
        if choice is not None:
            self.nanoseconds.append(process_time_ns() - began)
        return choice

    def __getattr__(self, name: str) -> object:
        return getattr(self._policy, name)


class Fleet:
    """A scheduler with full windows and a queue of constant length."""

    def __init__(self, setting: Setting) -> None:
        self._random = Random(1)
        self._hasher = PromptHasher(b"a secret of the benchmark")
        common = self._random.randbytes(COMMON_CHUNKS * CHUNK_BYTES if setting.common else 0)
        others = SHARED_CHUNKS * CHUNK_BYTES - len(common)
        self._prefixes = [common + self._random.randbytes(others) for _ in range(setting.prefixes)]
        self._setting = setting
        self._now = 0.0
        self._arrivals = self._output = 0
        self._running: list[RequestId] = []
        settings = SchedulerSettings(
            window=FixedWindow(setting.in_flight, unstarted_tokens=10**9),
            waiting=WaitingLimits(10 * setting.waiting + 1000, 1e9),
            prefix_limit=setting.chunks,
            kv_tokens=10**9,
        )
        self._scheduler = Scheduler(self._policy, settings, Parameters(), Random(0))
        for number in range(setting.workers):
            worker = Worker(WorkerId(f"w{number}"), frozenset([MODEL]), barrier=setting.barrier)
            self._handle(WorkerJoined(worker))
        self._fill_tree()
        while self._scheduler.waiting < setting.waiting:
            self._handle(Arrived(self._request()))
        if setting.barrier is not None:
            self._fill_ranks()
        self.turns(200)

    def _fill_ranks(self) -> None:
        """Let time pass until no request waits for its home while another rank has room."""
        while len(self._running) < self._setting.workers * self._setting.in_flight:
            self._now += SECONDS_BETWEEN
            self._handle(Arrived(self._request()) if self._scheduler.waiting < self._setting.waiting else Ticked())

    def _policy(self, context: PolicyContext) -> Policy:
        self._timed = TimedPolicy(POLICIES[self._setting.policy](context))
        return cast("Policy", self._timed)

    def choices(self, count: int) -> tuple[float, float]:
        """Run `count` turns, before each of which every running request gains a token; return the median CPU
        microseconds of a choice, and of a turn.
        """
        self._timed.nanoseconds.clear()
        turns = []
        for _ in range(count):
            self._output += 1
            self._handle(Progressed(dict.fromkeys(self._running, self._output)))
            turns.append(self.turns(1))
        return median(self._timed.nanoseconds) / 1000, median(turns) / 1000

    def turns(self, count: int, before_each: Callable[[], object] = lambda: None) -> int:
        """Run `count` arrivals and dispatches and return the CPU nanoseconds that they took.

        `before_each` is called before each event that is measured.
        """
        spent = 0
        for _ in range(count):
            self._now += SECONDS_BETWEEN
            request = self._request()
            ended = self._running.pop(self._random.randrange(len(self._running)))
            before_each()
            spent += self._handle(Arrived(request))
            self._handle(Started(ended))
            before_each()
            spent += self._handle(Finished(ended, Usage(1024, 20, 512)))
        return spent

    def progress(self, seconds: float) -> int:
        """Let all streams gain tokens for 2 s, reported every `seconds`; return the CPU nanoseconds per second."""
        for request in self._running:
            self._handle(Started(request))
        spent = 0
        for _ in range(round(PROGRESS_SECONDS / seconds)):
            self._now += seconds
            self._output += round(TOKENS_PER_SECOND * seconds)
            spent += self._handle(Progressed(dict.fromkeys(self._running, self._output)))
        return round(spent / PROGRESS_SECONDS)

    def evict(self, worker: int) -> int:
        """Evict at one worker the prefixes that all prompts share; return the CPU nanoseconds that it took, with the
        next arrival and dispatch.
        """
        held = self._scheduler.mirror.held_tokens(WorkerId(f"w{worker}"))
        return self._handle(Evicted(WorkerId(f"w{worker}"), round(held))) + self.turns(1)

    def longest_tick(self, count: int) -> int:
        """Let time pass in steps of `CHANGES_SECONDS`, `count` times; return the most CPU nanoseconds that one took."""
        longest = 0
        for _ in range(count):
            self._now += CHANGES_SECONDS
            longest = max(longest, self._handle(Ticked()))
        return longest

    def _handle(self, event: Event) -> int:
        began = process_time_ns()
        commands = self._scheduler.handle(event, self._now)
        spent = process_time_ns() - began
        self._running += [command.request for command in commands if isinstance(command, Dispatch)]
        return spent

    def _request(self) -> Request:
        self._arrivals += 1
        client = ClientId(f"client {self._random.randrange(self._setting.clients)}")
        return Request(RequestId(f"r{self._arrivals}"), client, MODEL, (self._prompt(),), 64)

    def _prompt(self) -> PromptKey:
        own = self._random.randbytes((PROMPT_CHUNKS - SHARED_CHUNKS) * CHUNK_BYTES)
        return self._hasher.prompt(self._random.choice(self._prefixes) + own).key

    def _fill_tree(self) -> None:
        prefixes, worker = self._scheduler.prefixes, 0
        while prefixes.tree.chunks < self._setting.chunks - PROMPT_CHUNKS:
            prefixes.insert(MODEL, [self._prompt()], WorkerId(f"w{worker % self._setting.workers}"), 0.0)
            worker += 1


def compare(make: Callable[[int], Setting], waiting: tuple[int, int], rounds: int, turns: int) -> list[list[float]]:
    """Return CPU microseconds per turn for each length of the queue, round by round."""
    fleets = [Fleet(make(length)) for length in waiting]
    return [[fleet.turns(turns) / turns / 1000 for fleet in fleets] for _ in range(rounds)]


def growth(policy: str) -> dict[str, Setting]:
    """Return a small fleet, and fleets that are larger in one way or in all, by their names."""
    fleets = {
        "8 workers, 10 clients, 10 waiting": Setting(policy, 10, 10),
        "256 workers": Setting(policy, 10, 10, workers=256),
        "2,000 clients": Setting(policy, 10, 2000),
        "20,000 waiting": Setting(policy, 20_000, 10),
        "all of these": Setting(policy, 20_000, 2000, workers=256),
        "all, and a prefix on all workers": Setting(policy, 20_000, 2000, workers=256, common=True),
    }
    return {name: replace(each, chunks=each.workers * WORKER_CHUNKS) for name, each in fleets.items()}


def evictions(policy: str, rounds: int) -> dict[str, float]:
    """Return the milliseconds of an eviction, with the next arrival and dispatch, of a prefix that all workers hold and
    that `ALIKE` waiting requests share: of the first, after which no longer all hold it, and the median; and of the
    longest event by which requests later take in the first.
    """
    workers = 256
    fleet = Fleet(Setting(policy, ALIKE, 10, workers=workers, chunks=300 * workers, in_flight=4, prefixes=1))
    first, later = fleet.evict(0), fleet.longest_tick(ALIKE // CHANGES_AT_ONCE)
    spent = [first, *[fleet.evict(round_ * workers // rounds) for round_ in range(1, rounds)]]
    return {"first": first / 1e6, "an event after the first": later / 1e6, "median": median(spent) / 1e6}


def balancing(policy: str, waiting: int, clients: int) -> Setting:
    """Return a group of ranks in step, with a queue of this length."""
    return Setting(policy, waiting, clients, RANKS, RANKS * 500, RANK_PLACES, barrier=BarrierId("group"))


def compare_growth(settings: Mapping[str, Setting], rounds: int, turns: int) -> dict[str, tuple[float, float]]:
    """Return, for each setting, the median CPU microseconds per turn and the median ratio to the first setting."""
    fleets = [Fleet(setting) for setting in settings.values()]
    spent = [[fleet.turns(turns) / turns / 1000 for fleet in fleets] for _ in range(rounds)]
    columns = zip(*spent, strict=True)
    return {
        name: (median(column), median(each / first[0] for each, first in zip(column, spent, strict=True)))
        for name, column in zip(settings, columns, strict=True)
    }


def cold_caches(setting: Setting, rounds: int, turns: int) -> tuple[float, float]:
    """Return the median CPU microseconds of a turn with the CPU's caches emptied before each event, and the median
    ratio to one without that.
    """
    fleet, filler = Fleet(setting), bytearray(b"x") * CPU_CACHE_BYTES
    few = max(1, turns // COLD_TURNS)
    spent = [(fleet.turns(few, lambda: filler.count(b"y")) / few, fleet.turns(turns) / turns) for _ in range(rounds)]
    return median(cold for cold, _ in spent) / 1000, median(cold / warm for cold, warm in spent)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    parser.add_argument("--policy", nargs="+", metavar="P", default=["d2lpm", "dlpm_home"], choices=[*POLICIES])
    parser.add_argument(
        "--clients", nargs="+", type=int, metavar="N", default=[10, 1000], help="numbers of clients (default: 10 1000)"
    )
    parser.add_argument(
        "--waiting",
        nargs=2,
        type=int,
        metavar="N",
        default=[10, 10_000],
        help="the two queue lengths (default: 10 10000)",
    )
    parser.add_argument(
        "--growth",
        nargs="*",
        metavar="P",
        default=["dlpm_home"],
        choices=[*POLICIES],
        help="policies whose cost is compared over sizes of the fleet (default: dlpm_home)",
    )
    parser.add_argument(
        "--balance",
        nargs="*",
        metavar="P",
        default=["br0", "brh", "dlpm_balance"],
        choices=[*POLICIES],
        help="policies whose choices among ranks in step are measured (default: br0 brh dlpm_balance)",
    )
    parser.add_argument(
        "--gate",
        nargs="*",
        metavar="P",
        default=["dlpm_home"],
        choices=[*POLICIES],
        help="policies whose cost with agent sessions is compared with and without the gate (default: dlpm_home)",
    )
    parser.add_argument("--rounds", type=int, default=9, help="number of rounds; the median counts (default: 9)")
    parser.add_argument(
        "--report-seconds",
        nargs="+",
        type=float,
        metavar="S",
        default=[0.1, 0.5, 1.0],
        help="times between two reports of all streams' progress (default: 0.1 0.5 1.0)",
    )
    parser.add_argument("--turns", type=int, default=300, help="arrivals per round (default: 300)")


def run(options: argparse.Namespace) -> None:
    """Print a table."""
    tune_collector()  # as the router does: with Python's defaults, full collections of all objects are measured, too
    short, long = options.waiting
    print(f"CPU time of an arrival and a dispatch, 4 KB prompts, 8 workers, 200,000 chunks; {os.cpu_count()} cores")
    print(f"{'policy':24}{'clients':>8}{f'{short} wait':>14}{f'{long} wait':>14}{'ratio':>8}")
    for policy in options.policy:
        for clients in options.clients:

            def make(waiting: int, policy: str = policy, clients: int = clients) -> Setting:
                return Setting(policy, waiting, clients)

            rounds = compare(make, (short, long), options.rounds, options.turns)
            few, many = median(r[0] for r in rounds), median(r[1] for r in rounds)
            ratio = median(r[1] / r[0] for r in rounds)
            print(f"{policy:24}{clients:8}{few:11.0f} us{many:11.0f} us{ratio:8.2f}")
    for policy in options.growth:
        print(f"\nCPU time of an arrival and a dispatch in fleets of several sizes, {policy}")
        for name, (spent, ratio) in compare_growth(growth(policy), options.rounds, options.turns).items():
            print(f"{name:40}{spent:11.0f} us{ratio:8.2f}")
        spent, ratio = cold_caches(next(iter(growth(policy).values())), options.rounds, options.turns)
        print(f"{'the first, with cold CPU caches':40}{spent:11.0f} us{ratio:8.2f}")
        for which, spent in evictions(policy, options.rounds).items():
            print(f"{f'a prefix of {ALIKE:,} waiting is evicted, {which}':62}{spent:9.1f} ms")
    if options.gate:
        print(f"\nCPU time of an arrival and a dispatch with {SESSIONS:,} agent sessions, {WAITING} waiting calls")
        print(f"{'policy':24}{'no gate':>14}{'gate':>14}{'ratio':>8}{'paused':>8}")
    for policy in options.gate:
        without, gate, ratio, paused = compare_gate(policy, options.rounds, options.turns)
        print(f"{policy:24}{without:11.0f} us{gate:11.0f} us{ratio:8.2f}{paused:8}")
    if options.balance:
        print(f"\nCPU time of one choice before {RANKS} ranks in step, {RANK_PLACES} requests each")
        columns = [*(f"{waiting:,} wait" for waiting in POOLS), "whole turn"]
        print(f"{'policy':24}{'clients':>8}" + "".join(f"{each:>14}" for each in columns))
    for policy in options.balance:
        for clients in options.clients:
            groups = [Fleet(balancing(policy, waiting, clients)) for waiting in POOLS]
            choices = [[group.choices(options.turns // 3) for group in groups] for _ in range(options.rounds)]
            medians = [median(each for each, _ in column) for column in zip(*choices, strict=True)]
            medians.append(median(turn for *_, (_, turn) in choices))
            print(f"{policy:24}{clients:8}" + "".join(f"{each:11.0f} us" for each in medians))
    print(f"\nCPU time of progress reports per second, {STREAMS} streams of {TOKENS_PER_SECOND} tokens/s, 10 clients")
    print(f"{'policy':24}" + "".join(f"{f'every {seconds} s':>14}" for seconds in options.report_seconds))
    for policy in options.policy:
        fleet = Fleet(Setting(policy, short, clients=10, in_flight=STREAMS // 8))
        progress = [[fleet.progress(seconds) for seconds in options.report_seconds] for _ in range(options.rounds)]
        print(f"{policy:24}" + "".join(f"{median(each) / 1e6:11.1f} ms" for each in zip(*progress, strict=True)))

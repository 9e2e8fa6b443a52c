"""Measure the cost of one decision, and how it grows with the queue.

A fleet has full windows and a queue: one request arrives, one ends, and the next is dispatched. The cost is the CPU
time of the scheduler for the arrival and the dispatch. A short and a long queue take turns in the same process, so that
their ratio is meaningful even on a noisy machine.
"""

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from statistics import median
from time import process_time_ns
from typing import Final

from router.core.clients.queue_limits import WaitingLimits
from router.core.fleet.window import FixedWindow
from router.core.model.commands import Dispatch
from router.core.model.events import Arrived, Event, Finished, Progressed, Started, WorkerJoined
from router.core.model.prompt_key import CHUNK_BYTES, PromptHasher, PromptKey
from router.core.model.request import ClientId, Request, RequestId, Usage, Worker, WorkerId
from router.core.policies.context import Parameters
from router.core.policies.registry import POLICIES
from router.core.scheduler import Scheduler
from router.core.scheduler_settings import SchedulerSettings

MODEL: Final = "m"
PROMPT_CHUNKS: Final = 4096 // CHUNK_BYTES
SHARED_CHUNKS: Final = PROMPT_CHUNKS // 2
"""Chunks of a prompt that are one of the shared prefixes."""
PREFIXES: Final = 1000
STREAMS: Final = 200
TOKENS_PER_SECOND: Final = 50
"""Tokens that each stream gains per second."""
PROGRESS_SECONDS: Final = 2.0
SECONDS_BETWEEN: Final = 0.02
"""Virtual time from one arrival to the next."""


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


class Fleet:
    """A scheduler with full windows and a queue of constant length."""

    def __init__(self, setting: Setting) -> None:
        self._random = Random(1)
        self._hasher = PromptHasher(b"a secret of the benchmark")
        self._prefixes = [self._random.randbytes(SHARED_CHUNKS * CHUNK_BYTES) for _ in range(PREFIXES)]
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
        self._scheduler = Scheduler(POLICIES[setting.policy], settings, Parameters(), Random(0))
        for number in range(setting.workers):
            self._handle(WorkerJoined(Worker(WorkerId(f"w{number}"), frozenset([MODEL]))))
        self._fill_tree()
        while self._scheduler.waiting < setting.waiting:
            self._handle(Arrived(self._request()))
        self.turns(200)

    def turns(self, count: int) -> int:
        """Run `count` arrivals and dispatches and return the CPU nanoseconds that they took."""
        spent = 0
        for _ in range(count):
            self._now += SECONDS_BETWEEN
            request = self._request()
            ended = self._running.pop(self._random.randrange(len(self._running)))
            spent += self._handle(Arrived(request))
            self._handle(Started(ended))
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
    print(f"\nCPU time of progress reports per second, {STREAMS} streams of {TOKENS_PER_SECOND} tokens/s, 10 clients")
    print(f"{'policy':24}" + "".join(f"{f'every {seconds} s':>14}" for seconds in options.report_seconds))
    for policy in options.policy:
        fleet = Fleet(Setting(policy, short, clients=10, in_flight=STREAMS // 8))
        spent = [[fleet.progress(seconds) for seconds in options.report_seconds] for _ in range(options.rounds)]
        print(f"{policy:24}" + "".join(f"{median(each) / 1e6:11.1f} ms" for each in zip(*spent, strict=True)))

"""`python -m tests.chaos.restart`: kill -9 of the router under load, and a second router in its place.

The second router must be ready within 3 s, with the service and deficits of the last save, and a worker must stop
abandoned work as soon as its engine can notice.
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP
from tempfile import mkdtemp
from typing import Final, NamedTuple

import aiohttp
import uvloop

from router.core.model.saved import Clients
from router.persistence.state_file import FILE_NAME, decode
from workers.dialects.sglang import SglangWire

from .clients import Crowd, Outcome, ask_all, make_clients
from .leftovers import busy_workers
from .processes import (
    LOOK,
    Server,
    get_json,
    is_ready,
    is_stopped,
    router,
    router_processes,
    running_workers,
    signal_all,
    until,
)
from .reading import Ending
from .violations import exit_code

READY: Final = 3.0
"""Seconds in which a started router must be ready."""
QUANTUM: Final = 100.0
FLAGS: Final = ("--log-level", "warning", "--dlpm-home.quantum", str(QUANTUM))
MOST_OF_A_CALL: Final = 400.0
"""Cost of the most expensive call of a client, in cost units."""
CORRECTION: Final = 20.0
"""Cost units by which an engine's usage may correct a call's service at its end."""
SLACK: Final = 1.0
"""Seconds allowed for a step of an engine, a poll and a busy machine."""


@dataclass(frozen=True, slots=True)
class Load:
    """The load of the router when it is killed."""

    seconds: float = 12.0
    interval: float = 5.0
    """Seconds between two saves: the router's default."""
    clients: int = 40
    workers: int = 4
    speed: float = 1.0
    """Speed of the emulated hardware, by which SGLang's delay before an abort is divided, too."""


class Books(NamedTuple):
    """The service and the deficit of each client in cost units, read just after the wall-clock time `at`."""

    at: float
    service: dict[str, float]
    deficit: dict[str, float]


@dataclass(frozen=True, slots=True)
class Restart:
    """The result of a restart."""

    load: Load
    ready: float
    """Seconds from the second router's start to its readiness."""
    unsaved: float
    """Seconds between the last save and the kill."""
    differences: Sequence[str]
    """Where the loaded books differ from those at the last save."""
    clients: int
    """Number of clients in the loaded books."""
    orphaned: dict[str, float]
    """The longest time from the kill until a worker had no request in flight, in seconds, by dialect."""
    after: Sequence[Outcome]
    """Outcomes of calls to the second router."""

    @property
    def objections(self) -> list[str]:
        """Describe every violation that does not depend on the speed of the machine."""
        wrong = [each.verdict.why for each in self.after if each.verdict.ending is not Ending.COMPLETE]
        return [*self.differences, *(f"after the restart: {why}" for why in wrong)]

    @property
    def late(self) -> list[str]:
        """Describe what took too long."""
        allowed = {"vllm": SLACK, "sglang": SglangWire.disconnect_poll / self.load.speed + SLACK}
        found = [f"{name} had work for {took:.2f} s" for name, took in self.orphaned.items() if took > allowed[name]]
        if self.ready > READY:
            found.append(f"ready after {self.ready:.2f} s")
        if self.unsaved > self.load.interval + SLACK:
            found.append(f"the last save was {self.unsaved:.2f} s before the kill")
        return found


async def restart(load: Load, directory: Path) -> Restart:
    """Run the load, the kill and the second router. `directory`: for the router's state and log."""
    state = directory / "state"
    flags = (*FLAGS, "--state", str(state), "--state-interval", str(load.interval))
    async with running_workers(load.workers, load.speed, 4) as workers, aiohttp.ClientSession() as http:
        proxy = router(directory / "log", [each.url for each in workers], *flags)
        try:
            await proxy.start()
            books = await _until_killed(load, proxy, state / FILE_NAME, http)
            killed = time.time()
            saved, written = _saved(state / FILE_NAME)
            orphans = asyncio.gather(*(_idle(http, each, killed) for each in workers))
            began = time.monotonic()
            await proxy.start()
            await until(partial(is_ready, http, proxy))
            ready = time.monotonic() - began
            loaded = await _read(http, proxy)
            times = await orphans
            crowd = Crowd(proxy.url, time.monotonic)
            await _ask(crowd, load, 2.0)
        finally:
            await proxy.end()
    orphaned = {name: max(times[number::2]) for number, name in enumerate(("vllm", "sglang"))}
    return Restart(
        load,
        ready,
        killed - saved,
        differences(books, saved, written, loaded),
        len(loaded.service),
        orphaned,
        crowd.outcomes,
    )


async def _until_killed(load: Load, proxy: Server, state: Path, http: aiohttp.ClientSession) -> list[Books]:
    """Load the router and kill it some time after a save; return the books read meanwhile.

    The last books are read after the last save and well before the next one, so that the books bound what was saved.
    The router is stopped for the last look at that, or it could save once more before it is killed: all its processes,
    because a scheduler whose supervisor is killed saves a last time.
    """
    crowd, books = Crowd(proxy.url, time.monotonic), list[Books]()
    asking = asyncio.ensure_future(_ask(crowd, load, None))
    began = time.monotonic()
    try:
        while True:
            await asyncio.sleep(LOOK)
            books.append(await _read(http, proxy))
            if time.monotonic() >= began + load.seconds and _covers(state, load, books[-1].at):
                signal_all(proxy, SIGSTOP)
                await until(partial(_all_stopped, proxy))
                if _covers(state, load, books[-1].at):
                    break
                signal_all(proxy, SIGCONT)
        signal_all(proxy, SIGKILL)
    finally:
        await proxy.end()
        crowd.over.set()
        await asking
    return books


async def _all_stopped(proxy: Server) -> bool:
    return all(map(is_stopped, (proxy.pid, *router_processes(proxy.pid).values())))


async def _ask(crowd: Crowd, load: Load, seconds: float | None) -> None:
    asking = asyncio.gather(ask_all(crowd, make_clients(1, load.clients, load.clients // 2), 2, 1.0))
    if seconds is not None:
        await crowd.pause(seconds)
        crowd.over.set()
    await asking
    await crowd.close()


async def _read(http: aiohttp.ClientSession, proxy: Server) -> Books:
    asked = time.time()
    clients = (await get_json(http, f"{proxy.url}/fairness"))["clients"]
    deficit = {
        name: entry["deficit"][worker]["order"]
        for name, entry in clients.items()
        for worker in list(entry["deficit"])[:1]
        if entry["deficit"][worker]["order"] is not None
    }
    return Books(asked, {name: entry["service"]["cost"] for name, entry in clients.items()}, deficit)


def _covers(state: Path, load: Load, look: float) -> bool:
    """Return whether half of the clients were saved, and `look` is after that save and well before the next one."""
    if not state.exists():
        return False
    pieces = decode(state.read_bytes()).pieces
    known = sum(len(piece.rows) for piece in pieces if isinstance(piece, Clients))
    written = _saved(state)[1]
    return known >= load.clients // 2 and written < look < written + load.interval / 2


def _saved(state: Path) -> tuple[float, float]:
    """Return the wall-clock times at which the writing of a state began and was done."""
    return decode(state.read_bytes()).header.saved, state.stat().st_mtime


def differences(books: Sequence[Books], saved: float, written: float, loaded: Books) -> list[str]:
    """Return, by client, where loaded books differ from all books that were read while they were saved."""
    before = [each for each, after in pairwise(books) if after.at <= saved][-1:] or books[:1]
    behind = next((each for each in books if each.at > written), books[-1])
    around = [each for each in books if before[0].at <= each.at <= behind.at]
    found = []
    for name, service in loaded.service.items():
        counts = [each.service.get(name, 0.0) for each in around]
        if not min(counts) - CORRECTION <= service <= max(counts) + CORRECTION:
            found.append(
                f"{name} was served {service:.0f}, which was {min(counts):.0f} to {max(counts):.0f} at the last save"
            )
    for name, deficit in loaded.deficit.items():
        seen = [each.deficit[name] for each in around if name in each.deficit]
        if seen and not min(seen) - MOST_OF_A_CALL <= deficit <= max(seen) + QUANTUM:
            found.append(f"{name} has {deficit:.0f}, which was {min(seen):.0f} to {max(seen):.0f} at the last save")
    found += [f"{name} is not known any more" for name in before[0].service if name not in loaded.service]
    return found


async def _idle(http: aiohttp.ClientSession, worker: Server, killed: float) -> float:
    """Return the seconds from the kill until a worker has no request in flight."""

    async def idle() -> bool:
        return not await busy_workers(http, worker.url)

    await until(idle)
    return time.time() - killed


def main() -> int:
    """Run, print the results, and return the exit code."""
    directory = Path(mkdtemp(prefix="chaos-restart-"))
    seen = uvloop.run(restart(Load(), directory))
    print(f"ready {seen.ready:.2f} s from its start")
    print(f"the last save was {seen.unsaved:.2f} s before the kill, of every {seen.load.interval:g} s")
    print(f"books of {seen.clients} clients, of which {len(seen.differences)} are not as they were then")
    for name, took in seen.orphaned.items():
        print(f"{name}: nothing under way {took:.2f} s behind the kill")
    print(f"calls to the second router: {len(seen.after)}, of which {len(seen.objections)} are not well")
    return exit_code([*seen.objections, *seen.late], directory, "The routers' log and state are")


if __name__ == "__main__":
    sys.exit(main())

"""A worker killed in the middle of requests and restarted: how soon the router believes nothing of its old cache."""

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import fmean

from router.core.model.commands import Dispatch
from router.core.model.events import BlocksLost, Evicted, WorkerLeft
from router.persistence.journal import JournalEntry, read

from .clients import Clients
from .fleet import Engine, Router
from .programs import programs

BEFORE = 100
"""Answers before the worker is killed."""
AFTER = 60
"""Requests at the restarted worker, which are enough for a result."""


def restart(name: str, started: Router, journal: Path, victim: Engine, bias: Mapping[str, int]) -> Iterator[str]:
    """Kill a worker during requests, restart it, and yield what the router predicted of it before and afterwards."""
    clients = Clients(started.url, programs(4.0), bias)
    threads = clients.start()
    id_ = str(started.worker(victim)["id"])
    try:
        _wait(lambda: len(clients.results) >= BEFORE, 60)
        killed = time.monotonic()
        victim.kill()
        victim.start_and_wait()
        back = time.monotonic()
        _wait(lambda: sum(r.worker == id_ and r.asked_at > back for r in list(clients.results)) >= AFTER, 120)
    finally:
        clients.stop()
        for thread in threads:
            thread.join()
    gone, first = forgotten(journal, id_, killed)
    after = [result for result in clients.results if result.worker == id_ and result.asked_at > back]
    error = fmean(result.error for result in after)
    yield (
        f"{name}: restart amid requests: stale entries gone after {gone:.2f} s; {clients.failed} requests failed; "
        f"then predicted first {first} tokens; {len(after)} requests there since, mean error {error:.2%}"
    )


def forgotten(journal: Path, worker: str, since: float) -> tuple[float, int]:
    """Return after how many seconds the router believed nothing of a worker, and its first prediction there after
    that.
    """
    gone: float | None = None
    with journal.open("rb") as lines:
        for item in read(lines):
            if isinstance(item, JournalEntry) and item.at >= since:
                event = item.event
                if gone is None and isinstance(event, WorkerLeft | BlocksLost | Evicted) and event.worker == worker:
                    gone = item.at - since
                for command in item.commands:
                    if isinstance(command, Dispatch) and command.worker == worker and gone is not None:
                        return gone, command.cached_tokens
    raise AssertionError("the router never forgot the worker")


def _wait(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the requests do not get on"
        time.sleep(0.05)

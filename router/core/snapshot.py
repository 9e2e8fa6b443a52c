"""The scheduler's state that survives a restart: what each client was served and owes, and what the workers hold.

Of a request that is live when the snapshot is taken, only what it was charged is saved. If its front reports it to the
next run (`Resumed`), that is taken back, and charged again as it goes on. If not, its client keeps owing for it: nobody
can say whether the engine computed it.
"""

from collections.abc import Iterable, Iterator
from math import isfinite
from typing import Final

from router.core.cache.saved_prefixes import restore_prefixes, saved_prefixes
from router.core.model.cost import NOTHING
from router.core.model.saved import (
    Cache,
    Clients,
    Counters,
    Fleet,
    Groups,
    LiveRequests,
    Piece,
    Prefixes,
    SavedClient,
    UsageRows,
    in_rows,
)
from router.core.scheduler import Scheduler

MAX_TOUCHES: Final = 10_000
"""Prefixes saved, the most recently used first."""
MAX_CHUNKS: Final = 500_000
"""Chunks saved over all these prefixes; 8 bytes each."""


def snapshot(scheduler: Scheduler, now: float, touches: int = MAX_TOUCHES, chunks: int = MAX_CHUNKS) -> Iterator[Piece]:
    """Yield the state in pieces, each as it is when it is asked for. Changes nothing."""
    yield from saved_accounts(scheduler)
    yield from saved_caches(scheduler, now, touches, chunks)


def saved_caches(
    scheduler: Scheduler, now: float, touches: int = MAX_TOUCHES, chunks: int = MAX_CHUNKS
) -> Iterator[Piece]:
    """Yield what the workers are believed to hold, each piece as it is when it is asked for. Changes nothing."""
    yield from [Cache(worker, cache.model, cache.report) for worker, cache in scheduler.mirror.caches.items()]
    yield from saved_prefixes(scheduler.prefixes.tree, now, touches, chunks)


def saved_accounts(scheduler: Scheduler) -> Iterator[Piece]:
    """Yield what clients were charged and which workers there are. The pieces agree with each other only if no event is
    handled in between. Changes nothing.
    """
    weights, accounts = scheduler.weights, scheduler.ledger.accounts
    clients = (
        SavedClient(client, weights[client], accounts[client].served if client in accounts else NOTHING)
        for client in list(weights)
        if client in weights
    )
    yield from map(Clients, in_rows(clients))
    yield from scheduler.ledger.saved_usage()
    yield from scheduler.policy.saved()
    yield from map(LiveRequests, in_rows(scheduler.charged_requests()))
    if workers := tuple(state.worker for state in scheduler.fleet if not state.left):
        yield Fleet(workers)


def restore(scheduler: Scheduler, pieces: Iterable[Piece], now: float) -> None:
    """Restore saved state into a scheduler that has handled no event yet.

    What live requests were charged stays charged, unless `Held` and `Resumed` follow. Debts hold until clients contend
    again: that no request waits at first does not mean that the fleet was idle. Raises ValueError if the pieces
    contradict themselves, before anything is changed.
    """
    pieces = list(pieces)
    _check(pieces)
    restore_prefixes(scheduler.prefixes.tree, [piece for piece in pieces if isinstance(piece, Prefixes)], now)
    for piece in pieces:
        match piece:
            case Clients(rows):
                for client, weight, served in rows:
                    scheduler.clients.remember(client, weight)
                    if served != NOTHING:
                        scheduler.ledger.restore(client, served)
            case UsageRows(used):
                for usage in used:
                    scheduler.ledger.usage.add(usage)
            case Counters() | Groups():
                scheduler.policy.restore(piece)
                for row in piece.rows:
                    if row.worker is not None:
                        scheduler.fleet.remember(row.worker)
            case Cache(worker, model, report):
                scheduler.fleet.remember(worker)
                cache = scheduler.mirror.cache(worker)
                cache.model, cache.report = model, report
            case Fleet(workers):
                for each in workers:
                    scheduler.fleet.remember(each.id)


def _check(pieces: Iterable[Piece]) -> None:
    for piece in pieces:
        match piece:
            case Clients(rows) if not all(_is_positive(row.weight) and min(row.served) >= 0 for row in rows):
                raise ValueError("a client has an invalid weight or service")
            case Counters(rows=rows) | Groups(rows) if not all(
                isfinite(row.value) and _is_positive(row.scale) for row in rows
            ):
                raise ValueError("a deficit is invalid")
            case LiveRequests(rows) if not all(min(row.charged) >= 0 for row in rows):
                raise ValueError("a live request has an invalid charge")
            case UsageRows(rows) if not all(min(row.counts) >= 0 for row in rows):
                raise ValueError("a row of usage is negative")
            case Prefixes(_, touches) if not all(isfinite(touch.age) for touch in touches):
                raise ValueError("a prefix has an invalid age")


def _is_positive(number: float) -> bool:
    return isfinite(number) and number > 0

"""The scheduler's state that survives a restart: what each client was served and owes, and what the workers hold.

Requests that are live when the snapshot is taken are not in it. But their input was reserved, and their clients owe for
it: after the restart, nobody can say whether the engines computed it.
"""

from collections.abc import Iterable, Iterator
from math import isfinite
from typing import Final

from router.core.cache.saved_prefixes import restore_prefixes, saved_prefixes
from router.core.model.cost import NOTHING
from router.core.model.saved import Cache, Clients, Counters, Groups, Piece, Prefixes, SavedClient, in_rows
from router.core.scheduler import Scheduler

MAX_TOUCHES: Final = 10_000
"""Prefixes saved, the most recently used first."""
MAX_CHUNKS: Final = 500_000
"""Chunks saved over all these prefixes; 8 bytes each."""


def snapshot(scheduler: Scheduler, now: float, touches: int = MAX_TOUCHES, chunks: int = MAX_CHUNKS) -> Iterator[Piece]:
    """Yield the state in pieces, each as it is when it is asked for. Changes nothing."""
    weights, accounts = scheduler.weights, scheduler.ledger.accounts
    clients = (
        SavedClient(client, weights[client], accounts[client].served if client in accounts else NOTHING)
        for client in list(weights)
        if client in weights
    )
    yield from map(Clients, in_rows(clients))
    yield from scheduler.policy.saved()
    yield from [Cache(worker, cache.model, cache.report) for worker, cache in scheduler.mirror.caches.items()]
    yield from saved_prefixes(scheduler.prefixes.tree, now, touches, chunks)


def restore(scheduler: Scheduler, pieces: Iterable[Piece], now: float) -> None:
    """Restore saved state into a scheduler that has handled no event yet.

    Debts hold until clients contend again: that no request waits at first does not mean that the fleet was idle. Raises
    ValueError if the pieces contradict themselves, before anything is changed.
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
            case Counters() | Groups():
                scheduler.policy.restore(piece)
                for row in piece.rows:
                    if row.worker is not None:
                        scheduler.cluster.remember(row.worker)
            case Cache(worker, model, report):
                scheduler.cluster.remember(worker)
                cache = scheduler.mirror.cache(worker)
                cache.model, cache.report = model, report


def _check(pieces: Iterable[Piece]) -> None:
    for piece in pieces:
        match piece:
            case Clients(rows) if not all(_is_positive(row.weight) and min(row.served) >= 0 for row in rows):
                raise ValueError("a client has an invalid weight or service")
            case Counters(rows=rows) | Groups(rows) if not all(
                isfinite(row.value) and _is_positive(row.scale) for row in rows
            ):
                raise ValueError("a deficit is invalid")
            case Prefixes(_, touches) if not all(isfinite(touch.age) for touch in touches):
                raise ValueError("a prefix has an invalid age")


def _is_positive(number: float) -> bool:
    return isfinite(number) and number > 0

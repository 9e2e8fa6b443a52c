"""The scheduler's state that survives a restart: who was served what, who owes what, and what the workers hold.

What runs when it is taken is not in it. But a client owes for the input of such requests, which was reserved: whether
the engines computed it, nobody is left to say.
"""

from collections.abc import Iterable, Iterator
from math import isfinite
from typing import Final

from router.core.cache.saved_prefixes import restore_prefixes, saved_prefixes
from router.core.model.cost import NOTHING
from router.core.model.saved import Cache, Clients, Counters, Groups, Piece, Prefixes, SavedClient, in_rows
from router.core.scheduler import Scheduler

MAX_TOUCHES: Final = 10_000
"""Prefixes saved, the newest first."""
MAX_CHUNKS: Final = 500_000
"""Of these, altogether; 8 bytes each."""


def snapshot(
    scheduler: Scheduler, now: float, touches: int = MAX_TOUCHES, chunks: int = MAX_CHUNKS
) -> Iterator[Piece]:
    """The state in pieces, each as it is when it is asked for; changes nothing."""
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
    """Give a scheduler to which nothing has happened yet what was saved.

    Debts hold until clients contend again: that nobody waits at first does not mean that the fleet was idle. Raises
    ValueError where the pieces contradict themselves, before anything is changed.
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
            case Clients(rows) if not all(_is_scale(row.weight) and min(row.served) >= 0 for row in rows):
                raise ValueError("the service of a client is broken")
            case Counters(rows=rows) | Groups(rows) if not all(
                isfinite(row.value) and _is_scale(row.scale) for row in rows
            ):
                raise ValueError("a counter is broken")
            case Prefixes(_, touches) if not all(isfinite(touch.age) for touch in touches):
                raise ValueError("the age of a prefix is broken")


def _is_scale(number: float) -> bool:
    return isfinite(number) and number > 0

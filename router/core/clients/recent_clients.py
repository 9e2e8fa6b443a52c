"""Which clients are remembered, so that no number of invented client names fills the memory.

Clients with a request waiting or in flight are always remembered, and of the others the most recent ones. Of a
forgotten client only its debt is kept. If there are more debtors than the limit, those with the least debt are dropped.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable
from typing import Final, Generic, TypeVar

from router.core.model.request import ClientId

K = TypeVar("K", bound=Hashable)

CHECKS_PER_ARRIVAL: Final = 4
"""Clients checked at each arrival while there are too many."""
DEBTOR_LIMIT: Final = 20_000
"""The most clients that one queue remembers only for their debts."""
SAMPLE: Final = 8
"""Of this many debtors, those that were away longest, the one with the least debt is dropped."""


class RecentClients:
    """All remembered clients, from the least to the most recent."""

    def __init__(self, limit: int) -> None:
        """`limit`: how many clients without requests waiting or in flight are remembered."""
        self._limit = limit
        # Not a plain dict, which finds its first key by walking past all keys removed before it.
        self._clients: OrderedDict[ClientId, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._clients)

    def touch(self, client: ClientId) -> None:
        """Mark a client as the most recent."""
        self._clients[client] = None
        self._clients.move_to_end(client)

    def drop(self, client: ClientId) -> None:
        """Forget a client, however recent it is."""
        self._clients.pop(client, None)

    def to_forget(self, busy: Callable[[ClientId], bool]) -> list[ClientId]:
        """Remove and return a few of the least recent clients beyond the limit, none for which `busy` is true."""
        found = []
        for _ in range(min(CHECKS_PER_ARRIVAL, len(self._clients) - self._limit)):
            client, _nothing = self._clients.popitem(last=False)
            if busy(client):
                self._clients[client] = None
            else:
                found.append(client)
        return found


class Debtors(Generic[K]):
    """Keys remembered only for their debts, from the first forgotten to the last."""

    def __init__(self, limit: int = DEBTOR_LIMIT) -> None:
        self._limit = limit
        self._keys: OrderedDict[K, None] = OrderedDict()
        self.keys: Final[Collection[K]] = self._keys.keys()
        """Read-only view."""

    def discard(self, key: K) -> None:
        """Remove a key whose client is back, or is dropped everywhere."""
        self._keys.pop(key, None)

    def keep(self, key: K) -> None:
        """Add a key without checking the others."""
        self._keys[key] = None

    def add(self, key: K, debt_of: Callable[[K], float]) -> list[K]:
        """Add a key. Returns the keys to drop: sampled ones without debt, or the one with the least debt beyond the
        limit.
        """
        self.keep(key)
        sample = [self._keys.popitem(last=False)[0] for _ in range(min(SAMPLE, len(self._keys)))]
        debts = {each: debt_of(each) for each in sample}
        forgotten = [each for each, debt in debts.items() if debt <= 0]
        if not forgotten and len(self._keys) + len(sample) > self._limit:
            forgotten = [min(debts, key=debts.__getitem__)]
        self._keys.update(dict.fromkeys(each for each in sample if each not in forgotten))
        return forgotten

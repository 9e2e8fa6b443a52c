"""Which clients are remembered, so that no number of names that somebody makes up fills the memory.

All are that have anything under way, and of the others those that came last. Of one that is forgotten nothing stays but
what it owes; and of more debtors than can be remembered, those go that owe least.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

from router.core.model.request import ClientId

K = TypeVar("K", bound=Hashable)

CHECKS_PER_ARRIVAL: Final = 4
"""How many clients are looked at for each that comes, when there are too many."""
DEBTOR_LIMIT: Final = 20_000
"""Remembered for their debts alone in one queue, at most."""
SAMPLE: Final = 8
"""Of so many debtors, those that were away longest, the one that owes least goes."""


class RecentClients:
    """All clients remembered, from the one that has not come for longest to the last that came."""

    def __init__(self, limit: int) -> None:
        """`limit`: how many are remembered that have nothing under way."""
        self._limit = limit
        # Ordered by links: the head of a plain dict is found by passing over all that were removed before it.
        self._clients: OrderedDict[ClientId, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._clients)

    def touch(self, client: ClientId) -> None:
        """It is the last that came."""
        self._clients[client] = None
        self._clients.move_to_end(client)

    def drop(self, client: ClientId) -> None:
        """It is not remembered, whenever it came."""
        self._clients.pop(client, None)

    def to_forget(self, busy: Callable[[ClientId], bool]) -> list[ClientId]:
        """Those that are too many, a few at a time; none that has anything under way. They are forgotten from here."""
        found = []
        for _ in range(min(CHECKS_PER_ARRIVAL, len(self._clients) - self._limit)):
            client, _nothing = self._clients.popitem(last=False)
            if busy(client):
                self._clients[client] = None
            else:
                found.append(client)
        return found


class Debtors(Generic[K]):
    """Whoever is remembered for its debt alone, from the one that was forgotten first to the last."""

    def __init__(self, limit: int = DEBTOR_LIMIT) -> None:
        self._limit = limit
        self._keys: OrderedDict[K, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def discard(self, key: K) -> None:
        """It is here again, or nowhere any more."""
        self._keys.pop(key, None)

    def keep(self, key: K) -> None:
        """One more, without a look at the others."""
        self._keys[key] = None

    def add(self, key: K, debt_of: Callable[[K], float]) -> list[K]:
        """One more; returns whom to forget altogether: some that owe nothing any more, and who is one too many."""
        self.keep(key)
        sample = [self._keys.popitem(last=False)[0] for _ in range(min(SAMPLE, len(self._keys)))]
        debts = {each: debt_of(each) for each in sample}
        forgotten = [each for each, debt in debts.items() if debt <= 0]
        if not forgotten and len(self._keys) + len(sample) > self._limit:
            forgotten = [min(debts, key=debts.__getitem__)]
        self._keys.update(dict.fromkeys(each for each in sample if each not in forgotten))
        return forgotten

"""The debts of forgotten clients, of which a limited number is kept: those with the least debt are dropped first."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable
from typing import Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)

DEBTOR_LIMIT: Final = 20_000
"""The most clients that one queue remembers only for their debts."""
SAMPLE: Final = 8
"""Of this many debtors, those that were away longest, the one with the least debt is dropped."""


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

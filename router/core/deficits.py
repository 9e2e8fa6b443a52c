"""Deficit counters with closed-form refill, for DLPM's clients and for D²LPM's workers alike."""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from math import floor
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class Counter:
    """A deficit counter q and the quantum that one refill adds to it, both in cost units."""

    credit: float
    quantum: float


class DeficitTable(Generic[K]):
    """Counters q by key: positive is credit, negative is debt.

    DLPM (Alg. 1) keeps one table per worker, by client; D²LPM (Alg. 2) one per client, by worker.
    """

    def __init__(self) -> None:
        self._counters: dict[K, Counter] = {}
        self._spent: dict[K, Counter] = {}
        """Those without credit: only they are refilled or forgiven."""

    def __contains__(self, key: K) -> bool:
        return key in self._counters

    def __iter__(self) -> Iterator[K]:
        return iter(self._counters)

    def join(self, key: K, quantum: float, credit: float) -> None:
        """Begin a counter at `credit`; one that exists keeps its credit and takes the new quantum."""
        counter = self._counters.get(key)
        if counter is None:
            counter = self._counters[key] = Counter(credit, quantum)
            self._sort(key, counter)
        else:
            counter.quantum = quantum

    def credit(self, key: K) -> float:
        """The counter's value q; 0 for a key that never joined."""
        counter = self._counters.get(key)
        return 0.0 if counter is None else counter.credit

    def charge(self, key: K, cost: float) -> None:
        """Take `cost` from a counter; negative gives back. A key that never joined is passed over."""
        counter = self._counters.get(key)
        if counter is not None:
            counter.credit -= cost
            self._sort(key, counter)

    def refill(self, contenders: Iterable[K]) -> int:
        """Add quanta until some contender has credit; returns the number of rounds.

        CHECKREFILL of Alg. 1, and the loop of Alg. 2's SELECTWORKER: each round adds one quantum to every
        counter that has none left, contender or not, so that debts also shrink in absence. The rounds are
        counted, not run: a debt may be thousands of quanta deep.
        """
        needed = [_rounds(self._counters[key]) for key in contenders]
        rounds = min(needed, default=0)
        if rounds:
            for key, counter in list(self._spent.items()):
                counter.credit += min(rounds, _rounds(counter)) * counter.quantum
                self._sort(key, counter)
        return rounds

    def forgive(self) -> None:
        """Set every debt to zero; credit stays."""
        for counter in self._spent.values():
            counter.credit = 0.0

    def _sort(self, key: K, counter: Counter) -> None:
        if counter.credit > 0:
            self._spent.pop(key, None)
        else:
            self._spent[key] = counter


def _rounds(counter: Counter) -> int:
    """How many quanta make this counter positive."""
    if counter.credit > 0:
        return 0
    rounds = floor(-counter.credit / counter.quantum) + 1
    # Rounding can leave the sum at or just below zero.
    return rounds if counter.credit + rounds * counter.quantum > 0 else rounds + 1

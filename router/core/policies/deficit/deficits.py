"""Deficit counters with closed-form refill, for DLPM's clients and D²LPM's workers.

A refill adds quanta, or fractions of quanta, to every counter, up to a deficit of one quantum. The table counts refill
rounds in one number, and each counter takes in the rounds that it missed when it is next read; so a refill costs the
same for any number of counters.
"""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import filterfalse
from math import floor
from typing import Generic, TypeVar

from router.core.clients.recent_clients import DEBTOR_LIMIT, Debtors
from router.core.model.request import GroupId

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class DeficitCounter:
    """A deficit counter q and the quantum that one refill adds to it, both in cost units."""

    deficit: float
    quantum: float
    rounds: float
    """Refill rounds that the counter has taken in, each counted as the fraction of a quantum that it added."""
    epoch: int
    """The epoch of the table in which the counter was last brought up to date; `DeficitTable.reset` starts a new
    epoch."""
    group: GroupId | None = None
    """The group whose clock counts the rounds; None for the table's own."""


class DeficitTable(Generic[K]):
    """Deficit counters q by key. A key with q > 0 may be served; q < 0 is debt.

    DLPM (Alg. 1) keeps one table per worker, by client; D²LPM (Alg. 2) keeps one per client, by worker. For the refill
    of counters in groups see `ClientDeficits`.
    """

    def __init__(self, debtors: int = DEBTOR_LIMIT) -> None:
        """`debtors`: how many counters of forgotten keys are kept because they are in debt."""
        self._counters: dict[K, DeficitCounter] = {}
        self._debtors: Debtors[K] = Debtors(debtors)
        """Forgotten keys whose counters are kept because they are in debt."""
        self.rounds = 0.0
        """Refill rounds so far, each counted as the fraction of a quantum that it added."""
        self._epoch = 0

    def __contains__(self, key: K) -> bool:
        return key in self._counters

    def __iter__(self) -> Iterator[K]:
        return iter(self._counters)

    def missing(self, keys: Iterable[K]) -> list[K]:
        """Those of the keys that have no counter."""
        return [*filterfalse(self._counters.__contains__, keys)]

    def join(self, key: K, quantum: float, deficit: float) -> bool:
        """Start a counter at `deficit`; an existing counter keeps its deficit and takes the new quantum.

        Returns whether the quantum of an existing counter changed.
        """
        counter = self._counters.get(key)
        if self._debtors.keys:
            self._debtors.discard(key)
        if counter is None:
            self._counters[key] = DeficitCounter(deficit, quantum, self.rounds, self._epoch)
            return False
        return self._set_quantum(counter, quantum)

    def _set_quantum(self, counter: DeficitCounter, quantum: float) -> bool:
        """Set what a refill adds to a counter from now on; returns whether that changed."""
        if counter.quantum == quantum:
            return False
        self._catch_up(counter)
        counter.quantum = quantum
        return True

    def deficit(self, key: K) -> float:
        """The deficit q of a key; 0 if the key has no counter."""
        counter = self._counters.get(key)
        return 0.0 if counter is None else self._catch_up(counter)

    def deficit_or_none(self, key: K) -> float | None:
        """The deficit q of a key; None if the key has no counter."""
        counter = self._counters.get(key)
        return None if counter is None else self._catch_up(counter)

    def restore(self, key: K, deficit: float, quantum: float) -> None:
        """Load a saved counter, to be kept for its debt alone until its key joins."""
        self._counters[key] = DeficitCounter(deficit, quantum, self.rounds, self._epoch)
        self._debtors.keep(key)

    def forget(self, key: K) -> None:
        """Keep a counter only while it is below the one quantum with which it would start anew."""
        if key in self._counters:
            for gone in self._debtors.add(key, self._debt):
                del self._counters[gone]

    def drop(self, key: K) -> None:
        """Remove a counter."""
        self._counters.pop(key, None)
        self._debtors.discard(key)

    def _debt(self, key: K) -> float:
        counter = self._counters[key]
        return self._refill_amount(counter) - self._catch_up(counter)

    def saved(self) -> Iterator[tuple[K, float, float]]:
        """Yield each key with its deficit and quantum, for `restore`. Changes nothing.

        Keys may join and counters may change between two items.
        """
        for key in list(self._counters):
            counter = self._counters.get(key)
            if counter is not None:
                yield key, self._current(counter), self._refill_amount(counter)

    def charge(self, key: K, cost: float) -> float:
        """Subtract `cost` from a counter; a negative cost is a refund. Returns the deficit q; 0 if the key has no
        counter.
        """
        counter = self._counters.get(key)
        if counter is None:
            return 0.0
        counter.deficit = self._catch_up(counter) - cost
        return counter.deficit

    def rounds_to_positive(self, key: K, fraction: float = 1.0) -> int:
        """The number of refill rounds after which this counter is positive, unless it is charged before.

        `fraction`: the fraction of a quantum that each round adds, in (0, 1].
        """
        counter = self._counters[key]
        return _rounds_until_positive(self._catch_up(counter), fraction * self._refill_amount(counter))

    def quanta_short(self, key: K) -> float:
        """The number of quanta, not rounded, by which a counter is below zero; negative if the counter is positive."""
        counter = self._counters[key]
        return -self._catch_up(counter) / self._refill_amount(counter)

    def cap(self, key: K, fraction: float) -> float:
        """Reduce a counter to this fraction of its quantum, and return it. A deficit above one quantum, which only an
        operator grants, stays.
        """
        counter = self._counters[key]
        deficit, amount = self._catch_up(counter), self._refill_amount(counter)
        if fraction * amount < deficit <= amount:
            counter.deficit = fraction * amount
        return counter.deficit

    def refill(self, contenders: Iterable[K], fraction: float = 1.0) -> int:
        """Add this fraction of a quantum per round until some contender's deficit is positive; returns the number of
        rounds.

        This is CHECKREFILL of Alg. 1 and the loop of Alg. 2's SELECTWORKER. Each round adds the same fraction of its
        quantum to every counter, contender or not, up to one quantum, so debts also shrink while a client is absent.
        The rounds are counted, not run: a debt may be thousands of quanta deep.

        Alg. 1 does not refill positive counters. Then a client that uses half of its share would run out in the middle
        of every second round and wait for its end. Here such a client starts each round with a whole quantum. The
        bounds of the theorem still hold, because they rest on q <= Q^u and on what waiting clients receive.
        """
        rounds = min([self.rounds_to_positive(key, fraction) for key in contenders], default=0)
        self.rounds += rounds * fraction
        return rounds

    def reset(self) -> None:
        """Set every counter to one quantum."""
        self._epoch += 1

    def _clock(self, counter: DeficitCounter) -> float:  # noqa: ARG002 - a group has its own clock
        """The refill rounds so far, as counted for this counter."""
        return self.rounds

    def _refill_amount(self, counter: DeficitCounter) -> float:
        """What a round adds to this counter now."""
        return counter.quantum

    def _missed_rounds(self, counter: DeficitCounter) -> float:
        """The rounds that this counter has not taken in, in rounds of the present size."""
        return self.rounds - counter.rounds

    def _catch_up(self, counter: DeficitCounter) -> float:
        """Apply the reset and the refills that a counter missed; returns its deficit."""
        clock = self.rounds if counter.group is None else self._clock(counter)
        if counter.epoch != self._epoch or counter.rounds != clock:
            counter.deficit = self._current(counter)
            counter.epoch = self._epoch
            counter.rounds = clock
        return counter.deficit

    def _current(self, counter: DeficitCounter) -> float:
        """A counter's deficit after the reset and the refills that it missed. Changes nothing.

        Callers that must leave no trace use this: because of rounding, applying two refills one by one differs from
        applying both at once.
        """
        amount = self._refill_amount(counter)
        if counter.epoch != self._epoch:
            return amount  # refills since the reset did not raise it further
        return max(counter.deficit, min(counter.deficit + self._missed_rounds(counter) * amount, amount))


def _rounds_until_positive(deficit: float, quantum: float) -> int:
    """The number of quanta that makes this deficit positive."""
    if deficit > 0:
        return 0
    rounds = floor(-deficit / quantum) + 1
    # Rounding can leave the sum at or just below zero.
    return rounds if deficit + rounds * quantum > 0 else rounds + 1

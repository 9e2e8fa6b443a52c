"""Deficit counters with closed-form refill, for DLPM's clients and for D²LPM's workers alike.

A refill adds quanta, or parts of quanta, to every counter, up to one quantum of credit. It is counted here in one
number for the whole table, and each counter takes in what it missed when it is next looked at; so a refill costs the
same however many there are.
"""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
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
    """How many refill rounds it has taken in, each counted as the part of a quantum that it added."""
    epoch: int
    """Since which of the table's beginnings it counts."""
    group: GroupId | None = None
    """Whose rounds these are; None for the table's own."""


class DeficitTable(Generic[K]):
    """Counters q by key: positive is credit, negative is debt.

    DLPM (Alg. 1) keeps one table per worker, by client; D²LPM (Alg. 2) one per client, by worker. What the counters of
    a group are refilled with, `ClientDeficits` says.
    """

    def __init__(self, debtors: int = DEBTOR_LIMIT) -> None:
        """`debtors`: how many debts are kept of who is forgotten."""
        self._counters: dict[K, DeficitCounter] = {}
        self._debtors: Debtors[K] = Debtors(debtors)
        """Those whose counters are kept for their debts alone."""
        self.rounds = 0.0
        """Refill rounds so far, each counted as the part of a quantum that it added."""
        self._epoch = 0

    def __contains__(self, key: K) -> bool:
        return key in self._counters

    def __iter__(self) -> Iterator[K]:
        return iter(self._counters)

    def missing(self, keys: Iterable[K]) -> list[K]:
        """Those of them that never joined."""
        counters = self._counters
        return [key for key in keys if key not in counters]

    def join(self, key: K, quantum: float, deficit: float) -> bool:
        """Begin a counter at `deficit`; one that exists keeps its credit and takes the new quantum.

        Returns whether the quantum of one that exists changed.
        """
        counter = self._counters.get(key)
        if self._debtors:
            self._debtors.discard(key)
        if counter is None:
            self._counters[key] = DeficitCounter(deficit, quantum, self.rounds, self._epoch)
            return False
        if counter.quantum == quantum:
            return False
        self._catch_up(counter)
        counter.quantum = quantum
        return True

    def deficit(self, key: K) -> float:
        """The counter's value q; 0 for a key that never joined."""
        counter = self._counters.get(key)
        return 0.0 if counter is None else self._catch_up(counter)

    def deficit_or_none(self, key: K) -> float | None:
        """Like `deficit`, but None for a key that never joined."""
        counter = self._counters.get(key)
        return None if counter is None else self._catch_up(counter)

    def restore(self, key: K, deficit: float, quantum: float) -> None:
        """Begin a counter as it was saved, to be kept for its debt alone until its key joins."""
        self._counters[key] = DeficitCounter(deficit, quantum, self.rounds, self._epoch)
        self._debtors.keep(key)

    def forget(self, key: K) -> None:
        """Remember of a counter only what is less than the one quantum with which it would begin anew."""
        if key in self._counters:
            for gone in self._debtors.add(key, self._debt):
                del self._counters[gone]

    def drop(self, key: K) -> None:
        """Remember nothing of a counter."""
        self._counters.pop(key, None)
        self._debtors.discard(key)

    def _debt(self, key: K) -> float:
        counter = self._counters[key]
        return self._refill_amount(counter) - self._catch_up(counter)

    def saved(self) -> Iterator[tuple[K, float, float]]:
        """Each key with its credit and its quantum, for `restore`; changes nothing.

        Others may join, and counters change, between two of them.
        """
        for key in list(self._counters):
            counter = self._counters.get(key)
            if counter is not None:
                yield key, self._current(counter), self._refill_amount(counter)

    def charge(self, key: K, cost: float) -> None:
        """Take `cost` from a counter; negative gives back. A key that never joined is passed over."""
        counter = self._counters.get(key)
        if counter is not None:
            counter.deficit = self._catch_up(counter) - cost

    def rounds_to_positive(self, key: K, fraction: float = 1.0) -> int:
        """After how many refill rounds this counter has credit, unless it is charged until then.

        `fraction`: of a quantum, that each of them adds; in (0, 1].
        """
        counter = self._counters[key]
        return _rounds_until_positive(self._catch_up(counter), fraction * self._refill_amount(counter))

    def quanta_short(self, key: K) -> float:
        """How many quanta, not counted in whole ones, a counter is away from having credit; negative with credit."""
        counter = self._counters[key]
        return -self._catch_up(counter) / self._refill_amount(counter)

    def cap(self, key: K, fraction: float) -> None:
        """Leave a counter no more credit than this part of its quantum; but what an operator gave beyond a quantum."""
        counter = self._counters[key]
        deficit, amount = self._catch_up(counter), self._refill_amount(counter)
        if fraction * amount < deficit <= amount:
            counter.deficit = fraction * amount

    def refill(self, contenders: Iterable[K], fraction: float = 1.0) -> int:
        """Add this part of a quantum until some contender has credit; returns the number of rounds.

        CHECKREFILL of Alg. 1, and the loop of Alg. 2's SELECTWORKER: each round adds the same part of its quantum to
        every counter, contender or not, so that debts also shrink in absence, but never beyond one quantum. The rounds
        are counted, not run: a debt may be thousands of quanta deep.

        Alg. 1 leaves what is positive as it is. Then a client that asks for half of what it might have is out of
        credit in the middle of every second round, and waits for its end. Here it begins each round with a whole
        quantum; the bounds of the theorem hold as before, for they rest on q <= Q^u and on what those get that wait.
        """
        rounds = min([self.rounds_to_positive(key, fraction) for key in contenders], default=0)
        self.rounds += rounds * fraction
        return rounds

    def reset(self) -> None:
        """Give every counter one quantum, whatever it had."""
        self._epoch += 1

    def _clock(self, counter: DeficitCounter) -> float:  # noqa: ARG002 - that of a group is another
        """The rounds that there were for this counter."""
        return self.rounds

    def _refill_amount(self, counter: DeficitCounter) -> float:
        """What a round of now adds to it."""
        return counter.quantum

    def _missed_rounds(self, counter: DeficitCounter) -> float:
        """The rounds that it has not taken in, counted in rounds of now."""
        return self.rounds - counter.rounds

    def _catch_up(self, counter: DeficitCounter) -> float:
        """Give a counter the beginning and the refills that it missed; returns its credit."""
        clock = self.rounds if counter.group is None else self._clock(counter)
        if counter.epoch != self._epoch or counter.rounds != clock:
            counter.deficit = self._current(counter)
            counter.epoch = self._epoch
            counter.rounds = clock
        return counter.deficit

    def _current(self, counter: DeficitCounter) -> float:
        """A counter's credit, with the beginning and the refills that it missed; changes nothing.

        That counts where nobody may see that it was looked at: rounding makes two refills other than one of both.
        """
        amount = self._refill_amount(counter)
        if counter.epoch != self._epoch:
            return amount  # and any refill that came since left it at that
        return max(counter.deficit, min(counter.deficit + self._missed_rounds(counter) * amount, amount))


def _rounds_until_positive(deficit: float, quantum: float) -> int:
    """How many quanta make this credit positive."""
    if deficit > 0:
        return 0
    rounds = floor(-deficit / quantum) + 1
    # Rounding can leave the sum at or just below zero.
    return rounds if deficit + rounds * quantum > 0 else rounds + 1

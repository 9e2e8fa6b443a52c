"""Who holds how much of what is short, and who holds most of it by weight.

Where room runs out, whoever holds most gives way, not whoever comes last ("longest queue drop"; B. Suter et al.,
"Buffer Management Schemes for Supporting TCP in Gigabit Routers with Per-flow Queueing", 1999). So a flood costs the
flooder, and nobody who holds less than an equal share by weight is refused for it.
"""

from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeVar

K = TypeVar("K", bound=str)


@dataclass(slots=True)
class Holding:
    """What one holder has."""

    amount: int = 0
    weight: float = 1.0


class LongestQueueDrop(Generic[K]):
    """Amounts by holder, their sum, and the holder with the most of it by weight.

    Adding, taking away and asking cost no more with many holders than with few, but for the logarithm of a heap.
    """

    def __init__(self) -> None:
        self.total = 0
        self._held: dict[K, Holding] = {}
        self._heap: list[tuple[float, K]] = []
        """Of each holder a level (negative) that is at least its own, and perhaps others."""

    def __len__(self) -> int:
        """How many hold anything."""
        return len(self._held)

    def amount_of(self, holder: K) -> int:
        """What a holder has."""
        held = self._held.get(holder)
        return 0 if held is None else held.amount

    def weighted_amount(self, holder: K) -> float:
        """What it has by weight."""
        held = self._held.get(holder)
        return 0.0 if held is None else held.amount / held.weight

    def add(self, holder: K, amount: int, weight: float = 1.0) -> None:
        """A holder has so much more; from now on it has this weight, which is positive."""
        if not amount:
            return
        held = self._held.get(holder)
        if held is None:
            held = self._held[holder] = Holding()
        held.amount += amount
        held.weight = weight
        self.total += amount
        heappush(self._heap, (-(held.amount / weight), holder))
        if len(self._heap) > 2 * len(self._held) + 16:
            self._heap = [(-self.weighted_amount(each), each) for each in self._held]
            heapify(self._heap)

    def remove(self, holder: K, amount: int) -> None:
        """It has so much less."""
        if not amount:
            return
        held = self._held[holder]
        held.amount -= amount
        self.total -= amount
        if not held.amount:
            del self._held[holder]

    def largest_holder(self) -> K | None:
        """Who has most by weight; of equals the first by name, None if nobody has anything."""
        while self._heap:
            level, holder = self._heap[0]
            actual = -self.weighted_amount(holder)
            if level == actual and holder in self._held:
                return holder
            if holder in self._held:
                heapreplace(self._heap, (actual, holder))
            else:
                heappop(self._heap)
        return None
